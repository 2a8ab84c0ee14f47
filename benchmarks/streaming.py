"""Packing on the fly beside peers: documents a second with tensors built, fill, and what a resume and a batch cost.

Documents are stretches of the standard library's docstrings, a token for four bytes, in lengths like those of answers
to grade-school problems: lognormal, median about 156, mean about 200 tokens. Every way gets the same documents in the
same order, as NumPy arrays or as lists, and makes for each row of 2,048 tokens what a model takes: tokens, labels,
positions and document boundaries or ids, as tensors or arrays (grain makes no labels). Times are processor time.

grain (first fit, as many open rows as the window), TRL (`pack_dataset` over batches of 1,000) and torchtune
(`PackedDataset`, next-fit over lists, the whole dataset before the first row) take part where they are installed;
torchtune's last release, 0.6.1, imports beside torchao 0.9. The plain loop is next-fit with one concatenation a field.
"""

import ast
import io
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Row, in_turn, uncollected
from pack_torch import PackCollator, PackedIterable, Sft

CAPACITY = 2_048
FORMAT = Sft(label_mode="tokens")
Documents = list[dict[str, Any]]


def docstrings() -> np.ndarray[Any, Any]:
    """Return the text of docstrings as token ids, a token for four bytes or so, all end to end."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, ValueError):
            continue
        defined = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, defined)]
    data = np.frombuffer("\n".join(texts).encode(), np.uint8).astype(np.int64)
    data = data[: len(data) // 4 * 4].reshape(-1, 4)
    return (data @ np.array([1, 31, 961, 29_791])) % 32_000


def documents(count: int) -> Documents:
    """Return documents as arrays of int64."""
    tokens, draw = docstrings(), np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(156), 0.7, count).astype(np.int64), 8, CAPACITY)
    starts = draw.integers(0, len(tokens) - CAPACITY, count)
    return [{"input_ids": tokens[start : start + length]} for start, length in zip(starts, lengths, strict=True)]


def ours(rows: Documents, window: int, strategy: str = "best_fit", **options: Any) -> Iterator[Any]:
    """Packs, each with tokens, labels, positions and boundaries as tensors."""
    packs = PackedIterable(rows, format=FORMAT, strategy=strategy, capacity=CAPACITY, window=window, **options)
    for pack in packs:
        yield pack["input_ids"], pack["labels"], pack.position_ids, pack.cu_seqlens


def state_share(rows: Documents, window: int) -> tuple[float, float, int]:
    """Return the seconds of a run, those of its states, one at every batch of 4 packs, and the bytes of the last."""
    packs = PackedIterable(rows, format=FORMAT, strategy="best_fit", capacity=CAPACITY, window=window)
    with uncollected():
        begin, spent, state = time.perf_counter(), 0.0, {}
        for number, pack in enumerate(packs):
            made = pack["input_ids"], pack["labels"], pack.position_ids, pack.cu_seqlens
            if number % 4 == 3:
                start = time.perf_counter()
                state = packs.state_dict()
                spent += time.perf_counter() - start
            del made
        whole = time.perf_counter() - begin
    return whole, spent, len(json.dumps(state))


def plain(rows: Documents, window: int) -> Iterator[Any]:
    """Next-fit in ten lines: what one writes oneself."""
    held: list[Any] = []
    room = CAPACITY
    for row in rows:
        tokens = row["input_ids"]
        if len(tokens) > room:
            yield _laid(held)
            held, room = [], CAPACITY
        held.append(tokens)
        room -= len(tokens)
    yield _laid(held)


def _laid(held: list[Any]) -> Any:
    tokens = np.concatenate(held)
    ends = np.cumsum([len(one) for one in held])
    labels = np.append(tokens[1:], -100)
    labels[ends - 1] = -100
    positions = np.concatenate([np.arange(len(one)) for one in held])
    return tuple(map(torch.from_numpy, (tokens, labels, positions, np.append(0, ends).astype(np.int32))))


def grain_first_fit(rows: Documents, window: int) -> Iterator[Any]:
    """grain's rows: tokens, segment ids, positions."""
    import grain
    from grain.experimental import FirstFitPackIterDataset

    alone = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # rows lie in memory: threads only cost
    source = grain.MapDataset.source(rows).to_iter_dataset(alone)
    packed = FirstFitPackIterDataset(
        source, length_struct={"input_ids": CAPACITY}, num_packing_bins=window, shuffle_bins=False
    )
    for row in packed:
        yield torch.from_numpy(row["input_ids"]), row["input_ids_segment_ids"], row["input_ids_positions"]


def trl_dataset(rows: Documents) -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    return datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows])


