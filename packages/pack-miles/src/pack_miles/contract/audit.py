"""What a run's contract files must agree on, and every place where they do not.

The rules hold for the updates that still stand: those that no later resume repeated. The trailing update of a run
that did not finish may be incomplete on some ranks, and is not judged. A torn line is no violation: what it should
have said is missed where it matters.
"""

from collections.abc import Callable, Iterator, Sequence

from pack_miles.contract.audit_asynchronous import ages, groups
from pack_miles.contract.audit_balance import balances, orders
from pack_miles.contract.audit_updates import normalizations, packings, plans
from pack_miles.contract.events import Checkpoint, Optimizer, RunFailed, RunFinished, RunStarted, ScoringCheck
from pack_miles.contract.facts import Facts, counted, has_finished, read_facts, status, unequal
from pack_miles.contract.log import Log, RunLogs, runs_of

Rule = Callable[[Facts], Iterator[str]]


def audit(logs: Sequence[Log]) -> list[str]:
    """Return every violation of the contract in the given logs, in words; an empty list when there is none.

    Logs of several directories are several runs, judged apart and named by directory.

    >>> audit([])
    ['no log was given, so nothing was audited']
    """
    runs = runs_of(logs)
    if not runs:
        return ["no log was given, so nothing was audited"]
    found = [(run, violation) for run in runs for violation in _audit_run(run)]
    return [f"{run.directory}: {violation}" if len(runs) > 1 else violation for run, violation in found]


def _audit_run(run: RunLogs) -> list[str]:
    facts = read_facts(run)
    violations = [violation for rule in (_files, _starts, _anything) for violation in rule(facts)]
    if set(facts.ranks) != set(range(facts.run.start.world_size if facts.run.start else 0)):
        return violations
    return [*violations, *(violation for rule in RULES for violation in rule(facts))]


def endings(logs: Sequence[Log]) -> list[str]:
    """Return of every run that did not finish how it ended, and how many updates were audited all the same.

    >>> endings([])
    []
    """
    runs = runs_of(logs)
    told = []
    for run in runs:
        if (how := status(run)) != "finished":
            updates = counted(len(read_facts(run).updates), "complete update")
            told.append(f"{run.directory}: {how}; {updates} audited" if len(runs) > 1 else f"{how}; {updates} audited")
    return told


def _files(facts: Facts) -> Iterator[str]:
    for log in facts.run.logs:
        yield from log.corrupt
        strangers = sorted({event.rank for event in log.events} - {log.rank})
        if strangers:
            yield f"{log.path.name} holds events of rank {strangers[0]}"
        # A process that could not even start leaves a run_failed alone.
        lasting = [event for event in log.events if not isinstance(event, RunFailed)]
        if not lasting:
            yield f"{log.path.name} holds no event of a run that started"
        elif not isinstance(lasting[0], RunStarted):
            yield f"{log.path.name} does not begin with run_started"


def _starts(facts: Facts) -> Iterator[str]:
    start = facts.run.start
    if start is None:
        yield "no run_started was recorded, so the number of ranks is unknown"
        return
    size = counted(start.world_size, "rank")
    missing = sorted(set(range(start.world_size)) - set(facts.ranks))
    if missing:
        yield f"the run has {size}, but there is no log of rank {', '.join(map(str, missing))}"
    beyond = sorted(set(facts.ranks) - set(range(start.world_size)))
    if beyond:
        yield f"the run has {size}, but there is a log of rank {', '.join(map(str, beyond))}"
    # Compared from the last backwards: a process that died while starting may have left no event.
    starts = {log.rank: [event for event in log.events if isinstance(event, RunStarted)] for log in facts.run.logs}
    for back in range(1, min(map(len, starts.values())) + 1):
        for what in ("configuration_digest", "world_size", "expert_parallel_size", "completed_steps", "resumed"):
            yield from unequal(f"run_started: {what}", {r: getattr(own[-back], what) for r, own in starts.items()})


def _anything(facts: Facts) -> Iterator[str]:
    if not facts.updates:
        yield f"no update is complete on every rank, so nothing was proven; the run: {status(facts.run)}"


