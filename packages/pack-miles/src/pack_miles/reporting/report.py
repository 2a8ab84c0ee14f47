"""A run in ten seconds: its key figures as text, and as a table on a terminal."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pack_miles.contract.facts import counted
from pack_miles.reporting.balance import Planning
from pack_miles.reporting.compare import Comparison, told
from pack_miles.reporting.planning_report import PLANNING_HEADINGS, order_told, planning_figures, planning_rows
from pack_miles.reporting.summary import Report, RunSummary, summarize
from pack_miles.reporting.waiting import waiting_told

__all__ = [
    "COUNT_NOTE",
    "Report",
    "RunSummary",
    "key_figures",
    "labels",
    "print_comparison",
    "print_report",
    "summarize",
]

#: Said wherever counts are shown next to one another.
COUNT_NOTE = "A count of forwards or tokens is not a wall time: it says how much was run, not how fast."


def key_figures(run: RunSummary) -> list[tuple[str, str]]:
    """Return the run's key figures as labels and texts, the most important first."""
    return [
        ("mean reward, first → last tenth", _reward(run)),
        ("forwards of one rank", _forwards(run)),
        ("fill", _fill(run)),
        ("packs of one rank an update", _span([row.packs for row in run.updates])),
        ("largest pack", _largest(run)),
        ("shapes of one rank's rows", run.shapes.told() if run.shapes else _none(run)),
        ("order of the samples", order_told(run.planning) or _none(run)),
        ("time", _time(run)),
        ("training throughput", _throughput(run)),
        ("memory of one rank at most", _memory(run)),
        ("log-probs, trainer against rollout", _differences(run.log_prob_mean, run.log_prob_max)),
        ("log-probs, scoring against training", _checked(run)),
        ("run", _shape(run)),
        ("status", run.status),
    ]


def print_report(report: Report, console: Console) -> None:
    """Print one table with a column a run, then what could not be read of the logs."""
    table = Table(title="training runs" if len(report.runs) > 1 else None, title_justify="left")
    table.add_column("", style="bold")
    for label in labels(report):
        table.add_column(Text(label), overflow="fold")
    columns = [key_figures(run) for run in report.runs]
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *(Text(text) for _, text in row))
    console.print(table)
    console.print(COUNT_NOTE, style="dim")
    for run, label in zip(report.runs, labels(report), strict=True):
        if run.planning is not None and run.planning.balanced:
            console.print(_planning_table(run.planning, label))
            for name, text in planning_figures(run, run.planning):
                console.print(Text(f"{name}: {text}"), soft_wrap=True)
    for run, label in zip(report.runs, labels(report), strict=True):
        for name, text in waiting_told(run.waiting) if run.waiting else ():
            console.print(Text(f"{label}, {name}: {text}"), soft_wrap=True)
    for run in report.runs:
        for problem in run.problems:
            console.print(problem, style="yellow", markup=False)


def _planning_table(planning: Planning, label: str) -> Table:
    title = Text(f"Planning of {label}: {counted(len(planning.balanced), 'reordered update')}, works added up")
    table = Table(title=title, title_justify="left")
    for heading in PLANNING_HEADINGS:
        table.add_column(heading, justify="left" if not heading else "right")
    for row in planning_rows(planning):
        table.add_row(*row)
    return table


def labels(report: Report) -> tuple[str, ...]:
    """Return what each run is called: its name, and of several runs the part of the folder that tells them apart."""
    if len(report.runs) < 2:
        return tuple(run.name for run in report.runs)
    folders = [Path(run.directory).parts for run in report.runs]
    common = 0
    while len({parts[common : common + 1] for parts in folders}) == 1 and all(len(p) > common + 1 for p in folders):
        common += 1
    return tuple(f"{run.name} ({Path(*parts[common:])})" for run, parts in zip(report.runs, folders, strict=True))


def reward_span(run: RunSummary) -> str | None:
    """Return the first and the last reward as they are shown everywhere: two decimals, three where two are equal."""
    digits = _digits(run)
    return None if digits is None else f"{run.reward_first:.{digits}f} → {run.reward_last:.{digits}f}"


def saved_share(run: RunSummary) -> str | None:
    """Return the share of forwards that packing saved, with a minus sign; None where nothing was to be saved."""
    return None if run.forwards_saved is None or run.one_a_row else f"\u2212{run.forwards_saved:.1%}"


