"""Measure balanced planning: how good its plans are, beside peers and a judge, and how fast it is.

    python benchmarks/balancing.py [--quick] [--rollouts gsm8k_rollouts.jsonl.gz]

Shares say how much of what lies over a bound in arrival order is gone: expert / token / pair work. 100 would attain a
bound, which no plan need be able to. Counts are not seconds.
"""

import argparse
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
from pack_core import Plan, Sample, Search, Work, dispatch_counts, owners, plan, record, schedule, work
from pack_core.filling import dealt as dealt_evenly
from pack_core.kernels.loads import kernel_of
from pack_core.search.construct import full
from pack_core.search.layout import Layout, Rules, Swap
from rich.console import Console
from rich.table import Table
from workloads import Workload, large, panel, workloads

WORKS = ("critical_work_proxy", "attention_token_work", "attention_pair_work")
KERNELS = ("numpy", "python")


def planned(workload: Workload, search: Search, order: str = "balanced") -> Plan:
    """Return the plan of a workload under the clock, as a trainer makes it."""
    samples = [Sample(index, int(length)) for index, length in enumerate(workload.lengths)]
    return plan(
        samples,
        topology=workload.topology,
        capacity=workload.capacity,
        step_samples=len(samples),
        pack_order=order,
        counts=workload.counts,
        search=search,
        clock=time.monotonic,
    )


def shares(after: Sequence[int], arrival: Work, bounds: object) -> list[float]:
    """Return how many percent of what lay over each bound are gone."""
    gone = []
    for name, now in zip(WORKS, after, strict=True):
        was, least = getattr(arrival, name), getattr(bounds, name)
        gone.append(100.0 * (was - now) / (was - least) if was > least else 100.0)
    return gone


def objective(after: Sequence[int], arrival: Work) -> float:
    """Return the sum of the three works, each over that of arrival order."""
    return sum(now / getattr(arrival, name) for name, now in zip(WORKS, after, strict=True))


def of(found: Work) -> tuple[int, int, int]:
    """Return the three works."""
    return tuple(getattr(found, name) for name in WORKS)


def quality(cases: Sequence[Workload], title: str, proposals: int) -> Table:
    """Return a table of what each planner makes of each workload."""
    table = Table(
        "samples, ranks, EP, capacity",
        "planner",
        "packs",
        "gone: expert / token / pair %",
        "objective",
        "s",
        title=title,
    )
    for case in cases:
        ours = planned(case, Search())
        arrival, bounds = ours.arrival[0], ours.bounds[0]
        rows: list[tuple[str, int, tuple[int, int, int], float]] = [
            ("arrival order", arrival.packs_per_rank, of(arrival), 0.0)
        ]
        for name, partition in peers().items():
            begin = time.perf_counter()
            found = dealt(case, partition)
            rows.append((name, found.packs_per_rank, of(found), time.perf_counter() - begin))
        for name, search in (
            ("the reference's search", Search(method="reference")),
            ("constructed at once", Search(proposals=0)),
            ("ours", Search()),
        ):
            begin = time.perf_counter()
            made = planned(case, search)
            rows.append((name, made.work[0].packs_per_rank, of(made.work[0]), time.perf_counter() - begin))
        from annealing import anneal

        begin = time.perf_counter()
        judged = anneal(case, ours.steps[0], of(arrival), proposals)
        rows.append(
            (f"annealing, {proposals:,} swaps", ours.work[0].packs_per_rank, judged, time.perf_counter() - begin)
        )
        for number, (name, packs, works, seconds) in enumerate(rows):
            gone = " / ".join(f"{share:.0f}" for share in shares(works, arrival, bounds))
            label = f"{case.name} (bound {bounds.packs_per_rank} packs)" if not number else ""
            table.add_row(label, name, str(packs), gone, f"{objective(works, arrival):.3f}", f"{seconds:.2f}")
        table.add_section()
    return table


def dealt(case: Workload, partition: Callable[[list[int], int], list[list[int]]]) -> Work:
    """Return the work of a partition into equal shares, packed as the trainer packs it."""
    columns = partition(case.lengths.tolist(), case.topology.ranks)
    order = [index for row in zip(*columns, strict=True) for index in row]
    laid = schedule(case.lengths, case.topology.ranks, case.capacity, order=order)
    return work(laid, case.lengths, case.capacity, case.counts)


