"""The metrics of an update, worked out by hand from what two ranks wrote."""

from typing import Any

import pytest
from pack_miles.contract import events
from pack_miles.contract.events import Event
from pack_miles.training.collectives import World
from pack_miles.training.metrics import collection_metrics
from pack_miles.training.tracking import Tracker

WORK = {
    "packs_per_rank": 2,
    "attention_token_work": 150,
    "attention_pair_work": 9000,
    "model_tokens": 260,
    "max_pack_tokens": 90,
    "fill_fraction": 0.65,
}


def packing(rank: int, step: int, packs: int, samples: int, tokens: int, largest: int, which: Any) -> Event:
    return events.Packing(
        rank=rank,
        step=step,
        rollout_id=3,
        pass_=which,
        plan_digest="d",
        samples=samples,
        packs=packs,
        model_tokens=tokens,
        max_pack_tokens=largest,
        token_budget=100,
        fill_fraction=tokens / (packs * 100),
        samples_per_pack=samples / packs,
    )


def optimizer(rank: int, step: int, objective: float, seconds: float) -> Event:
    return events.Optimizer(
        rank=rank,
        step=step,
        rollout_id=3,
        normalization=events.Normalization(
            samples=10, active_tokens=180, token_denominator=180, model_tokens=260, world_size=2
        ),
        reduction="token",
        scoring_pass="standalone",
        local_policy_objective=objective,
        clip_fraction=0.0,
        gradient_norm=1.5,
        local_behavior_versions=("6",),
        local_microbatches=2,
        lr_used=1e-3,
        lr_next=1e-3,
        elapsed_seconds=seconds,
    )


def collection(rank: int, *, experts: bool) -> list[Event]:
    """Return what a rank writes of collection 3: updates 7 and 8."""
    work = WORK | ({"critical_work_proxy": 400, "dispatches": 2} if experts else {})
    found: list[Event] = []
    if rank == 0:
        record = {"work": [work, work | {"attention_pair_work": 8000}], "samples": {"ids": list(range(20))}}
        found.append(
            events.Plan(rank=0, step=6, rollout_id=3, record=record, counting_seconds=0.1, planning_seconds=0.3)
        )
    found.append(events.ScoreTiming(rank=rank, step=6, rollout_id=3, seconds=1.0 + rank, model_tokens=500))
    for step in (7, 8):
        found.append(packing(rank, step, 1, 5, 999, 999, "scoring"))
        found.append(packing(rank, step, 2, 6 - 2 * rank, 140 - 20 * rank, 90 - 10 * rank, "training"))
        if experts and rank == 0:
            found.append(
                events.ExpertBalance(
                    rank=0,
                    step=step,
                    rollout_id=3,
                    plan_digest="d",
                    layers=[1],
                    routed_layers=1,
                    packs_per_rank=2,
                    dispatches=2,
                    skew_mean=1.25,
                    skew_max=1.5,
                    max_slot_assignments=9,
                    critical_work_proxy=400,
                    mismatched_layers=[],
                )
            )
        found.append(optimizer(rank, step, 0.25 - rank, 2.0 + rank))
    found.append(
        events.Memory(
            rank=rank, step=8, rollout_id=3, peak_allocated_bytes=7000 + rank, peak_resident_bytes=90_000 + rank
        )
    )
    return found


def test_the_metrics_of_two_ranks_and_two_updates() -> None:
    first, second = collection_metrics([collection(rank, experts=True) for rank in range(2)])
    assert first == pytest.approx(
        {
            "train/step": 6,
            "train/completed_steps": 7,
            "train/rollout_id": 3,
            "train/packing/packs_per_rank": 2,
            "train/packing/samples_per_pack": 10 / 4,
            "train/packing/tokens_per_pack": 260 / 4,
            "train/packing/fill_fraction": 260 / 400,
            "train/packing/largest_pack": 90,
            "train/packing/rank0_peak_allocated_bytes": 7000,
            "train/packing/expert_dispatch_skew_mean": 1.25,
            "train/packing/expert_dispatch_skew_max": 1.5,
            "train/packing/attention_token_work": 150,
            "train/packing/attention_pair_work": 9000,
            "train/packing/critical_work_proxy": 400,
            "train/packing/planning_seconds": 0.2,  # 0.4 over two updates
            "train/packing/score_seconds": 1.0,  # the slower rank's 2.0 over two updates
            "train/packing/train_seconds": 3.0,
            "train/step_seconds": 3.0,
            "train/policy_objective": -0.5,
            "train/grad_norm": 1.5,
            "train/model_tokens": 260,
            "train/active_response_tokens": 180,
        }
    )
    assert (second["train/step"], second["train/packing/attention_pair_work"]) == (7, 8000)


def test_the_names_are_those_of_the_configuration_whatever_happened() -> None:
    plain, planned = (
        [set(values) for values in collection_metrics([collection(rank, experts=experts) for rank in range(2)])]
        for experts in (False, True)
    )
    assert plain[0] == plain[1]
    assert planned[0] == planned[1]
    assert planned[0] - plain[0] == {
        "train/packing/expert_dispatch_skew_mean",
        "train/packing/expert_dispatch_skew_max",
        "train/packing/critical_work_proxy",
    }
    unscored = [event for event in collection(0, experts=False) if not isinstance(event, events.ScoreTiming)]
    assert set(collection_metrics([unscored])[0]) == plain[0]


def test_a_cpu_has_no_peak_and_says_so_with_a_number() -> None:
    own = [
        events.Memory(rank=0, step=8, rollout_id=3, peak_allocated_bytes=None, peak_resident_bytes=5)
        if isinstance(event, events.Memory)
        else event
        for event in collection(0, experts=False)
    ]
    assert collection_metrics([own])[0]["train/packing/rank0_peak_allocated_bytes"] == 0


class Written:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, values: Any) -> None:
        self.rows.append(dict(values))

    def finish(self, failed: bool) -> None: ...


class Two(World):
    """A world whose other rank heard what rank 1 writes."""

    def gather(self, value: Any) -> Any:
        assert "samples" not in next(event.record for event in value if isinstance(event, events.Plan))
        return [value, collection(1, experts=True)]


def test_a_tracker_logs_each_collection_once() -> None:
    written = Written()
    tracker = Tracker(Two(0, 2), written)
    for event in collection(0, experts=True):
        tracker.hear(event)
    tracker.hear(events.RunFailed(rank=0, step=8, error="not a metric"))
    said = tracker.end_collection()
    assert [row["train/step"] for row in written.rows] == [6, 7]
    assert said == written.rows
    silent = Tracker(World(0, 1), None)
    for event in collection(0, experts=False):
        silent.hear(event)
    assert len(silent.end_collection()) == 2
    assert silent.end_collection() == []
