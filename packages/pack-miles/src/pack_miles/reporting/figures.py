"""Pictures of a run, each a figure of its own; no state is shared and no window system is needed.

Colours are the Okabe-Ito palette, which people with colour-blindness can tell apart.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pack_miles.contract.facts import counted
from pack_miles.reporting.report import reward_span
from pack_miles.reporting.summary import Block, PackPicture, RunSummary, tenth

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW = "#CC79A7", "#56B4E9", "#F0E442"
INK, SOFT, EMPTY = "#222222", "#8A8A8A", "#ECECEC"

#: Fill colour and text colour of prompt groups, in order of appearance; more groups start over.
GROUP_COLOURS = (
    (BLUE, "white"),
    (ORANGE, INK),
    (GREEN, INK),
    (PURPLE, INK),
    (SKY, INK),
    (VERMILLION, INK),
    (YELLOW, INK),
    ("#6A5ACD", "white"),
)

#: Lanes drawn at most; a picture of more ranks says how many it shows.
MOST_LANES = 64

#: Rows of one sample drawn a rank at most: they all look alike.
MOST_ROWS = 12

#: More bars than these are drawn as one stepped area.
MOST_BARS = 48

#: More updates than these are drawn as means of several, for steps narrower than a dot of the screen make false combs.
MOST_STEPS = 100

#: Fewer collections than these have no trend that a smoothed line could show.
LEAST_SMOOTHED = 10

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pack-miles",
    "font.family": "DejaVu Sans",
    "font.size": 10,
}

#: What a browser takes where it has not the font the picture was laid out with; none of them is wider.
FONTS = "'DejaVu Sans', Verdana, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"

WIDE, SMALL = 11.5, (5.6, 3.3)


def svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element that scales with the page; the same figure always gives the same text.

    Args:
        figure: the figure.
        name: unique in the page; ids inside the picture begin with it.
    """
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"\bid=\"([^\"]+)\"", rf'id="{name}-\1"', drawn)
    drawn = re.sub(r"(url\(|href=\")#", rf"\1#{name}-", drawn)
    drawn = drawn.replace("'DejaVu Sans'", FONTS)
    return re.sub(r"<svg ([^>]*?)>", _scalable, drawn, count=1, flags=re.DOTALL).strip()


def _scalable(match: re.Match[str]) -> str:
    attributes = re.sub(r"\b(width|height)=\"[^\"]*\"\s*", "", match[1])
    return f'<svg role="img" {attributes}>'


def draw_packs(picture: PackPicture) -> Figure:
    """Return the packs of one update: a lane a pack, a block a sample on the token axis, the capacity as a line."""
    shown, part = _shown(picture)
    lanes = sum(len(packs) for packs in shown)
    lane = 0.27 if lanes <= 24 and not _one_a_row(picture) else 0.2 if lanes <= 40 else 0.15
    figure, axes = _figure(WIDE, 1.4 + lane * (lanes + 0.6 * len(shown)))
    colours = _group_colours(picture)
    ticks, names, y = [], [], 0.0
    for rank, packs in enumerate(shown):
        middle = y + (len(packs) - 1) / 2
        ticks.append(middle)
        names.append(f"rank {rank}")
        for pack in packs:
            tokens = sum(block.length for block in pack)
            axes.barh(y, picture.capacity, height=0.86, color=EMPTY, linewidth=0)
            left = 0
            for block in pack:
                fill, text = colours[block.group if block.group is not None else ("", block.id)]
                axes.barh(y, block.length, left=left, height=0.86, color=fill, edgecolor="white", linewidth=0.8)
                if lane >= 0.2 and block.length > 0.035 * picture.capacity:
                    place = left + block.length / 2
                    axes.text(place, y, f"{block.length:,}", color=text, size=7, ha="center", va="center_baseline")
                left += block.length
            share = f"{tokens / picture.capacity:.0%}"
            axes.text(picture.capacity * 1.008, y, share, size=8 if lane >= 0.2 else 6.5, color=INK, va="center")
            y += 1
        y += 0.6
    axes.axvline(picture.capacity, color=VERMILLION, linewidth=1.4)
    axes.text(picture.capacity * 0.997, -0.62, "limit", color=VERMILLION, size=8, ha="right", va="bottom")
    axes.set_xlim(0, picture.capacity * 1.05)
    axes.set_ylim(y - 0.9, -0.75)
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"tokens in the {'row' if _one_a_row(picture) else 'pack'} (limit {picture.capacity:,})")
    axes.xaxis.set_major_formatter(thousands())
    axes.spines["left"].set_visible(False)
    title = _packs_title(picture)
    _title(axes, f"{title} ({part} drawn)" if part else title, pad=14)
    return figure


def _one_a_row(picture: PackPicture) -> bool:
    return all(len(pack) == 1 for packs in picture.ranks for pack in packs)


