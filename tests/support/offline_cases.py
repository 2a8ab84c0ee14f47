"""Documents for offline packing, and an independent reading of packed rows."""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


def documents(lengths: Sequence[int], seed: int = 0) -> dict[str, list[list[int]]]:
    """Return tokens that tell their document and place apart, and a second column that differs from the first."""
    tokens = [[1000 * d + place for place in range(length)] for d, length in enumerate(lengths)]
    return {"input_ids": tokens, "labels": [[-value for value in row] for row in tokens]}


def lognormal(count: int, seed: int = 0) -> list[int]:
    return np.clip(np.random.default_rng(seed).lognormal(3, 1, count).astype(int), 1, 250).tolist()


def chunked(columns: dict[str, list[Any]], cuts: Iterable[int], schema: Any = None) -> Any:
    """Return a table whose memory is cut at some documents, the pieces being slices with offsets of their own."""
    whole = pa.table(columns, schema)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < whole.num_rows}), whole.num_rows]
    return pa.concat_tables([whole.slice(a, b - a) for a, b in pairwise(edges)])


def unpacked(rows: Iterable[dict[str, Any]], column: str) -> dict[int, dict[int, list[Any]]]:
    """Return document -> first token -> the tokens that rows say lie there."""
    found: dict[int, dict[int, list[Any]]] = {}
    for row in rows:
        begin = 0
        for document, start, size in zip(row["documents"], row["starts"], row["seq_lengths"], strict=True):
            parts = found.setdefault(int(document), {})
            assert int(start) not in parts, "twice"
            parts[int(start)] = list(row[column][begin : begin + size])
            begin += size
        assert begin == len(row[column])
    return found


def joined(parts: dict[int, list[Any]]) -> list[Any]:
    """Return the parts of one document as one, after checking that each begins where the one before ends."""
    values: list[Any] = []
    for start in sorted(parts):
        assert start == len(values)
        values += parts[start]
    return values


def command(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pack_torch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
