"""Contract files read back: lines to events, files to runs, and what of a resumed run still stands."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import msgspec

from pack_miles.contract.events import Event, Optimizer, Packing, Plan, RunStarted
from pack_miles.contract.line import SCHEMA_VERSION
from pack_miles.errors import InputError

PATTERN = "training_contract_rank*.jsonl"

#: Corrupt lines of a file that are told one by one; the rest are counted.
MOST_CORRUPT = 5

#: What decoding a line that is no JSON raises.
BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

WANTED = "give a contract file or the directory a run wrote them to"


@attrs.frozen
class Log:
    """One rank's contract file.

    `problems` says what could not be read, by line; `corrupt` are those of them that no interrupted process explains.
    """

    path: Path
    events: tuple[Event, ...]
    problems: tuple[str, ...] = ()
    corrupt: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The rank the file's name gives, or else that of its first event."""
        match = re.fullmatch(r"training_contract_rank(\d+)\.jsonl", self.path.name)
        return int(match[1]) if match else self.events[0].rank if self.events else 0


@attrs.frozen
class Update:
    """All ranks' events of one optimizer update, by rank."""

    step: int
    optimizer: dict[int, Optimizer] = attrs.field(factory=dict)
    training: dict[int, list[Packing]] = attrs.field(factory=dict)
    scoring: dict[int, list[Packing]] = attrs.field(factory=dict)


@attrs.frozen
class RunLogs:
    """The logs of one run: those of one directory, by rank."""

    directory: Path
    logs: tuple[Log, ...]

    @property
    def start(self) -> RunStarted | None:
        """The latest start of the lowest rank that recorded one."""
        found = ([event for event in log.events if isinstance(event, RunStarted)] for log in self.logs)
        return next((starts[-1] for starts in found if starts), None)

    def standing(self) -> dict[int, tuple[Event, ...]]:
        """Return by rank the events that no later resume superseded."""
        return {log.rank: standing(log.events) for log in self.logs}

    def updates(self) -> tuple[Update, ...]:
        """Return the standing updates in order, each with what every rank recorded of it."""
        found: dict[int, Update] = {}
        for rank, events in self.standing().items():
            for event in events:
                if isinstance(event, Optimizer):
                    found.setdefault(event.step, Update(event.step)).optimizer[rank] = event
                elif isinstance(event, Packing):
                    update = found.setdefault(event.step, Update(event.step))
                    passes = update.training if event.pass_ == "training" else update.scoring
                    passes.setdefault(rank, []).append(event)
        return tuple(found[step] for step in sorted(found))

    def plans(self) -> dict[int, Plan]:
        """Return the standing plan of each collection, by rollout id."""
        return {
            event.rollout_id: event
            for events in self.standing().values()
            for event in events
            if isinstance(event, Plan)
        }


