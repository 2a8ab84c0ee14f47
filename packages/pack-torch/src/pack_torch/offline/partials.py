"""Files that appear whole under their name or not at all: written beside it, and renamed when they are done."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a name to write under; rename the file to `path` when all is written, or remove it when that fails.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "rows"
    >>> with written_whole(path) as partial:
    ...     _ = partial.write_text("all"), path.exists()
    >>> path.read_text(), partial.exists()
    ('all', False)
    """
    partial = path.with_name(f".{path.name.removeprefix('.')}.{os.getpid()}-{_machine()}.partial")
    try:
        yield partial
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # Arrow does not say where a disk was full
            error.filename = str(path)
        raise
    try:
        partial.replace(path)
    except FileNotFoundError:  # another run of the same write was first, and cleared up
        if not path.exists():
            raise


def remove_orphans(folder: Path) -> None:
    """Remove what killed processes of this machine had written halfway in a folder."""
    for left in folder.glob(".*.partial"):
        process, _, machine = left.name.split(".")[-2].partition("-")
        if machine == _machine() and process.isdecimal() and not _runs(int(process)):
            left.unlink(missing_ok=True)


def _machine() -> str:
    return platform.node().replace(".", "-")  # a folder may be shared by several


def _runs(process: int) -> bool:
    if os.name != "posix":  # elsewhere there is no asking without ending it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
