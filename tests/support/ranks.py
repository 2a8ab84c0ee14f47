"""Start a function on several ranks of a gloo world on this machine, and bring every rank's result back."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

#: After one rank failed, how long the others may take to say why they did.
GRACE_SECONDS = 2.0


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds every rank's own words."""


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """Return `function(rank, *arguments)` of every rank, in order of rank.

    Each rank is a fresh process (spawn) with one torch thread, inside a gloo group over the loopback device. The function
    is found by its import path, so it belongs in an importable module, not in a test file.

    Raises:
        RankError: a rank raised or died, or the time was over. Every process started here is gone by then.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        processes: list[BaseProcess] = []
        receivers: list[Connection] = []
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_serve, args=(sender, rank, ranks, store, function, arguments), daemon=True
                )
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            answers = _collect(receivers, time.monotonic() + timeout)
        finally:
            _end(processes)
    failures = [f"rank {rank}: {answers.get(rank, (False, 'no answer'))[1]}" for rank in _failed(answers, ranks)]
    if failures:
        raise RankError("\n".join(failures))
    return [answers[rank][1] for rank in range(ranks)]


def _failed(answers: dict[int, tuple[bool, Any]], ranks: int) -> list[int]:
    return [rank for rank in range(ranks) if not answers.get(rank, (False, None))[0]]


def _collect(receivers: Sequence[Connection], deadline: float) -> dict[int, tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(waiting), timeout=left):
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                answers[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                answers[rank] = (False, "died without a word")
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return answers


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.join(timeout=1.0 if process.exitcode is None else 0)
        if process.exitcode is None:
            process.kill()
            process.join()


def _serve(
    sender: Connection, rank: int, ranks: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        with _world(rank, ranks, store):
            answer = (True, function(rank, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain pickle copies tensors; the shared memory torch would use instead dies with this process.
    sender.send_bytes(pickle.dumps(answer))
    sender.close()


@contextlib.contextmanager
def _world(rank: int, ranks: int, store: str) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
