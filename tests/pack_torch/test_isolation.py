"""With fixed routes nothing of one document reaches another: not its outputs, not its gradients, not one bit."""

from __future__ import annotations

import attrs
import pytest
import torch
from pack_torch import (
    ModelConfig,
    PackedBatch,
    Rollout,
    SmallModel,
    build_batch,
    full_gradients,
    policy_loss,
    response_log_probs,
)
from support.ranks import Run
from support.torch_cases import CONFIG, HYBRID, make_rollouts, record_routes
from support.torch_work import isolate

PACK = (0, 1, 3, 5, 7)


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return record_routes(SmallModel(CONFIG, seed=3, dtype=torch.float64), make_rollouts())


def change(rollouts: list[Rollout], index: int, places: list[int] | None = None) -> list[Rollout]:
    """The rollouts with other tokens in sample `index`, everywhere or at `places`, its routes kept."""
    tokens = rollouts[index].tokens.clone()
    for place in range(tokens.numel()) if places is None else places:
        tokens[place] = (tokens[place] + 1 + place) % CONFIG.vocab_size
    return [attrs.evolve(r, tokens=tokens) if i == index else r for i, r in enumerate(rollouts)]


def hidden_of(model: SmallModel, batch: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        return model(batch).hidden


@pytest.mark.parametrize(
    ("attention", "config"),
    [("segment", CONFIG), ("dense", CONFIG), ("segment", HYBRID)],
    ids=["segment", "dense", "hybrid"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_changing_any_one_token_changes_no_other_documents_output(
    rollouts: list[Rollout], dtype: torch.dtype, attention: str, config: ModelConfig
) -> None:
    model = SmallModel(config, seed=3, dtype=dtype, attention=attention)
    batch = build_batch(rollouts, PACK, replay=True)
    before = hidden_of(model, batch)

    for document, index in enumerate(PACK):
        for place in range(rollouts[index].length):
            after = hidden_of(model, build_batch(change(rollouts, index, [place]), PACK, replay=True))

            others = batch.document_ids != document
            earlier = ~others & (batch.position_ids < place)
            assert torch.equal(after[others], before[others])
            assert torch.equal(after[earlier], before[earlier])
            assert not torch.equal(after[~others], before[~others])


@pytest.mark.parametrize("config", [CONFIG, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_documents_loss_has_no_gradient_at_another_documents_input(
    rollouts: list[Rollout], recompute: bool, config: ModelConfig
) -> None:
    model = SmallModel(config, seed=3, dtype=torch.float64, recompute=recompute)
    batch = build_batch(rollouts, PACK, replay=True)
    inputs: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if not inputs:
            arguments[0].retain_grad()
            inputs.append(arguments[0])

    model.blocks[0].register_forward_pre_hook(keep)
    for document, values in enumerate(PACK):
        inputs.clear()
        batch.split(response_log_probs(model, batch))[document].sum().backward()

        gradient = inputs[0].grad
        assert gradient is not None
        own = batch.document_ids == document
        assert float(gradient[~own].abs().max()) == 0.0
        last = own & (batch.position_ids == rollouts[values].length - 1)
        assert float(gradient[last].abs().max()) == 0.0
        assert bool((gradient[own & ~last].abs().amax(dim=1) > 0).all())


@pytest.mark.parametrize("config", [CONFIG, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_documents_parameter_gradients_do_not_know_the_others_tokens(
    rollouts: list[Rollout], dtype: torch.dtype, recompute: bool, config: ModelConfig
) -> None:
    def gradients(version: list[Rollout], document: int) -> dict[str, torch.Tensor]:
        model = SmallModel(config, seed=3, dtype=dtype, recompute=recompute)
        batch = build_batch(version, PACK, replay=True)
        log_probs = response_log_probs(model, batch)
        # The document's part of the loss: everyone else's response is masked.
        masked = [
            attrs.evolve(r, loss_mask=r.loss_mask if place == document else torch.zeros(r.response_length))
            for place, r in enumerate(batch.rollouts)
        ]
        policy_loss(log_probs, build_batch(masked, range(len(masked)))).numerator.backward()
        return full_gradients(model)

    for document in range(len(PACK)):
        before = gradients(rollouts, document)
        other = PACK[(document + 2) % len(PACK)]
        after = gradients(change(rollouts, other), document)

        for name in before:
            assert torch.equal(before[name], after[name]), f"document {document}: {name}"
        assert max(float(value.abs().max()) for value in before.values()) > 0


@pytest.mark.parametrize("config", [CONFIG, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("recompute", [False, True])
def test_documents_stay_apart_where_ranks_share_the_experts(
    run_on_ranks: Run, rollouts: list[Rollout], recompute: bool, config: ModelConfig
) -> None:
    ranks = run_on_ranks(2, isolate, rollouts, change(rollouts, 1), recompute, config)
    for before, after in ((rank["before"], rank["after"]) for rank in ranks):
        assert torch.equal(before["hidden"], after["hidden"])
        for name, gradient in before["gradients"].items():
            assert torch.equal(gradient, after["gradients"][name]), name
