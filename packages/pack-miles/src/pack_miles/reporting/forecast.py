"""What a rollouts file would cost to train on: packs, fill and work proxies, beside what no packing can beat."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from pack_core import Bounds, DispatchCounts, PackError, Plan, Sample, Work, headroom

from pack_miles.errors import InputError, counted
from pack_miles.planning import count_rows, plan_samples
from pack_miles.reporting.outlook import Outlook
from pack_miles.samples import RolloutRow, RowLimits, read_rows, to_samples
from pack_miles.settings.config import Config
from pack_miles.tasks import TASKS

#: Shown wherever a proxy is.
PROXY_NOTE = "expert, token and pair work are counts, not wall times: they rank plans of the same samples"


@attrs.frozen
class Forecast:
    """A plan of a rollouts file and its sums.

    `forwards` counts a rank's forwards over all complete steps; `single_forwards` the same with one sample a row.
    Work is summed over packs and taken at the slowest rank (see `pack_core.Work`); bounds are summed over steps.
    `outlook` says what another order could do, or what the balanced one does; None where packing is off.
    """

    plan: Plan
    samples: int
    forwards: int
    single_forwards: int
    work: Work
    bounds: Bounds
    outlook: Outlook | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast for JSON: sums, and a line for each complete optimizer step."""
        outlook = self.outlook
        return {
            "samples": self.samples,
            "complete_steps": len(self.plan.steps),
            "tail_samples": len(self.plan.tail),
            "plan_digest": self.plan.digest,
            "forwards_per_rank": self.forwards,
            "one_sample_a_row_forwards_per_rank": self.single_forwards,
            "total": _figures(self.work, self.bounds),
            "steps": [_figures(work, bounds) for work, bounds in zip(self.plan.work, self.plan.bounds, strict=True)],
            "headroom": outlook.as_dict() if outlook and not outlook.balanced else None,
            "balance": outlook.as_dict() if outlook and outlook.balanced else None,
            "notes": list(self.notes),
        }


def forecast_file(config: Config, path: str | Path) -> Forecast:
    """Return the forecast of a rollouts file, read one line at a time.

    Raises:
        InputError: naming what is wrong with the file or a sample of it.
    """
    unrouted = unmasked = 0
    held: list[DispatchCounts | None] = []

    def counted() -> Iterator[RolloutRow]:
        nonlocal unrouted, unmasked
        for row in read_rows(path, row_limits(config)):
            unrouted += row.rollout_routed_experts is None
            unmasked += row.loss_mask is None
            # Counted at once and let go: the routes of a whole file would not fit into memory.
            if row.rollout_routed_experts is None or (held and held[-1] is None):
                held.append(None)
            else:
                held.append(count_rows(config, [row]))
            yield row

    samples = to_samples(counted())
    return forecast(config, samples, counts=_joined(held), unrouted=unrouted, unmasked=unmasked)


def _joined(held: Sequence[DispatchCounts | None]) -> DispatchCounts | None:
    """The counts of all rows as one value; None unless every row has some."""
    known = [one for one in held if one is not None]
    if not known or len(known) < len(held):
        return None
    counts = array("i")
    for one in known:
        counts.extend(one.counts)
    return attrs.evolve(known[0], counts=counts)


def row_limits(config: Config) -> RowLimits:
    """Return what the rows of a configuration must keep to.

    Token ids are limited where the small model speaks those of a task, routes where they are replayed in it.
    """
    length, small = config.core.max_sequence_length, config.model.format == "small"
    task = TASKS.get(config.data.task or "") if small else None
    vocabulary = task.vocabulary if task else None
    if not small or not config.miles.use_rollout_routing_replay:
        return RowLimits(max_length=length, vocabulary=vocabulary)
    return RowLimits(
        max_length=length,
        vocabulary=vocabulary,
        layers=config.model.num_hidden_layers,
        top_k=config.model.num_experts_per_tok,
        experts=config.model.n_routed_experts,
        moe_layers=config.moe_layers,
    )