def trl_batches(data: Any, window: int) -> Iterator[Any]:
    """TRL's rows in batches of 1,000 documents, then its collator."""
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    for row in pack_dataset(data, CAPACITY, map_kwargs={"batch_size": 1_000, "load_from_cache_file": False}):
        batch = collate([row])
        yield batch["input_ids"][0], batch["labels"], batch["position_ids"], batch["cu_seq_lens_q"]


def torchtune_rows(samples: list[dict[str, list[int]]], window: int) -> Iterator[Any]:
    """torchtune's rows: tokens, labels, positions and lengths."""
    with redirect_stderr(io.StringIO()):  # it draws a bar wherever it runs
        from torchtune.datasets import PackedDataset

        rows = PackedDataset(samples, max_seq_len=CAPACITY)
    for number in range(len(rows)):
        yield rows[number]


def consumed(rows: Iterable[Any]) -> int:
    """Go through all rows, and return how many they were."""
    return sum(1 for _ in rows)


def measure(quick: bool) -> list[Row]:
    """Measure throughput and fill, the price of a state, and collation."""
    count, runs = (10_000, 3) if quick else (20_000, 5)
    arrays = documents(count)
    lists = [{"input_ids": row["input_ids"].tolist()} for row in arrays]
    found = []
    for window in (64,) if quick else (8, 64, 256):
        found += throughput(arrays, lists, window, runs)
    return [*found, *resume(arrays, runs), *collation(arrays, runs)]


def throughput(arrays: Documents, lists: Documents, window: int, runs: int) -> list[Row]:
    """Measure all ways with one window, in turn."""
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "best_fit, arrays": partial(ours, arrays, window),
        "first_fit, arrays": partial(ours, arrays, window, "first_fit"),
        "best_fit, lists": partial(ours, lists, window),
        "plain next-fit, arrays": partial(plain, arrays, window),
    }
    if find_spec("grain"):
        ways["grain first-fit, arrays"] = partial(grain_first_fit, arrays, window)
    if find_spec("trl") and find_spec("datasets"):
        ways["trl bfd in batches"] = partial(trl_batches, trl_dataset(arrays), window)
    if find_spec("torchtune"):
        samples = [{"tokens": row["input_ids"], "labels": row["input_ids"]} for row in lists]
        ways["torchtune next-fit, lists"] = partial(torchtune_rows, samples, window)
    tokens = sum(len(row["input_ids"]) for row in arrays)
    seconds = in_turn({name: partial(_run, way) for name, way in ways.items()}, runs, time.process_time)
    rows = []
    for name, each in seconds.items():
        fill = tokens / (consumed(ways[name]()) * CAPACITY)
        rate = len(arrays) / sorted(each)[len(each) // 2]
        figures = {"documents a second": rate, "fill": fill}
        rows.append(
            Row(f"{len(arrays):,} documents, window {window}", name, each, f"{rate:,.0f}/s, fill {fill:.3f}", figures)
        )
    return rows


def _run(way: Callable[[], Iterator[Any]]) -> int:
    return consumed(way())


def resume(arrays: Documents, runs: int) -> list[Row]:
    """Measure what a state at every batch of 4 packs adds, and how large it is."""
    found = [state_share(arrays, 256) for _ in range(3 * runs)]
    added = statistics.median(spent / (whole - spent) for whole, spent, _ in found)
    said = f"states add {100 * added:.1f} %, the last of {found[0][2]:,} bytes"
    wholes = tuple(whole for whole, _, _ in found)
    return [
        Row("exact resume", "a state at every 4 packs", wholes, said, {"share": added, "bytes": float(found[0][2])})
    ]


def collation(arrays: Documents, runs: int) -> list[Row]:
    """Measure a batch of 4 packs beside copying the bytes of its columns into a batch, one `torch.cat` each."""
    packs = list(PackedIterable(arrays, format=FORMAT, strategy="best_fit", capacity=CAPACITY, window=256))
    groups = [packs[start : start + 4] for start in range(0, len(packs) - 3, 4)]
    columns = [[[pack["input_ids"], pack["labels"], pack.position_ids] for pack in group] for group in groups]

    def copy() -> None:
        for group in columns:
            made = [torch.cat(each) for each in zip(*group, strict=True)]  # a batch holds them all at once
        del made

    def collate(mask: str) -> None:
        for group in groups:
            PackCollator(mask=mask)(group)

    ways: dict[str, Callable[[], object]] = {"copying the bytes": copy}
    ways |= {f"PackCollator, {mask}": partial(collate, mask) for mask in ("varlen", "dense")}
    seconds = in_turn(ways, 5 * runs, time.process_time)
    base = statistics.median(seconds["copying the bytes"])
    return [
        Row("batches of 4 packs", name, each, f"{statistics.median(each) / base:.2f} of copying")
        for name, each in seconds.items()
    ]
