"""A run in ten seconds: its key figures as text, and as a table on a terminal."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pack_miles.summary import Report, RunSummary, summarize

__all__ = ["COUNT_NOTE", "Report", "RunSummary", "key_figures", "print_report", "summarize"]

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
        ("time", _time(run)),
        ("training throughput", _throughput(run)),
        ("log-probs, trainer against rollout", _differences(run.log_prob_mean, run.log_prob_max)),
        ("log-probs, scoring against training", _checked(run)),
        ("run", _shape(run)),
        ("status", run.status),
    ]


def print_report(report: Report, console: Console) -> None:
    """Print one table with a column a run, then what could not be read of the logs."""
    table = Table(title="packed training runs" if len(report.runs) > 1 else None, title_justify="left")
    table.add_column("", style="bold")
    for run in report.runs:
        table.add_column(Text(run.name), overflow="fold")
    columns = [key_figures(run) for run in report.runs]
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *(Text(text) for _, text in row))
    console.print(table)
    console.print(COUNT_NOTE, style="dim")
    for run in report.runs:
        for problem in run.problems:
            console.print(problem, style="yellow", markup=False)


def _reward(run: RunSummary) -> str:
    if run.reward_first is None or run.reward_last is None:
        return "none recorded"
    return f"{run.reward_first:.3f} → {run.reward_last:.3f} ({run.reward_last - run.reward_first:+.3f})"


def _forwards(run: RunSummary) -> str:
    if run.forwards_saved is None:
        return "none recorded"
    if not run.forwards_saved:
        return f"{run.forwards:,}, one sample a row"
    return f"{run.forwards:,} instead of {run.forwards_single:,} with one sample a row ({-run.forwards_saved:+.1%})"


def _fill(run: RunSummary) -> str:
    if run.fill is None:
        return "none recorded"
    fills = [row.fill_mean for row in run.updates]
    return f"{run.fill:.1%} ({min(fills):.1%} to {max(fills):.1%})"


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
    parts = {"rollout": run.rollout_seconds, "score": run.score_seconds, "train": run.train_seconds}
    total = math.fsum(parts.values())
    if not total:
        return "none recorded"
    return ", ".join(f"{name} {seconds:,.1f} s ({seconds / total:.0%})" for name, seconds in parts.items())


def _throughput(run: RunSummary) -> str:
    rate = run.tokens_per_second
    return "none recorded" if rate is None else f"{rate:,.0f} model tokens/s in score and train, all ranks"


def _differences(mean: float | None, largest: float | None) -> str:
    parts = [
        f"{name} {value:.2g}" for name, value in (("mean difference", mean), ("largest", largest)) if value is not None
    ]
    return ", ".join(parts) or "none recorded"


def _checked(run: RunSummary) -> str:
    if not run.checks:
        return "no check recorded"
    checks = "1 check" if run.checks == 1 else f"{run.checks:,} checks"
    return f"{_differences(run.check_mean, run.check_max)} in {checks} (limit {run.check_tolerance:g})"


def _shape(run: RunSummary) -> str:
    shape = f"{len(run.collections):,} collections, {len(run.updates):,} updates, {run.ranks} ranks"
    shape += f", expert parallel {run.expert_parallel}" if run.expert_parallel > 1 else ""
    return shape + (f", started {run.starts} times" if run.starts > 1 else "")
