"""Packed rows into a folder of files: in bounded memory, by several processes, and taken up again after a kill."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
from pack_core.errors import PackError
from pack_core.lengths import as_integer

from pack_torch.offline.errors import DatasetError, counted
from pack_torch.offline.formats import count_rows, format_of, write_tables
from pack_torch.offline.layout import Recipe, Rows
from pack_torch.offline.packed import TRACED, Gatherer, Opened, PackedRows
from pack_torch.offline.partials import remove_orphans, written_whole
from pack_torch.offline.sources import Source

#: What says which rows a folder holds; readers of data folders pass over hidden files.
MANIFEST = ".manifest.json"

#: Tokens gathered at a time, which bounds what is held beside the plan: about 8 MB a column of 64-bit integers.
AT_A_TIME = 2**20

#: Tokens a file is planned to hold.
PART_TOKENS = 2**24


@attrs.frozen
class Written:
    """What a write left: the files, and how many of them an earlier run had written."""

    paths: tuple[Path, ...]
    found: int


def write_rows(
    packed: PackedRows,
    folder: str | Path,
    *,
    processes: int = 1,
    part_tokens: int = PART_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write packed rows as `part-00000-of-00012.parquet` and so on, and return the files.

    The folder's suffix says the format: `.parquet` (also where there is none), `.arrow`, `.jsonl` or `.jsonl.gz`.
    Each file appears whole under its name or not at all. After a kill the same call writes what is missing; the result
    is the one an uninterrupted call gives, byte for byte, whatever the number of processes.

    Args:
        packed: the rows.
        folder: where; it may hold nothing else.
        processes: how many write at once. With more than one, call it under `if __name__ == "__main__":`.
        part_tokens: most tokens a file is planned to hold.
        progress: called with rows written and rows in all, after each file.

    Raises:
        DatasetError: the folder holds other files, or rows of another configuration; or a process died.
        PackError: `processes` or `part_tokens` is no whole number of at least 1.
    """
    processes, part_tokens = as_integer(processes, "processes"), as_integer(part_tokens, "part_tokens")
    folder = Path(folder)
    suffix = format_of(folder)
    each = max(1, part_tokens // packed.layout.recipe.capacity)
    count = max(1, -(-len(packed) // each))  # without a row one file still says which columns there are
    configuration = _describe(packed.gatherer, packed.layout.recipe, suffix, part_tokens)
    _claim(folder, configuration, packed.layout.digest())
    remove_orphans(folder)
    paths = [folder / f"part-{p:05d}-of-{count:05d}{suffix}" for p in range(count)]
    spans = [(p * each, min((p + 1) * each, len(packed))) for p in range(count)]
    todo = [p for p in range(count) if not _complete(paths[p], spans[p])]
    done = len(packed) - sum(spans[p][1] - spans[p][0] for p in todo)
    if progress is not None:
        progress(done, len(packed))
    tasks = ((paths[p], packed.layout.rows.part(*spans[p])) for p in todo)
    written = _alone(packed.gatherer, tasks) if processes == 1 else _together(packed.gatherer, list(tasks), processes)
    for rows in written:
        done += rows
        if progress is not None:
            progress(done, len(packed))
    for left in folder.glob(".part-*.partial"):
        left.unlink(missing_ok=True)
    return Written(tuple(paths), count - len(todo))


def refuse_other(
    folder: Path,
    source: Source,
    recipe: Recipe,
    columns: Sequence[str],
    per_document: Sequence[str] = (),
    add: Sequence[str] = TRACED,
) -> None:
    """Refuse a folder that `write_rows` would refuse, before anything is read or planned.

    Raises:
        DatasetError: as `write_rows`.
    """
    gatherer = Gatherer(source, tuple(columns), tuple(per_document), tuple(add))
    _claim(folder, _describe(gatherer, recipe, format_of(folder), PART_TOKENS), None)


def _describe(gatherer: Gatherer, recipe: Recipe, suffix: str, part_tokens: int) -> dict[str, Any]:
    """Return all that decides what a written folder holds, as JSON-able values."""
    return {
        "schema": 1,
        **attrs.asdict(recipe),
        "columns": list(gatherer.columns),
        "per_document": list(gatherer.per_document),
        "add": list(gatherer.add),
        "format": suffix,
        "part_tokens": part_tokens,
        "documents": gatherer.source.identity(),
    }


def _claim(folder: Path, configuration: Mapping[str, Any], plan: str | None) -> None:
    """Make a folder the one of a configuration and plan, or find that it is; `plan` None only looks."""
    manifest = folder / MANIFEST
    if manifest.exists():
        held = _read(manifest)
        wanted = {**configuration, "plan": plan}
        for name in [name for name in wanted if not (name == "plan" and plan is None)]:
            if held.get(name) != wanted[name]:
                raise DatasetError(
                    f"{folder} holds rows of another configuration: {name} was {held.get(name)!r} and is now "
                    f"{wanted[name]!r}; give another folder, delete this one, or take up the write as it was begun"
                )
        return
    if folder.exists() and (not folder.is_dir() or any(not name.startswith(".") for name in os.listdir(folder))):
        raise DatasetError(f"{folder} is there already and was not written by this command; give a new folder")
    if plan is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(manifest) as partial:
            partial.write_text(json.dumps({**configuration, "plan": plan}, indent=1, default=int) + "\n")


def _read(manifest: Path) -> dict[str, Any]:
    """Return what a manifest says."""
    try:
        held = json.loads(manifest.read_text())
    except (ValueError, OSError) as error:
        held = error
    if not isinstance(held, dict):
        raise DatasetError(
            f"{manifest} is damaged, so it is not known which rows the folder holds ({held}); delete the folder, or "
            "give another one"
        )
    return held


def _complete(path: Path, span: tuple[int, int]) -> bool:
    return path.exists() and count_rows(path) == span[1] - span[0]


def _write_part(opened: Opened, rows: Rows, path: Path) -> int:
    """Write one file of rows under a name of its own, give it its name when it is whole, and return its rows."""
    with written_whole(path) as partial:
        write_tables(tables(opened, rows), partial, format_of(path))
    return len(rows)


def tables(opened: Opened, rows: Rows) -> Iterator[Any]:
    """Yield rows as Arrow tables of about a million tokens; of no rows one table, which has their columns."""
    if not len(rows):
        yield opened.table(rows)
    totals = rows.totals().cumsum()
    first = 0
    while first < len(rows):
        before = totals[first - 1] if first else 0
        last = max(first + 1, int(totals.searchsorted(before + AT_A_TIME, side="right")))
        yield opened.table(rows.part(first, last))
        first = last


def _alone(gatherer: Gatherer, tasks: Iterator[tuple[Path, Rows]]) -> Iterator[int]:
    opened = gatherer.open()
    for path, rows in tasks:
        yield _write_part(opened, rows, path)


def _together(gatherer: Gatherer, tasks: Sequence[tuple[Path, Rows]], processes: int) -> Iterator[int]:
    context = get_context("spawn")  # a fork would share Arrow's and torch's threads, which it cannot
    running: dict[Any, tuple[Any, int]] = {}
    try:
        for place in range(min(processes, len(tasks))):
            here, there = context.Pipe(duplex=False)
            own = tasks[place::processes]
            process = context.Process(target=_write_parts, args=(gatherer, own, there), daemon=True)
            process.start()
            there.close()
            running[here] = process, len(own)
        while running:
            for ready in wait(list(running)):
                process, left = running.pop(ready)
                try:
                    rows: int | Exception = ready.recv()  # type: ignore[union-attr,call-arg,assignment]
                except EOFError:
                    process.join()
                    raise DatasetError(
                        f"a writing process ended with exit status {process.exitcode}, {counted(left, 'file')} short; "
                        "nothing is lost: the same call again writes what is missing; in a script it must stand under "
                        'if __name__ == "__main__":'
                    ) from None
                if isinstance(rows, Exception):
                    raise rows
                if left > 1:
                    running[ready] = process, left - 1
                else:
                    process.join()
                yield rows
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()
        for folder in {path.parent for path, _ in tasks}:
            remove_orphans(folder)


def _write_parts(gatherer: Gatherer, tasks: Sequence[tuple[Path, Rows]], connection: Connection) -> None:
    try:
        for rows in _alone(gatherer, iter(tasks)):
            connection.send(rows)  # ends this process too when the one that listens is gone
    except BrokenPipeError:
        raise
    except (PackError, OSError) as error:
        connection.send(error)