def standing(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of one rank that still stand, in order.

    A process that starts with c completed steps repeats every update after c, so whatever earlier processes wrote
    about those updates is superseded. A start that resumes nothing supersedes everything before it.

    >>> from pack_miles.contract.events import RunFailed, RunFinished
    >>> first, failed = RunFinished(rank=0, step=1, completed_steps=1, rollouts=1, seconds=1), RunFailed(
    ...     rank=0, step=1, error="killed")
    >>> start = RunStarted(rank=0, step=1, configuration_digest="d", name="n", world_size=1, expert_parallel_size=1,
    ...     resumed=True, completed_steps=1, versions={}, configuration={}, time=0)
    >>> standing([first, failed, start]) == (first, start)
    True
    """
    kept: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted):
            kept = [one for one in kept if event.resumed and one.update <= event.completed_steps]
        kept.append(event)
    return tuple(kept)


def read_log(path: Path) -> Log:
    """Return the events of one contract file; a line that cannot be read is reported by number and left out.

    A torn line, the unfinished write of an interrupted process, is expected at the end and directly before the start
    of a later process. Any other unreadable line means that the file is corrupt; of many, the first are told.

    Raises:
        InputError: when there is no such file, or it must not be read.
    """
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a file; {WANTED}")
        data = path.read_bytes()
    except OSError as refused:
        raise _unreadable(path, refused) from None
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    read = [_decode(line) for _, line in lines]
    events: list[Event] = []
    problems: list[str] = []
    corrupt: list[str] = []
    untold = 0
    for place, ((number, line), (event, error)) in enumerate(zip(lines, read, strict=True)):
        if event is not None:
            events.append(event)
            continue
        last = place + 1 == len(lines)
        followed_by_start = not last and isinstance(read[place + 1][0], RunStarted)
        if (last or followed_by_start) and _is_incomplete(line):
            problems.append(f"{path}:{number}: torn line of {len(line):,} bytes left out; the process was interrupted")
        elif len(corrupt) < MOST_CORRUPT:
            corrupt.append(f"{path}:{number}: corrupt line left out: {error}")
            problems.append(corrupt[-1])
        else:
            untold += 1
    if untold:
        corrupt.append(f"{path}: {untold:,} more corrupt line{'' if untold == 1 else 's'} left out")
        problems.append(corrupt[-1])
    return Log(path, tuple(events), tuple(problems), tuple(corrupt))


def read_logs(paths: Iterable[Path]) -> tuple[Log, ...]:
    """Return the logs of the given contract files, and of every contract file in the given directories.

    A process killed before its first event leaves an empty contract file, which is read beside those of other ranks.

    Raises:
        InputError: when a path is missing or must not be read, a directory holds no contract file, or a file or run
            holds no event.
    """
    found: dict[Path, None] = {}
    for path in paths:
        try:
            found.update(dict.fromkeys(_files(path)))
        except OSError as error:
            raise _unreadable(path, error) from None
    logs = tuple(read_log(path) for path in found)
    told = {log.path.parent for log in logs if log.events}
    for log in logs:
        killed = log.path.match(PATTERN) and not log.corrupt and log.path.parent in told
        if not log.events and not killed:
            raise InputError(_no_event(log))
    return logs


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"{path} does not exist; {WANTED}")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.match(PATTERN))
    if not files:
        raise InputError(f"{path} holds no {PATTERN} file; give the directory named by output.root of a run")
    return files


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read: {error.strerror or error}; {WANTED} that this user may read")


def _no_event(log: Log) -> str:
    first = log.problems[0].removeprefix(f"{log.path}:").replace(" corrupt line left out:", "") if log.problems else ""
    why = f"its line {first}" if first else "it is empty"
    return f"{log.path}: not a contract file: it holds no event of a run ({why}); {WANTED}"


def runs_of(logs: Iterable[Log]) -> tuple[RunLogs, ...]:
    """Return the logs grouped into runs, one a directory, in the order given; ranks ascend inside each."""
    groups: dict[Path, list[Log]] = {}
    for log in logs:
        groups.setdefault(log.path.parent, []).append(log)
    return tuple(
        RunLogs(directory, tuple(sorted(group, key=lambda log: log.rank))) for directory, group in groups.items()
    )


def _decode(line: bytes) -> tuple[Event | None, str]:
    try:
        return msgspec.json.decode(line, type=Event), ""
    except msgspec.ValidationError as error:
        version = _version(line)
        if version != SCHEMA_VERSION:
            return None, f"it has schema_version {version}, and this reader knows {SCHEMA_VERSION}"
        return None, str(error)
    except BROKEN as error:
        return None, str(error)


def _version(line: bytes) -> object:
    try:
        fields = msgspec.json.decode(line)
    except BROKEN:  # a value of the wrong type may be found before the line turns out to be no JSON
        return SCHEMA_VERSION
    return fields.get("schema_version", SCHEMA_VERSION) if isinstance(fields, dict) else SCHEMA_VERSION


def _is_incomplete(line: bytes) -> bool:
    """A line is incomplete when it begins like an event and is not JSON as a whole."""
    try:
        msgspec.json.decode(line)
    except BROKEN:
        return line.startswith(b"{")
    return False
