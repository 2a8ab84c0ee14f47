"""A layout or an advice as a picture in a file; needs matplotlib, which the extra `plot` brings."""

from pathlib import Path
from typing import Any

import numpy as np

from pack_torch.offline.advice import Advice
from pack_torch.offline.errors import DatasetError
from pack_torch.offline.layout import Layout

_ROWS = 40


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before there is anything to draw.

    Raises:
        DatasetError: the file is to be of another kind, or its folder is not there.
    """
    if path.suffix not in (".png", ".svg"):
        raise DatasetError(f"{path} ends in {path.suffix!r}; a picture is a .png or a .svg")
    if not path.parent.is_dir():
        raise DatasetError(f"{path}: the picture cannot be written: there is no folder {path.parent}; make it")
    import matplotlib  # noqa: F401


def draw_layout(layout: Layout, path: Path) -> None:
    """Draw the histogram of document lengths and some rows, spread evenly, to a `.png` or `.svg`."""
    figure, (left, right) = _figure(path)
    lengths = layout.lengths
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 40).round())
    left.hist(lengths, bins=edges if len(edges) > 1 else 1, color="#4477aa")
    left.set(xscale="log", xlabel="tokens of a document", ylabel="documents", title=f"{len(lengths):,} documents")
    left.axvline(layout.recipe.capacity, color="#cc3311", linestyle="--")
    rows = layout.rows
    shown = np.unique(np.linspace(0, len(rows) - 1, min(_ROWS, len(rows))).round().astype(int))
    for place, p in enumerate(shown):
        sizes = rows.sizes[rows.offsets[p] : rows.offsets[p + 1]]
        begins = np.cumsum(sizes) - sizes
        right.barh(place, sizes, left=begins, color=["#4477aa", "#88ccee"], edgecolor="white", linewidth=0.3)
    right.set(xlim=(0, layout.recipe.capacity), xlabel="tokens", ylabel="row", yticks=range(len(shown)))
    right.set_yticklabels([f"{p:,}" for p in shown], fontsize=6)
    right.invert_yaxis()
    right.set_title(f"{len(shown)} of {len(rows):,} rows")
    _save(figure, path)


def draw_advice(advice: Advice, path: Path) -> None:
    """Draw fill, share kept and their product over the capacities tried, and the knee, to a `.png` or `.svg`."""
    figure, (left, right) = _figure(path)
    capacities = [trial.capacity for trial in advice.trials]
    left.plot(capacities, [trial.fill for trial in advice.trials], "o-", color="#4477aa", label="full")
    left.plot(capacities, [trial.kept for trial in advice.trials], "s-", color="#ccbb44", label="kept")
    left.plot(capacities, [trial.gain for trial in advice.trials], "^-", color="#228833", label="full x kept")
    left.axvline(advice.knee.capacity, color="#cc3311", linestyle="--", label=f"knee {advice.knee.capacity:,}")
    left.set(xlabel="capacity, tokens", ylabel="share")
    left.legend()
    right.plot(capacities, [trial.rows for trial in advice.trials], "o-", color="#4477aa", label="rows")
    right.plot(
        capacities, [trial.shapes for trial in advice.trials], "s-", color="#ccbb44", label="different row lengths"
    )
    right.set(yscale="log", xlabel="capacity, tokens")
    right.legend()
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    _save(figure, path)


def _figure(path: Path) -> tuple[Any, Any]:
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    return figure, figure.subplots(1, 2)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise DatasetError(f"{path}: the picture cannot be written: {error.strerror}") from None
