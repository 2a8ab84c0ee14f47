"""Measure `pack_dataset` beside TRL's on functions of the installed Python packages, and the planner's memory.

    python benchmarks/offline.py [--documents 400000] [--capacity 4096] [--runs 3] [--memory]

Needs `pip install 'pack-torch[datasets]' trl==1.16.0`. A token is four bytes of source text; functions are taken in the
order of their files until there are enough, and a dataset of two columns is stored and mapped into memory before the
clock starts. Planning of TRL ends where it begins to gather rows, measured over one narrow column so that what it
copies before is small. End to end: TRL writes its cache, a thousand documents at a time, its default, and all at once;
ours writes Arrow and Parquet files; one process each.
Every result is checked: no row is over the capacity, and every document is there, whole or cut to it. With --memory the
planner's memory above its input is shown instead, for 1 and 10 million lognormal lengths, in processes of their own:
the peak and what is left of traced allocations, and the rise of resident memory.
"""

import argparse
import ast
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from measure import Row

VOCABULARY = 50_257


def functions(most: int) -> Iterator[Any]:
    """Yield the tokens of functions of the standard library and of installed packages."""
    found = 0
    for folder in sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}):
        for path in sorted(Path(folder).rglob("*.py")):
            try:
                text = path.read_text()
                tree = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError):
                continue
            lines = text.splitlines(keepends=True)
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    source = "".join(lines[node.lineno - 1 : node.end_lineno]).encode()
                    yield np.frombuffer(source + b" " * (-len(source) % 4), "<u4") % VOCABULARY
                    found += 1
                    if found == most:
                        return


def store(folder: Path, most: int) -> Any:
    import pyarrow as pa
    from datasets import Dataset

    rows = list(functions(most))
    offsets = np.cumsum([0, *map(len, rows)])
    tokens = pa.array(np.concatenate(rows).astype(np.int32))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), tokens).cast(pa.list_(pa.int32()))
    Dataset(pa.table({"input_ids": lists, "labels": lists})).save_to_disk(folder)
    return Dataset.load_from_disk(folder)


class Gathering(Exception):
    """TRL has planned."""


def trl_planning(table: Any, capacity: int) -> None:
    from trl import data_utils

    def stop(*_: Any) -> None:
        raise Gathering

    original, data_utils.pc = data_utils.pc, type("Stopped", (), {})()
    for name in ("list_value_length", "greater", "filter", "list_slice", "make_struct"):
        setattr(data_utils.pc, name, getattr(original, name))
    data_utils.pc.take = stop
    try:
        data_utils._pack_bfd(table, capacity)
    except Gathering:
        return
    finally:
        data_utils.pc = original
    raise AssertionError("TRL did not gather")


def read(folder: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if folder.suffix == ".parquet":
        return pq.read_table(folder)
    return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in folder.glob("part-*")])


def several(runs: int, work: Callable[[], Any]) -> tuple[tuple[float, ...], Any]:
    """Return the seconds of each run, and the last result."""
    times, result = [], None
    for _ in range(runs):
        result = None
        begin = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - begin)
    return tuple(times), result


def check(table: Any, lengths: Any, capacity: int) -> None:
    """Check rows of any packer: capacity, and that they hold every document cut to it, by the multiset of lengths."""
    rows = np.concatenate([np.diff(piece.offsets.to_numpy()) for piece in table["input_ids"].chunks])
    inside = np.concatenate([piece.flatten().to_numpy() for piece in table["seq_lengths"].chunks])
    assert rows.max() <= capacity
    assert np.array_equal(np.sort(inside), np.sort(np.minimum(lengths, capacity)))


def measure(quick: bool) -> list[Row]:
    """Measure 400,000 documents of up to 4,096 tokens, or a twentieth of them."""
    return compare(20_000 if quick else 400_000, 4_096, 2 if quick else 3)


