"""Where contract events go: one append-only file a rank, one JSON object a line."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import structlog
from structlog.typing import EventDict, WrappedLogger

from pack_miles.contract.events import Event, name_of


def contract_path(root: Path, rank: int) -> Path:
    """Return the contract file of a rank.

    >>> contract_path(Path("runs"), 3).name
    'training_contract_rank3.jsonl'
    """
    return root / f"training_contract_rank{rank}.jsonl"


def refuse_non_finite(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Return the event unchanged; NaN and infinity have no JSON form and would silently become null.

    Raises:
        ValueError: naming the event and the field that is not finite.
    """
    for field, value in _non_finite(event):
        raise ValueError(
            f"event {event['event']!r}, field {field!r} is {value}, and only finite numbers can be logged; "
            "write None where the contract allows it, or stop the run"
        )
    return event


def refuse_unreadable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Return the event unchanged when it can be read back as a contract event.

    Raises:
        ValueError: naming the event and the field that the contract does not allow.
    """
    try:
        msgspec.convert(event, Event)
    except msgspec.ValidationError as error:
        raise ValueError(f"event {event['event']!r} is not as the contract says: {error}") from error
    return event


def render_json(logger: WrappedLogger, method: str, event: EventDict) -> bytes:
    """Return the event as JSON with sorted keys, without a newline.

    >>> render_json(None, "msg", {"step": 1, "event": "x", "rank": 0})
    b'{"event":"x","rank":0,"step":1}'
    """
    return msgspec.json.encode(event, order="sorted")


#: What happens to an event on its way to the file; the last one renders.
PROCESSORS = (refuse_non_finite, refuse_unreadable, render_json)


class ContractSink:
    """An append-only writer of one rank's contract file; to be closed, or used in a `with` statement.

    A last line torn by an interrupted process is ended on opening, so that what follows stays readable.

    >>> import tempfile
    >>> from pack_miles.contract.events import RunFinished
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with ContractSink(contract_path(Path(root), 0), rank=0) as sink:
    ...         sink.write(RunFinished(rank=0, step=4, completed_steps=4, rollouts=2, seconds=1.5))
    ...     print(sink.path.read_text(), end="")
    {"completed_steps":4,"event":"run_finished","rank":0,"rollouts":2,"schema_version":1,"seconds":1.5,"step":4}
    """

    def __init__(self, path: Path, rank: int) -> None:
        """Open, or create, the contract file at `path`, and its directory, for the events of `rank`."""
        self.path = path
        self.rank = rank
        #: Told of every event that has been written.
        self.hear: Callable[[Event], None] | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(path)
        self._file: BinaryIO = path.open("ab")
        self._logger = structlog.wrap_logger(
            structlog.BytesLogger(self._file),
            processors=list(PROCESSORS),
            wrapper_class=structlog.BoundLogger,
            context_class=dict,
            cache_logger_on_first_use=True,
        )

    def write(self, event: Event) -> None:
        """Append the event as one line and hand it to the operating system.

        Raises:
            ValueError: when the event is another rank's, holds NaN or infinity, or could not be read back.
        """
        name = name_of(event)
        if event.rank != self.rank:
            raise ValueError(f"event {name!r} of rank {event.rank} was given to the contract file of rank {self.rank}")
        try:
            fields = msgspec.to_builtins(event, str_keys=True)
        except TypeError as error:
            raise ValueError(f"event {name!r} has no JSON form: {error}") from error
        del fields["event"]
        try:
            self._logger.msg(name, **fields)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self.hear is not None:
            self.hear(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "ContractSink":
        """Return this sink."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


def _end_torn_line(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _non_finite(value: object, where: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _non_finite(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple) and not {*map(type, value)} <= {int, str}:  # as most are, and long
        for place, inner in enumerate(value):
            yield from _non_finite(inner, f"{where}[{place}]")
