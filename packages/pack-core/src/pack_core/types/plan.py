"""Who forwards what, when."""

import attrs

from pack_core.types.packs import Schedule
from pack_core.types.samples import Topology
from pack_core.types.search import Search, SearchTrace
from pack_core.types.work import Bounds, Work, WorkReport


@attrs.frozen(repr=False)
class Plan:
    """Who forwards what, when: the schedules of all complete optimizer steps, and the samples that wait.

    Attributes:
        topology: the ranks.
        capacity: most tokens a pack may hold.
        step_samples: samples of one optimizer step, over all ranks.
        equalize: how ranks with fewer packs were split up to the largest count.
        max_documents: most samples a pack may hold, or None.
        pack_order: `"arrival"` or `"balanced"`.
        order: every sample index once, in the order planned; the tail last.
        steps: one `Schedule` per complete block of `step_samples`.
        tail: indices of the incomplete trailing block, untouched, in arrival order.
        work: one `Work` per step.
        arrival: one `Work` per step, of its samples in arrival order; that of `work` where nothing was reordered.
        bounds: one `Bounds` per step.
        search: how steps were searched, or None in arrival order.
        traces: one `SearchTrace` per step, none in arrival order.
        layers: numbers of the routed layers the expert figures are about; empty without routes.
        routed_layers: how many routed layers there are.
        digest: of `order` and `steps`, see `pack_core.digest`.

    >>> from pack_core import Sample, plan
    >>> made = plan([Sample(i, 5) for i in range(5)], topology=Topology(ranks=2), capacity=8, step_samples=4)
    >>> made.steps[0].packs, made.tail
    ((((0,), (2,)), ((1,), (3,))), (4,))
    """

    topology: Topology
    capacity: int
    step_samples: int
    equalize: str
    max_documents: int | None
    pack_order: str
    order: tuple[int, ...]
    steps: tuple[Schedule, ...]
    tail: tuple[int, ...]
    work: tuple[Work, ...]
    arrival: tuple[Work, ...]
    bounds: tuple[Bounds, ...]
    search: Search | None
    traces: tuple[SearchTrace, ...]
    layers: tuple[int, ...]
    routed_layers: int
    digest: str

    def report(self, step: int) -> WorkReport:
        """Return one step's work before and after, against its bounds."""
        return WorkReport(self.arrival[step], self.work[step], self.bounds[step], self.layers, self.routed_layers)

    def __repr__(self) -> str:
        """Show the shape of the plan, not its thousands of indices."""
        counts = ", ".join(str(step.packs_per_rank) for step in self.steps[:8]) + (", ..." if self.steps[8:] else "")
        return (
            f"<Plan of {len(self.order):,} samples: {len(self.steps)} steps of {self.step_samples} on "
            f"{self.topology.ranks} ranks, packs per rank [{counts}], {len(self.tail)} samples in the tail, "
            f"capacity {self.capacity:,}, digest {self.digest[:12]}>"
        )
