"""Sequence packing as pure functions over plain data: lengths to packs, samples to the plan of every rank and step."""

from pack_core.balancing import balance
from pack_core.certificate import Certificate, certify
from pack_core.codec import decode, encode, rebuild, record, samples_of
from pack_core.digest import digest
from pack_core.errors import CountError, LengthError, PackError, RecordError, RoutingError, TopologyError
from pack_core.lengths import Lengths, as_lengths
from pack_core.packing import equalize, pack
from pack_core.planner import headroom, plan
from pack_core.routing import dispatch_counts, fold, owners
from pack_core.schedule import schedule
from pack_core.types import (
    Bounds,
    DispatchCounts,
    Packing,
    Plan,
    Sample,
    Schedule,
    Search,
    SearchTrace,
    Topology,
    Work,
    WorkReport,
)
from pack_core.verify import verify
from pack_core.work import bounds, dispatch_loads, work

__all__ = [
    "Bounds",
    "Certificate",
    "CountError",
    "DispatchCounts",
    "LengthError",
    "Lengths",
    "PackError",
    "Packing",
    "Plan",
    "RecordError",
    "RoutingError",
    "Sample",
    "Schedule",
    "Search",
    "SearchTrace",
    "Topology",
    "TopologyError",
    "Work",
    "WorkReport",
    "as_lengths",
    "balance",
    "bounds",
    "certify",
    "decode",
    "digest",
    "dispatch_counts",
    "dispatch_loads",
    "encode",
    "equalize",
    "fold",
    "headroom",
    "owners",
    "pack",
    "plan",
    "rebuild",
    "record",
    "samples_of",
    "schedule",
    "verify",
    "work",
]
