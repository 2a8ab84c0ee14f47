"""The small model: what it records and replays, where its weights come from, and what it refuses."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from pack_torch import ModelConfig, PackedBatch, Rollout, SmallModel, build_batch, full_gradients, full_state
from pack_torch.experts import build_dispatches
from pack_torch.layers import rotation
from support.torch_cases import CONFIG, HYBRID, make_rollouts, record_routes


def make(**options: Any) -> SmallModel:
    return SmallModel(CONFIG, **{"seed": 3, "dtype": torch.float64} | options)


def test_hidden_states_and_routes_have_one_row_per_token() -> None:
    output = make()(build_batch(make_rollouts(), [0, 1, 4]))

    assert output.hidden.shape == (5 + 8 + 5, 16)
    assert output.routes.shape == (18, 3, 2)
    assert output.routes.dtype == torch.int32
    assert bool((output.routes[:, 0] == -1).all())
    assert bool(((output.routes[:, 1:] >= 0) & (output.routes[:, 1:] < 4)).all())
    assert bool((output.routes[:, 1:, 0] != output.routes[:, 1:, 1]).all())


def test_replaying_what_was_recorded_changes_nothing_at_all() -> None:
    model = make()
    batch = build_batch(make_rollouts(), [0, 1, 4])
    live = model(batch)

    again = model(attrs.evolve(batch, routes=live.routes))

    assert torch.equal(again.hidden, live.hidden)
    assert torch.equal(again.routes, live.routes)


def test_replayed_experts_are_used_and_the_router_still_learns() -> None:
    model = make()
    batch = build_batch(make_rollouts(), [0, 1])
    routes = torch.tensor([3, 1], dtype=torch.uint8).expand(13, 3, 2).clone()
    routes[:, 0] = 255  # a dense layer's column may hold garbage

    output = model(attrs.evolve(batch, routes=routes))
    output.hidden.square().sum().backward()

    assert output.routes[:, 1:].tolist() == routes[:, 1:].tolist()
    gradients = full_gradients(model)
    for layer in (1, 2):
        assert float(gradients[f"blocks.{layer}.mlp.experts.down"][[0, 2]].abs().max()) == 0.0
        assert float(gradients[f"blocks.{layer}.mlp.experts.down"][[1, 3]].abs().min()) > 0.0
        assert float(gradients[f"blocks.{layer}.mlp.router"][[1, 3]].abs().max()) > 1e-6
        # Shares are normalised over the chosen, so experts not chosen move no share.
        assert float(gradients[f"blocks.{layer}.mlp.router"][[0, 2]].abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("replay", [False, True])
def test_recomputation_changes_no_gradient(dtype: torch.dtype, replay: bool) -> None:
    rollouts = record_routes(make(), make_rollouts())
    found = []
    for recompute in (False, True):
        model = make(recompute=recompute, dtype=dtype)
        output = model(build_batch(rollouts, [0, 1, 4], replay=replay))
        output.hidden.square().sum().backward()
        found.append((output.routes, full_gradients(model)))

    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert gradient.dtype == dtype
        assert torch.equal(gradient, found[1][1][name]), name


def test_the_router_chooses_once_however_often_a_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(*arguments: Any) -> Any:
        calls.append(arguments[0].shape)
        return build_dispatches(*arguments)

    monkeypatch.setattr("pack_torch.experts.build_dispatches", counting)
    model = make(recompute=True)
    model(build_batch(make_rollouts(), [0, 1])).hidden.sum().backward()

    assert calls == [(1, 13, 2)] * 2


def test_dropout_acts_in_training_only_and_recomputes_alike() -> None:
    config = attrs.evolve(CONFIG, dropout=0.5)
    batch = build_batch(make_rollouts(), [0, 1])
    gradients = []
    for recompute in (False, True):
        model = SmallModel(config, seed=3, dtype=torch.float64, recompute=recompute)
        torch.manual_seed(11)
        model(batch).hidden.square().sum().backward()
        gradients.append(full_gradients(model))

    assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())
    assert not torch.equal(model(batch).hidden, model(batch).hidden)
    model.eval()
    assert torch.equal(model(batch).hidden, make()(batch).hidden)


def test_a_seed_fixes_every_weight() -> None:
    first, second, other = (full_state(make(seed=seed)) for seed in (3, 3, 4))

    assert all(torch.equal(value, second[name]) for name, value in first.items())
    drawn = [name for name, value in first.items() if value.dim() > 1]
    assert all(not torch.equal(first[name], other[name]) for name in drawn)
    assert all(bool((value == 1).all()) for value in first.values() if value.dim() == 1)


def test_both_precisions_start_from_the_same_numbers() -> None:
    narrow, wide = full_state(make(dtype=torch.float32)), full_state(make())

    assert all(torch.equal(narrow[name], value.float()) for name, value in wide.items())


def test_positions_restart_with_each_document() -> None:
    model = make()
    tokens = torch.tensor([5, 6, 7])
    twice = model(PackedBatch(torch.cat([tokens, tokens]), (3, 3))).hidden

    torch.testing.assert_close(twice[:3], twice[3:], rtol=0, atol=1e-12)
    torch.testing.assert_close(twice[:3], model(PackedBatch(tokens, (3,))).hidden, rtol=0, atol=1e-12)


def test_angles_of_positions_by_hand() -> None:
    cos, sin = rotation(torch.tensor([0, 3]), 4, 100.0, torch.float64)

    # Two pairs: speeds 1 and 100^(-1/2).
    assert cos.shape == sin.shape == (2, 1, 2)
    expected = torch.tensor([[0.0, 0.0], [3.0, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(cos[:, 0], expected.cos(), rtol=0, atol=1e-15)
    torch.testing.assert_close(sin[:, 0], expected.sin(), rtol=0, atol=1e-15)


def test_no_row_goes_missing_on_the_way_to_its_expert() -> None:
    ids = torch.randint(0, 8, (3, 50, 2), generator=torch.Generator().manual_seed(0))

    for layer, dispatch in enumerate(build_dispatches(ids, 8, None)):
        pairs = ids[layer].reshape(-1)
        assert pairs[dispatch.order].tolist() == sorted(pairs.tolist())
        assert dispatch.order[dispatch.inverse].tolist() == list(range(100))
        assert dispatch.rows == [pairs.tolist().count(expert) for expert in range(8)]
        assert dispatch.send == dispatch.receive == [100]


def test_a_model_of_dense_layers_alone_routes_nothing() -> None:
    model = SmallModel(attrs.evolve(CONFIG, dense_layers_indices=(0, 1, 2)), seed=0)

    output = model(build_batch(make_rollouts(), [0]))

    assert bool((output.routes == -1).all())
    assert model.expert_parameters() == []


def test_a_routed_first_layer_works_too() -> None:
    model = SmallModel(attrs.evolve(CONFIG, dense_layers_indices=()), seed=0)

    assert bool((model(build_batch(make_rollouts(), [0])).routes >= 0).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 18}, "hidden_size 18 must be a multiple of twice num_attention_heads 2"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is over n_routed_experts 4"),
        ({"dense_layers_indices": (3,)}, "dense_layers_indices names 3 but layers are 0 to 2"),
        ({"dropout": 1.0}, r"dropout is 1\.0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attrs.evolve(CONFIG, **change)


def test_bad_rows_are_refused_by_sample_before_anything_runs() -> None:
    model = make()
    good = Rollout("good", [1, 2, 3], 1, routes=torch.zeros(2, 3, 2, dtype=torch.int32))
    tokens = Rollout("odd", [1, 99], 1)
    routes = Rollout("far", [1, 2, 3], 1, routes=torch.tensor([[[0, 1]] * 3, [[0, 1], [0, 1], [0, 7]]]))
    layers = Rollout("flat", [1, 2, 3], 1, routes=torch.zeros(2, 1, 2, dtype=torch.int32))

    with pytest.raises(ValueError, match="sample 'odd': token 99 at row 4 of the pack is outside the vocabulary of 23"):
        model(build_batch([good, tokens], [0, 1]))
    with pytest.raises(ValueError, match="sample 'far': row 1 of layer 2 is routed to expert 7 but experts are 0 to 3"):
        model(build_batch([good, routes], [0, 1], replay=True))
    with pytest.raises(ValueError, match="sample 'flat': routes have 1 layers and top_k 2 but the model has 3 layers"):
        model(build_batch([layers], [0], replay=True))
    with pytest.raises(ValueError, match="'torch' cannot keep documents apart"):
        make(attention="torch")(build_batch([good, tokens], [0, 1]))


def test_router_logits_are_given_when_asked_for_and_explain_the_routes() -> None:
    batch = build_batch(make_rollouts(), [0, 1, 4])
    found = {}
    for recompute in (False, True):
        model = make(recompute=recompute)
        output = model(batch, router_logits=True)
        assert model(batch).router_logits is None
        assert torch.equal(output.hidden, model(batch).hidden)
        assert output.router_logits.shape == (18, 2, 4)
        assert torch.equal(output.router_logits.topk(2).indices, output.routes[:, [1, 2]].long())
        output.router_logits.square().sum().backward()
        found[recompute] = full_gradients(model)

    for name, gradient in found[False].items():
        assert torch.equal(gradient, found[True][name]), name
    assert float(found[True]["blocks.2.mlp.router"].abs().max()) > 0

    dense = SmallModel(attrs.evolve(CONFIG, dense_layers_indices=(0, 1, 2)), seed=3)(batch, router_logits=True)
    assert dense.router_logits.shape == (18, 0, 4)


def test_experts_hold_the_latent_width_and_the_router_the_full_one() -> None:
    state = full_state(SmallModel(HYBRID, seed=3))

    assert state["blocks.1.mlp.router"].shape == (4, 16)
    assert state["blocks.1.mlp.latent_in"].shape == (6, 16)
    assert state["blocks.1.mlp.experts.gate_up"].shape == (4, 6, 16)
    assert state["blocks.1.mlp.experts.down"].shape == (4, 8, 6)
    assert state["blocks.1.mlp.latent_out"].shape == (16, 6)


def test_linear_attention_starts_with_channels_that_forget_slowly_and_fast() -> None:
    config = attrs.evolve(HYBRID, linear_key_head_dim=64)
    state = full_state(SmallModel(config, seed=3, dtype=torch.float64))

    rates, steps = (
        state["blocks.0.attention.A_log"].exp(),
        torch.nn.functional.softplus(state["blocks.0.attention.dt_bias"]),
    )
    assert bool(((rates >= 1) & (rates <= 16)).all())
    assert bool(((steps >= 0.000999) & (steps <= 0.1001)).all())
    assert float(steps.min()) < 0.003 < 0.03 < float(steps.max())


def test_a_config_refuses_mixers_and_widths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="layer_types names 1 layers but num_hidden_layers is 3"):
        attrs.evolve(CONFIG, layer_types=("full_attention",))
    with pytest.raises(
        ValueError, match="layer_types has 'mamba' for layer 1 but must be one of full_attention, linear"
    ):
        attrs.evolve(CONFIG, layer_types=("full_attention", "mamba", "full_attention"))
    with pytest.raises(ValueError, match="moe_latent_dim 16 must be below hidden_size 16"):
        attrs.evolve(CONFIG, moe_latent_dim=16)
    with pytest.raises(ValueError, match="linear_conv_kernel_dim is 0 but must be at least 1"):
        attrs.evolve(CONFIG, linear_conv_kernel_dim=0)
    assert attrs.evolve(CONFIG, layer_types=["full_attention"] * 3).layer_type(2) == "full_attention"
    assert [HYBRID.layer_type(layer) for layer in range(2)] == ["linear_attention", "full_attention"]


def test_a_config_of_any_list_of_dense_layers_knows_its_routed_ones() -> None:
    config = ModelConfig(8, 8, 4, 2, 8, 8, 4, 1, dense_layers_indices=[0, 2])

    assert config.moe_layers == (1, 3)
