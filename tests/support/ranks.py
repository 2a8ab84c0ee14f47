"""Start ranks of a gloo world on this machine, run functions on all of them, and bring every rank's result back."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

#: What `run_ranks` is, and the fixture that keeps worlds up between tests.
Run = Callable[..., list[Any]]

#: After one rank failed, how long the others may take to say why they did.
GRACE_SECONDS = 2.0


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds every rank's own words."""


class World:
    """Ranks that stay up between runs: fresh processes (spawn), one torch thread each, joined by gloo over loopback.

    A failure ends the world: a rank that raised may have left the others inside a collective.
    """

    def __init__(self, ranks: int, timeout: float = 60.0) -> None:
        """Start the processes and wait until the group is formed."""
        self.ended = False
        self._directory = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._processes, self._connections = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            store = f"file://{self._directory.name}/store"
            process = context.Process(target=_serve, args=(there, rank, ranks, store), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self._collect(timeout)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """Return `function(rank, *arguments)` of every rank, in order of rank.

        The function is found by its import path, so it belongs in an importable module, not in a test file.

        Raises:
            RankError: a rank raised or died, or the time was over; every process of this world is gone by then.
        """
        message = pickle.dumps((function, arguments))
        for connection in self._connections:
            connection.send_bytes(message)
        return self._collect(timeout)

    def end(self) -> None:
        """End every process this world started, by its id."""
        if self.ended:
            return
        self.ended = True
        for connection in self._connections:
            connection.close()  # a rank that waits for work reads the end of it and leaves
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.join(timeout=max(deadline - time.monotonic(), 0))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        """Return this world."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.end()

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "died without a word")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        found = [answers.get(rank, (False, "no answer")) for rank in range(len(self._connections))]
        if not all(succeeded for succeeded, _ in found):
            self.end()
            raise RankError("\n".join(f"rank {rank}: {words}" for rank, (good, words) in enumerate(found) if not good))
        return [answer for _, answer in found]


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """Return `function(rank, *arguments)` of every rank of a world made for this one call; see `World.run`."""
    with World(ranks, timeout) as world:
        return world.run(function, *arguments, timeout=timeout)


def _serve(connection: Connection, rank: int, ranks: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        except BaseException:
            answer: tuple[bool, Any] = (False, traceback.format_exc())
        else:
            answer = _answer(function, rank, arguments)
        # Plain pickle copies tensors; the shared memory torch would use instead dies with this process.
        connection.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


def _answer(function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(rank, *arguments)
    except BaseException:
        return False, traceback.format_exc()
