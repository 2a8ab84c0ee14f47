"""Plausible contract logs of a small run, made from a seed: what the runtime would write, without a model."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from pack_core import DispatchCounts, Plan, Sample, Schedule, Search, Topology, dispatch_loads, plan, record, schedule
from pack_miles.contract import events
from pack_miles.contract.events import Event
from pack_miles.contract.log import Log
from pack_miles.contract.sink import ContractSink, contract_path

RANKS = 4
CAPACITY = 512
STEPS = 2
PROMPTS = 8
ANSWERS = 8

#: Routed layers of the model, those counted, the experts a token is sent to, and the destinations.
ROUTED, COUNTED, TOP_K, DESTINATIONS = 6, (1, 3, 5), 4, 2


def write_run(root: Path, by_rank: dict[int, list[Event]]) -> Path:
    """Append the events of every rank to its contract file in `root`."""
    for rank, own in by_rank.items():
        with ContractSink(contract_path(root, rank), rank) as sink:
            for event in own:
                sink.write(event)
    return root


def as_logs(by_rank: dict[int, list[Event]], root: Path = Path("run")) -> list[Log]:
    """Return the logs that reading the events of every rank back from `root` would give."""
    return [Log(contract_path(root, rank), tuple(own)) for rank, own in by_rank.items()]


def make_run(
    collections: int = 6,
    *,
    seed: int = 17,
    ranks: int = RANKS,
    first: int = 0,
    start: dict[str, Any] | None = None,
    packing: bool = True,
    finish: bool = True,
    capacity: int = CAPACITY,
    name: str = "demo",
    pack_order: str = "arrival",
    routes: bool = False,
) -> dict[int, list[Event]]:
    """Return by rank the events of collections `first` to `collections`, each of `STEPS` updates, checkpointed each.

    With `pack_order="balanced"` samples are reordered, and with `routes` by their expert load too; `ranks` is then a
    multiple of 4, for two replicas of two destinations at least.
    """
    by_rank: dict[int, list[Event]] = {rank: [] for rank in range(ranks)}
    for rank, own in by_rank.items():
        own.append(_start(rank, ranks, first, packing, capacity, name, start or {}))
    if pack_order != "arrival":
        order = {"pack_order": pack_order, "expert_balanced_packing": routes}
        by_rank = {rank: [_ordered(own[0], order)] for rank, own in by_rank.items()}
    for rollout_id in range(first, collections):
        random = Random(f"{seed}/{rollout_id}")
        progress = rollout_id / max(1, collections - 1)
        samples = draw_samples(random, rollout_id, progress, capacity)
        counts = draw_counts(seed, rollout_id, samples) if routes else None
        made = plan(
            samples,
            topology=Topology(ranks=ranks, expert_parallel=2 if ranks % 2 == 0 else 1),
            capacity=capacity,
            step_samples=PROMPTS * ANSWERS // STEPS,
            max_documents=None if packing else 1,
            pack_order=pack_order,
            counts=counts,
            search=Search(proposals=48, kernels="python"),
        )
        by_rank[0] += _opening(rollout_id, samples, made, counts, random, progress)
        for rank, own in by_rank.items():
            own += _collection(rank, rollout_id, samples, made, random, collections * STEPS)
    if finish:
        steps = collections * STEPS
        for rank, own in by_rank.items():
            own.append(
                events.RunFinished(rank=rank, step=steps, completed_steps=steps, rollouts=collections, seconds=9.5)
            )
    return by_rank


def draw_samples(random: Random, rollout_id: int, progress: float, capacity: int) -> list[Sample]:
    """Return one collection: prompts of one length each, answers that grow longer as the run goes on."""
    samples = []
    for prompt in range(PROMPTS):
        group = rollout_id * PROMPTS + prompt
        prompt_tokens = random.randint(capacity // 40, capacity // 12)
        for answer in range(ANSWERS):
            length = prompt_tokens + int(random.lognormvariate(0.2 * progress, 0.7) * capacity / 9)
            samples.append(Sample(group * ANSWERS + answer, min(length, capacity), group))
    return samples


def draw_counts(seed: int, rollout_id: int, samples: list[Sample]) -> DispatchCounts:
    """Return where the tokens of samples go: each prompt leans to one destination in each counted layer."""
    counts = array("i")
    for sample in samples:
        leaning = Random(f"{seed}/{rollout_id}/{sample.group}")
        for _ in COUNTED:
            first = int(sample.length * TOP_K * leaning.choice((0.15, 0.35, 0.55, 0.8)))
            counts.extend([first, sample.length * TOP_K - first])
    return DispatchCounts(COUNTED, ROUTED, DESTINATIONS, counts)


def _start(
    rank: int, ranks: int, first: int, packing: bool, capacity: int, name: str, changes: dict[str, Any]
) -> Event:
    fields = {
        "configuration_digest": "a1b2c3",
        "name": name,
        "world_size": ranks,
        "expert_parallel_size": 2 if ranks % 2 == 0 else 1,
        "resumed": first > 0,
        "completed_steps": first * STEPS,
        "versions": {"pack-core": "0.1.0", "pack-torch": "0.1.0", "pack-miles": "0.1.0", "torch": "2.13.0"},
        "configuration": {
            "schema_version": 1,
            "name": name,
            "core": {"sequence_packing": packing, "packing_max_tokens": capacity, "attention_backend": "segment"},
            "miles": {"global_batch_size": PROMPTS * ANSWERS // STEPS, "rollout_batch_size": PROMPTS},
            "run": {"ranks": ranks},
        },
        "time": 1.8e9 + first,
    }
    return events.RunStarted(rank=rank, step=first * STEPS, **{**fields, **changes})


def _ordered(start: Event, order: dict[str, Any]) -> Event:
    assert isinstance(start, events.RunStarted)
    configuration = {**start.configuration, "core": {**start.configuration.get("core", {}), **order}}
    return msgspec.structs.replace(start, configuration=configuration)


def _opening(
    rollout_id: int,
    samples: list[Sample],
    made: Plan,
    counts: DispatchCounts | None,
    random: Random,
    progress: float,
) -> list[Event]:
    mean = min(0.97, max(0.03, 0.12 + 0.75 * progress**0.8 + random.gauss(0, 0.03)))
    step = rollout_id * STEPS
    tokens = sum(sample.length for sample in samples)
    return [
        events.Rollout(
            rank=0,
            step=step,
            rollout_id=rollout_id,
            samples=len(samples),
            reward_mean=mean,
            reward_std=0.35 * (1 - mean) + 0.05,
            reward_min=0.0,
            reward_max=1.0,
            response_tokens=tokens * 3 // 4,
            model_tokens=tokens,
            seconds=0.8 + random.random() * 0.3,
        ),
        _plan(rollout_id, samples, made, counts),
    ]


def _plan(rollout_id: int, samples: list[Sample], made: Plan, counts: DispatchCounts | None) -> Event:
    fields: dict[str, Any] = {"rank": 0, "step": rollout_id * STEPS, "rollout_id": rollout_id}
    fields["record"] = record(made, samples, counts)
    if made.search is not None:
        fields["planning_seconds"] = 0.03 + 0.01 * rollout_id
    if counts is not None:
        fields["counting_seconds"] = 0.002
        orders = [range(place * made.step_samples, (place + 1) * made.step_samples) for place in range(STEPS)]
        before = [_arrival(samples, made, order) for order in orders]
        fields["loads_before"] = [_loads(one, counts) for one in before]
        fields["loads_after"] = [_loads(one, counts) for one in made.steps]
    return events.Plan(**fields)


def _arrival(samples: list[Sample], made: Plan, order: Sequence[int]) -> Schedule:
    lengths = [sample.length for sample in samples]
    return schedule(lengths, made.topology.ranks, made.capacity, order=order, equalize=made.equalize)


def _loads(laid: Schedule, counts: DispatchCounts) -> list[list[list[int]]]:
    return [
        [[sum(column) for column in zip(*layers, strict=True)] for layers in packs]
        for packs in dispatch_loads(laid, counts)
    ]


def _balance(rollout_id: int, made: Plan, place: int) -> Event:
    work = made.work[place]
    return events.ExpertBalance(
        rank=0,
        step=rollout_id * STEPS + place + 1,
        rollout_id=rollout_id,
        plan_digest=made.digest,
        layers=list(made.layers),
        routed_layers=made.routed_layers,
        packs_per_rank=work.packs_per_rank,
        dispatches=work.dispatches or 0,
        skew_mean=work.skew_mean or 0.0,
        skew_max=work.skew_max or 0.0,
        max_slot_assignments=work.max_slot_assignments or 0,
        critical_work_proxy=work.critical_work_proxy or 0,
        mismatched_layers=[],
    )


def _collection(
    rank: int, rollout_id: int, samples: list[Sample], made: Plan, random: Random, total_steps: int
) -> list[Event]:
    done = rollout_id * STEPS
    found: list[Event] = [_packing(rank, rollout_id, samples, made, place, "scoring") for place in range(STEPS)]
    own = sum(samples[i].length for step in made.steps for pack in step.packs[rank] for i in pack)
    seconds = 0.15 * made.steps[0].packs_per_rank / 4 + 0.02 * random.random()
    found.append(events.ScoreTiming(rank=rank, step=done, rollout_id=rollout_id, seconds=seconds, model_tokens=own))
    for place in range(STEPS):
        found.append(_packing(rank, rollout_id, samples, made, place, "training"))
        found += [_balance(rollout_id, made, place)] if made.layers and rank == 0 else []
        found.append(_scores(rank, rollout_id, done + place + 1))
        if place == 0:
            found.append(_check(rank, rollout_id, done))
        found.append(_optimizer(rank, rollout_id, samples, made, place, random, total_steps))
    found.append(events.Checkpoint(rank=rank, step=done + STEPS, path=f"checkpoints/{done + STEPS}", seconds=0.1))
    return found


def _packing(rank: int, rollout_id: int, samples: list[Sample], made: Plan, place: int, pass_: Any) -> Event:
    packs = made.steps[place].packs[rank]
    sizes = [sum(samples[i].length for i in pack) for pack in packs]
    count = sum(len(pack) for pack in packs)
    return events.Packing(
        rank=rank,
        step=rollout_id * STEPS + place + 1,
        rollout_id=rollout_id,
        pass_=pass_,
        plan_digest=made.digest,
        samples=count,
        packs=len(packs),
        model_tokens=sum(sizes),
        max_pack_tokens=max(sizes),
        token_budget=made.capacity,
        fill_fraction=sum(sizes) / (len(packs) * made.capacity),
        samples_per_pack=count / len(packs),
    )


def _scores(rank: int, rollout_id: int, step: int) -> Event:
    thirds = {
        "first_third": events.Agreement(tokens=400, mean_abs=2e-7),
        "middle_third": events.Agreement(tokens=300, mean_abs=4e-7),
        "last_third": events.Agreement(tokens=300, mean_abs=3e-7),
    }
    lengths = {
        "length_le_1024": events.Agreement(tokens=1000, mean_abs=2.9e-7),
        "length_1025_4096": events.Agreement(tokens=0, mean_abs=0.0),
        "length_gt_4096": events.Agreement(tokens=0, mean_abs=0.0),
    }
    return events.Scores(
        rank=rank,
        step=step,
        rollout_id=rollout_id,
        source="standalone",
        active_tokens=1000,
        max_abs=2e-6,
        p50_upper=0.001,
        p95_upper=0.001,
        p99_upper=0.001,
        histogram_upper_edges=(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0),
        histogram_counts=(1000, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        groups=thirds | lengths,
    )


def _check(rank: int, rollout_id: int, done: int) -> Event:
    return events.ScoringCheck(
        rank=rank,
        step=done,
        rollout_id=rollout_id,
        active_tokens=1000,
        mean_abs=1e-8,
        max_abs=3e-7,
        tokens_above_edge=0,
        edge=1e-3,
        tolerance=1e-3,
        max_tolerance=None,
    )


def _optimizer(
    rank: int, rollout_id: int, samples: list[Sample], made: Plan, place: int, random: Random, total_steps: int
) -> Event:
    schedule = made.steps[place]
    tokens = sum(samples[i].length for own in schedule.packs for pack in own for i in pack)
    step = rollout_id * STEPS + place + 1
    return events.Optimizer(
        rank=rank,
        step=step,
        rollout_id=rollout_id,
        normalization=events.Normalization(
            samples=made.step_samples,
            active_tokens=tokens * 3 // 4,
            token_denominator=tokens * 3 // 4,
            model_tokens=tokens,
            world_size=len(schedule.packs),
        ),
        reduction="token",
        scoring_pass="standalone",
        local_policy_objective=random.gauss(0, 0.01),
        clip_fraction=0.01,
        gradient_norm=1.5 - step / total_steps,
        local_behavior_versions=(str(rollout_id * STEPS),),
        local_microbatches=schedule.packs_per_rank,
        lr_used=3e-3,
        lr_next=3e-3,
        elapsed_seconds=0.32 * schedule.packs_per_rank / 4 + 0.05 * random.random(),
    )