def recorded_ranks(run: RunSummary) -> str:
    """Return whose events the figures are made of.

    The figures of a run without some of its logs are those of the other ranks.
    """
    if not run.missing:
        return "all ranks" if run.ranks > 1 else "1 rank"
    there = [rank for rank in range(run.ranks) if rank not in run.missing]
    return f"rank {', '.join(map(str, there))} only"


def _digits(run: RunSummary) -> int | None:
    if run.reward_first is None or run.reward_last is None:
        return None
    return 3 if f"{run.reward_first:.2f}" == f"{run.reward_last:.2f}" else 2


def _reward(run: RunSummary) -> str:
    span, digits = reward_span(run), _digits(run)
    if span is None or run.reward_first is None or run.reward_last is None:
        return _none(run)
    gain = round(run.reward_last, digits) - round(run.reward_first, digits)
    return f"{span} ({gain:+z.{digits}f})"


def _none(run: RunSummary) -> str:
    """Only rank 0 records what is the whole run's."""
    return "unknown without the log of rank 0" if 0 in run.missing else "none recorded"


def _forwards(run: RunSummary) -> str:
    if run.forwards_saved is None:
        return "none recorded"
    if run.one_a_row:
        return f"{run.forwards:,}, one sample a row"
    return f"{run.forwards:,} instead of {run.forwards_single:,} with one sample a row ({saved_share(run)})"


def _fill(run: RunSummary) -> str:
    if run.fill is None:
        return "none recorded"
    fills = [row.fill_mean for row in run.updates]
    text = f"{run.fill:.1%} ({min(fills):.1%} to {max(fills):.1%})"
    text += ", one sample a row" if run.one_a_row else ""
    return f"{text}, {recorded_ranks(run)}" if run.missing else text


def _span(values: Sequence[int]) -> str:
    if not values:
        return "none recorded"
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _largest(run: RunSummary) -> str:
    if not run.updates:
        return "none recorded"
    largest = max(row.max_pack_tokens for row in run.updates)
    return f"{largest:,} of {run.capacity:,} tokens" if run.capacity else f"{largest:,} tokens"


def _time(run: RunSummary) -> str:
    parts = {"score": run.score_seconds, "train": run.train_seconds}
    if run.collections:
        parts = {"rollout": run.rollout_seconds, **parts}
    total = math.fsum(parts.values())
    if not total:
        return "none recorded"
    return ", ".join(f"{name} {seconds:,.1f} s ({seconds / total:.0%})" for name, seconds in parts.items())


def _throughput(run: RunSummary) -> str:
    rate = run.tokens_per_second
    return "none recorded" if rate is None else f"{rate:,.0f} model tokens/s in score and train, {recorded_ranks(run)}"


def _memory(run: RunSummary) -> str:
    parts = {"of the GPU": run.peak_allocated, "of the machine": run.peak_resident}
    told = [f"{size / 2**30:.2f} GiB {where}" for where, size in parts.items() if size is not None]
    return ", ".join(told) or "none recorded"


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what several runs of the same samples cost beside one another, or why that is not said."""
    if comparison.runs:
        table = Table(title="On the same samples, seconds of an update", title_justify="left")
        for heading in ("", "cold start", "warmed", "planning", "warmed and planning"):
            table.add_column(heading, justify="right" if heading else "left")
        for run in comparison.runs:
            cold = "-" if run.cold_seconds is None else f"{run.cold_seconds:.3g}"
            seconds = (run.warm_seconds, run.planning_seconds, run.net_seconds)
            table.add_row(Text(run.label), cold, *(f"{value:.3g}" for value in seconds))
        console.print(table)
    for line in told(comparison):
        console.print(Text(line), soft_wrap=True)


def _differences(mean: float | None, largest: float | None) -> str:
    parts = [
        f"{name} {value:.2g}" for name, value in (("mean difference", mean), ("largest", largest)) if value is not None
    ]
    return ", ".join(parts) or "none recorded"


def _checked(run: RunSummary) -> str:
    if not run.checks:
        return "no check recorded"
    checks = counted(run.checks, "check")
    return f"{_differences(run.check_mean, run.check_max)} in {checks} (limit {run.check_tolerance:g})"


def _shape(run: RunSummary) -> str:
    collections = len(run.collections) or len({row.rollout_id for row in run.updates})
    shape = f"{counted(collections, 'collection')}, {counted(len(run.updates), 'update')}, {counted(run.ranks, 'rank')}"
    shape += f", expert parallel {run.expert_parallel}" if run.expert_parallel > 1 else ""
    return shape + (f", started {run.starts} times" if run.starts > 1 else "")
