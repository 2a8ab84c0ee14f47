"""What every benchmark shares: a row of the report, clocks, memory, and the machine."""

import gc
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random

import attrs
import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


@attrs.frozen
class Row:
    """One thing measured: who did which work, the seconds of each run, and what came of it."""

    work: str
    who: str
    seconds: tuple[float, ...]
    result: str = ""
    #: Bare figures for plots and for whoever reads the JSON: megabytes, packs over the bound, documents a second.
    figures: dict[str, float] = attrs.field(factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def milliseconds(self) -> str:
        middle, low, high = (1e3 * each for each in (self.median, min(self.seconds), max(self.seconds)))
        return f"{middle:,.4g} ({low:,.4g} to {high:,.4g})"


@attrs.frozen
class Benchmark:
    """A benchmark of the registry: `measure(quick)` gives its rows, and `draw(rows, folder)` may add pictures."""

    name: str
    says: str
    measure: Callable[[bool], list[Row]]
    draw: Callable[[list[Row], Path], list[str]] | None = None


def timed(action: Callable[[], object], runs: int, clock: Callable[[], float] = time.perf_counter) -> tuple[float, ...]:
    """Return the seconds of each run after one that is not counted."""
    return in_turn({"": action}, runs, clock)[""]


def in_turn(
    actions: dict[str, Callable[[], object]], runs: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each action, one run of each after another, so that a busy minute strikes all alike.

    Every round has an order of its own: an action also pays for the state its forerunner leaves the heap in.
    """
    for action in actions.values():
        action()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    gc.collect()
    gc.freeze()  # peers' imports are a million objects, which every search for cycles would go through
    for run in range(runs):
        for name in Random(run).sample(list(actions), len(actions)):
            with uncollected():
                begin = clock()
                result = actions[name]()
                seconds[name].append(clock() - begin)
            del result  # freeing what was made is nobody's work
    gc.unfreeze()
    return {name: tuple(each) for name, each in seconds.items()}


@contextmanager
def uncollected() -> Iterator[None]:
    """Search nothing for cycles meanwhile, as `timeit` does, so that nobody pays for what others keep."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resident() -> float:
    """Megabytes at the peak of this process; not `getrusage`, whose peak a process inherits from its parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def peak(script: str, lengths: Lengths, *arguments: str) -> float:
    """Return the peak megabytes above its input that a script prints when it runs alone in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/lengths.npy"  # so that making them is in no one's peak
        np.save(path, lengths)
        command = [sys.executable, script, path, *arguments]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def machine() -> dict[str, str]:
    """Say where and when, and the versions of whatever takes part."""
    names = ("pack-core", "torch", "numpy", "lightbinpack", "seqpacker", "verl", "miles-rl", "grain", "trl")
    installed = {}
    for name in names:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_memory():.0f} GiB",
        "python": platform.python_version(),
        **installed,
    }


def _memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
