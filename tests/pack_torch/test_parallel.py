"""Groups, the one reduction a step, norms, and the process starter itself."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import torch
from pack_core import Topology
from pack_torch import (
    Groups,
    SmallModel,
    build_groups,
    clip_gradients,
    full_state,
    gradient_norm,
    load_full_state,
    reduce_gradients,
)
from support.ranks import RankError, Run, World, run_ranks
from support.torch_cases import CONFIG, PACKS, accumulate, counted_collectives, make_rollouts, record_routes
from support.torch_work import add_ranks, count_collectives, fail_on_one, gather_state, never_end

ALONE = Groups(Topology(1))


def test_one_process_needs_no_group() -> None:
    groups = build_groups(Topology(1))

    assert (groups.world, groups.expert, groups.expert_data) == (None, None, None)


def test_a_topology_of_another_size_than_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="the topology has 4 ranks but 1 are running"):
        build_groups(Topology(4, 2))


def test_gradients_are_reduced_once_however_many_packs_there_are(run_on_ranks: Run) -> None:
    rollouts = record_routes(SmallModel(CONFIG, seed=3, dtype=torch.float64), make_rollouts())
    cuts = ([[0, 1, 2, 3]], [[0, 1], [2], [3]])

    shared = run_on_ranks(2, count_collectives, rollouts, cuts, Topology(2, 2))
    whole = run_on_ranks(2, count_collectives, rollouts, cuts, Topology(2, 1))
    both = run_on_ranks(4, count_collectives, rollouts, cuts, Topology(4, 2))

    for rank in shared:
        for packs, found in zip((1, 3), rank, strict=True):
            # Counts of all layers at once, then two routed layers: there, back, and their two gradients.
            assert found["during"] == ["all_to_all_single"] * (packs * (1 + 2 * 4))
            assert found["reduction"] == ["all_reduce"]  # experts have no twin to sum with
            assert found["clipping"] == ["all_reduce"]  # one number: the squares of the others' experts
    for rank in whole:
        for found in rank:
            assert found == {"during": [], "reduction": ["all_reduce", "all_reduce"], "clipping": []}
    for rank in both:
        for packs, found in zip((1, 3), rank, strict=True):
            assert found["during"] == ["all_to_all_single"] * (packs * 9)
            assert found["reduction"] == ["all_reduce", "all_reduce"]
            assert found["clipping"] == ["all_reduce"]


def test_one_process_never_communicates() -> None:
    model = SmallModel(CONFIG, seed=3)
    with counted_collectives() as calls:
        accumulate(model, make_rollouts(), PACKS, replay=False)
        reduce_gradients(model, ALONE)
        clip_gradients(model, 1.0, ALONE)

    assert calls == []


def test_the_norm_is_that_of_all_gradients_in_one_row() -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    accumulate(model, make_rollouts(), PACKS, replay=False)
    row = torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    assert gradient_norm(model, ALONE) == pytest.approx(math.sqrt(float((row * row).sum())), rel=1e-12)


def test_clipping_scales_to_the_limit_and_only_down() -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    accumulate(model, make_rollouts(), PACKS, replay=False)
    before = [p.grad.clone() for p in model.parameters()]

    norm = clip_gradients(model, 1e6, ALONE)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))

    assert clip_gradients(model, norm / 4, ALONE) == pytest.approx(norm, rel=1e-12)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 4, rtol=1e-12, atol=0)


def test_a_norm_that_is_not_finite_is_reported_and_scales_nothing() -> None:
    model = SmallModel(CONFIG, seed=3)
    reduce_gradients(model, ALONE)
    model.embedding.grad[0, 0] = float("nan")
    model.norm.grad[:] = 2.0

    assert math.isnan(clip_gradients(model, 0.5, ALONE))
    assert model.norm.grad.tolist() == [2.0] * CONFIG.hidden_size


def test_parameters_without_a_gradient_count_as_zeros() -> None:
    model = SmallModel(CONFIG, seed=3)

    reduce_gradients(model, ALONE)

    assert all(float(p.grad.abs().max()) == 0.0 for p in model.parameters())
    assert gradient_norm(model, ALONE) == 0.0


def test_dense_and_expert_parameters_are_all_of_them_once() -> None:
    model = SmallModel(CONFIG, seed=3)
    listed = [*model.dense_parameters(), *model.expert_parameters()]

    assert {id(p) for p in listed} == {id(p) for p in model.parameters()}
    assert len(listed) == len(list(model.parameters()))
    assert [tuple(p.shape) for p in model.expert_parameters()] == [(4, 16, 16), (4, 8, 16)] * 2


def test_weights_are_the_same_for_every_degree_and_move_between_degrees(run_on_ranks: Run) -> None:
    drawn = full_state(SmallModel(CONFIG, seed=3, dtype=torch.float64))
    other = full_state(SmallModel(CONFIG, seed=4, dtype=torch.float64))

    for rank in run_on_ranks(2, gather_state, other):
        assert rank["held"] == [2] * 4
        assert rank["drawn"].keys() == drawn.keys()
        assert all(torch.equal(rank["drawn"][name], value) for name, value in drawn.items())
        assert all(torch.equal(rank["loaded"][name], value) for name, value in other.items())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = SmallModel(CONFIG, seed=3)
    before = full_state(model)
    other = full_state(SmallModel(CONFIG, seed=4))

    with pytest.raises(ValueError, match=r"differ in head\.weight"):
        load_full_state(model, {name: value for name, value in other.items() if name != "head.weight"})
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.experts\.down has shape \[2, 8, 16\].*\[4, 8, 16\]"):
        load_full_state(model, other | {"blocks.1.mlp.experts.down": torch.zeros(2, 8, 16)})

    assert all(torch.equal(value, before[name]) for name, value in full_state(model).items())


def test_every_ranks_result_comes_back_in_order() -> None:
    assert run_ranks(2, add_ranks, 40) == [40, 41]


def test_a_rank_that_raises_ends_the_run_within_seconds_with_its_own_words() -> None:
    started = time.monotonic()

    with pytest.raises(RankError, match="rank one has had enough"):
        run_ranks(2, fail_on_one, timeout=60)

    assert time.monotonic() - started < 30


def test_a_rank_that_never_answers_is_ended(tmp_path: Path) -> None:
    with World(1) as world, pytest.raises(RankError, match="no answer"):
        world.run(never_end, str(tmp_path), timeout=1)

    process = int((tmp_path / "0.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