def forecast(
    config: Config,
    samples: Sequence[Sample],
    *,
    counts: DispatchCounts | None = None,
    unrouted: int = 0,
    unmasked: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Forecast:
    """Return the plan the trainer would make of the samples, and what it costs.

    `counts` say where the tokens of every sample go, None where that is not known. `unrouted` counts the rows that
    brought no routes, `unmasked` those without a loss mask: notes say what it means, for routes with replay on, for
    masks when other rows have one.

    Raises:
        InputError: naming the sample that fits no row.
    """
    try:
        started = clock()
        made = plan_samples(config, samples, counts if _experts_on(config) else None, clock)
        outlook = _outlook(config, made, samples, counts, (clock() - started, unrouted))
    except PackError as error:
        raise InputError(str(error)) from None
    return Forecast(
        plan=made,
        samples=len(samples),
        forwards=sum(work.packs_per_rank for work in made.work),
        single_forwards=len(made.steps) * (config.step_samples // config.run.ranks),
        work=_total_work(made, config),
        bounds=Bounds(
            packs_per_rank=sum(one.packs_per_rank for one in made.bounds),
            attention_token_work=sum(one.attention_token_work for one in made.bounds),
            attention_pair_work=sum(one.attention_pair_work for one in made.bounds),
        ),
        outlook=outlook,
        notes=tuple(_notes(config, made, unrouted, unmasked, len(samples))),
    )


def _outlook(
    config: Config, made: Plan, samples: Sequence[Sample], counts: DispatchCounts | None, told: tuple[float, int]
) -> Outlook | None:
    if not config.core.sequence_packing:
        return None
    seconds, unrouted = told
    if made.pack_order == "balanced":
        reports = tuple(made.report(step) for step in range(len(made.steps)))
        unknown = "" if made.layers else _why_unknown(config, counts, unrouted, planned=True)
        return Outlook(made.pack_order, reports, made.traces, seconds, unknown)
    reports = headroom(
        samples,
        topology=config.topology,
        capacity=config.capacity,
        step_samples=config.step_samples,
        counts=counts,
        equalize=config.core.packing_equalize,
    )
    return Outlook(made.pack_order, reports, expert_unknown=_why_unknown(config, counts, unrouted, planned=False))


def _why_unknown(config: Config, counts: DispatchCounts | None, unrouted: int, *, planned: bool) -> str:
    """Say why nothing is known of expert work; "" where it is."""
    ranks, degree = config.run.ranks, config.core.expert_parallel_size
    if not ranks > degree > 1:
        return (
            f"{counted(ranks, 'rank')} with core.expert_parallel_size {degree}: evening it out takes ranks > "
            "expert_parallel_size > 1"
        )
    if planned and not _experts_on(config):
        return "core.expert_balanced_packing is off"
    if not config.miles.use_rollout_routing_replay:
        return "routes are not replayed, miles.use_rollout_routing_replay is off"
    if unrouted:
        return f"{counted(unrouted, 'row')} {'brings' if unrouted == 1 else 'bring'} no routes"
    return "" if counts is not None else "the run file does not say how many experts the model has"


def _total_work(made: Plan, config: Config) -> Work:
    packs = sum(work.packs_per_rank for work in made.work)
    tokens = sum(work.model_tokens for work in made.work)
    room = packs * config.run.ranks * config.capacity
    return Work(
        packs_per_rank=packs,
        attention_token_work=sum(work.attention_token_work for work in made.work),
        attention_pair_work=sum(work.attention_pair_work for work in made.work),
        model_tokens=tokens,
        max_pack_tokens=max((work.max_pack_tokens for work in made.work), default=0),
        fill_fraction=tokens / room if room else 0.0,
    )


def _notes(config: Config, made: Plan, unrouted: int, unmasked: int, rows: int) -> list[str]:
    notes = []
    if not made.steps:
        verb = "is" if len(made.tail) == 1 else "are"
        notes.append(
            f"no complete optimizer step: {counted(len(made.tail), 'sample')} {verb} fewer than "
            f"miles.global_batch_size = {config.step_samples}"
        )
    elif made.tail:
        one = len(made.tail) == 1
        notes.append(
            f"the last {'sample does' if one else f'{len(made.tail):,} samples do'} not fill an optimizer step and "
            f"{'stays' if one else 'stay'} untouched"
        )
    if config.miles.use_rollout_routing_replay and unrouted:
        verb = "brings" if unrouted == 1 else "bring"
        notes.append(
            f"{counted(unrouted, 'row')} {verb} no routes (rollout_routed_experts): replay is on and will need them"
        )
    if 0 < unmasked < rows:
        verb, whose = ("brings", "its") if unmasked == 1 else ("bring", "their")
        notes.append(f"{unmasked:,} of {rows:,} rows {verb} no loss_mask: all {whose} tokens count")
    if not config.core.sequence_packing:
        notes.append("packing is off: every row holds one sample")
    return [*notes, PROXY_NOTE]


def _figures(work: Work, bounds: Bounds) -> dict[str, Any]:
    return {
        "packs_per_rank": work.packs_per_rank,
        "packs_per_rank_bound": bounds.packs_per_rank,
        "fill_fraction": work.fill_fraction,
        "max_pack_tokens": work.max_pack_tokens,
        "model_tokens": work.model_tokens,
        "attention_token_work": work.attention_token_work,
        "attention_token_work_bound": bounds.attention_token_work,
        "attention_pair_work": work.attention_pair_work,
        "attention_pair_work_bound": bounds.attention_pair_work,
    }


def _experts_on(config: Config) -> bool:
    return bool(config.core.expert_balanced_packing)
