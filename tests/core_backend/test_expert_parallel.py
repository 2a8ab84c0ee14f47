"""Real OLMo-core with its experts on two ranks (gloo), each with packs of its own, against all of it on one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.olmo_cases import distance
from support.olmo_ranks import joined, refuse_on_rank, train_on_rank
from support.ranks import RankError

#: Every second sample each, in two packs each.
PACKS = (((0, 2), (4, 6)), ((1, 3, 5), (7,)))
ALL = ((*PACKS[0], *PACKS[1]),)

OPTIONS: dict[str, Any] = {"ranks": 2, "expert_parallel": 2, "replay": True, "recompute": False}
ALONE = {**OPTIONS, "ranks": 1, "expert_parallel": 1}

Run = Callable[..., list[Any]]


def compare(two: list[dict[str, Any]], one: dict[str, Any]) -> None:
    scores = {**two[0]["scores"], **two[1]["scores"]}
    assert scores.keys() == one["scores"].keys()
    for index, values in scores.items():
        torch.testing.assert_close(values, one["scores"][index], rtol=1e-6, atol=1e-6)
    assert len(two[0]["experts"]) == 4
    for step in range(2):
        assert distance(joined(two, "gradients")[step], one["gradients"][step]) < 1e-5
    assert distance(joined(two, "parameters"), one["parameters"]) < 1e-5


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_two_ranks_train_as_one(run_on_ranks: Run, recompute: bool, replay: bool) -> None:
    options = {"replay": replay, "recompute": recompute}
    two = run_on_ranks(2, train_on_rank, PACKS, {**OPTIONS, **options})
    compare(two, run_on_ranks(1, train_on_rank, ALL, {**ALONE, **options})[0])
    for name, value in two[0]["parameters"].items():
        # Dense weights of the ranks stay the same bits; their experts are different ones.
        assert torch.equal(value, two[1]["parameters"][name]) == (name not in two[0]["experts"]), name


def test_auxiliary_losses_of_two_ranks_are_those_of_one(run_on_ranks: Run) -> None:
    options = {"router": {"z_loss_weight": 0.1, "lb_loss_weight": 0.1}, "loss_div_factor": 51.0}
    two = run_on_ranks(2, train_on_rank, PACKS, {**OPTIONS, **options})
    one = run_on_ranks(1, train_on_rank, ALL, {**ALONE, **options})[0]
    compare(two, one)
    plain = run_on_ranks(1, train_on_rank, ALL, ALONE)[0]
    assert distance(one["gradients"][0], plain["gradients"][0]) > 1e-3


def test_a_document_is_not_felt_on_the_other_rank_nor_in_its_own_row(run_on_ranks: Run) -> None:
    before = run_on_ranks(2, train_on_rank, PACKS, OPTIONS)
    after = run_on_ranks(2, train_on_rank, PACKS, {**OPTIONS, "changed": (3,)})
    moved = [
        index
        for rank in (0, 1)
        for index, values in before[rank]["scores"].items()
        if not torch.equal(values, after[rank]["scores"][index])
    ]
    assert moved == [3]


def test_a_degree_that_does_not_divide_the_experts_is_refused(run_on_ranks: Run) -> None:
    with pytest.raises(RankError, match=r"blocks\.1 has 4 experts, which do not divide over expert_parallel_size = 3"):
        run_on_ranks(1, refuse_on_rank, 3)
