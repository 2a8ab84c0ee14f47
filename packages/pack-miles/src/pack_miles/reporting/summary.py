"""What happened in a run, summed up from its contract files as plain values: what tables and pictures are made of."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
from pack_core import PackError, rebuild, samples_of

from pack_miles.contract.events import (
    Checkpoint,
    Event,
    Memory,
    Optimizer,
    Packing,
    Plan,
    Rollout,
    RunStarted,
    Scores,
    ScoreTiming,
    ScoringCheck,
)
from pack_miles.contract.facts import missing_ranks, status
from pack_miles.contract.log import Log, RunLogs, Update, runs_of
from pack_miles.reporting.balance import Planning, planning_of
from pack_miles.reporting.shapes import Shapes, shapes_of
from pack_miles.reporting.waiting import Waiting, waiting_of

OneEvent = TypeVar("OneEvent", bound=Event)


@attrs.frozen
class Block:
    """One sample in a picture of packs: its length in tokens and the prompt group it belongs to."""

    id: str | int
    length: int
    group: str | int | None


@attrs.frozen
class PackPicture:
    """The packs of one update: `ranks[rank][pack]` are the blocks of that pack, in order."""

    step: int
    capacity: int
    ranks: tuple[tuple[tuple[Block, ...], ...], ...]


@attrs.frozen
class CollectionRow:
    """One collection: its rewards over all samples, and the seconds its rollout took."""

    rollout_id: int
    samples: int
    reward_mean: float
    reward_std: float
    reward_min: float
    reward_max: float
    response_tokens: int
    model_tokens: int
    rollout_seconds: float


@attrs.frozen
class UpdateRow:
    """One optimizer update.

    `packs` and `samples` are per rank, the largest where ranks differ; `fill` is by rank, `fill_mean` over all their
    packs. `forwards` counts the packs a rank runs in scoring and training, `forwards_single` the same passes with one
    sample a row. Seconds are the slowest rank's; those of a scoring pass over several updates are shared equally.
    """

    step: int
    rollout_id: int
    packs: int
    samples: int
    forwards: int
    forwards_single: int
    fill: tuple[float, ...]
    fill_mean: float
    model_tokens: int
    max_pack_tokens: int
    score_seconds: float
    train_seconds: float


@attrs.frozen
class RunSummary:
    """One run. `log_prob_*` compare trainer and rollout, `check_*` scoring and training (nats; None: none recorded).

    `peak_allocated` is the memory of a GPU, `peak_resident` that of a process, in bytes, the largest over ranks.
    `missing` are the ranks without a log; `updates` are then of the others alone. `planning` is None without plans.
    """

    name: str
    directory: str
    status: str
    ranks: int
    missing: tuple[int, ...]
    expert_parallel: int
    starts: int
    checkpoints: int
    capacity: int | None
    collections: tuple[CollectionRow, ...]
    updates: tuple[UpdateRow, ...]
    pictures: tuple[PackPicture, ...]
    planning: Planning | None
    shapes: Shapes | None
    waiting: Waiting | None
    peak_allocated: int | None
    peak_resident: int | None
    log_prob_mean: float | None
    log_prob_max: float | None
    checks: int
    check_mean: float | None
    check_max: float | None
    check_tolerance: float | None
    versions: dict[str, str]
    configuration: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def one_a_row(self) -> bool:
        """Whether every forward ran one sample, as it does with packing off."""
        return bool(self.updates) and self.forwards == self.forwards_single

    @property
    def reward_first(self) -> float | None:
        """Mean reward of the first tenth of the collections, at least one."""
        return _mean([row.reward_mean for row in self.collections[: tenth(len(self.collections))]])

    @property
    def reward_last(self) -> float | None:
        """Mean reward of the last tenth of the collections, at least one."""
        return _mean([row.reward_mean for row in self.collections[-tenth(len(self.collections)) :]])

    @property
    def fill(self) -> float | None:
        """Mean over the updates of the share of pack capacity filled with tokens."""
        return _mean([row.fill_mean for row in self.updates])

    @property
    def forwards(self) -> int:
        """Forwards one rank ran, scoring and training together."""
        return sum(row.forwards for row in self.updates)

    @property
    def forwards_single(self) -> int:
        """Forwards one rank would have run with one sample a row."""
        return sum(row.forwards_single for row in self.updates)

    @property
    def forwards_saved(self) -> float | None:
        """Share of the one-sample-a-row forwards that packing saved."""
        return 1 - self.forwards / self.forwards_single if self.forwards_single else None

    @property
    def tokens_per_second(self) -> float | None:
        """Model tokens of the ranks with a log, each counted once, per second of scoring and training."""
        seconds = self.score_seconds + self.train_seconds
        return sum(row.model_tokens for row in self.updates) / seconds if seconds else None

    @property
    def score_seconds(self) -> float:
        """Seconds in scoring passes."""
        return math.fsum(row.score_seconds for row in self.updates)

    @property
    def train_seconds(self) -> float:
        """Seconds in training: forwards, backwards, reductions and optimizer steps."""
        return math.fsum(row.train_seconds for row in self.updates)

    @property
    def rollout_seconds(self) -> float:
        """Seconds in rollouts."""
        return math.fsum(row.rollout_seconds for row in self.collections)


@attrs.frozen
class Report:
    """One or several runs, in the order given."""

    runs: tuple[RunSummary, ...]


def tenth(count: int) -> int:
    """Return a tenth of the count, at least 1.

    >>> tenth(64), tenth(3)
    (6, 1)
    """
    return max(1, count // 10)


def summarize(logs: Sequence[Log]) -> Report:
    """Return the report of the given logs, one run a directory.

    Updates that a resume repeated count once, as they were last run.
    """
    return Report(tuple(_summarize(run) for run in runs_of(logs)))


def _summarize(run: RunLogs) -> RunSummary:
    by_rank = run.standing()
    events = [event for own in by_rank.values() for event in own]
    start = run.start
    score_seconds = _score_seconds(events)
    updates = tuple(_update_row(update, score_seconds) for update in run.updates() if update.training)
    scores = _once([event for event in events if isinstance(event, Scores)])
    checks = _once([event for event in events if isinstance(event, ScoringCheck)])
    differing = [(mean, event) for event in scores if (mean := _mean_abs(event)) is not None]
    tokens = sum(event.active_tokens for _, event in differing)
    compared = sum(event.active_tokens for event in checks)
    memory = [event for event in events if isinstance(event, Memory)]
    allocated = [event.peak_allocated_bytes for event in memory if event.peak_allocated_bytes is not None]
    capacity = next((event.token_budget for event in reversed(events) if isinstance(event, Packing)), None)
    rollouts = {row.step: row.rollout_id for row in updates}
    planning = planning_of(run.plans(), rollouts, events)
    return RunSummary(
        name=start.name if start else run.directory.name,
        directory=str(run.directory),
        status=status(run),
        ranks=start.world_size if start else len(run.logs),
        missing=missing_ranks(run),
        expert_parallel=start.expert_parallel_size if start else 1,
        starts=sum(isinstance(event, RunStarted) for event in run.logs[0].events),
        checkpoints=len(_once([event for event in events if isinstance(event, Checkpoint)])),
        capacity=capacity,
        collections=tuple(_collection_row(e) for e in _once([e for e in events if isinstance(e, Rollout)])),
        updates=updates,
        pictures=_pictures(run, updates),
        planning=planning,
        shapes=shapes_of(run.plans(), planning.updates, rollouts, capacity) if planning else None,
        waiting=waiting_of(events),
        peak_allocated=max(allocated, default=None),
        peak_resident=max((event.peak_resident_bytes for event in memory), default=None),
        log_prob_mean=sum(mean * e.active_tokens for mean, e in differing) / tokens if tokens else None,
        log_prob_max=max((event.max_abs for event in scores), default=None),
        checks=len(checks),
        check_mean=sum(e.mean_abs * e.active_tokens for e in checks) / compared if compared else None,
        check_max=max((event.max_abs for event in checks), default=None),
        check_tolerance=checks[-1].tolerance if checks else None,
        versions=start.versions if start else {},
        configuration=start.configuration if start else {},
        problems=tuple(problem for log in run.logs for problem in log.problems),
    )


def _collection_row(event: Rollout) -> CollectionRow:
    return CollectionRow(
        rollout_id=event.rollout_id,
        samples=event.samples,
        reward_mean=event.reward_mean,
        reward_std=event.reward_std,
        reward_min=event.reward_min,
        reward_max=event.reward_max,
        response_tokens=event.response_tokens,
        model_tokens=event.model_tokens,
        rollout_seconds=event.seconds,
    )


def _update_row(update: Update, score_seconds: Mapping[int, float]) -> UpdateRow:
    training = [own[-1] for _, own in sorted(update.training.items())]
    scoring = [own[-1] for _, own in sorted(update.scoring.items())]
    passes = [training, scoring] if scoring else [training]
    capacity = sum(event.packs * event.token_budget for event in training)
    tokens = sum(event.model_tokens for event in training)
    first = training[0]
    return UpdateRow(
        step=update.step,
        rollout_id=first.rollout_id,
        packs=max(event.packs for event in training),
        samples=max(event.samples for event in training),
        forwards=sum(max(event.packs for event in one) for one in passes),
        forwards_single=sum(max(event.samples for event in one) for one in passes),
        fill=tuple(event.fill_fraction for event in training),
        fill_mean=tokens / capacity if capacity else 0.0,
        model_tokens=tokens,
        max_pack_tokens=max(event.max_pack_tokens for event in training),
        score_seconds=score_seconds.get(first.rollout_id, 0.0),
        train_seconds=max((event.elapsed_seconds for event in update.optimizer.values()), default=0.0),
    )


def _score_seconds(events: Sequence[Event]) -> dict[int, float]:
    """Return by collection the slowest rank's scoring seconds, shared equally over the collection's updates."""
    slowest: dict[int, float] = {}
    sharing: dict[int, set[int]] = {}
    for event in events:
        if isinstance(event, ScoreTiming):
            slowest[event.rollout_id] = max(event.seconds, slowest.get(event.rollout_id, 0.0))
        elif isinstance(event, Optimizer):
            sharing.setdefault(event.rollout_id, set()).add(event.step)
    return {rollout_id: seconds / len(sharing.get(rollout_id, {0})) for rollout_id, seconds in slowest.items()}


def _pictures(run: RunLogs, updates: Sequence[UpdateRow]) -> tuple[PackPicture, ...]:
    """Return the pictures of the first and the last update whose plan can be rebuilt; rows of one look alike."""
    plans = run.plans()
    packed = any(row.packs < row.samples for row in updates)
    steps = dict.fromkeys([updates[0].step, updates[-1 if packed else 0].step]) if updates else {}
    rollouts = {row.step: row.rollout_id for row in updates}
    drawn = (_picture(step, plans.get(rollouts[step])) for step in steps)
    return tuple(picture for picture in drawn if picture is not None)


def _picture(step: int, event: Plan | None) -> PackPicture | None:
    if event is None:
        return None
    try:
        samples = samples_of(event.record)
        plan = rebuild(event.record, samples)
    except (PackError, KeyError, TypeError, ValueError):
        return None  # the audit says what is wrong with the record
    place = step - event.update
    if not 0 <= place < len(plan.steps):
        return None
    blocks = [Block(sample.id, sample.length, sample.group) for sample in samples]
    ranks = tuple(tuple(tuple(blocks[i] for i in pack) for pack in rank) for rank in plan.steps[place].packs)
    return PackPicture(step, plan.capacity, ranks)


def _mean_abs(event: Scores) -> float | None:
    """Mean absolute difference over all active tokens: the thirds of the responses cover each token once."""
    parts = [(group.tokens, group.mean_abs) for name, group in event.groups.items() if name.endswith("_third")]
    tokens = sum(count for count, _ in parts)
    return sum(count * (mean or 0.0) for count, mean in parts) / tokens if tokens else None


def _once(events: Iterable[OneEvent]) -> list[OneEvent]:
    """Return one event of each step, in order: what is global is the same on every rank."""
    found: dict[int, OneEvent] = {}
    for event in events:
        found.setdefault(event.step, event)
    return [found[step] for step in sorted(found)]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
