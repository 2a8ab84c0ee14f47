"""What a rollouts file would cost to train on: packs, fill and work proxies, beside what no packing can beat."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from pack_core import Bounds, PackError, Plan, Sample, Work

from pack_miles.config import Config
from pack_miles.errors import InputError, counted
from pack_miles.planning import plan_samples
from pack_miles.samples import RolloutRow, RowLimits, read_rows, to_samples
from pack_miles.tasks import TASKS

#: Shown wherever a proxy is.
PROXY_NOTE = "token and pair work are counts, not wall times: they rank plans of the same samples"


@attrs.frozen
class Forecast:
    """A plan of a rollouts file and its sums.

    `forwards` counts a rank's forwards over all complete steps; `single_forwards` the same with one sample a row.
    Work is summed over packs and taken at the slowest rank (see `pack_core.Work`); bounds are summed over steps.
    """

    plan: Plan
    samples: int
    forwards: int
    single_forwards: int
    work: Work
    bounds: Bounds
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast for JSON: sums, and a line for each complete optimizer step."""
        return {
            "samples": self.samples,
            "complete_steps": len(self.plan.steps),
            "tail_samples": len(self.plan.tail),
            "plan_digest": self.plan.digest,
            "forwards_per_rank": self.forwards,
            "one_sample_a_row_forwards_per_rank": self.single_forwards,
            "total": _figures(self.work, self.bounds),
            "steps": [_figures(work, bounds) for work, bounds in zip(self.plan.work, self.plan.bounds, strict=True)],
            "notes": list(self.notes),
        }


def forecast_file(config: Config, path: str | Path) -> Forecast:
    """Return the forecast of a rollouts file, read one line at a time.

    Raises:
        InputError: naming what is wrong with the file or a sample of it.
    """
    unrouted = unmasked = 0

    def counted() -> Iterator[RolloutRow]:
        nonlocal unrouted, unmasked
        for row in read_rows(path, row_limits(config)):
            unrouted += row.rollout_routed_experts is None
            unmasked += row.loss_mask is None
            yield row

    samples = to_samples(counted())
    return forecast(config, samples, unrouted=unrouted, unmasked=unmasked)


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


def forecast(config: Config, samples: Sequence[Sample], *, unrouted: int = 0, unmasked: int = 0) -> Forecast:
    """Return the plan the trainer would make of the samples, in their order, and what it costs.

    `unrouted` counts the rows that brought no routes, `unmasked` those without a loss mask: notes say what it means,
    for routes with replay on, for masks when other rows have one.

    Raises:
        InputError: naming the sample that fits no row.
    """
    try:
        made = plan_samples(config, samples)
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
        notes=tuple(_notes(config, made, unrouted, unmasked, len(samples))),
    )


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
