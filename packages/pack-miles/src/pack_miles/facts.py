"""One run's contract files as the audit looks at them: read once, then only asked."""

from collections.abc import Iterator, Mapping

import attrs

from pack_miles.events import Event, Plan, RunFinished, RunStarted
from pack_miles.log import Log, RunLogs, Update


@attrs.frozen
class Facts:
    """One run's logs, read once for all rules; `updates` are the complete ones, `partial` the others."""

    run: RunLogs
    ranks: tuple[int, ...]
    standing: Mapping[int, tuple[Event, ...]]
    updates: tuple[Update, ...]
    partial: tuple[Update, ...]
    plans: Mapping[int, Plan]
    finished: bool

    @property
    def packing(self) -> bool:
        """Whether packing was on; taken as on where the configuration does not say."""
        return _option(self.run, "core", "sequence_packing") is not False

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
    return Facts(
        run=run,
        ranks=ranks,
        standing=run.standing(),
        updates=complete,
        partial=tuple(update for update in updates if update not in complete),
        plans=run.plans(),
        finished=any(has_finished(log) for log in run.logs),
    )


def has_finished(log: Log) -> bool:
    """Return whether the latest process of the log ended as configured."""
    ends = [event for event in log.events if isinstance(event, RunStarted | RunFinished)]
    return bool(ends) and isinstance(ends[-1], RunFinished)


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
