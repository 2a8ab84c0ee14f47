"""Configurations and forecasts for people: tables on a terminal, plain lines in a pipe."""

import shlex
from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pack_miles.errors import counted
from pack_miles.reporting.forecast import Forecast
from pack_miles.reporting.gain import stops_of, told_stops
from pack_miles.reporting.outlook import Outlook
from pack_miles.settings.config import Config
from pack_miles.settings.options import Option, spell
from pack_miles.settings.overview import areas, overview

#: Steps shown one by one; the sums always cover all.
STEPS_SHOWN = 6


def line(console: Console, text: str = "") -> None:
    """Print one line as it is: unwrapped, nothing in it taken for markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_areas(console: Console, config: Config, here: bool) -> None:
    """Print a line for each area checked, then the verdict."""
    machine = "checked: this machine can run it" if here else "not looked at (validate --here does)"
    for area, words in [*areas(config), ("machine", machine)]:
        line(console, f"{area:8} {words}")
    line(console, "valid")


def show_plan(console: Console, config: Config, rollouts: Forecast | None) -> None:
    """Print the resolved options, the shape, the scoring decision, and the forecast when there is one."""
    told = overview(config, rollouts)
    line(console, f"{told['name']}, configuration digest {told['configuration_digest']}")
    _pairs(console, "Shape", told["shape"])
    _pairs(console, "Scoring pass", told["scoring_pass"])
    _pairs(console, "Core options", told["core"])
    line(console, "\nMILES arguments")
    for argument in _by_flag(told["argv"]):
        line(console, f"  {argument}")
    if rollouts is not None:
        _show_forecast(console, config, rollouts)


def _pairs(console: Console, title: str, values: dict[str, Any]) -> None:
    line(console, f"\n{title}")
    for key, value in values.items():
        line(console, f"  {key:36} {value if isinstance(value, str) else spell(value)}")


def _by_flag(arguments: list[str]) -> Iterable[str]:
    """Yield each flag with its value, quoted for a shell."""
    place = 0
    while place < len(arguments):
        end = place + 1
        while end < len(arguments) and not arguments[end].startswith("--"):
            end += 1
        yield shlex.join(arguments[place:end])
        place = end


def _show_forecast(console: Console, config: Config, rollouts: Forecast) -> None:
    made = rollouts.plan
    line(
        console,
        f"\nRollouts: {counted(rollouts.samples, 'sample')}, {counted(len(made.steps), 'complete optimizer step')} of "
        f"{config.step_samples:,}, {counted(len(made.tail), 'sample')} left over; plan digest {made.digest}",
    )
    if made.steps:
        console.print(_step_table(rollouts))
        saved = 1 - rollouts.forwards / rollouts.single_forwards
        line(
            console,
            f"Forwards of a rank: {rollouts.forwards:,}, against {rollouts.single_forwards:,} with one sample a row "
            f"({saved:.1%} fewer)",
        )
        if rollouts.outlook is not None:
            _show_outlook(console, rollouts.outlook)
    for note in rollouts.notes:
        line(console, f"Note: {note}")


def _step_table(rollouts: Forecast) -> Table:
    title = "Packs of a rank, their fill, and work against what no packing can beat"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("step", "packs", "bound", "fill", "token work", "x bound", "pair work", "x bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    steps = list(zip(rollouts.plan.work, rollouts.plan.bounds, strict=True))
    rows = [(str(number), *pair) for number, pair in enumerate(steps[:STEPS_SHOWN], start=1)]
    for name, work, bounds in [*rows, ("all", rollouts.work, rollouts.bounds)]:
        if name == "all":
            if len(steps) > STEPS_SHOWN:
                table.add_row("...")
            table.add_section()
        table.add_row(
            name,
            f"{work.packs_per_rank:,}",
            f"{bounds.packs_per_rank:,}",
            f"{work.fill_fraction:.3f}",
            f"{work.attention_token_work:,}",
            f"{work.attention_token_work / bounds.attention_token_work:.2f}",
            f"{work.attention_pair_work:,}",
            f"{work.attention_pair_work / bounds.attention_pair_work:.2f}",
        )
    return table


def _show_outlook(console: Console, outlook: Outlook) -> None:
    console.print(_outlook_table(outlook))
    line(console, outlook.verdict)
    if outlook.floor:
        line(console, outlook.floor)
    if outlook.dispatch:
        line(console, f"Of dispatches, in arrival order -> {'as planned' if outlook.balanced else 'built at once'}:")
    for name, (before, after) in outlook.dispatch.items():
        shown = f"{before:.3f} -> {after:.3f}" if isinstance(before, float) else f"{before:,} -> {after:,}"
        line(console, f"  {name:22} {shown}")
    if not outlook.expert:
        line(console, f"Expert work is not counted: {outlook.expert_unknown}.")
    if outlook.balanced:
        line(
            console,
            f"Search: {counted(outlook.proposals, 'proposal')} in {counted(len(outlook.traces), 'step')}; stopped: "
            f"{told_stops(stops_of(outlook.traces))}; planned in {outlook.seconds:.3f} s",
        )


def _outlook_table(outlook: Outlook) -> Table:
    if outlook.balanced:
        title = "Balanced against arrival order: gap is work over its bound, removed a share of the removable"
        headings = ["arrival", "planned", "bound", "gap", "removable", "removed"]
    else:
        title = "Headroom: what lies over the bound, and how much of it an order built at once removes"
        headings = ["arrival", "bound", "removable", "built", "removed"]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("work", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for gain in outlook.gains:
        removed = "-" if gain.removed is None else f"{gain.removed:.1f} %"
        before, after, bound = (f"{value:,}" for value in (gain.before, gain.after, gain.bound))
        removable, gap = f"{gain.removable:.1f} %", f"{gain.gap:.1f} %"
        row = [before, after, bound, gap, removable] if outlook.balanced else [before, bound, removable, after]
        table.add_row(gain.title, *row, removed)
    return table


def show_options(console: Console, options: Iterable[Option]) -> None:
    """Print the option table: each option under its canonical name, with the other places it may be written."""
    section = None
    for one in options:
        if one.section != section:
            section = one.section
            line(console, f"\n[{section}]")
        default = "required" if one.required else f"default {spell(one.default)}"
        line(console, f"  --{one.name}  {one.allowed}; {default}")
        also = f" (also {', '.join(one.places[1:])})" if len(one.places) > 1 else ""
        line(console, f"      {one.help}{also}")
