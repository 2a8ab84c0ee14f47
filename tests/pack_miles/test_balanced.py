"""Balanced order from end to end: samples change places, nothing else does, and routers execute what was planned."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pack_miles.contract import events as contract
from pack_miles.contract.audit import audit
from pack_miles.contract.log import Log, read_logs
from support import balanced_ranks
from support.miles_config import write_toml
from support.miles_runs import TINY, events, run, weights
from support.ranks import World

#: Four ranks, two replicas, rows short enough for several packs, in float64.
EXPERT: dict[str, Any] = TINY | {
    "model.dtype": "float64",
    "core.expert_balanced_packing": True,
    "core.packing_max_tokens": 36,
    "miles.rollout_batch_size": 8,
    "miles.global_batch_size": 16,
    "miles.num_rollout": 2,
    "run.ranks": 4,
    "run.save_rollouts": True,
    "run.checkpoint_every": 1,
}


@pytest.fixture(scope="module")
def expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with expert-balanced packing: two collections, then a third after a resume."""
    folder = tmp_path_factory.mktemp("expert")
    file = str(write_toml(folder, EXPERT))
    told = run("train", file, "--debug")
    assert told.returncode == 0, told.stderr
    resumed = run("train", file, "--run.resume", "true", "--miles.num_rollout", "3", "--debug")
    assert resumed.returncode == 0, resumed.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def four_ranks() -> Any:
    with World(4) as ranks:
        yield ranks


def test_the_run_passes_its_own_audit_across_a_resume(expert: Path) -> None:
    audited = run("audit", str(expert))
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert [event["resumed"] for event in events(expert, 0, "run_started")] == [False, True]
    assert [event["step"] for event in events(expert, 0, "optimizer")] == [1, 2, 3, 4, 5, 6]


