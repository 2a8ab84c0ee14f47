"""Pictures of what planning did to one update: the load of every rank in every pack, and the works against bounds."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from pack_miles.contract.facts import counted
from pack_miles.reporting.balance import Grid, LoadPicture
from pack_miles.reporting.figures import BLUE, INK, VERMILLION, WIDE, plain_axes, thousands

#: Ranks and packs drawn at most; a picture of more says how many it shows.
MOST_RANKS, MOST_PACKS = 64, 40

#: A cell narrower than this many inches holds no number.
LEAST_CELL = 0.34

#: From nothing to the largest load: one hue, so that it can be read without colour. Of fewer than 50 shades a colour
#: bar is drawn as shapes and not as an image.
SCALE = LinearSegmentedColormap.from_list("load", ["#F7FAFD", "#B9D6EA", BLUE, "#003A5D"], N=48)

#: What the three panels and the gaps around them take of the width, in inches.
_BARS, _MARGINS = 3.3, 2.2


def draw_loads(picture: LoadPicture) -> Figure:
    """Return the loads in arrival order and as planned, on one colour scale, and the works with their bounds."""
    before, after = (tuple(row[:MOST_PACKS] for row in grid[:MOST_RANKS]) for grid in (picture.before, picture.after))
    ranks, packs = len(before), (len(before[0]), len(after[0]))
    cell = min(0.27, 6.4 / ranks)
    figure = Figure(figsize=(WIDE, 1.7 + max(1.9, cell * ranks)), layout="constrained", facecolor="white")
    # A pack is as wide before as after: fewer packs are a narrower panel.
    left, right, bars = figure.subplots(1, 3, width_ratios=[*_panels(packs), _BARS])
    norm = Normalize(0, max(max(map(max, grid)) for grid in (picture.before, picture.after)))
    numbers = (WIDE - _BARS - _MARGINS) / sum(packs) >= LEAST_CELL and ranks <= 24
    for axes, grid, whole in ((left, before, picture.before), (right, after, picture.after)):
        _heat(axes, grid, _peaks(whole), norm, numbers)
        for edge in range(picture.destinations, ranks, picture.destinations) if picture.destinations > 1 else ():
            axes.axhline(edge, color=INK, linewidth=1.3)
    _rank_axis(left, ranks)
    right.set_yticks([])
    unit = "expert choices" if picture.experts else "tokens"
    scale = figure.colorbar(ScalarMappable(norm, SCALE), ax=[left, right], pad=0.012, aspect=28, fraction=0.05)
    scale.set_label(f"{unit} in a pack", color=INK, size=8.5)
    scale.ax.tick_params(colors=INK, labelsize=8)
    scale.ax.yaxis.set_major_formatter(thousands())
    scale.outline.set_visible(False)
    if scale.solids is not None:
        scale.solids.set_edgecolor("face")
    _works(bars, picture)
    _titles(figure, (left, right, bars), picture)
    return figure


def _panels(packs: tuple[int, int]) -> list[float]:
    room = WIDE - _BARS - _MARGINS
    return [max(1.6, room * count / sum(packs)) for count in packs]


def _peaks(grid: Grid) -> list[int]:
    """The most loaded rank of every pack, the first of equals."""
    return [max(range(len(grid)), key=lambda rank: (grid[rank][pack], -rank)) for pack in range(len(grid[0]))]


def _heat(axes: Axes, grid: Sequence[Sequence[int]], peaks: Sequence[int], norm: Normalize, numbers: bool) -> None:
    axes.pcolormesh(grid, cmap=SCALE, norm=norm, edgecolors="white", linewidth=0.7)
    for rank, row in enumerate(grid):
        for pack, load in enumerate(row if numbers else ()):
            colour = "white" if norm(load) > 0.55 else INK
            axes.text(pack + 0.5, rank + 0.5, short(load), color=colour, size=7, ha="center", va="center_baseline")
    for pack, rank in enumerate(peaks[: len(grid[0])]):
        if rank < len(grid):
            frame = Rectangle((pack + 0.04, rank + 0.06), 0.92, 0.88, fill=False, edgecolor=VERMILLION, linewidth=1.8)
            axes.add_patch(frame)
    axes.set_ylim(len(grid), 0)
    count = len(grid[0])
    every = max(1, -(-count // 12))
    axes.set_xticks([pack + 0.5 for pack in range(0, count, every)], [str(pack + 1) for pack in range(0, count, every)])
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.set_xlabel("pack", size=9, color=INK)
    for side in axes.spines.values():
        side.set_visible(False)


def _rank_axis(axes: Axes, ranks: int) -> None:
    every = max(1, -(-ranks // 32))
    shown = range(0, ranks, every)
    axes.set_yticks([rank + 0.5 for rank in shown], [f"rank {rank}" for rank in shown])


def _works(axes: Axes, picture: LoadPicture) -> None:
    """Bars of every work, in percent of arrival order, for the works have units of their own."""
    plain_axes(axes)
    for place, gain in enumerate(picture.gains):
        after, bound = (100 * value / gain.before if gain.before else 0.0 for value in (gain.after, gain.bound))
        axes.bar(place - 0.2, 100, 0.36, color="#C9CDD3", label="" if place else "arrival order")
        axes.bar(place + 0.2, after, 0.36, color=BLUE, label="" if place else "as planned")
        axes.text(place + 0.2, after + 1.5, f"{after:.0f}", color=INK, size=8, ha="center", va="bottom")
        line = "" if place else "bound"
        axes.hlines(bound, place - 0.42, place + 0.42, color=VERMILLION, linewidth=2, label=line)
    names = [gain.title.replace(" of a rank", "").replace(" ", "\n") for gain in picture.gains]
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0, labelsize=8.5)
    axes.set_ylim(0, 112)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.legend(
        frameon=False,
        fontsize=8,
        loc="lower left",
        ncols=3,
        bbox_to_anchor=(-0.05, 1),
        columnspacing=1,
        handlelength=1.2,
    )


def _titles(figure: Figure, panels: Sequence[Axes], picture: LoadPicture) -> None:
    ranks, packs = len(picture.before), (len(picture.before[0]), len(picture.after[0]))
    parts = [f"{MOST_RANKS} of {ranks:,} ranks"] if ranks > MOST_RANKS else []
    parts += [f"{MOST_PACKS} packs of a rank"] if max(packs) > MOST_PACKS else []
    drawn = f" (the first {' and '.join(parts)} are drawn)" if parts else ""
    unit = "expert choices" if picture.experts else "tokens"
    title = f"Update {picture.step:,}: {unit} of every rank and pack{drawn}"
    figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold", color=INK)
    named = (f"arrival order: {counted(packs[0], 'pack')}", f"as planned: {counted(packs[1], 'pack')}")
    for axes, name in zip(panels, (*named, "work, % of arrival order"), strict=True):
        pad = 6 if name in named else 22
        axes.set_title(name, loc="left", size=9.5, color=INK, pad=pad)


def short(value: int) -> str:
    """Return a count in at most five characters.

    >>> short(874), short(4312), short(128_000), short(2_340_000)
    ('874', '4.3k', '128k', '2.3M')
    """
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.1f}{unit}" if value < 99.95 * size else f"{value / size:.0f}{unit}"
    return str(value)