def _packs_title(picture: PackPicture) -> str:
    every = [pack for packs in picture.ranks for pack in packs]
    samples = sum(len(pack) for pack in every)
    fill = sum(block.length for pack in every for block in pack) / (len(every) * picture.capacity)
    packs = ", one a row," if _one_a_row(picture) else f" in {counted(len(every), 'pack')}"
    ranks = counted(len(picture.ranks), "rank")
    return f"Update {picture.step:,}: {counted(samples, 'sample')}{packs} on {ranks}, {fill:.0%} full"


def _shown(picture: PackPicture) -> tuple[Sequence[Sequence[Sequence[Block]]], str]:
    """Return the packs that fit the picture by rank, and in words which part of all they are; "" for the whole."""
    deep = MOST_ROWS if _one_a_row(picture) else MOST_LANES
    packs = max(len(packs) for packs in picture.ranks)
    most = max(1, MOST_LANES // max(1, min(deep, packs)))
    shown = [packs[:deep] for packs in picture.ranks[:most]]
    cut, ranks = packs > deep, len(picture.ranks)
    if not cut:
        return shown, f"the first {most:,} ranks are" if ranks > most else ""
    lanes = f"the first {deep} {'rows' if _one_a_row(picture) else 'packs'}"
    if ranks == 1 or most == 1:
        return shown, f"{lanes} of rank 0 are"
    return shown, f"{lanes} of " + (f"the first {most:,} ranks are" if ranks > most else "each rank are")


def _group_colours(picture: PackPicture) -> dict[object, tuple[str, str]]:
    """Return a colour for each prompt group, and for each sample that belongs to none.

    Colours follow the order of the groups, and leave out those of groups next to it in a pack while there are others.
    """
    beside: dict[object, set[object]] = {}
    for pack in (pack for packs in picture.ranks for pack in packs):
        row: list[object] = [block.group if block.group is not None else ("", block.id) for block in pack]
        for group, other in zip(row, [*row[1:], row[-1]], strict=True):
            beside.setdefault(group, set()).add(other)
            beside.setdefault(other, set()).add(group)
    colours: dict[object, tuple[str, str]] = {}
    for place, group in enumerate(sorted(beside, key=lambda group: (str(type(group)), group))):
        turn = [GROUP_COLOURS[(place + step) % len(GROUP_COLOURS)] for step in range(len(GROUP_COLOURS))]
        taken = {colours.get(other) for other in beside[group]}
        colours[group] = next((colour for colour in turn if colour not in taken), turn[0])
    return colours


def draw_rewards(run: RunSummary) -> Figure:
    """Return the mean reward of every collection, a smoothed line through many, and the deviation of the samples."""
    figure, axes = _figure(*SMALL)
    rows = run.collections
    x = [row.rollout_id + 1 for row in rows]
    means = [row.reward_mean for row in rows]
    low = [max(row.reward_min, row.reward_mean - row.reward_std) for row in rows]
    high = [min(row.reward_max, row.reward_mean + row.reward_std) for row in rows]
    _band(axes, x, low, high, BLUE, "samples, ± 1 std")
    axes.plot(
        x,
        means,
        "o",
        color=BLUE,
        markersize=3 if len(means) >= LEAST_SMOOTHED else 5,
        alpha=0.55,
        label="mean of a collection",
    )
    if len(means) >= LEAST_SMOOTHED:
        axes.plot(x, smooth(means, tenth(len(means))), color=BLUE, linewidth=2, label="smoothed")
    _count_axis(axes, x, "collection")
    axes.set_ylabel("reward")
    _title(axes, f"Mean reward {reward_span(run)}")
    _legend(axes)
    return figure


def draw_fill(run: RunSummary) -> Figure:
    """Return the share of pack capacity filled in every update: the mean of all packs and the span of the ranks."""
    figure, axes = _figure(*SMALL)
    x = [row.step for row in run.updates]
    low, high = ([100 * pick(row.fill) for row in run.updates] for pick in (min, max))
    means = [100 * row.fill_mean for row in run.updates]
    many, reach, every = len(x) > MOST_STEPS, tenth(len(x)) // 2, "all rows" if run.one_a_row else "all packs"
    if any(len(row.fill) > 1 for row in run.updates):
        # A band that jumps with every update would hide itself.
        low, high = (smooth(edge, reach) if many else edge for edge in (low, high))
        _band(axes, x, low, high, GREEN, "least to most filled rank")
    if many:
        axes.plot(x, means, color=GREEN, linewidth=0.6, alpha=0.7, label=every)
        axes.plot(x, smooth(means, reach), color=INK, linewidth=1.6, label="smoothed")
    else:
        axes.plot(x, means, color=GREEN, linewidth=1.8, marker="o" if len(x) <= 2 else None, label=every)
    axes.set_ylim(0, 104)
    _count_axis(axes, x, "update")
    axes.set_ylabel("filled share of capacity (%)")
    title = "Fill" if run.fill is None else f"Fill {run.fill:.1%} on average"
    _title(axes, f"{title}, one sample a row" if run.one_a_row else title)
    _legend(axes)
    return figure


def draw_forwards(run: RunSummary) -> Figure:
    """Return the forwards of one rank in every update, packed against one sample a row where that differs."""
    figure, axes = _figure(*SMALL)
    single = [row.forwards_single for row in run.updates]
    packed = [row.forwards for row in run.updates]
    if run.one_a_row:
        _bars(axes, run, [(single, BLUE, "one sample a row")])
    else:
        _bars(axes, run, [(single, "#C9C9C9", "one sample a row")])
        _bars(axes, run, [(packed, BLUE, "packed")])
    axes.set_ylabel("forwards of one rank")
    axes.set_ylim(0, max(single, default=1) * 1.06)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(thousands())
    single_text = "one sample a row" if run.one_a_row else f"instead of {run.forwards_single:,}"
    _title(axes, f"{run.forwards:,} forwards{', ' if run.one_a_row else ' '}{single_text}")
    _legend(axes)
    return figure


def draw_times(run: RunSummary) -> Figure:
    """Return the seconds of every update in scoring and training, one on the other, of the slowest rank."""
    figure, axes = _figure(*SMALL)
    train = [row.train_seconds for row in run.updates]
    score = [row.score_seconds for row in run.updates]
    top = _bars(axes, run, [(train, ORANGE, "training"), (score, SKY, "scoring")])
    axes.set_ylabel("seconds")
    axes.set_ylim(0, top * 1.06 or 1.0)
    _title(axes, f"Training {run.train_seconds:,.1f} s, scoring {run.score_seconds:,.1f} s")
    _legend(axes)
    return figure


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and its neighbours up to `reach` away, fewer at the ends.

    >>> smooth([0.0, 3.0, 6.0], 1)
    [1.5, 3.0, 4.5]
    """
    windows = (values[max(0, place - reach) : place + reach + 1] for place in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    plain_axes(axes)
    return figure, axes


def plain_axes(axes: Axes) -> None:
    """Draw axes without the two frames that carry no scale, in the colours of the page."""
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)


def together(run: RunSummary) -> int:
    """Return how many updates one step of a picture is the mean of: whole collections, and 1 up to `MOST_STEPS`."""
    if len(run.updates) <= MOST_STEPS:
        return 1
    collection = max(Counter(row.rollout_id for row in run.updates).values())
    return collection * math.ceil(len(run.updates) / (MOST_STEPS * collection))


def _bars(axes: Axes, run: RunSummary, layers: Sequence[tuple[Sequence[float], str, str]]) -> float:
    """Draw values, colours and labels on one another, a bar or a step an update, and return the height of all."""
    steps, size = [row.step for row in run.updates], together(run)
    x = steps[::size]
    edges = [x[0] - 0.5, *(step - 0.5 for step in x[1:]), steps[-1] + 0.5]
    bottoms = [0.0] * len(x)
    for values, colour, label in layers:
        parts = [values[place : place + size] for place in range(0, len(values), size)]
        tops = [bottom + sum(part) / len(part) for bottom, part in zip(bottoms, parts, strict=True)]
        if len(x) <= MOST_BARS and size == 1:
            axes.bar(x, values, 0.8, bottoms, color=colour, label=label)
        else:
            axes.stairs(tops, edges, baseline=bottoms, fill=True, color=colour, linewidth=0, label=label)
        bottoms = tops
    _count_axis(axes, steps, "update" if size == 1 else f"update (each step is the mean of {size})")
    return max(bottoms)


def _band(axes: Axes, x: Sequence[int], low: Sequence[float], high: Sequence[float], colour: str, label: str) -> None:
    if len(x) == 1:
        axes.vlines(x, low, high, color=colour, alpha=0.25, linewidth=9, label=label)
    else:
        axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0, label=label)


def _title(axes: Axes, text: str, pad: int = 24) -> None:
    axes.set_title(text, loc="left", size=11, weight="bold", color=INK, pad=pad)


def _legend(axes: Axes) -> None:
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left", ncols=3, borderaxespad=0.2, bbox_to_anchor=(-0.015, 1))


def _count_axis(axes: Axes, x: Sequence[int], label: str) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if x:
        axes.set_xlim(x[0] - 0.6 - 0.01 * len(x), x[-1] + 0.6 + 0.01 * len(x))


def thousands() -> FuncFormatter:
    """Return what writes the numbers of an axis with separators."""
    return FuncFormatter(lambda value, _: f"{value:,.0f}")
