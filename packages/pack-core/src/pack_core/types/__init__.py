"""The values of this package. Each is frozen, compares by content and holds metadata only, never a tensor."""

from pack_core.types.dispatch import DispatchCounts
from pack_core.types.packs import Lost, Packing, Parts, Schedule
from pack_core.types.plan import Plan
from pack_core.types.samples import Sample, Topology
from pack_core.types.search import GUARDED, Search, SearchTrace
from pack_core.types.work import Bounds, Work, WorkReport

__all__ = [
    "GUARDED",
    "Bounds",
    "DispatchCounts",
    "Lost",
    "Packing",
    "Parts",
    "Plan",
    "Sample",
    "Schedule",
    "Search",
    "SearchTrace",
    "Topology",
    "Work",
    "WorkReport",
]
