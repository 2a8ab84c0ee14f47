"""One run's contract files as audit and report look at them: read once, then only asked."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping

import attrs
from pack_core import PackError, Sample, rebuild, samples_of
from pack_core import Plan as CorePlan

from pack_miles.contract.events import Event, Plan, RunFailed, RunFinished, RunStarted
from pack_miles.contract.log import Log, RunLogs, Update

#: Characters of an error that a status shows at most.
ERROR_LENGTH = 140

#: What libraries say on the ranks that survive another's end.
LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|pair closure|timed out|\btimeout\b"
    r"|remote (process|error)|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)

#: Errors that the ranks told one another: their connection was sound, whatever the text says.
AGREED = ("RankError:", "DisagreementError:")

#: Where in a library's source an error was raised, and everything after the error itself.
SOURCE = re.compile(r"\[[^\[\]]*\.(?:cc?|cpp|cu|h|hpp):\d+\]\s*")
TRACE = re.compile(r"\s*(Exception raised from |frame #0|Traceback \(most recent call last\)).*", re.DOTALL)


@attrs.frozen
class Rebuilt:
    """A recorded plan made again from its record, with its samples; without a plan, `error` says why not."""

    plan: CorePlan | None
    samples: tuple[Sample, ...] = ()
    error: str = ""


@attrs.frozen
class Facts:
    """One run's logs, read once for all rules; `updates` are the complete ones, `partial` the others."""

    run: RunLogs
    ranks: tuple[int, ...]
    standing: Mapping[int, tuple[Event, ...]]
    updates: tuple[Update, ...]
    partial: tuple[Update, ...]
    plans: Mapping[int, Plan]
    rebuilt: Mapping[int, Rebuilt]
    finished: bool

    def option(self, section: str, key: str) -> object:
        """Return an option of the run's configuration; None where it does not say."""
        return _option(self.run, section, key)

    @property
    def packing(self) -> bool:
        """Whether packing was on; taken as on where the configuration does not say."""
        return _option(self.run, "core", "sequence_packing") is not False

    @property
    def pack_order(self) -> str | None:
        """The order samples are packed in, by the configuration; None where it does not say."""
        given = _option(self.run, "core", "pack_order")
        return "balanced" if self.expert_balanced else given if isinstance(given, str) else None

    @property
    def expert_balanced(self) -> bool:
        """Whether the order was to even out expert load."""
        return _option(self.run, "core", "expert_balanced_packing") is True

    @property
    def stochastic(self) -> bool:
        """Whether dropout makes two forwards differ, so that scoring and training cannot be compared."""
        return bool(_option(self.run, "model", "dropout"))

    @property
    def step_samples(self) -> int | None:
        """The samples of one update over all ranks, by the configuration; None where it does not say."""
        given = _option(self.run, "miles", "global_batch_size")
        if isinstance(given, int):
            return given
        prompts = _option(self.run, "miles", "rollout_batch_size")
        answers = _option(self.run, "miles", "n_samples_per_prompt")
        return prompts * answers if isinstance(prompts, int) and isinstance(answers, int) else None


def read_facts(run: RunLogs) -> Facts:
    """Return the facts of a run."""
    ranks = tuple(log.rank for log in run.logs)
    updates = run.updates()
    complete = tuple(update for update in updates if set(update.optimizer) == set(ranks))
    recorded = run.plans()
    return Facts(
        run=run,
        ranks=ranks,
        standing=run.standing(),
        updates=complete,
        partial=tuple(update for update in updates if update not in complete),
        plans=recorded,
        rebuilt={rollout_id: _rebuilt(one) for rollout_id, one in recorded.items()},
        finished=any(has_finished(log) for log in run.logs),
    )


def _rebuilt(recorded: Plan) -> Rebuilt:
    try:
        samples = samples_of(recorded.record)
        return Rebuilt(rebuild(recorded.record, samples), tuple(samples))
    except PackError as error:
        return Rebuilt(None, error=str(error))


def has_finished(log: Log) -> bool:
    """Return whether the latest process of the log ended as configured."""
    ends = [event for event in log.events if isinstance(event, RunStarted | RunFinished)]
    return bool(ends) and isinstance(ends[-1], RunFinished)


def missing_ranks(run: RunLogs) -> tuple[int, ...]:
    """Return the ranks of which there is no event, by the number of ranks the run started with."""
    there = {log.rank for log in run.logs if log.events}
    return tuple(sorted(set(range(run.start.world_size if run.start else 0)) - there))


def status(run: RunLogs) -> str:
    """Return in one short line how the run ended, and which ranks' logs are missing.

    An error that only tells of a lost connection is the consequence of another rank's end. Such errors speak only where
    no other was recorded, and then the ranks that ended without a word are named.
    """
    missing = missing_ranks(run)
    several = "logs of rank {} are missing" if len(missing) > 1 else "the log of rank {} is missing"
    return "; ".join([_end(run), *([several.format(_ranks(missing))] if missing else [])])


def _end(run: RunLogs) -> str:
    last = {
        log.rank: own[-1]
        for log in run.logs
        if (own := [event for event in log.events if isinstance(event, RunStarted | RunFinished | RunFailed)])
    }
    failed = {rank: event.error for rank, event in sorted(last.items()) if isinstance(event, RunFailed)}
    if not failed:
        finished = [rank for rank, event in last.items() if isinstance(event, RunFinished)]
        return "finished" if finished and len(finished) == len(last) else "not finished"
    causes = {rank: error for rank, error in failed.items() if error.startswith(AGREED) or not LOST.search(error)}
    error = next(iter((causes or failed).values()))
    ranks = [rank for rank, other in failed.items() if other == error] if causes else list(failed)
    told = f"failed on rank {_ranks(ranks)}: {one_line(error)}"
    silent = [rank for rank, event in sorted(last.items()) if isinstance(event, RunStarted)]
    return (
        told if causes or not silent else f"{told}; the likely cause is rank {_ranks(silent)}: no run_failed recorded"
    )


def one_line(text: str) -> str:
    """Return an error as one short line: no source places, traces, control characters or emoji.

    >>> one_line("RuntimeError: [/build/tcp/pair.cc:544] Connection closed\\n  by peer")
    'RuntimeError: Connection closed by peer'
    """
    text = SOURCE.sub("", TRACE.sub("", text))
    kept = (" " if unicodedata.category(sign) in ("So", "Cc", "Cf", "Cs", "Co", "Cn") else sign for sign in text)
    line = " ".join("".join(kept).replace("\ufe0f", "").split()) or "no reason recorded"
    return line if len(line) <= ERROR_LENGTH else line[: ERROR_LENGTH - 1].rstrip() + "…"


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun in the number that belongs to it.

    >>> counted(1, "rank"), counted(1200, "pack"), counted(0, "batch", "es")
    ('1 rank', '1,200 packs', '0 batches')
    """
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def unequal(what: str, values: Mapping[int, object]) -> Iterator[str]:
    """Yield one violation when the values, by rank, are not all the same.

    >>> list(unequal("packs", {0: 3, 1: 4}))
    ['packs differs between ranks: rank 0 has 3, rank 1 has 4']
    """
    if len(set(map(repr, values.values()))) > 1:
        yield f"{what} differs between ranks: " + ", ".join(f"rank {r} has {v}" for r, v in sorted(values.items()))


def _option(run: RunLogs, section: str, name: str) -> object:
    values = run.start.configuration.get(section) if run.start else None
    return values.get(name) if isinstance(values, dict) else None
