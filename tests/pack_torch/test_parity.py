"""Packed rows against one sample a row and against the formulas: the same losses, gradients and weights."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from pack_core import Topology
from pack_torch import (
    ModelConfig,
    Rollout,
    SmallModel,
    build_batch,
    full_gradients,
    full_state,
    normalization,
    policy_loss,
    response_log_probs,
)
from support.ranks import Run
from support.torch_cases import (
    CONFIG,
    HYBRID,
    PACKS,
    PACKS_OF_FOUR,
    PACKS_OF_TWO,
    accumulate,
    assert_close,
    assert_same_training,
    make_rollouts,
    record_routes,
    train,
)
from support.torch_naive import naive_log_probs, naive_loss
from support.torch_work import route_live, train_singly, train_variants

REDUCTIONS = ("token", "response")


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    return record_routes(model, make_rollouts())


@pytest.fixture(scope="module")
def unpacked(rollouts: list[Rollout]) -> dict[str, dict[str, Any]]:
    singles = [[index] for index in range(len(rollouts))]
    return {reduction: train(rollouts, singles, reduction=reduction, attention="torch") for reduction in REDUCTIONS}


@pytest.fixture(scope="module")
def hybrid_rollouts() -> list[Rollout]:
    return record_routes(SmallModel(HYBRID, seed=3, dtype=torch.float64), make_rollouts())


@pytest.fixture(scope="module")
def hybrid_unpacked(hybrid_rollouts: list[Rollout]) -> dict[str, Any]:
    singles = [[index] for index in range(len(hybrid_rollouts))]
    return train(hybrid_rollouts, singles, attention="torch", config=HYBRID)


@pytest.mark.parametrize("config", [CONFIG, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_packed_step_equals_the_formulas_taken_one_token_at_a_time(
    reduction: str, replay: bool, config: ModelConfig
) -> None:
    model = SmallModel(config, seed=3, dtype=torch.float64)
    rollouts = record_routes(model, make_rollouts())
    state = {name: value.requires_grad_() for name, value in full_state(model).items()}
    naive = {r.id: naive_log_probs(state, config, r, replay) for r in rollouts}
    total = sum(naive_loss(naive[r.id], r, reduction) for r in rollouts)
    active = sum(int(r.loss_mask.sum()) for r in rollouts)
    expected = total / (active if reduction == "token" else len(rollouts))
    expected.backward()

    loss, log_probs = accumulate(model, rollouts, PACKS, reduction, replay=replay)

    for name, values in naive.items():
        assert_close(log_probs[name], values.detach(), f"log-probabilities of {name}")
    assert abs(loss - float(expected.detach())) <= 1e-9 * max(1, abs(float(expected.detach())))
    for name, gradient in full_gradients(model).items():
        assert_close(gradient, state[name].grad, f"gradient of {name}")
        assert float(gradient.abs().max()) > 1e-6, f"{name} has no gradient worth comparing"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_packs_on_one_rank_train_as_one_sample_a_row(
    rollouts: list[Rollout], unpacked: dict[str, Any], reduction: str, recompute: bool
) -> None:
    packed = train(rollouts, PACKS, reduction=reduction, recompute=recompute)

    assert_same_training([packed], unpacked[reduction])


@pytest.mark.parametrize("recompute", [False, True])
def test_linear_attention_and_latent_experts_train_as_one_sample_a_row(
    hybrid_rollouts: list[Rollout], hybrid_unpacked: dict[str, Any], recompute: bool
) -> None:
    packed = train(hybrid_rollouts, PACKS, recompute=recompute, config=HYBRID)

    assert_same_training([packed], hybrid_unpacked)


def test_linear_attention_and_latent_experts_on_two_ranks_train_as_one_process(
    run_on_ranks: Run, hybrid_rollouts: list[Rollout], hybrid_unpacked: dict[str, Any]
) -> None:
    variants = [
        {"topology": Topology(2, degree), "recompute": recompute, "config": HYBRID}
        for degree in (2, 1)
        for recompute in (False, True)
    ]

    ranks = run_on_ranks(2, train_variants, hybrid_rollouts, PACKS_OF_TWO, variants)

    for place in range(len(variants)):
        assert_same_training([rank[place] for rank in ranks], hybrid_unpacked)


def test_router_losses_of_documents_train_as_one_sample_a_row(
    run_on_ranks: Run, hybrid_rollouts: list[Rollout]
) -> None:
    balances = [
        {"grouping": "sequence", "reduction": reduction, "count_source": source}
        for reduction, source in (("token", "replayed"), ("response", "live"))
    ]
    singles = [[index] for index in range(len(hybrid_rollouts))]
    expected = [train(hybrid_rollouts, singles, config=HYBRID, router=balance) for balance in balances]
    without = train(hybrid_rollouts, singles, config=HYBRID)

    for balance, wanted in zip(balances, expected, strict=True):
        for recompute in (False, True):
            packed = train(hybrid_rollouts, PACKS, recompute=recompute, config=HYBRID, router=balance)
            assert_same_training([packed], wanted)
        moved = wanted["steps"][0]["gradients"]["blocks.1.mlp.router"]
        assert float((moved - without["steps"][0]["gradients"]["blocks.1.mlp.router"]).abs().max()) > 1e-3

    variants = [
        {"topology": Topology(2, 2), "recompute": recompute, "config": HYBRID, "router": balance}
        for balance in balances
        for recompute in (False, True)
    ]
    ranks = run_on_ranks(2, train_variants, hybrid_rollouts, PACKS_OF_TWO, variants)
    for place in range(len(variants)):
        assert_same_training([rank[place] for rank in ranks], expected[place // 2])


def test_the_balancing_loss_of_a_pack_is_another_objective_in_another_cut(hybrid_rollouts: list[Rollout]) -> None:
    balance = {"grouping": "local_batch", "reduction": "token", "count_source": "replayed"}
    singles = [[index] for index in range(len(hybrid_rollouts))]

    packed = train(hybrid_rollouts, PACKS, config=HYBRID, router=balance)["steps"][0]
    alone = train(hybrid_rollouts, singles, config=HYBRID, router=balance)["steps"][0]
    recomputed = train(hybrid_rollouts, PACKS, config=HYBRID, router=balance, recompute=True)["steps"][0]

    assert abs(packed["loss"] - alone["loss"]) > 1e-3
    assert packed["loss"] == recomputed["loss"]
    for name, gradient in packed["gradients"].items():
        assert bool(gradient.isfinite().all()), name
        assert_close(recomputed["gradients"][name], gradient, name)


def test_every_cut_into_packs_gives_one_loss_and_gradient(rollouts: list[Rollout], unpacked: dict[str, Any]) -> None:
    for packs in ([range(8)], [[0], [1, 2, 3, 4, 5, 6], [7]], [[7, 5, 3], [1], [6, 4, 2, 0]]):
        assert_same_training([train(rollouts, packs)], unpacked["token"])


def test_two_ranks_that_share_the_experts_train_as_one_process(
    run_on_ranks: Run, rollouts: list[Rollout], unpacked: dict[str, Any]
) -> None:
    variants = [
        {"topology": Topology(2, degree), "reduction": reduction, "recompute": recompute}
        for degree in (2, 1)
        for reduction in REDUCTIONS
        for recompute in (False, True)
    ]

    ranks = run_on_ranks(2, train_variants, rollouts, PACKS_OF_TWO, variants)

    for place, variant in enumerate(variants):
        assert_same_training([rank[place] for rank in ranks], unpacked[variant["reduction"]])
        for name, values in ranks[0][place]["state"].items():
            assert torch.equal(values, ranks[1][place]["state"][name]), f"ranks differ in {name}"


def test_two_ranks_that_share_the_experts_train_alike_one_sample_a_row(
    run_on_ranks: Run, rollouts: list[Rollout], unpacked: dict[str, Any]
) -> None:
    variant = {"topology": Topology(2, 2), "attention": "torch"}

    ranks = run_on_ranks(2, train_singly, rollouts, variant)

    assert_same_training(ranks, unpacked["token"])


def test_two_replicas_of_two_ranks_train_as_one_process(
    run_on_ranks: Run, rollouts: list[Rollout], unpacked: dict[str, Any]
) -> None:
    ranks = run_on_ranks(4, train_variants, rollouts, PACKS_OF_FOUR, [{"topology": Topology(4, 2), "recompute": True}])

    assert_same_training([rank[0] for rank in ranks], unpacked["token"])


def test_a_rank_whose_experts_nobody_chose_takes_part_all_the_same(run_on_ranks: Run, rollouts: list[Rollout]) -> None:
    lazy = [attrs.evolve(r, routes=torch.tensor([0, 1]).expand(r.length - 1, 3, 2).clone()) for r in rollouts]
    expected = train(lazy, PACKS)

    variants = [{"topology": Topology(2, 2), "recompute": recompute} for recompute in (False, True)]
    ranks = run_on_ranks(2, train_variants, lazy, PACKS_OF_TWO, variants)

    for place in range(2):
        assert_same_training([rank[place] for rank in ranks], expected)
    gradients = expected["steps"][0]["gradients"]
    assert float(gradients["blocks.1.mlp.experts.down"][2:].abs().max()) == 0.0


def test_live_routes_do_not_depend_on_ranks_or_recomputation(run_on_ranks: Run, rollouts: list[Rollout]) -> None:
    ranks = run_on_ranks(2, route_live, rollouts, ((0, 2), (1, 3, 5)))

    for rank, pack in enumerate(((0, 2), (1, 3, 5))):
        alone = torch.cat([torch.cat([rollouts[i].routes, ranks[rank]["on"]["routes"][:1] * 0 - 9]) for i in pack])
        known = alone[:, 0, 0] != -9
        for found in ranks[rank].values():
            assert torch.equal(found["routes"][known], alone[known])
        assert torch.equal(ranks[rank]["on"]["routes"], ranks[rank]["off"]["routes"])
        for name, gradient in ranks[rank]["off"]["gradients"].items():
            assert torch.equal(gradient, ranks[rank]["on"]["gradients"][name]), name
        # Two routed layers: counts, there and back, and the gradient's way there and back; recomputing runs the tokens'
        # two trips again and never the counts.
        assert ranks[rank]["off"]["calls"] == ["all_to_all_single"] * (2 * 3 + 2 * 2)
        assert ranks[rank]["on"]["calls"] == ["all_to_all_single"] * (2 * 3 + 2 * 2 + 2 * 2)


def test_one_denominator_serves_all_ranks() -> None:
    rollouts = make_rollouts()
    halves = normalization(rollouts[::2]) + normalization(rollouts[1::2])

    assert halves == normalization(rollouts)
    assert halves.samples == 8
    assert halves.active_tokens == sum(int(r.loss_mask.sum()) for r in rollouts)
    assert halves.model_tokens == 5 + 8 + 6 + 7 + 5 + 8 + 3 + 9


def test_a_fully_masked_sample_changes_no_gradient(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    accumulate(model, rollouts, PACKS)
    everything = full_gradients(model)
    model.zero_grad()

    accumulate(model, rollouts, [[0, 1], [3, 4], [5, 6, 7]])

    for name, gradient in full_gradients(model).items():
        assert_close(gradient, everything[name], name, tolerance=1e-12)


def test_clipping_is_active_on_both_sides_of_these_cases(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    clipped = {"low": 0, "high": 0}
    for index, rollout in enumerate(rollouts):
        batch = build_batch([rollout], [0], replay=True)
        loss = policy_loss(response_log_probs(model, batch), batch)
        clipped["high" if index % 3 else "low"] += int(loss.clipped)

    assert clipped["low"] > 0
    assert clipped["high"] > 0