def compare(documents: int, capacity: int, runs: int) -> list[Row]:
    """Measure TRL and ours on the same stored dataset; nothing where TRL is not installed."""
    if not (find_spec("trl") and find_spec("datasets")):
        return []
    import datasets
    import pyarrow as pa
    import trl
    from pack_torch.offline import pack_dataset, to_dataset, write_rows

    datasets.disable_progress_bars()
    folder = Path(tempfile.mkdtemp(prefix="offline-"))
    try:
        stored = store(folder / "documents", documents)
        logging.getLogger("pack_torch.offline").setLevel(logging.ERROR)  # it tells of documents cut short, every time
        packed = pack_dataset(stored, capacity, "bfd", add=("seq_lengths",))
        lengths = packed.layout.lengths
        narrow = pa.array(np.zeros(int(lengths.sum()), np.int8))
        offsets = pa.array(np.cumsum([0, *lengths]).astype(np.int32))
        thin = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, narrow)})
        fresh = {"load_from_cache_file": False}
        count = [0]

        def ours() -> Any:
            return pack_dataset(stored, capacity, "bfd", add=("seq_lengths",))

        def written(suffix: str) -> Path:
            count[0] += 1
            target = folder / f"rows{count[0]}{suffix}"
            if suffix == ".arrow":
                to_dataset(ours(), target)
            else:
                write_rows(ours(), target)
            return target

        def theirs(**batch: Any) -> Any:
            return trl.pack_dataset(stored, capacity, "bfd", map_kwargs=fresh | batch).data.table

        works: dict[tuple[str, str], Callable[[], Any]] = {
            ("planning alone", "TRL, 1,000 at a time"): lambda: [
                trl_planning(thin.slice(first, 1000), capacity) for first in range(0, len(thin), 1000)
            ],
            ("planning alone", "TRL, all at once"): lambda: trl_planning(thin, capacity),
            ("planning alone", "pack_dataset, all at once"): ours,
            ("end to end", "TRL to Arrow, 1,000 at a time"): theirs,
            ("end to end", "TRL to Arrow, all at once"): lambda: theirs(batch_size=len(stored)),
            ("end to end", "pack_dataset to Arrow"): lambda: written(".arrow"),
            ("end to end", "pack_dataset to Parquet (zstd)"): lambda: written(".parquet"),
        }
        rows = []
        for (what, who), work in works.items():
            seconds, made = several(runs, work)
            made = read(made) if isinstance(made, Path) else made
            if isinstance(made, pa.Table):
                check(made, lengths, capacity)
            said = f"{len(stored):,} documents"
            if isinstance(made, (pa.Table, type(packed))):
                said += f", {len(made):,} rows"
            rows.append(Row(f"functions to {capacity}, {what}", who, seconds, said, {"documents": float(len(stored))}))
        return rows
    finally:
        shutil.rmtree(folder)


def remember(given: argparse.Namespace) -> None:
    """Print bytes a document that planning takes above its input, in this process."""
    from pack_torch.offline import Recipe, lay_out

    drawn = np.random.default_rng(0).lognormal(np.log(350), 1.0, given.alone)
    lengths = np.clip(drawn, 1, given.capacity).astype(np.int64)
    del drawn
    lay_out(lengths[:5000], Recipe(given.capacity))  # what is loaded once
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    layout = lay_out(lengths, Recipe(given.capacity))
    held, peak = (value - before for value in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    print(json.dumps({"documents": given.alone, "rows": len(layout.rows), "held": held, "peak": peak}))


def resident(given: argparse.Namespace) -> None:
    """Print what resident memory rises by over planning, in this process."""
    from pack_torch.offline import Recipe, lay_out

    drawn = np.random.default_rng(0).lognormal(np.log(350), 1.0, given.alone)
    lengths = np.clip(drawn, 1, given.capacity, out=drawn).astype(np.int64)
    del drawn
    lay_out(lengths[:5000], Recipe(given.capacity))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = resident_now("VmRSS")
    begin = time.perf_counter()
    layout = lay_out(lengths, Recipe(given.capacity))
    seconds = time.perf_counter() - begin
    print(json.dumps({"rows": len(layout.rows), "resident": resident_now("VmHWM") - before, "seconds": seconds}))


def dataset(given: argparse.Namespace) -> None:
    """Print the same of `pack_dataset` over an Arrow table, from offsets to the first row."""
    import pyarrow as pa
    from pack_torch.offline import pack_dataset

    drawn = np.random.default_rng(0).lognormal(np.log(350), 1.0, given.alone)
    offsets = np.zeros(given.alone + 1, np.int64)
    np.cumsum(np.clip(drawn, 1, given.capacity, out=drawn).astype(np.int64), out=offsets[1:])
    del drawn
    values = pa.array(np.zeros(int(offsets[-1]), np.int8))  # never touched, and so in no memory
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), values)})
    pack_dataset(table.slice(0, 5000), given.capacity)[0]
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_now("VmRSS")
    begin = time.perf_counter()
    packed = pack_dataset(table, given.capacity)
    packed[0]
    seconds = time.perf_counter() - begin
    print(json.dumps({"rows": len(packed), "resident": resident_now("VmHWM") - before, "seconds": seconds}))


def resident_now(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=400_000)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        {"plan": resident, "traced plan": remember, "dataset": dataset}[given.what](given)
    elif given.memory:
        print(f"planner, capacity {given.capacity:,}, {machine()}")
        for documents in (1_000_000, 10_000_000):
            for what in ("plan", "traced plan", "dataset"):
                own = ["--alone", str(documents), "--capacity", str(given.capacity), "--what", what]
                told = subprocess.run([sys.executable, __file__, *own], capture_output=True, text=True, check=True)
                found = json.loads(told.stdout)
                each = {
                    name: f"{found[name] / documents:.1f} B" for name in ("held", "peak", "resident") if name in found
                }
                print(f"{documents:>12,} documents, {what}: {found} = {each} a document")
    else:
        print(machine())
        for row in compare(given.documents, given.capacity, given.runs):
            print(f"{row.work}: {row.who:<32} {row.milliseconds:>28} ms  {row.result}", flush=True)


if __name__ == "__main__":
    main()
