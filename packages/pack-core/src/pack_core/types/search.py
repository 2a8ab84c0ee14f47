"""How long and how to look for a better order, and what came of it."""

from collections.abc import Mapping
from math import isfinite

import attrs

from pack_core.errors import PackError
from pack_core.lengths import as_integer

METHODS = ("priced", "reference")
GUARDS = ("baseline", "reference")
KERNELS = ("python", "numpy")

#: What a chosen order may not make worse, in the order in which rejections name it.
GUARDED = (
    "packs_per_rank",
    "critical_work_proxy",
    "skew_mean",
    "skew_max",
    "max_slot_assignments",
    "attention_token_work",
    "attention_pair_work",
)


@attrs.frozen
class Search:
    """How to look for a better order of each optimizer step.

    Attributes:
        proposals: most fully scored swaps of a step; 0 keeps the best constructed order.
        seconds: the allowance of a whole collection, shared evenly by its complete steps; None for none. It needs a
            clock, and covers the search alone: counting, construction and logging lie outside.
        method: `"priced"`, swaps chosen by what they would save, or `"reference"`, which needs NumPy.
        guard: what the order chosen may never be worse than. `"baseline"`: the best constructed order, itself the
            best of the constructed ones in pack count and the three works. `"reference"`: arrival order, and a
            constructed one only where it is worse in none of the seven guarded figures.
        max_slot_assignments: the largest load of a destination in one layer of one dispatch, for memory; None for no
            limit. Where every order found is over it, the one of arrival is kept.
        kernels: `"python"`, `"numpy"`, or None for NumPy where it can be imported. All give the same plan.

    Raises:
        PackError: an option is unknown, negative or not finite.

    >>> Search(proposals=0)
    Search(proposals=0, seconds=0.25, method='priced', guard='baseline', max_slot_assignments=None, kernels=None)
    """

    proposals: int = 1024
    seconds: float | None = 0.25
    method: str = "priced"
    guard: str = "baseline"
    max_slot_assignments: int | None = None
    kernels: str | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what is no option."""
        object.__setattr__(self, "proposals", as_integer(self.proposals, "proposals", least=0))
        if self.seconds is not None:
            whole = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
            if not whole or not isfinite(self.seconds) or self.seconds < 0:
                raise PackError(f"seconds is {self.seconds!r}; it must be a finite number of at least 0, or None")
        for name, value, known in (
            ("method", self.method, METHODS),
            ("guard", self.guard, GUARDS),
            ("kernels", self.kernels, (*KERNELS, None)),
        ):
            if value not in known:
                raise PackError(f"search {name} is {value!r}; it must be one of {', '.join(map(repr, known))}")
        if self.max_slot_assignments is not None:
            limit = as_integer(self.max_slot_assignments, "max_slot_assignments")
            object.__setattr__(self, "max_slot_assignments", limit)


@attrs.frozen
class SearchTrace:
    """What a search of one optimizer step did; with the samples and their counts it can be done again.

    Attributes:
        method: the method used.
        seed: of its random numbers, from the ids of the step's samples.
        baseline: the constructed order it had to keep to: `"arrival"`, or how samples were dealt to ranks (`"length"`,
            `"expert"`), with packs filled one after the other or level; `"reference"` for that method.
        attempts: swaps drawn. A search cut by the clock is repeated by drawing as many.
        proposals: swaps fully scored.
        screened: attempts that were not, by reason.
        estimated: swaps estimated while drawing, cheaply and not fully.
        accepted: swaps taken, by kind.
        rejections: states visited that the guard refused, by the figure that was worse.
        paths: how swaps were scored: `"fixed"` (same pack boundaries), `"columns"` (two ranks cut anew), `"global"`.
        stop: `"lower_bound"`, `"stagnation"`, `"proposal_budget"`, `"deadline"` or `"no_candidates"`.
        order: the order chosen, as places of the step in arrival order.

    >>> from pack_core import Sample, Topology, plan
    >>> samples = [Sample(i, length) for i, length in enumerate([9, 1, 9, 1])]
    >>> how = {"topology": Topology(ranks=2), "capacity": 10, "step_samples": 4}
    >>> (trace,) = plan(samples, **how, pack_order="balanced").traces
    >>> trace.baseline, trace.stop, trace.order
    ('length', 'lower_bound', (0, 2, 1, 3))
    """

    method: str
    seed: int
    baseline: str
    attempts: int
    proposals: int
    screened: Mapping[str, int]
    estimated: int
    accepted: Mapping[str, int]
    rejections: Mapping[str, int]
    paths: Mapping[str, int]
    stop: str
    order: tuple[int, ...]
