"""Measure counting expert ids: nanoseconds an id, by kernels and width of the ids.

    python benchmarks/counting.py [--rows 3000] [--layers 19] [--top-k 16] [--samples 4] [--runs 5]

One thread, and processor time, which other processes disturb less. A row is what an update pays for counting: reading,
checking and counting each id of its samples, and their synthetic rows. Counts are checked before they are timed.
"""

import argparse
import os
import platform
import statistics
import time
from array import array
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from measure import timed
from pack_core.routing import dispatch_counts, owners
from pack_torch.routing import observed_counts
from rich.console import Console
from rich.table import Table

CASES = [
    ("int32", 512),
    ("int16", 512),
    ("int64", 512),
    ("uint8", 256),
    ("bytes", 256),
    ("bytes", 128),
    ("bytes", 64),
    ("int32", 256),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=3000, help="recorded rows of a sample")
    parser.add_argument("--layers", type=int, default=19)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--destinations", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = f"{options.samples} x [{options.rows}, {options.layers}, {options.top_k}] ids"
    table = Table(
        title=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, torch {torch.__version__}, one thread; {sizes}, median of {options.runs} runs"
    )
    for heading in ("ids", "experts", "kernels", "counts per", "ns an id", "min to max"):
        table.add_column(heading, justify="left" if heading in ("ids", "kernels", "counts per") else "right")

    for width, experts in CASES:
        measure(table, width, experts, options)
    Console(width=120).print(table)


def measure(table: Table, width: str, experts: int, options: argparse.Namespace) -> None:
    draw = np.random.default_rng(0)
    shape = (options.rows, options.layers, options.top_k)
    total = options.samples * options.rows * options.layers * options.top_k
    ids = [draw.integers(0, experts, shape) for _ in range(options.samples)]
    routes = [one.astype("uint8").tobytes() if width == "bytes" else one.astype(width) for one in ids]

    def count(kernels: str, folded: tuple[int, ...] | None) -> "array[int]":
        lengths = [options.rows + 1] * options.samples
        layout = {"layers": options.layers, "experts": experts, "top_k": options.top_k}
        return dispatch_counts(routes, lengths, **layout, owners=folded, kernels=kernels).counts

    def observe() -> None:
        for one in routes:
            observed_counts(torch.as_tensor(one), experts=experts, layers=range(options.layers))

    for kernels in ("numpy", "python"):
        first = np.asarray(count(kernels, None)[:experts]) - (np.arange(experts) < options.top_k)
        assert (first == np.bincount(ids[0][:, 0].ravel(), minlength=experts)).all()
        for folded in (None, owners(experts, options.destinations)):
            seconds = timed(partial(count, kernels, folded), options.runs, time.process_time)
            report(table, width, experts, kernels, "destination" if folded else "expert", seconds, total)
    if width != "bytes":
        report(table, width, experts, "torch CPU", "expert", timed(observe, options.runs, time.process_time), total)


def report(
    table: Table, width: str, experts: int, kernels: str, per: str, seconds: tuple[float, ...], total: int
) -> None:
    low, middle, high = (1e9 * value / total for value in (min(seconds), statistics.median(seconds), max(seconds)))
    table.add_row(width, str(experts), kernels, per, f"{middle:.1f}", f"{low:.1f} to {high:.1f}")


if __name__ == "__main__":
    main()
