"""Pictures of a run, each a figure of its own; no state is shared and no window system is needed.

Colours are the Okabe-Ito palette, which people with colour-blindness can tell apart.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pack_miles.summary import Block, PackPicture, RunSummary, tenth

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

#: More bars than these are drawn as one stepped area.
MOST_BARS = 48

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
    shown, whole = _shown(picture)
    lanes = sum(len(packs) for packs in shown)
    lane = 0.27 if lanes <= 24 else 0.2 if lanes <= 40 else 0.15
    figure, axes = _figure(WIDE, 1.25 + lane * (lanes + 0.6 * len(shown)))
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
    axes.set_xlabel(f"tokens in the pack (limit {picture.capacity:,})")
    axes.xaxis.set_major_formatter(_thousands())
    axes.spines["left"].set_visible(False)
    _title(axes, _packs_title(picture, len(shown), whole), pad=14)
    return figure


def _packs_title(picture: PackPicture, ranks: int, whole: bool) -> str:
    every = [pack for packs in picture.ranks for pack in packs]
    samples = sum(len(pack) for pack in every)
    fill = sum(block.length for pack in every for block in pack) / (len(every) * picture.capacity)
    title = f"Update {picture.step:,}: {samples:,} samples in {len(every):,} packs on {len(picture.ranks):,} ranks"
    title += f", {fill:.0%} full"
    if whole and ranks == len(picture.ranks):
        return title
    part = f"the first {ranks:,} ranks" if whole else f"the first {MOST_LANES} packs of rank 0"
    return f"{title} ({part} are drawn)"


def _shown(picture: PackPicture) -> tuple[Sequence[Sequence[Sequence[Block]]], bool]:
    """Return the ranks that fit the picture, whole; one cut short, and False, when not even the first does."""
    most = max(1, MOST_LANES // max(1, max(len(packs) for packs in picture.ranks)))
    shown = picture.ranks[:most]
    if len(shown[0]) > MOST_LANES:
        return [shown[0][:MOST_LANES]], False
    return shown, True


def _group_colours(picture: PackPicture) -> dict[object, tuple[str, str]]:
    """Return a colour for each prompt group, and for each sample that belongs to none."""
    blocks = (block for packs in picture.ranks for pack in packs for block in pack)
    found = sorted(
        dict.fromkeys(block.group if block.group is not None else ("", block.id) for block in blocks),
        key=lambda group: (str(type(group)), group),
    )
    return {group: GROUP_COLOURS[place % len(GROUP_COLOURS)] for place, group in enumerate(found)}


def draw_rewards(run: RunSummary) -> Figure:
    """Return the mean reward of every collection, a smoothed line, and one standard deviation of the samples."""
    figure, axes = _figure(*SMALL)
    rows = run.collections
    x = [row.rollout_id + 1 for row in rows]
    means = [row.reward_mean for row in rows]
    low = [max(row.reward_min, row.reward_mean - row.reward_std) for row in rows]
    high = [min(row.reward_max, row.reward_mean + row.reward_std) for row in rows]
    axes.fill_between(x, low, high, color=BLUE, alpha=0.12, linewidth=0, label="samples, ± 1 std")
    axes.plot(x, means, "o", color=BLUE, markersize=3, alpha=0.55, label="mean of a collection")
    axes.plot(x, smooth(means, tenth(len(means))), color=BLUE, linewidth=2, label="smoothed")
    _count_axis(axes, x, "collection")
    axes.set_ylabel("reward")
    if run.reward_first is not None and run.reward_last is not None:
        _title(axes, f"Mean reward {run.reward_first:.2f} → {run.reward_last:.2f}")
    _legend(axes)
    return figure


def draw_fill(run: RunSummary) -> Figure:
    """Return the share of pack capacity filled in every update: the mean of all packs and the span of the ranks."""
    figure, axes = _figure(*SMALL)
    x = [row.step for row in run.updates]
    low, high = ([100 * pick(row.fill) for row in run.updates] for pick in (min, max))
    means = [100 * row.fill_mean for row in run.updates]
    axes.fill_between(x, low, high, color=GREEN, alpha=0.2, linewidth=0, label="least to most filled rank")
    axes.plot(x, means, color=GREEN, linewidth=1.8, marker="o" if len(x) <= 2 else None, label="all packs")
    axes.set_ylim(0, 104)
    _count_axis(axes, x, "update")
    axes.set_ylabel("filled share of capacity (%)")
    _title(axes, f"Fill {run.fill:.0%} on average" if run.fill is not None else "Fill")
    _legend(axes)
    return figure


def draw_forwards(run: RunSummary) -> Figure:
    """Return the forwards of one rank in every update, packed against one sample a row."""
    figure, axes = _figure(*SMALL)
    x = [row.step for row in run.updates]
    single = [row.forwards_single for row in run.updates]
    nothing = [0.0] * len(x)
    _bars(axes, x, single, nothing, "#C9C9C9", "one sample a row")
    _bars(axes, x, [row.forwards for row in run.updates], nothing, BLUE, "packed")
    _count_axis(axes, x, "update")
    axes.set_ylabel("forwards of one rank")
    axes.set_ylim(0, max(single, default=1) * 1.06)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(_thousands())
    saved = run.forwards_saved
    _title(axes, "Forwards" if saved is None else f"{run.forwards:,} forwards instead of {run.forwards_single:,}")
    _legend(axes)
    return figure


def draw_times(run: RunSummary) -> Figure:
    """Return the seconds of every update in scoring and training, one on the other, of the slowest rank."""
    figure, axes = _figure(*SMALL)
    x = [row.step for row in run.updates]
    train = [row.train_seconds for row in run.updates]
    score = [row.score_seconds for row in run.updates]
    _bars(axes, x, train, [0.0] * len(x), ORANGE, "training")
    _bars(axes, x, score, train, SKY, "scoring")
    _count_axis(axes, x, "update")
    axes.set_ylabel("seconds")
    axes.set_ylim(0, max(map(sum, zip(train, score, strict=True)), default=1) * 1.06)
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
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _bars(
    axes: Axes, x: Sequence[int], heights: Sequence[float], bottoms: Sequence[float], colour: str, label: str
) -> None:
    if len(x) <= MOST_BARS:
        axes.bar(x, heights, 0.8, bottom=bottoms, color=colour, label=label)
        return
    tops = [height + bottom for height, bottom in zip(heights, bottoms, strict=True)]
    edges = [x[0] - 0.5, *(step + 0.5 for step in x)]
    axes.stairs(tops, edges, baseline=bottoms, fill=True, color=colour, linewidth=0, label=label)


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


def _thousands() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{value:,.0f}")
