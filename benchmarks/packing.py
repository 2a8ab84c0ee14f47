"""Offline packing beside peers: time, packs over the lower bound, and peak memory above the input.

Times are processor time, which other processes disturb less; a parallel peer uses more processors than it keeps anyone
waiting for, so its wall time is what counts. Every result is checked before it is timed: each document once, no pack
over the capacity. Peers are those installed, lightbinpack and seqpacker; they take the same array of NumPy or the list,
whichever is sooner for them. Memory is that of a fresh process.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from measure import Lengths, Row, in_turn, peak, resident
from offline import functions
from pack_core import certify, pack

STRATEGIES = ("first_fit_decreasing", "best_fit_decreasing", "fewest")


def lognormal(documents: int, capacity: int) -> Lengths:
    draw = np.random.default_rng(0)
    return np.clip(draw.lognormal(np.log(350), 1.0, documents).astype(np.int64), 1, capacity)


def uniform(documents: int, low: int, high: int) -> Lengths:
    return np.random.default_rng(1).integers(low, high + 1, documents)


def function_lengths() -> Lengths:
    """Lengths of all functions of the installed Python packages, in tokens of four bytes."""
    return np.fromiter(map(len, functions(10_000_000)), np.int64)


#: Name of the work -> its lengths and capacity.
WORK: dict[str, Callable[[], tuple[Lengths, int]]] = {
    "512 lognormal, 32768": lambda: (lognormal(512, 32_768), 32_768),
    "200k lognormal, 4096": lambda: (lognormal(200_000, 4_096), 4_096),
    "200k over half, 4096": lambda: (uniform(200_000, 2_049, 4_096), 4_096),
    "200k equal, 4096": lambda: (np.full(200_000, 350), 4_096),
    "200k ones, 4096": lambda: (np.ones(200_000, np.int64), 4_096),
    "200k rising, 4096": lambda: (np.sort(lognormal(200_000, 4_096)), 4_096),
    "200k falling, 4096": lambda: (np.sort(lognormal(200_000, 4_096))[::-1].copy(), 4_096),
    "100k uniform, 32768": lambda: (uniform(100_000, 1, 32_768), 32_768),
    "functions, 4096": lambda: (np.minimum(function_lengths(), 4_096), 4_096),
    "1M lognormal, 4096": lambda: (lognormal(1_000_000, 4_096), 4_096),
    "1M lognormal, 32768": lambda: (lognormal(1_000_000, 32_768), 32_768),
    "1M uniform, 131072": lambda: (uniform(1_000_000, 1, 131_072), 131_072),
    "10M lognormal, 4096": lambda: (lognormal(10_000_000, 4_096), 4_096),
}
QUICK = ("512 lognormal, 32768", "200k lognormal, 4096", "200k over half, 4096", "100k uniform, 32768")
#: Where plain Python takes minutes, and five runs tell no more than three.
HEAVY = ("1M uniform, 131072", "10M lognormal, 4096")
#: Where memory is asked for.
WEIGHED = ("1M lognormal, 4096", "10M lognormal, 4096")


def peers() -> dict[str, Callable[[Any, int], object]]:
    """The packers of other projects that are installed: first-fit decreasing, and best-fit in their fastest modes."""
    found: dict[str, Callable[[Any, int], object]] = {}
    if find_spec("lightbinpack"):
        import lightbinpack

        for mode in ("ffd", "obfd", "obfdp"):
            found[f"lightbinpack {mode}"] = getattr(lightbinpack, mode)
    if find_spec("seqpacker"):
        import seqpacker

        for mode in ("ffd", "obfd", "obfdp"):
            found[f"seqpacker {mode}"] = partial(_seqpacker, seqpacker.Packer, mode)
    return found


def _seqpacker(packer: Any, mode: str, lengths: Any, capacity: int) -> object:
    return packer(capacity=capacity, strategy=mode).pack(lengths).bins


def checked(packs: Sequence[Sequence[int]], lengths: Lengths, capacity: int) -> int:
    order = np.fromiter((document for one in packs for document in one), np.int64)
    starts = np.cumsum([0, *map(len, packs)])[:-1]
    assert (np.sort(order) == np.arange(len(lengths))).all()
    assert np.add.reduceat(lengths[order], starts).max() <= capacity
    return len(packs)


def measure(quick: bool) -> list[Row]:
    return [row for work in (QUICK if quick else WORK) for row in rows_of(work, 3 if quick or work in HEAVY else 5)]


def rows_of(work: str, runs: int) -> list[Row]:
    """Measure one work: peers in turn with ours."""
    lengths, capacity = WORK[work]()
    listed = lengths.tolist()
    bound = certify(pack(lengths, capacity=capacity), lengths, capacity=capacity).floors.packs
    cpu: dict[str, Callable[[], object]] = {}
    wall: dict[str, Callable[[], object]] = {}
    over, weigh = {}, {}
    for name, run in peers().items():
        over[name] = checked(run(listed, capacity), lengths, capacity) - bound  # type: ignore[arg-type]
        side = wall if name.endswith("obfdp") else cpu
        for form, given in (("array", lengths), ("list", listed)):
            side[f"{name}, {form}"] = partial(run, given, capacity)
        weigh[name] = (name, "-")
    for strategy in STRATEGIES:
        for kernels in ("numpy", "python") if work not in HEAVY else ("numpy",):
            name = f"{strategy}, {kernels}"
            given = lengths if kernels == "numpy" else listed
            cpu[name] = partial(pack, given, capacity=capacity, strategy=strategy, kernels=kernels)
            over[name] = certify(cpu[name](), lengths, capacity=capacity).over  # type: ignore[arg-type]
            weigh[name] = (strategy, kernels)
    seconds = in_turn(cpu, runs, time.process_time) | in_turn(wall, runs)
    for name in peers():
        array, listing = seconds.pop(f"{name}, array"), seconds.pop(f"{name}, list")
        seconds[name] = min(array, listing, key=lambda each: sorted(each)[len(each) // 2])
    rows = []
    for name in weigh:
        figures = {"documents": float(len(lengths)), "packs over the bound": float(over[name])}
        if work in WEIGHED:
            figures["peak MB above input"] = peak(__file__, lengths, str(capacity), *weigh[name])
        said = f"{over[name]} over the bound"
        rows.append(Row(work, name, seconds[name], said, figures))
    return rows


def alone(path: str, capacity: int, who: str, kernels: str) -> None:
    """Print the peak megabytes above the input of the first run in this process."""
    lengths = np.load(path)
    pack(lengths[:4_096].copy(), capacity=capacity, strategy="best_fit_decreasing", kernels="numpy")  # imports
    run = peers().get(who)
    before = resident()
    result = run(lengths, capacity) if run else pack(lengths, capacity=capacity, strategy=who, kernels=kernels)
    print(resident() - before)
    del result


if __name__ == "__main__":
    _, path, capacity, who, kernels = sys.argv
    alone(path, int(capacity), who, kernels)