def _resumes(facts: Facts) -> Iterator[str]:
    for log in facts.run.logs:
        completed, saved = 0, 0
        before: RunStarted | None = None
        for event in log.events:
            if isinstance(event, Optimizer):
                completed = event.step
            elif isinstance(event, Checkpoint):
                saved = event.step
            elif isinstance(event, RunStarted):
                where = f"rank {log.rank}: run_started"
                if event.resumed and before is not None:
                    yield from _another_run(where, before, event)
                before = event
                if event.resumed and event.completed_steps > completed:
                    yield f"{where} resumes after update {event.completed_steps}, but only {completed} are recorded"
                elif event.resumed and event.completed_steps < saved:
                    yield (
                        f"{where} resumes after update {event.completed_steps} although a checkpoint of update {saved} "
                        "was saved: completed updates are repeated"
                    )
                elif not event.resumed and event.completed_steps:
                    yield f"{where} has {event.completed_steps} completed updates but resumes nothing"
                completed, saved = event.completed_steps, min(saved, event.completed_steps)


def _another_run(where: str, before: RunStarted, now: RunStarted) -> Iterator[str]:
    for what in ("configuration_digest", "world_size"):
        was, became = getattr(before, what), getattr(now, what)
        if was != became:
            yield f"{where} resumes with {what} {became}, but the run had {was}"


def _steps(facts: Facts) -> Iterator[str]:
    for log in facts.run.logs:
        expected = 1
        for event in log.events:
            if isinstance(event, RunStarted):
                expected = event.completed_steps + 1
            elif isinstance(event, Optimizer):
                if event.step != expected:
                    yield f"rank {log.rank}: optimizer step {event.step} stands where {expected} should follow"
                expected = event.step + 1
    last = facts.updates[-1].step if facts.updates else 0
    for update in facts.partial:
        # A scoring pass writes of updates that are still to come, so an interrupted run may have no more of them.
        if not facts.finished and (update.step == last + 1 or (update.step > last and not update.optimizer)):
            continue
        missing = [rank for rank in facts.ranks if rank not in update.optimizer]
        yield f"update {update.step}: no optimizer event on rank {', '.join(map(str, missing))}"


def _ends(facts: Facts) -> Iterator[str]:
    if not facts.finished:
        return
    last = facts.updates[-1].step if facts.updates else 0
    for log in facts.run.logs:
        if not has_finished(log):
            yield f"rank {log.rank}: no run_finished, which other ranks have"
            continue
        end = [event for event in log.events if isinstance(event, RunFinished)][-1]
        if end.completed_steps != last:
            yield f"rank {log.rank}: run_finished counts {end.completed_steps} completed steps, the log holds {last}"


def _checks(facts: Facts) -> Iterator[str]:
    for log in facts.run.logs:
        for event in log.events:
            if not isinstance(event, ScoringCheck):
                continue
            where = f"rank {log.rank}: scoring check of update {event.update}"
            if event.mean_abs > event.tolerance:
                yield f"{where} differs by {event.mean_abs:g} on average, the tolerance is {event.tolerance:g}"
            if event.max_tolerance is not None and event.max_abs > event.max_tolerance:
                yield f"{where} differs by up to {event.max_abs:g}, the limit is {event.max_tolerance:g}"
    checked = {e.update for log in facts.run.logs for e in log.events if isinstance(e, ScoringCheck)}
    for log in facts.run.logs:
        first = False
        for event in log.events:
            if isinstance(event, RunStarted):
                first = True
            elif isinstance(event, Optimizer):
                if first and event.scoring_pass == "skipped":
                    yield f"rank {log.rank}: update {event.step} is the first of its process, but scoring was skipped"
                if event.scoring_pass == "checked" and event.step not in checked:
                    yield f"rank {log.rank}: update {event.step} was checked, but no scoring_check of it is recorded"
                if first and event.scoring_pass == "standalone" and event.step not in checked and not facts.stochastic:
                    yield (
                        f"rank {log.rank}: update {event.step} is the first of its process and was scored, but no "
                        "scoring_check of it is recorded"
                    )
                first = False


#: The rules for a run of which every rank's log is there.
RULES: tuple[Rule, ...] = (
    _resumes,
    _steps,
    _ends,
    normalizations,
    packings,
    plans,
    orders,
    balances,
    ages,
    groups,
    _checks,
)
