"""One rank of a run, in a process of its own: it meets the others, trains, and writes down and says what went wrong."""

import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pack_miles.asynchronous.post import Post
from pack_miles.contract.sink import ContractSink, contract_path
from pack_miles.errors import InputError
from pack_miles.reporting.progress import Progress
from pack_miles.settings.config import Config
from pack_miles.training.collectives import RankError, World
from pack_miles.training.scoring import DisagreementError
from pack_miles.training.statuses import USER_MISTAKE, say
from pack_miles.training.trainer import Clocks, train_rank

#: Errors that every rank raises alike, so that one of them may speak for all.
SHARED = (RankError, DisagreementError)

#: What the collectives' library says when another rank is gone or does not answer.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out")


def run_rank(rank: int, config: Config, meeting: str, debug: bool, post: Post | None = None) -> int:
    """Run one rank in this process and return its exit status; what went wrong is written down and said.

    `post` is where an asynchronous run's collections come from.
    """
    torch.set_num_threads(config.run.threads_per_rank)
    size = config.run.ranks
    shown = config.tracking.progress and rank == 0
    try:
        with ContractSink(contract_path(Path(config.output.root), rank), rank) as sink:
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
                clocks = Clocks(time.time, time.perf_counter)
                train_rank(config, World(rank, size), clocks, sink, progress, _device(rank, config), post)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, SHARED):
            if rank == 0:
                say(f"error: {error}")
        else:
            say(f"rank {rank}: {_words(error, config)}")
        return USER_MISTAKE if isinstance(error, InputError) else 1
    finally:
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


def _words(error: Exception, config: Config) -> str:
    """Return an error as a person wants to read it."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; free space there, or choose another output.root"
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST):
        return (
            "lost another rank: it is gone, or did not answer within "
            f"run.timeout_seconds = {config.run.timeout_seconds:g} (--debug shows more)"
        )
    return str(error)