def peers() -> dict[str, Callable[[list[int], int], list[list[int]]]]:
    """Return the length balancers of installed peers, which deal equal counts by Karmarkar-Karp."""
    found = {}
    for name, package, path in (
        ("verl, Karmarkar-Karp", "verl", "utils/seqlen_balancing.py"),
        ("MILES, Karmarkar-Karp", "miles", "utils/seqlen_balancing.py"),
    ):
        module = module_of(package, path)
        if module is not None:
            found[name] = partial(_equal, module)
    return found


def _equal(module: ModuleType, lengths: list[int], ranks: int) -> list[list[int]]:
    return module.get_seqlen_balanced_partitions(lengths, ranks, equal_size=True)


def module_of(package: str, path: str) -> ModuleType | None:
    """Return one module of a package without running the package, whose imports need a cluster."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / path
    for name in (
        "torch",
        "torch.distributed",
        "verl.protocol",
        "verl.utils",
        "verl.utils.tensordict_utils",
        "verl.utils.device",
    ):
        if package == "verl" and name not in sys.modules:
            stand_in = ModuleType(name)
            stand_in.__dict__.update(
                distributed=None, Tensor=object, DataProto=None, get_device_name=None, tensordict_utils=None
            )
            sys.modules[name] = stand_in
    spec = importlib.util.spec_from_file_location(f"{package}_balancing", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in sys.modules if name.startswith("verl")]:
        del sys.modules[name]
    return module


def scoring() -> Table:
    """Return a table of fully scored proposals a second, at 16 ranks, EP 8, 48 layers, 512 samples."""
    case = large(512, 16, 8, 48)
    rules = Rules(16, case.capacity, "tokens", None)
    lengths = case.lengths.tolist()
    layout = Layout(full(dealt_evenly(lengths, 16), lengths, rules), lengths, rules)
    random = Random(0)
    pairs = [tuple(random.sample(range(512), 2)) for _ in range(12_000)]
    swaps = [
        swap for pair in pairs for swap in (layout.weigh(*pair),) if isinstance(swap, Swap) and swap.layout is None
    ]
    exchanges = [(swap.first, swap.second) for swap in swaps if swap.path == "fixed"]
    mixed = [(swap.first, swap.second) for swap in swaps]
    table = Table(
        "kernel",
        "proposals",
        "at a time",
        "a second (min to max)",
        title=f"fully scored proposals: 16 ranks, EP 8, 48 layers, 512 samples, {layout.packs} packs a rank",
    )
    for name in KERNELS:
        loads = kernel_of(case.counts.counts, 512, 8, name).loads(layout)
        for kind, chosen in (("that keep pack boundaries", exchanges), ("at random, a third of them so", mixed)):
            for together in (1024, 32):
                chosen = chosen[: 3072 if name == "numpy" else 512]
                rates = []
                for _ in range(5):
                    begin = time.perf_counter()
                    for at in range(0, len(chosen), together):
                        weighed = [layout.weigh(*pair) for pair in chosen[at : at + together]]
                        loads.score([swap.changes for swap in weighed])
                    rates.append(len(chosen) / (time.perf_counter() - begin))
                table.add_row(name, kind, str(together), _spread(rates))
    return table


def costs() -> Table:
    """Return a table of everything an update pays for planning, at the reference's scale."""
    table = Table(
        "step",
        "numpy, ms",
        "python, ms",
        title="what planning an update costs: 8 ranks, EP 2, up to 6,144 tokens, 19 layers, top-16 of 512, int32 ids",
    )
    for samples in (128, 256):
        case = panel(samples, 8, 2, 6144)
        random = np.random.default_rng(0)
        routes = [random.integers(0, 512, (length - 1, 19, 16), dtype=np.int32) for length in case.lengths.tolist()]
        rows: dict[str, list[str]] = {}
        for name in KERNELS:
            for what, seconds in _parts(case, routes, name).items():
                rows.setdefault(what, []).append(_spread([1e3 * one for one in seconds], 1))
        for what, cells in rows.items():
            table.add_row(f"{samples} samples: {what}", *cells)
        table.add_section()
    return table


