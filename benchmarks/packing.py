"""Measure offline packing beside peers: time, packs over the lower bound, and peak memory above the input.

    python benchmarks/packing.py [--runs 5] [--work NAME ...] [--strategy NAME ...] [--memory]

Times are processor time, which other processes disturb less: the median and, in brackets, the least and the most. A
parallel peer uses more processors than it keeps anyone waiting for, so its wall time is what stands there. Every result
is checked before it is timed: each document once, no pack over the capacity. Peers are those installed, lightbinpack
and seqpacker. Peers take the same array of NumPy, or the list where that is sooner for them; theirs are lists of lists.
With --memory each row runs in a process of its own, and the peak of its resident memory over that before is shown.
"""

import argparse
import ast
import gc
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from pack_core import certify, pack
from rich.console import Console
from rich.table import Table

Row = NDArray[np.int64]

STRATEGIES = ["first_fit_decreasing", "best_fit_decreasing", "fewest"]


def lognormal(documents: int, capacity: int) -> Row:
    draw = np.random.default_rng(0)
    return np.clip(draw.lognormal(np.log(350), 1.0, documents).astype(np.int64), 1, capacity)


def uniform(documents: int, low: int, high: int) -> Row:
    return np.random.default_rng(1).integers(low, high + 1, documents)


def functions() -> Row:
    """Lengths of all functions of the installed Python packages, in tokens of four characters."""
    lengths = []
    for folder in sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}):
        for path in sorted(Path(folder).rglob("*.py")):
            try:
                text = path.read_text()
                tree = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError):
                continue
            starts = np.cumsum([0, *map(len, text.splitlines(keepends=True))])
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                    lengths.append(int(starts[node.end_lineno] - starts[node.lineno - 1]) // 4 + 1)
    return np.array(lengths, np.int64)


#: Name of the work -> its lengths and capacity.
WORK: dict[str, Callable[[], tuple[Row, int]]] = {
    "512 lognormal, 32768": lambda: (lognormal(512, 32_768), 32_768),
    "200k lognormal, 4096": lambda: (lognormal(200_000, 4_096), 4_096),
    "200k over half, 4096": lambda: (uniform(200_000, 2_049, 4_096), 4_096),
    "200k equal, 4096": lambda: (np.full(200_000, 350), 4_096),
    "200k ones, 4096": lambda: (np.ones(200_000, np.int64), 4_096),
    "200k rising, 4096": lambda: (np.sort(lognormal(200_000, 4_096)), 4_096),
    "200k falling, 4096": lambda: (np.sort(lognormal(200_000, 4_096))[::-1].copy(), 4_096),
    "100k uniform, 32768": lambda: (uniform(100_000, 1, 32_768), 32_768),
    "1M lognormal, 4096": lambda: (lognormal(1_000_000, 4_096), 4_096),
    "1M lognormal, 32768": lambda: (lognormal(1_000_000, 32_768), 32_768),
    "1M uniform, 131072": lambda: (uniform(1_000_000, 1, 131_072), 131_072),
    "10M lognormal, 4096": lambda: (lognormal(10_000_000, 4_096), 4_096),
    "functions, 4096": lambda: (np.minimum(functions(), 4_096), 4_096),
}
HEAVY = {"1M uniform, 131072", "10M lognormal, 4096", "functions, 4096"}


def peers() -> dict[str, Callable[[Any, int], object]]:
    """The packers of other projects that are installed, in their fastest modes."""
    found: dict[str, Callable[[Any, int], object]] = {}
    if find_spec("lightbinpack"):
        import lightbinpack

        for mode in ("obfd", "obfdp"):
            found[f"lightbinpack {mode}"] = getattr(lightbinpack, mode)
    if find_spec("seqpacker"):
        import seqpacker

        for mode in ("ffd", "obfd", "obfdp"):
            found[f"seqpacker {mode}"] = partial(_seqpacker, seqpacker.Packer, mode)
    return found


def _seqpacker(packer: Any, mode: str, lengths: Any, capacity: int) -> object:
    return packer(capacity=capacity, strategy=mode).pack(lengths).bins


def checked(packs: Sequence[Sequence[int]], lengths: Row, capacity: int) -> int:
    order = np.fromiter((document for one in packs for document in one), np.int64)
    starts = np.cumsum([0, *map(len, packs)])[:-1]
    assert (np.sort(order) == np.arange(len(lengths))).all()
    assert np.add.reduceat(lengths[order], starts).max() <= capacity
    return len(packs)


def timed(run: Callable[[], object], runs: int, clock: Callable[[], float]) -> list[float]:
    seconds = []
    for _ in range(runs):
        gc.collect()
        begin = clock()
        result = run()
        seconds.append(clock() - begin)
        del result
    return seconds


def shown(seconds: list[float]) -> str:
    middle, low, high = (1e3 * each(seconds) for each in (statistics.median, min, max))
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def resident() -> float:
    # Not `getrusage`, whose peak a process inherits from the one that started it.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def memory(lengths: Row, capacity: int, who: str, kernels: str) -> float:
    """Peak megabytes above the input, of the first run in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/lengths.npy"  # so that making them is in no one's peak
        np.save(path, lengths)
        command = [sys.executable, str(Path(__file__)), "--alone", path, str(capacity), who, kernels]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def alone(path: str, capacity: int, who: str, kernels: str) -> None:
    lengths = np.load(path)
    pack(lengths[:4_096].copy(), capacity=capacity, strategy="best_fit_decreasing", kernels="numpy")  # imports
    run = peers().get(who)
    before = resident()
    result = run(lengths, capacity) if run else pack(lengths, capacity=capacity, strategy=who, kernels=kernels)
    print(resident() - before)
    del result


def rows(work: str, strategies: list[str], runs: int, with_memory: bool) -> list[list[str]]:
    lengths, capacity = WORK[work]()
    listed = lengths.tolist()
    bound = certify(pack(lengths, capacity=capacity), lengths, capacity=capacity).floors.packs
    found = []
    for name, run in peers().items():
        packs = checked(run(listed, capacity), lengths, capacity)  # type: ignore[arg-type]
        clock = time.perf_counter if name.endswith("obfdp") else time.process_time
        best = min(
            (timed(partial(run, given, capacity), runs, clock) for given in (lengths, listed)), key=statistics.median
        )
        peak = f"{memory(lengths, capacity, name, '-'):.0f}" if with_memory else ""
        found.append([work, name, shown(best), f"{packs - bound}", peak])
    for strategy in strategies:
        for kernels in ("numpy", "python"):
            given: Any = lengths if kernels == "numpy" else listed
            run_ours = partial(pack, given, capacity=capacity, strategy=strategy, kernels=kernels)
            over = certify(run_ours(), lengths, capacity=capacity).over
            peak = f"{memory(lengths, capacity, strategy, kernels):.0f}" if with_memory else ""
            seconds = timed(run_ours, runs, time.process_time)
            found.append([work, f"{strategy}, {kernels}", shown(seconds), f"{over}", peak])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work", nargs="*", choices=list(WORK), default=[name for name in WORK if name not in HEAVY])
    parser.add_argument("--strategy", nargs="*", default=STRATEGIES)
    parser.add_argument("--memory", action="store_true", help="show peak memory too")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        path, capacity, who, kernels = options.alone
        alone(path, int(capacity), who, kernels)
        return
    versions = (
        f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    table = Table("work", "who", "ms", "packs over the bound", "peak MB above input", title=versions)
    for work in options.work:
        for row in rows(work, options.strategy, options.runs, options.memory):
            table.add_row(*row)
        table.add_section()
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
