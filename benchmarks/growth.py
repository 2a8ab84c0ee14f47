"""How time and memory of packing grow with the number of documents, and the exponent that fits best.

An exponent of 1 is linear growth: it is the slope of log seconds over log documents, by least squares, from ten
thousand documents on (below, what every call costs whatever its size is most of it).
"""

import sys
from pathlib import Path

import numpy as np
from measure import Row, peak, resident, timed
from pack_core import certify, pack
from packing import lognormal

CAPACITY = 4_096
#: Strategies that keep arrival order look at one document after another, and are measured up to a million.
ARRIVING = ("next_fit", "first_fit", "best_fit")
DECREASING = ("first_fit_decreasing", "best_fit_decreasing", "fewest")
FITTED_FROM = 10_000
#: Less than this is what the process itself comes and goes by.
LEAST_MB = 0.1


def measure(quick: bool) -> list[Row]:
    rows = []
    for strategy in (*ARRIVING, *DECREASING):
        largest = (5 if quick else 6) if strategy in ARRIVING else (5 if quick else 7)
        rows += [_row(strategy, 10**power, quick) for power in range(3, largest + 1)]
    return rows


def _row(strategy: str, documents: int, quick: bool) -> Row:
    lengths = lognormal(documents, CAPACITY)
    packing = pack(lengths, capacity=CAPACITY, strategy=strategy)
    over = certify(packing, lengths, capacity=CAPACITY).over
    runs = 3 if quick or documents > 1_000_000 else 5
    seconds = timed(lambda: pack(lengths, capacity=CAPACITY, strategy=strategy), runs)
    figures = {"documents": float(documents)}
    if not quick:
        figures["peak MB above input"] = peak(__file__, lengths, strategy)
    return Row(strategy, f"{documents:,} documents", seconds, f"{over} over the bound", figures)


def exponent(rows: list[Row]) -> float:
    """Return the slope of log seconds over log documents.

    >>> exponent([Row("", "", (n * 1e-6,), figures={"documents": n}) for n in (1e4, 1e5, 1e6)])
    1.0
    """
    far = [row for row in rows if row.figures["documents"] >= FITTED_FROM]
    documents = np.log([row.figures["documents"] for row in far])
    return round(float(np.polyfit(documents, np.log([row.median for row in far]), 1)[0]), 2)


def draw(rows: list[Row], folder: Path) -> list[str]:
    """Draw seconds and memory over documents; return what to say in the report."""
    import matplotlib.pyplot as plt

    weighed = any("peak MB above input" in row.figures for row in rows)
    figure, axes = plt.subplots(1, 1 + weighed, figsize=(6 * (1 + weighed), 4.2), squeeze=False, layout="constrained")
    said = []
    for strategy in dict.fromkeys(row.work for row in rows):
        own = [row for row in rows if row.work == strategy]
        documents = [row.figures["documents"] for row in own]
        slope = exponent(own)
        said.append(f"{strategy} grows with the {slope:g}th power")
        axes[0, 0].plot(documents, [row.median for row in own], marker="o", label=f"{strategy}: exponent {slope:g}")
        if weighed:
            weights = [(row.figures["documents"], row.figures["peak MB above input"]) for row in own]
            seen = [weight for weight in weights if weight[1] >= LEAST_MB]
            axes[0, 1].plot(*zip(*seen, strict=True), marker="o", label=strategy)
    axes[0, 0].set_ylabel("seconds (median)")
    if weighed:
        axes[0, 1].set_ylabel("peak memory above the input, MB")
        axes[0, 1].set_ylim(bottom=LEAST_MB)
    for each in axes[0]:
        each.set(xscale="log", yscale="log", xlabel="documents")
        each.grid(alpha=0.3)
        each.legend(frameon=False, fontsize=8)
    figure.savefig(folder / "growth.svg")
    plt.close(figure)
    picture = "![Seconds and memory over documents](growth.svg)"
    return [picture, "", f"Lognormal lengths, capacity {CAPACITY}: {'; '.join(said)}."]


if __name__ == "__main__":
    given = np.load(sys.argv[1])
    pack(given[:1_000].copy(), capacity=CAPACITY, strategy=sys.argv[2])  # imports
    before = resident()
    kept = pack(given, capacity=CAPACITY, strategy=sys.argv[2])
    print(resident() - before)
