"""Start a run's ranks and see them end: all of them, together, with a word on what went wrong.

Under torchrun (or anything else that sets RANK and WORLD_SIZE) this process is one rank. Otherwise it spawns them
all on this machine and watches.
"""

import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from pack_miles import standing
from pack_miles.collectives import RankError, World
from pack_miles.config import Config
from pack_miles.errors import InputError
from pack_miles.progress import Progress
from pack_miles.scoring import DisagreementError
from pack_miles.sink import ContractSink, contract_path
from pack_miles.trainer import Clocks, train_rank

#: How long the other ranks get to say what they saw before they are stopped, in seconds.
GRACE = 5.0

#: The exit status of a mistake the user can mend.
USER_MISTAKE = 2

#: Errors that every rank raises alike, so that one of them may speak for all.
SHARED = (RankError, DisagreementError, InputError)


def launch(config: Config, *, debug: bool = False, environment: Mapping[str, str] = os.environ) -> int:
    """Train and return an exit status: 0 when every rank finished, 1 when any failed, 130 when interrupted."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return run_rank(int(environment["RANK"]), config, "env://", debug)
    return spawn(config, debug)


def spawn(config: Config, debug: bool) -> int:
    """Run all ranks as processes of this machine and return the exit status of the whole."""
    # Ranks of one machine meet on loopback; a host name that does not resolve must not stop them.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (config, f"file://{meeting}/ranks", debug)
        context = start_processes(  # type: ignore[no-untyped-call]
            _spawned, args=arguments, nprocs=config.run.ranks, join=False, start_method="spawn"
        )
        try:
            statuses = _watch(context.processes)
        except KeyboardInterrupt:
            _say("interrupted; all ranks are stopped")
            return 130
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
    if not any(statuses):
        return 0
    if USER_MISTAKE in statuses:
        return USER_MISTAKE  # the rank has said what to mend
    _say(_ending(statuses, config))
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


def _spawned(rank: int, config: Config, meeting: str, debug: bool) -> None:
    sys.exit(run_rank(rank, config, meeting, debug))


def run_rank(rank: int, config: Config, meeting: str, debug: bool) -> int:
    """Run one rank in this process and return its exit status; what went wrong is written down and said."""
    torch.set_num_threads(config.run.threads_per_rank)
    size = config.run.ranks
    world = World(rank, size)
    sink = ContractSink(contract_path(Path(config.output.root), rank), rank)
    shown = config.tracking.progress and rank == 0
    try:
        if size > 1:
            dist.init_process_group(
                # Control messages are CPU tensors, whatever the backend of the gradients is.
                "gloo" if config.run.backend == "gloo" else f"cpu:gloo,cuda:{config.run.backend}",
                init_method=meeting,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=config.run.timeout_seconds),
            )
        with Progress(config.miles.num_rollout, shown) as progress:
            train_rank(config, world, Clocks(time.time, time.perf_counter), sink, progress, _device(rank, config))
    except Exception as error:
        if debug:
            traceback.print_exc()
        if rank == 0 or not isinstance(error, SHARED):
            _say(f"rank {rank}: {error}")
        return USER_MISTAKE if isinstance(error, InputError) else 1
    finally:
        sink.close()
        if size > 1 and dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _device(rank: int, config: Config) -> torch.device:
    """Return where this rank's model lives: with nccl the GPU of its place on this machine, else the CPU."""
    if config.run.backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    return device


def _ending(statuses: Sequence[int | None], config: Config) -> str:
    """Return in words what ended the run."""
    killed = {rank: signal.Signals(-status).name for rank, status in enumerate(statuses) if status and status < 0}
    failed = {rank: status for rank, status in enumerate(statuses) if status and status > 0}
    # A killed rank is the cause; the others failed because it was gone.
    told = [f"rank {rank} was killed by {name}" for rank, name in killed.items()]
    told = told or [f"rank {rank} stopped with exit status {status}" for rank, status in failed.items()]
    saved = standing.latest(Path(config.output.root))
    remedy = f"; the newest checkpoint is {saved}: go on with --run.resume true" if saved else ""
    return f"error: {', '.join(told)}; the run is over and no rank is left{remedy}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
