"""What one optimizer step costs, in counts, and what nothing can go below."""

import attrs


@attrs.frozen
class Work:
    """What one optimizer step costs, in counts. A count is a proxy: it orders schedules, it is not a wall time.

    The last five are None where the routes of the samples are not known.

    Attributes:
        packs_per_rank: forwards on every rank.
        attention_token_work: tokens; over packs, the sum of the largest rank's.
        attention_pair_work: tokens squared; over packs, the sum of the largest rank's sum of squared sample lengths.
        model_tokens: tokens of all ranks and packs.
        max_pack_tokens: tokens of the largest pack.
        fill_fraction: `model_tokens / (ranks * packs_per_rank * capacity)`, in (0, 1].
        critical_work_proxy: expert choices; over packs and layers, the sum of the most loaded destination's.
        dispatches: joint forwards of a replica, `replicas * packs_per_rank`.
        skew_mean: mean over dispatches of (most loaded destination / mean destination), layers summed; at least 1.
        skew_max: the largest of those.
        max_slot_assignments: expert choices of the most loaded destination in any layer of any dispatch.

    >>> from pack_core import schedule, work
    >>> done = work(schedule([5, 3, 4, 4], ranks=2, capacity=8), [5, 3, 4, 4], capacity=8)
    >>> done.packs_per_rank, done.attention_token_work, done.attention_pair_work, done.fill_fraction
    (1, 8, 34, 1.0)
    """

    packs_per_rank: int
    attention_token_work: int
    attention_pair_work: int
    model_tokens: int
    max_pack_tokens: int
    fill_fraction: float
    critical_work_proxy: int | None = None
    dispatches: int | None = None
    skew_mean: float | None = None
    skew_max: float | None = None
    max_slot_assignments: int | None = None


@attrs.frozen
class Bounds:
    """What no packing of the same samples over the same ranks can go below; units as in `Work`.

    A bound proves a schedule optimal only where it is attained: it is a relaxation and may lie below every schedule.

    Attributes:
        packs_per_rank, attention_token_work, attention_pair_work, critical_work_proxy: bounds of those works.
        even_critical_work: expert choices of a step spread evenly over all layers and ranks.
        placed_critical_work: the bound on expert work if experts were placed anew, layer by layer, longest processing
            time first; below `critical_work_proxy` where placing could help. None unless counts per expert were given.

    >>> from pack_core import bounds
    >>> least = bounds([5, 3, 4, 4], ranks=2, capacity=8)
    >>> least.packs_per_rank, least.attention_token_work, least.attention_pair_work
    (1, 8, 33)
    """

    packs_per_rank: int
    attention_token_work: int
    attention_pair_work: int
    critical_work_proxy: int | None = None
    even_critical_work: int | None = None
    placed_critical_work: int | None = None

    @property
    def routing_floor(self) -> int | None:
        """Expert work over an even spread that no packing removes, with routes and placement as they are."""
        if self.critical_work_proxy is None or self.even_critical_work is None:
            return None
        return self.critical_work_proxy - self.even_critical_work


@attrs.frozen
class WorkReport:
    """One optimizer step before and after reordering, against its bounds. Counts are not seconds.

    Attributes:
        before: the work in arrival order.
        after: the work as planned.
        bounds: of both.
        layers: numbers of the layers the expert figures are about; empty without routes.
        routed_layers: how many routed layers there are.

    >>> before, after = Work(4, 100, 900, 200, 60, 0.5), Work(3, 70, 600, 200, 70, 0.7)
    >>> report = WorkReport(before, after, Bounds(2, 60, 500))
    >>> report.change("attention_token_work"), report.removed("attention_token_work"), report.gap("packs_per_rank")
    (-30.0, 75.0, 50.0)
    """

    before: Work
    after: Work
    bounds: Bounds
    layers: tuple[int, ...] = ()
    routed_layers: int = 0

    def change(self, name: str) -> float | None:
        """Return by how many percent the work of that name changed, or None where it is not known or was 0."""
        before, after = getattr(self.before, name), getattr(self.after, name)
        return None if not before else 100.0 * (after - before) / before

    def gap(self, name: str) -> float | None:
        """Return by how many percent the work of that name is over its bound, or None without one."""
        bound, after = getattr(self.bounds, name), getattr(self.after, name)
        return None if not bound else 100.0 * (after - bound) / bound

    def removable(self, name: str) -> float | None:
        """Return how many percent of arrival order's work lie over the bound; None where it is not known or was 0."""
        before, bound = getattr(self.before, name), getattr(self.bounds, name)
        return None if not before or bound is None else 100.0 * (before - bound) / before

    def removed(self, name: str) -> float | None:
        """Return how many percent of what lay over the bound in arrival order are gone; None where nothing did."""
        before, after, bound = (getattr(one, name) for one in (self.before, self.after, self.bounds))
        return (
            None if before is None or bound is None or before <= bound else 100.0 * (before - after) / (before - bound)
        )