def counted(expert: Path, rollout_id: int) -> dict[int, list[Counter[int]]]:
    """Return of each saved sample, by index, its expert choices by destination, one counter a routed layer."""
    found = {}
    lines = gzip.decompress((expert / "rollouts" / f"{rollout_id:06d}.jsonl.gz").read_bytes()).splitlines()
    for line in lines:
        row = json.loads(line)
        assert len(row["rollout_routed_experts"]) == len(row["tokens"]) - 1
        layers = []
        for layer in (1, 2):  # layer 0 is dense
            experts = [expert for token in row["rollout_routed_experts"] for expert in token[layer]]
            layers.append(Counter(expert // 2 for expert in [*experts, 0, 1]))  # of four experts a rank owns two
        found[row["index"]] = layers
    return found


def test_what_was_executed_is_what_the_saved_routes_make_of_the_packs(expert: Path) -> None:
    told = {event["step"]: event for event in events(expert, 0, "expert_balance")}
    assert sorted(told) == [1, 2, 3, 4, 5, 6]
    for event in events(expert, 0, "plan"):
        counts, record = counted(expert, event["rollout_id"]), event["record"]
        ids = record["samples"]["ids"]
        for step, trace in enumerate(record["traces"]):
            update = told[event["step"] + step + 1]
            packs = update["packs_per_rank"]
            # Which pack of its rank a sample is in is told by no event, so loads are compared over a rank's packs.
            total: Counter[tuple[int, int]] = Counter()
            for position, place in enumerate(trace["order"]):
                for of_layer in counts[ids[16 * step + place]]:
                    for destination, times in of_layer.items():
                        total[position % 4 // 2, destination] += times
            after = event["loads_after"][step]
            assert [len(replica) for replica in after] == [packs, packs]
            summed = [[sum(pack[d] for pack in replica) for d in (0, 1)] for replica in after]
            assert summed == [[total[g, d] for d in (0, 1)] for g in (0, 1)]
            assert update["mismatched_layers"] == []
            assert (update["layers"], update["routed_layers"]) == ([1, 2], 2)
            assert update["dispatches"] == 2 * packs
            work = record["work"][step]
            for name in ("critical_work_proxy", "max_slot_assignments", "skew_max", "skew_mean"):
                assert update[name] == pytest.approx(work[name], rel=1e-12), name


def test_no_step_is_worse_than_in_arrival_order_and_some_are_better(expert: Path) -> None:
    pairs = [
        (arrival, work)
        for event in events(expert, 0, "plan")
        for arrival, work in zip(event["record"]["arrival"], event["record"]["work"], strict=True)
    ]
    for name in ("packs_per_rank", "critical_work_proxy", "attention_token_work", "attention_pair_work"):
        assert all(work[name] <= arrival[name] for arrival, work in pairs), name
    assert sum(w["packs_per_rank"] for _, w in pairs) < sum(a["packs_per_rank"] for a, _ in pairs)
    packs = [event["packs"] for event in events(expert, 3, "packing") if event["pass"] == "training"]
    assert packs == [work["packs_per_rank"] for _, work in pairs]


def test_planning_is_timed_apart_from_counting(expert: Path) -> None:
    for event in events(expert, 0, "plan"):
        assert 0 < event["counting_seconds"] < 5
        assert 0 < event["planning_seconds"] < 5
    assert events(expert, 1, "plan") == events(expert, 1, "expert_balance") == []


def broken(expert: Path, kind: Any, step: int | None = None, **fields: Any) -> list[str]:
    """Return what the audit says once fields of the matching events of rank 0 are others; None leaves the event out."""
    logs, found = [], 0
    for log in read_logs([expert]):
        kept = []
        for event in log.events:
            if isinstance(event, kind) and step in (None, event.step):
                found += 1
                if fields:
                    kept.append(msgspec.structs.replace(event, **fields))
            else:
                kept.append(event)
        logs.append(Log(log.path, tuple(kept)))
    assert found
    return audit(logs)


@pytest.mark.parametrize(
    ("step", "fields", "words"),
    [
        (2, {}, "update 2: 0 expert_balance events where 1 belongs"),
        (3, {"critical_work_proxy": 9}, "update 3, expert_balance: critical_work_proxy is 9, the plan says "),
        (3, {"skew_mean": 9.5}, "update 3, expert_balance: skew_mean is 9.5, the plan says "),
        (4, {"mismatched_layers": [2]}, "update 4, expert_balance: layers [2] did not execute the loads"),
        (5, {"plan_digest": "other"}, "update 5, expert_balance: plan_digest other, but the recorded plan has"),
        (5, {"layers": [1]}, "update 5, expert_balance: it is about layers [1] of 2, the plan about [1, 2] of 2"),
    ],
)
def test_the_audit_finds_what_is_wrong_with_the_loads_of_an_update(
    expert: Path, step: int, fields: dict[str, Any], words: str
) -> None:
    (violation,) = broken(expert, contract.ExpertBalance, step, **fields)
    assert violation.startswith(words)


def test_the_audit_finds_plans_without_loads_or_with_choices_lost(expert: Path) -> None:
    assert broken(expert, contract.Plan, 2, loads_before=None, loads_after=None) == [
        "plan of collection 1: expert_balanced_packing is on, but no loads are recorded"
    ]
    first = next(event for event in read_logs([expert])[0].events if isinstance(event, contract.Plan))
    after = json.loads(json.dumps(first.loads_after))
    after[0][0][0][0] += 1
    (lost,) = broken(expert, contract.Plan, 0, loads_after=after)
    assert "loads_before add up to" in lost
    (fewer,) = broken(
        expert, contract.Plan, 0, loads_after=[first.loads_after[0]], loads_before=[first.loads_before[0]]
    )[:1]
    assert "loads_before tells of" in fewer


def test_the_audit_finds_a_plan_in_another_order_and_loads_nobody_asked_for(expert: Path) -> None:
    (start, *_) = (e for e in read_logs([expert])[0].events if isinstance(e, contract.RunStarted))
    off = start.configuration | {"core": start.configuration["core"] | {"expert_balanced_packing": False}}
    off["core"]["pack_order"] = "arrival"
    told = broken(expert, contract.RunStarted, configuration=off)
    assert "plan of collection 0: samples are in balanced order, but pack_order is arrival" in told
    assert "update 1: expert_balance is recorded, but expert_balanced_packing is off" in told


def test_a_plan_worse_than_arrival_order_is_found(expert: Path) -> None:
    first = next(event for event in read_logs([expert])[0].events if isinstance(event, contract.Plan))
    record = json.loads(json.dumps(first.record))
    for one in record["arrival"]:
        one["critical_work_proxy"] = 1
    told = broken(expert, contract.Plan, 0, record=record)
    assert any("step 0: critical_work_proxy is" in line and "more than the 1 of arrival order" in line for line in told)


@pytest.mark.parametrize("recompute", ["false", "true"], ids=["kept activations", "recompute"])
def test_two_updates_in_balanced_order_equal_those_in_arrival_order(
    expert: Path, four_ranks: World, tmp_path: Path, recompute: str
) -> None:
    file, rollouts = str(expert.parent / "run.toml"), str(expert / "rollouts" / "000000.jsonl.gz")
    common = [("core.activation_checkpointing", recompute), ("miles.clip_grad", "1e9")]

    def train(name: str, balanced: str) -> list[dict[str, Any]]:
        flags = [*common, ("core.expert_balanced_packing", balanced)]
        return four_ranks.run(balanced_ranks.train_recorded, file, rollouts, str(tmp_path / name), flags)

    arrival, balanced = train("arrival", "false"), train("balanced", "true")

    assert sum(balanced[0]["packs"]) < sum(arrival[0]["packs"])
    assert arrival[0]["order"] == tuple(range(32)) != balanced[0]["order"]
    # Steps keep their samples: the first sixteen in one, the others in the next.
    assert arrival[0]["samples"] == balanced[0]["samples"] == [list(range(16)), list(range(16, 32))]
    assert_scores_alike(arrival, balanced)
    for rank, (one, other) in enumerate(zip(arrival, balanced, strict=True)):
        assert len(one["gradients"]) == len(other["gradients"]) == 2
        for update in range(2):
            assert_alike(one["gradients"][update], other["gradients"][update], f"rank {rank}, update {update}")
        assert_alike(one["moments"], other["moments"], f"rank {rank}")
        assert_alike(one["parameters"], other["parameters"], f"rank {rank}")
    assert [event["mismatched_layers"] for event in balanced[0]["observed"]] == [[], []]
    assert arrival[0]["observed"] == balanced[1]["observed"] == []


def assert_scores_alike(arrival: list[dict[str, Any]], balanced: list[dict[str, Any]]) -> None:
    first, second = ({i: s for rank in ranks for i, s in rank["scores"].items()} for ranks in (arrival, balanced))
    assert sorted(first) == list(range(32))
    moved = [i for rank, one in enumerate(arrival) for i in one["scores"] if i not in balanced[rank]["scores"]]
    assert moved, "no sample went to another rank, so nothing was compared"
    assert_alike(first, second, "scores")


def assert_alike(first: dict[Any, torch.Tensor], second: dict[Any, torch.Tensor], what: str) -> None:
    """Compare to 1e-9 · max(1, |x|), value by value; some are not zero."""
    assert set(first) == set(second)
    assert any(float(one.abs().max()) > 1e-4 for one in first.values())
    for name, one in first.items():
        assert one.dtype == torch.float64
        assert float(((one - second[name]).abs() / one.abs().clamp(min=1)).max()) <= 1e-9, f"{what}: {name}"


@pytest.mark.parametrize(("spoil", "moved"), [("loads", [-1, 0]), ("routes", [2, -2])])
def test_executing_other_loads_than_planned_stops_all_ranks_before_any_weight_moves(
    expert: Path, four_ranks: World, tmp_path: Path, spoil: str, moved: list[int]
) -> None:
    file, rollouts = str(expert.parent / "run.toml"), str(expert / "rollouts" / "000000.jsonl.gz")
    ranks = four_ranks.run(balanced_ranks.train_spoilt, file, rollouts, str(tmp_path / "out"), spoil)
    assert {rank["told"] for rank in ranks} == {ranks[0]["told"]}
    said = re.search(
        r"update 1 did not execute what its plan counted: layer 2, pack \d of replica \d: the plan says "
        r"\[(\d+), (\d+)\] expert choices by destination, executed were \[(\d+), (\d+)\] \(1 in all\)",
        ranks[0]["told"],
    )
    assert said, ranks[0]["told"]
    planned, executed = [int(said[1]), int(said[2])], [int(said[3]), int(said[4])]
    change = [done - before for before, done in zip(planned, executed, strict=True)]
    assert change in (moved, [-step for step in moved]) if spoil == "routes" else change == moved
    assert all(rank["still"] for rank in ranks)
    assert [event["mismatched_layers"] for event in ranks[0]["balance"]] == [[2]]


def test_all_ranks_follow_the_plan_that_the_clock_of_rank_0_gave(
    expert: Path, four_ranks: World, tmp_path: Path
) -> None:
    file, rollouts = str(expert.parent / "run.toml"), str(expert / "rollouts" / "000000.jsonl.gz")
    ranks = four_ranks.run(balanced_ranks.plan_with_own_clock, file, rollouts, str(tmp_path / "out"), False)
    assert {rank[0] for rank in ranks} == {ranks[0][0]}
    assert ranks[0][1] == "deadline"
    assert [rank[2] for rank in ranks] == [True, False, False, False]
    (event,) = events(tmp_path / "out", 0, "plan")
    assert event["record"]["digest"] == ranks[0][0]


def test_routes_missing_on_rank_0_are_an_error_of_all_that_names_the_sample(
    expert: Path, four_ranks: World, tmp_path: Path
) -> None:
    file, rollouts = str(expert.parent / "run.toml"), str(expert / "rollouts" / "000000.jsonl.gz")
    ranks = four_ranks.run(balanced_ranks.plan_with_own_clock, file, rollouts, str(tmp_path / "out"), True)
    assert set(ranks) == {ranks[0]}
    assert "rank 0: RoutingError: sample 3 (position 3) has no routes" in ranks[0]


#: Two ranks and no experts at all, in float64.
DENSE: dict[str, Any] = TINY | {
    "model.dtype": "float64",
    "model.dense_layers_indices": [0, 1, 2],
    "core.expert_parallel_size": 1,
    "core.packing_max_tokens": 48,
    "miles.global_batch_size": 16,
    "core.max_policy_lag": 0,
    "miles.use_rollout_routing_replay": False,
    "miles.num_rollout": 2,
}


def train_dense(folder: Path, **changes: Any) -> Path:
    changed = {place.replace("__", "."): value for place, value in changes.items()}
    told = run("train", str(write_toml(folder, DENSE | changed)), "--debug")
    assert told.returncode == 0, told.stderr
    assert audit(read_logs([folder / "out"])) == []
    return folder / "out"


@pytest.fixture(scope="module")
def dense_in_arrival(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The yardstick: packed, samples as they came."""
    return train_dense(tmp_path_factory.mktemp("arrival"))


@pytest.mark.parametrize(
    "changes",
    [{}, {"core__sequence_packing": False, "core__packing_max_tokens": None}],
    ids=["packed", "one sample a row"],
)
def test_balanced_order_without_routes_learns_the_same_at_less_work(
    dense_in_arrival: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    root = train_dense(tmp_path, core__pack_order="balanced", **changes)
    given = [[event["reward_mean"] for event in events(one, 0, "rollout")] for one in (dense_in_arrival, root)]
    assert given[0] == given[1]
    for one, other in zip(weights(dense_in_arrival), weights(root), strict=True):
        assert_alike(one, other, "weights")
    works = []
    for event in events(root, 0, "plan"):
        record = event["record"]
        assert (record["pack_order"], record["layers"], event["loads_after"]) == ("balanced", [], None)
        works += zip(record["arrival"], record["work"], strict=True)
    for name in ("packs_per_rank", "attention_token_work", "attention_pair_work"):
        assert all(work[name] <= arrival[name] for arrival, work in works)
    assert any(work["attention_pair_work"] < arrival["attention_pair_work"] for arrival, work in works)
    assert events(root, 0, "expert_balance") == []
