"""Sequence packing as pure functions over plain data: lengths to packs, samples to the plan of every rank and step."""

from pack_core.codec import decode, encode, rebuild, record, samples_of
from pack_core.digest import digest
from pack_core.errors import CountError, LengthError, PackError, RecordError, TopologyError
from pack_core.lengths import Lengths, as_lengths
from pack_core.packing import equalize, pack
from pack_core.planner import plan
from pack_core.schedule import schedule
from pack_core.types import Bounds, Packing, Plan, Sample, Schedule, Topology, Work
from pack_core.verify import verify
from pack_core.work import bounds, work

__all__ = [
    "Bounds",
    "CountError",
    "LengthError",
    "Lengths",
    "PackError",
    "Packing",
    "Plan",
    "RecordError",
    "Sample",
    "Schedule",
    "Topology",
    "TopologyError",
    "Work",
    "as_lengths",
    "bounds",
    "decode",
    "digest",
    "encode",
    "equalize",
    "pack",
    "plan",
    "rebuild",
    "record",
    "samples_of",
    "schedule",
    "verify",
    "work",
]
