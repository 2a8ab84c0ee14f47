"""Runs side by side on the same samples: warmed trainer time, planning, memory, and the net of it in plain words."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import attrs
import msgspec

from pack_miles.contract.events import Rollout, RunStarted
from pack_miles.contract.log import RunLogs
from pack_miles.errors import counted
from pack_miles.reporting.summary import RunSummary

#: Updates after every start of a process that count as cold: caches fill, kernels compile.
WARMUP = 5

#: Options that say where a run writes and how it is watched: they make no two runs different.
ELSEWHERE = ("output", "tracking", "name", "run.resume", "run.checkpoint_every", "run.checkpoint_keep")

#: A difference of so many standard errors stands out.
STANDING_OUT = 2.0


@attrs.frozen
class Measured:
    """One run of a comparison. Seconds are means of an update; the trainer's are scoring and training together."""

    label: str
    cold_seconds: float | None
    warm_seconds: float
    planning_seconds: float

    @property
    def net_seconds(self) -> float:
        """Trainer and planning together, warmed."""
        return self.warm_seconds + self.planning_seconds


@attrs.frozen
class Versus:
    """A run against the first: the mean difference of an update in seconds, paired, and its standard error."""

    label: str
    difference: float
    error: float

    @property
    def stands_out(self) -> bool:
        """Whether the difference is more than chance between updates explains."""
        return abs(self.difference) > STANDING_OUT * self.error


@attrs.frozen
class Comparison:
    """What several runs of the same samples cost.

    `refusal` says why they are not compared, "" when they are. `updates` are the warmed ones all runs have, `left_out`
    the collections whose samples are not the same. `differing` holds the options that differ, one value a run.
    """

    refusal: str
    updates: int = 0
    left_out: int = 0
    warmup: int = WARMUP
    runs: tuple[Measured, ...] = ()
    versus: tuple[Versus, ...] = ()
    differing: tuple[tuple[str, tuple[Any, ...]], ...] = ()


def compare(
    runs: Sequence[RunLogs], summaries: Sequence[RunSummary], labels: Sequence[str], warmup: int = WARMUP
) -> Comparison:
    """Return how the runs compare, or why they do not.

    Args:
        runs: at least two.
        summaries: of the same runs, in the same order.
        labels: what each is called.
        warmup: updates after every start that are told apart as cold.
    """
    digests = [sample_digests(run) for run in runs]
    for label, own in zip(labels, digests, strict=True):
        if not own:
            return Comparison(f"{label} records no plan, so its samples are unknown; give the log of its rank 0")
    common = set.intersection(*map(set, digests))
    same = {one for one in common if len({own[one] for own in digests}) == 1}
    if not same:
        return Comparison(
            "their samples differ in every collection, so their times are those of different work; run both on the "
            "same rollouts and seeds"
        )
    steps = [{row.step: row.rollout_id for row in summary.updates} for summary in summaries]
    shared = {step for step in set.intersection(*map(set, steps)) if len({own[step] for own in steps}) == 1}
    shared = {step for step in shared if steps[0][step] in same}
    cold = {step for step in shared for run in runs if _is_cold(step, run, warmup)}
    warm = sorted(shared - cold)
    if len(warm) < 2:
        return Comparison(
            f"{counted(len(shared), 'update')} of the same samples, {counted(len(warm), 'update')} after the first "
            f"{warmup} of each start: too few for a warmed time; train longer, or lower --warmup"
        )
    spent = [_seconds(run, summary) for run, summary in zip(runs, summaries, strict=True)]
    return Comparison(
        refusal="",
        updates=len(warm),
        left_out=len(common - same),
        warmup=warmup,
        runs=tuple(_measured(label, own, warm, sorted(cold)) for label, own in zip(labels, spent, strict=True)),
        versus=tuple(_versus(label, own, spent[0], warm) for label, own in list(zip(labels, spent, strict=True))[1:]),
        differing=differing([summary.configuration for summary in summaries]),
    )


def sample_digests(run: RunLogs) -> dict[int, str]:
    """Return by collection a digest of its samples in arrival order, their lengths, groups, rewards and responses."""
    rewarded = {
        event.rollout_id: (event.reward_mean, event.reward_std, event.response_tokens)
        for own in run.standing().values()
        for event in own
        if isinstance(event, Rollout)
    }
    return {
        rollout_id: blake2b(
            msgspec.json.encode([plan.record.get("samples"), rewarded.get(rollout_id)], order="sorted"), digest_size=16
        ).hexdigest()
        for rollout_id, plan in run.plans().items()
    }


