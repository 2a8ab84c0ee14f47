"""Start a run's ranks and see them end: all of them, together, with a word on what went wrong.

Under torchrun (or anything else that sets RANK and WORLD_SIZE) this process is one rank. Otherwise it starts them
all, as processes of this machine or as Ray actors (`run.engine`), and watches. All run `rank.run_rank`.
"""

import ctypes
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from types import FrameType

from pack_miles import standing
from pack_miles.asynchronous.post import Post
from pack_miles.settings.config import Config
from pack_miles.training.statuses import USER_MISTAKE, say

#: How long the other ranks get to say what they saw before they are stopped, in seconds.
GRACE = 5.0


class Stopped(BaseException):
    """The run is to end because somebody asked for it; `args[0]` is the signal's number."""


def launch(config: Config, *, debug: bool = False) -> int:
    """Train and return an exit status.

    0 when every rank finished, 1 when any failed, 2 for a mistake the user can mend, 128 and the signal's number when
    stopped from outside.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return rank_of(int(os.environ["RANK"]), config, "env://", debug)
    root = Path(config.output.root)
    begun = standing.latest(root) if config.run.resume else None
    if begun is not None and standing.read(begun).rollouts >= config.miles.num_rollout:
        sys.stdout.write(f"nothing to do: {root} has all {config.miles.num_rollout} collections (miles.num_rollout)\n")
        return 0
    start = actors if config.run.engine == "ray" else spawn
    status = start(config, debug, begun)
    if status == 0:
        sys.stdout.write(f"trained {config.miles.num_rollout} collections; look at them: pack-miles report {root}\n")
    return status


def spawn(config: Config, debug: bool, begun: Path | None) -> int:
    """Run all ranks as processes of this machine and return the exit status of the whole.

    `begun` is the checkpoint the run resumes from, or None.
    """
    with tempfile.TemporaryDirectory() as meeting, _stoppable():
        arguments = (config, f"file://{meeting}/ranks", debug, os.getpid())
        ranks: list[BaseProcess] = []
        try:
            with _held_back(signal.SIGINT):  # a terminal's Ctrl-C is this process's to answer, not the ranks'
                for rank in range(config.run.ranks):
                    process = get_context("spawn").Process(target=_spawned, args=(rank, *arguments))
                    process.start()
                    ranks.append(process)
            statuses = _watch(ranks)
        except Stopped as stopped:
            _end(ranks)
            return _stopped(stopped, config, begun)
        finally:
            _end(ranks)
    return _status(statuses, _ending(statuses), config, begun)


def actors(config: Config, debug: bool, begun: Path | None) -> int:
    """Run all ranks as Ray actors and return the exit status of the whole; `begun` as in `spawn`."""
    from pack_miles.training.ray_ranks import LOOK, Asked, run_actors

    asked = Event()
    with futures.ThreadPoolExecutor(1) as thread, _stoppable():
        running = thread.submit(run_actors, rank_of, config, debug, GRACE, asked)
        try:
            while not futures.wait([running], timeout=LOOK).done:
                with _stoppable():  # anew: Ray, while it starts, puts a handler before this one that prints a stack
                    pass
            outcome = running.result()
        except Stopped as stopped:
            asked.set()
            # Not ignored: what Ray starts would inherit that, and could not be ended.
            with _heard(signal.SIGINT), _heard(signal.SIGTERM), suppress(Asked):
                running.result()
            return _stopped(stopped, config, begun)
    if outcome.about:
        sys.stdout.write(f"{outcome.about}\n")
    return _status(outcome.statuses, "; ".join(outcome.deaths) or _ending(outcome.statuses), config, begun)


def _stopped(stopped: Stopped, config: Config, begun: Path | None) -> int:
    say(f"stopped by {signal.Signals(stopped.args[0]).name}; all ranks are stopped{_remedy(config, begun)}")
    return 128 + int(stopped.args[0])


def _status(statuses: Sequence[int | None], ending: str, config: Config, begun: Path | None) -> int:
    """Return the exit status of a run whose ranks have all ended, and say how it ended if it did not end well."""
    if not any(statuses):
        return 0
    if USER_MISTAKE in statuses:
        return USER_MISTAKE  # the rank has said what to mend
    say(f"error: {ending}; the run is over and no rank is left{_remedy(config, begun)}")
    return 1


def _watch(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Wait for all ranks to end and return how they did; None for one that had not when its time was over.

    When a rank fails, the others get `GRACE` seconds to notice and say so.
    """
    deadline = math.inf
    while alive := [process for process in processes if process.is_alive()]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        wait([process.sentinel for process in alive], timeout=min(left, 60.0))
    return [process.exitcode for process in processes]


def _end(processes: Sequence[BaseProcess]) -> None:
    """End what still runs of the ranks, by their own ids."""
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn Ctrl-C and a scheduler's polite signal into `Stopped`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _heard(number: signal.Signals) -> Iterator[None]:
    """Do nothing more about a signal: it has been heard."""
    before = signal.signal(number, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Hear of a signal at the end only; a process that is started meanwhile inherits the block, and never does."""
    resource_tracker.ensure_running()  # by itself it would start with the first process, and lift the block
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def rank_of(rank: int, config: Config, meeting: str, debug: bool, post: Post | None = None) -> int:
    """Run one rank, see `pack_miles.training.rank`; torch is loaded here, and so not where ranks are only watched."""
    from pack_miles.training.rank import run_rank

    return run_rank(rank, config, meeting, debug, post)


def _spawned(rank: int, config: Config, meeting: str, debug: bool, parent: int) -> None:
    _end_with(parent)
    # Ranks of one machine meet on loopback; a host name that does not resolve must not stop them.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(rank_of(rank, config, meeting, debug))


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)


def _ending(statuses: Sequence[int | None]) -> str:
    """Return in words which ranks ended the run."""
    killed = {rank: signal.Signals(-status).name for rank, status in enumerate(statuses) if status and status < 0}
    failed = {rank: status for rank, status in enumerate(statuses) if status and status > 0}
    # A killed rank is the cause; the others failed because it was gone.
    told = [f"rank {rank} was killed by {name}" for rank, name in killed.items()]
    return ", ".join(told or [f"rank {rank} stopped with exit status {status}" for rank, status in failed.items()])


def _remedy(config: Config, begun: Path | None) -> str:
    """Return how to go on, when this run has left a checkpoint of its own."""
    saved = standing.latest(Path(config.output.root))
    if saved is None or saved == begun:
        return ""
    return f"; the newest checkpoint is {saved}: go on with --run.resume true"
