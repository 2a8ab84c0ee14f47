"""What happens where a collection ends: its memory is written down, and its metrics are logged if that is asked."""

import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import msgspec
import torch

from pack_miles.contract import events
from pack_miles.contract.sink import ContractSink
from pack_miles.settings.config import Config
from pack_miles.training.collectives import World
from pack_miles.training.metrics import collection_metrics

#: The events that metrics are made of.
HEARD = (
    events.Rollout,
    events.Plan,
    events.Packing,
    events.ScoreTiming,
    events.ExpertBalance,
    events.Optimizer,
    events.Memory,
)

#: Bytes of the unit in which the system counts a process's memory.
UNIT = 1 if sys.platform == "darwin" else 1024


class Writer(Protocol):
    """Where the metrics of updates go."""

    def log(self, values: Mapping[str, float]) -> None:
        """Write the metrics of one update."""

    def finish(self, failed: bool) -> None:
        """End the run."""


class Tracker:
    """Hears what one rank writes of a collection; at its end all ranks hold its metrics, and the first logs them."""

    def __init__(self, world: World, writer: Writer | None) -> None:
        """Begin to hear; `writer` is None on all ranks but the first."""
        self._world = world
        self._writer = writer
        self._heard: list[events.Event] = []

    def hear(self, event: events.Event) -> None:
        """Keep an event of the collection."""
        if isinstance(event, HEARD):
            self._heard.append(_small(event))

    def end_collection(self) -> list[dict[str, float]]:
        """Return the metrics of every update since the last call, the same on every rank; all ranks must call it."""
        everyone = self._world.gather(self._heard)
        self._heard = []
        found = collection_metrics(everyone)
        if self._writer is not None:
            for values in found:
                self._writer.log(values)
        return found


def _small(event: events.Event) -> events.Event:
    """Return an event without what no metric shows: a plan's record holds every sample."""
    if not isinstance(event, events.Plan):
        return event
    record = {"work": event.record.get("work", ())}
    return msgspec.structs.replace(event, record=record, loads_before=None, loads_after=None)


@contextmanager
def tracking(config: Config, world: World, sink: ContractSink) -> Iterator[Tracker | None]:
    """Track a run by W&B while the context is open, or not at all; all ranks must enter it.

    Raises:
        RankError: on every rank, when W&B does not open a run.
    """
    if not config.tracking.use_wandb:
        yield None
        return
    from pack_miles.training.weights_and_biases import WandbRun

    writer: Writer | None = world.agreed(lambda: WandbRun(config) if world.rank == 0 else None)
    tracker = Tracker(world, writer)
    sink.hear = tracker.hear
    failed = True
    try:
        yield tracker
        failed = False
    finally:
        sink.hear = None
        if writer is not None:
            writer.finish(failed)


def end_collection(
    tracker: Tracker | None, sink: ContractSink, rollout_id: int, step: int, device: torch.device
) -> None:
    """Write down this rank's memory, and log the collection's metrics; all ranks must call it."""
    allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
    sink.write(
        events.Memory(
            rank=sink.rank,
            step=step,
            rollout_id=rollout_id,
            peak_allocated_bytes=allocated,
            peak_resident_bytes=resident,
        )
    )
    if tracker is not None:
        tracker.end_collection()
