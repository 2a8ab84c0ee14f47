"""Rollouts files for tests, written with the standard library alone."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def row(length: int, response: int, **fields: Any) -> dict[str, Any]:
    """Return one row of `length` tokens, all of the sort task's digits, the last `response` of them the response."""
    return {"tokens": [n % 10 for n in range(length)], "response_length": response, **fields}


def routes(length: int, layers: int = 3, top_k: int = 2, expert: int = 1) -> list[list[list[int]]]:
    """Return the routes of a row, one for every token but the last, to `top_k` experts from `expert` on."""
    return [[list(range(expert, expert + top_k)) for _ in range(layers)] for _ in range(length - 1)]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows, one a line; text is written as it is, gzip when the name says so."""
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
