"""The whole validation of packing on a small model of linear attention, full attention and latent experts, in float64.

Routes replayed as recorded; one rank, two that share the experts, two that do not; recomputation off and on; two Adam
updates, the first anchored on a checked scoring pass, the second on its own forward. Policy loss alone: equal to one
sample a row in every number. With router losses: another objective in another cut, so the same cut is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pack_core import Topology
from pack_torch import Rollout, SmallModel
from support.ranks import Run
from support.torch_cases import HYBRID, PACKS, PACKS_OF_TWO, assert_close, make_rollouts, record_routes
from support.validation import update_twice, update_variants

ROUTER = {"balance": 0.05, "size": 0.02}
RANKS = [{"topology": Topology(2, degree), "recompute": recompute} for degree in (2, 1) for recompute in (False, True)]


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return record_routes(SmallModel(HYBRID, seed=3, dtype=torch.float64), make_rollouts())


@pytest.fixture(scope="module")
def alone(rollouts: list[Rollout]) -> dict[str, Any]:
    return update_twice(rollouts, [[index] for index in range(len(rollouts))], attention="torch")


@pytest.fixture(scope="module")
def combined(rollouts: list[Rollout]) -> dict[str, Any]:
    """One rank over the packs of two, with router losses."""
    return update_twice(rollouts, [pack for packs in PACKS_OF_TWO for pack in packs], **ROUTER)


def assert_same_updates(ranks: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Scores, losses, gradients, weights and both moments of Adam, within 1e-9 * max(1, |x|)."""
    for update, wanted in enumerate(expected["updates"]):
        found = [rank["updates"][update] for rank in ranks]
        log_probs = {name: values for one in found for name, values in one["log_probs"].items()}
        assert log_probs.keys() == wanted["log_probs"].keys()
        for name, values in wanted["log_probs"].items():
            assert_close(log_probs[name], values, f"update {update}, log-probabilities of {name}")
        for part in ("policy", "balance", "size"):
            assert sum(one[part] for one in found) == pytest.approx(wanted[part], abs=1e-9)
        for one in found:
            for name, values in wanted["gradients"].items():
                assert_close(one["gradients"][name], values, f"update {update}, gradient of {name}")
    for rank in ranks:
        for kind in ("state", "exp_avg", "exp_avg_sq"):
            for name, values in expected[kind].items():
                assert_close(rank[kind][name], values, f"{kind} of {name}")


def assert_sound(ranks: Sequence[dict[str, Any]]) -> None:
    """The scoring check holds, documents stay apart after the updates, each token counts once, every weight moved."""
    for rank in ranks:
        assert rank["off"] == [0.0] * len(rank["off"])
        assert rank["moved"] == [(True, 0.0)] * len(rank["moved"])
        for name, values in rank["state"].items():
            assert bool(values.isfinite().all()), name
            assert not torch.equal(values, rank["start"][name]), f"{name} did not move"
    counted = [counts for rank in ranks for counts in rank["counted"]]
    assert [sum(column) for column in zip(*counted, strict=True)] == [2 * 51, 2 * 8]  # tokens, documents; two updates


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_rows_update_as_one_sample_a_row(
    rollouts: list[Rollout], alone: dict[str, Any], recompute: bool
) -> None:
    packed = update_twice(rollouts, PACKS, recompute=recompute)

    assert_sound([alone])
    assert_sound([packed])
    assert_same_updates([packed], alone)


def test_two_ranks_update_as_one_sample_a_row_whether_they_share_the_experts_or_not(
    run_on_ranks: Run, rollouts: list[Rollout], alone: dict[str, Any]
) -> None:
    ranks = run_on_ranks(2, update_variants, rollouts, PACKS_OF_TWO, RANKS)

    for place in range(len(RANKS)):
        found = [rank[place] for rank in ranks]
        assert_sound(found)
        assert_same_updates(found, alone)


def test_with_router_losses_the_same_packs_give_the_same_updates_on_one_rank_and_on_two(
    run_on_ranks: Run, rollouts: list[Rollout], combined: dict[str, Any]
) -> None:
    packs = [pack for packs in PACKS_OF_TWO for pack in packs]
    assert_sound([combined])
    assert_same_updates([update_twice(rollouts, packs, recompute=True, **ROUTER)], combined)

    ranks = run_on_ranks(2, update_variants, rollouts, PACKS_OF_TWO, [variant | ROUTER for variant in RANKS])

    for place in range(len(RANKS)):
        found = [rank[place] for rank in ranks]
        assert_sound(found)
        assert_same_updates(found, combined)


def test_router_losses_change_the_routers_gradient_and_another_cut_changes_the_balancing_loss_alone(
    rollouts: list[Rollout], alone: dict[str, Any], combined: dict[str, Any]
) -> None:
    first = combined["updates"][0]
    singles = update_twice(rollouts, [[index] for index in range(len(rollouts))], **ROUTER)["updates"][0]

    assert first["policy"] == pytest.approx(alone["updates"][0]["policy"], abs=1e-12)
    assert first["size"] == pytest.approx(singles["size"], abs=1e-12)
    assert abs(first["balance"] - singles["balance"]) > 1e-3
    for name in ("blocks.1.mlp.router", "blocks.2.mlp.router"):
        change = first["gradients"][name] - alone["updates"][0]["gradients"][name]
        assert float(change.abs().max()) > 1e-3, name