def differing(configurations: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return the options that are not the same in all configurations, and each one's value.

    >>> differing([{"core": {"sequence_packing": True}}, {"core": {"sequence_packing": False}}])
    (('core.sequence_packing', (True, False)),)
    """
    flat = [_flat(one) for one in configurations]
    names = sorted({name for one in flat for name in one})
    found = ((name, tuple(one.get(name) for one in flat)) for name in names if not _elsewhere(name))
    return tuple((name, values) for name, values in found if any(value != values[0] for value in values))


def _flat(configuration: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, values in configuration.items():
        if isinstance(values, Mapping):
            found |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            found[section] = values
    return found


def _elsewhere(name: str) -> bool:
    return name in ELSEWHERE or name.partition(".")[0] in ELSEWHERE


def _is_cold(step: int, run: RunLogs, warmup: int) -> bool:
    starts = (event for own in run.standing().values() for event in own if isinstance(event, RunStarted))
    return any(event.completed_steps < step <= event.completed_steps + warmup for event in starts)


def _seconds(run: RunLogs, summary: RunSummary) -> dict[int, tuple[float, float]]:
    """Return by update its trainer and its planning seconds; a plan's are shared equally by its updates."""
    plans = run.plans()
    counts = Counter(row.rollout_id for row in summary.updates)
    found = {}
    for row in summary.updates:
        plan = plans.get(row.rollout_id)
        planning = (plan.counting_seconds + plan.planning_seconds) / counts[row.rollout_id] if plan else 0.0
        found[row.step] = (row.score_seconds + row.train_seconds, planning)
    return found


def _measured(
    label: str, spent: Mapping[int, tuple[float, float]], warm: Sequence[int], cold: Sequence[int]
) -> Measured:
    return Measured(
        label=label,
        cold_seconds=statistics.fmean(spent[step][0] for step in cold) if cold else None,
        warm_seconds=statistics.fmean(spent[step][0] for step in warm),
        planning_seconds=statistics.fmean(spent[step][1] for step in warm),
    )


def _versus(
    label: str, own: Mapping[int, tuple[float, float]], first: Mapping[int, tuple[float, float]], warm: Sequence[int]
) -> Versus:
    """Return the paired difference: the same update of both runs trains the same samples."""
    differences = [math.fsum(own[step]) - math.fsum(first[step]) for step in warm]
    return Versus(label, statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences)))


def told(comparison: Comparison) -> list[str]:
    """Return the comparison in plain words, a sentence a line."""
    if comparison.refusal:
        return [f"not compared: {comparison.refusal}"]
    first = comparison.runs[0]
    lines = []
    if comparison.differing:
        names = (f"{name} ({', '.join(map(str, values))})" for name, values in comparison.differing)
        lines.append(f"what differs: {'; '.join(names)}")
    for run, versus in zip(comparison.runs[1:], comparison.versus, strict=True):
        share = abs(versus.difference) / first.net_seconds if first.net_seconds else 0.0
        trainer = (
            f"{run.label}: {run.warm_seconds:.3g} s of scoring and training an update instead of "
            f"{first.warm_seconds:.3g} s, {run.planning_seconds:.3g} s of planning instead of "
            f"{first.planning_seconds:.3g} s: "
        )
        if not versus.stands_out:
            net = f"no difference that stands out ({versus.difference:+.2g} s ± {versus.error:.2g} s an update)"
        elif versus.difference < 0:
            net = f"a net gain of {-versus.difference:.3g} s an update, {share:.1%}"
        else:
            net = f"a net loss of {versus.difference:.3g} s an update, {share:.1%}"
        lines.append(trainer + net)
    shared = (
        f"Over {counted(comparison.updates, 'update')} of the same samples, the first {comparison.warmup} after every "
        "start left out"
    )
    if comparison.left_out:
        shared += f"; {counted(comparison.left_out, 'collection')} with other samples left out as well"
    return [*lines, f"{shared}. Seconds are those of this machine and this load."]