def _parts(case: Workload, routes: list[np.ndarray], kernels: str) -> dict[str, list[float]]:
    ids = sum(route.size for route in routes)
    parts: dict[str, list[float]] = {}
    for _ in range(3):
        begin = time.perf_counter()
        table = owners(512, 2)  # plain Python counts much faster straight into destinations
        counted = dispatch_counts(routes, case.lengths, layers=19, experts=512, top_k=16, owners=table, kernels=kernels)
        parts.setdefault(f"counting {ids / 1e6:.0f} M expert ids", []).append(time.perf_counter() - begin)
        del counted
        for what, search in (
            ("folding, construction, bounds, measuring", Search(proposals=0, kernels=kernels)),
            ("all that and the search", Search(kernels=kernels)),
        ):
            begin = time.perf_counter()
            made = planned(case, search)
            parts.setdefault(what, []).append(time.perf_counter() - begin)
        samples = [Sample(index, int(length)) for index, length in enumerate(case.lengths)]
        begin = time.perf_counter()
        record(made, samples)
        parts.setdefault("the log record", []).append(time.perf_counter() - begin)
    return parts


def scaling() -> Table:
    """Return a table of whole plans of growing size."""
    table = Table(
        "ranks, samples",
        "proposals",
        "stop",
        "packs (bound)",
        "gone: expert / token / pair %",
        "s",
        title="growth: EP 8, 24 layers, default allowance of 0.25 s for the search",
    )
    for ranks, samples in ((16, 512), (64, 2048), (256, 8192)):
        case = large(samples, ranks, 8, 24)
        begin = time.perf_counter()
        made = planned(case, Search())
        seconds = time.perf_counter() - begin
        trace, bounds = made.traces[0], made.bounds[0]
        gone = " / ".join(f"{share:.0f}" for share in shares(of(made.work[0]), made.arrival[0], bounds))
        packs = f"{made.arrival[0].packs_per_rank} -> {made.work[0].packs_per_rank} ({bounds.packs_per_rank})"
        table.add_row(f"{ranks}, {samples}", f"{trace.proposals:,}", trace.stop, packs, gone, f"{seconds:.2f}")
    return table


def default_search() -> Table:
    """Return a table of the default search on both kernels, without a clock."""
    table = Table(
        "kernel",
        "1,024 proposals, ms (min to max)",
        title="the default search of a step: 16 ranks, EP 8, 48 layers, 512 samples, construction included",
    )
    case = large(512, 16, 8, 48)
    for name in KERNELS:
        seconds = []
        for _ in range(5 if name == "numpy" else 2):
            begin = time.perf_counter()
            made = planned(case, Search(kernels=name, seconds=None))
            seconds.append(1e3 * (time.perf_counter() - begin))
        table.add_row(f"{name} ({made.traces[0].proposals:,} proposals)", _spread(seconds))
    return table


def _spread(values: Sequence[float], digits: int = 0) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two panels, two workloads, a tenth of the annealing")
    parser.add_argument("--rollouts", type=Path, help="JSONL of real rollouts, for their lengths")
    options = parser.parse_args()
    console = Console(width=150)
    console.print(f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, one thread")
    panels = [
        panel(64, 8, 2, 6144),
        panel(128, 4, 2, 6144),
        panel(256, 8, 2, 6144),
        panel(256, 8, 2, 12288),
        panel(256, 16, 8, 34816),
    ]
    cases = workloads(rollouts=options.rollouts)
    proposals = 100_000 if options.quick else 1_000_000
    few = slice(2) if options.quick else slice(None)
    for table in (
        lambda: quality(panels[few], "panels: long-tailed lengths, 19 layers, six topics", proposals),
        lambda: quality(cases[few], "workloads: 256 samples, 16 ranks, EP 4, 12 layers", proposals),
        scoring,
        default_search,
        costs,
        scaling,
    ):
        console.print(table())


if __name__ == "__main__":
    main()
