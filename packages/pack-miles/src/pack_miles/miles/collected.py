"""Rows of the table about the samples of a collection: what cannot be planned, by the first sample at fault.

The configuration cannot show these; they are asked of every collection before anything of it moves.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import attrs
from pack_core import DispatchCounts, Sample, dispatch_counts
from pack_core import owners as contiguous_owners
from pack_core.errors import RoutingError

from pack_miles.errors import InputError
from pack_miles.miles.layout import model_layout
from pack_miles.miles.options import Settings
from pack_miles.miles.samples import read_field, to_sample, whole_field
from pack_miles.settings.refusal import Refusal

#: Why rollouts of several samples are not planned for.
SEVERAL = "rollouts of several samples (compact or multi-turn) are not supported; turn the reordering off for them"


@attrs.frozen(eq=False, slots=False)
class Collected:
    """The samples of one collection, in arrival order, beside the settings they are planned under.

    `groups` are as the sample filter gets them, None where the samples came as one list.
    """

    settings: Settings
    samples: Sequence[Any]
    groups: Sequence[Sequence[Any]] | None = None
    written: Mapping[str, str] = MappingProxyType({})

    @property
    def step(self) -> int:
        """Samples of one optimizer step."""
        return int(self.settings.arg("global_batch_size"))

    @cached_property
    def complete(self) -> Sequence[Any]:
        """The samples of complete optimizer steps; the tail is not looked into."""
        return self.samples[: len(self.samples) - len(self.samples) % self.step]

    @cached_property
    def planned(self) -> list[Sample]:
        """What a plan needs of the samples of complete steps."""
        return [to_sample(sample, place) for place, sample in enumerate(self.complete)]

    @cached_property
    def counts(self) -> DispatchCounts | RoutingError | None:
        """Where the tokens go, why that cannot be told, or None where routes are not counted."""
        core = self.settings.core
        if not self.settings.counts_experts:
            return None
        layout = model_layout(str(self.settings.arg("hf_checkpoint")), core.expert_balance_layer_stride)
        try:
            return dispatch_counts(
                [read_field(sample, "rollout_routed_experts") for sample in self.complete],
                [sample.length for sample in self.planned],
                layers=layout.layers,
                experts=layout.experts,
                top_k=layout.top_k,
                dense_layers=layout.dense_layers,
                layer_stride=core.expert_balance_layer_stride,
                owners=contiguous_owners(layout.experts, core.expert_parallel_size),
                ids=[sample.id for sample in self.planned],
            )
        except RoutingError as error:
            return error


def refuse_collected(collected: Collected) -> None:
    """Raise the first row that applies: later ones build on what earlier ones have found right.

    Raises:
        InputError: naming the sample, what is wrong with it and what to do.
    """
    for row in DATA:
        if row.applies(collected):
            raise InputError(row.text(collected))


def _row(code: str, fault: Callable[[Collected], str]) -> Refusal[Collected]:
    """Return the row of a fault, told as reason and remedy, "" where there is none."""
    return Refusal(
        code,
        lambda c: bool(fault(c)),
        lambda c: fault(c).partition("; ")[0],
        lambda c: fault(c).partition("; ")[2],
        scope="data",
    )


def _first(faults: Callable[[Any, int], str], samples: Sequence[Any]) -> str:
    return next((fault for place, sample in enumerate(samples) if (fault := faults(sample, place))), "")


def _field(name: str) -> Callable[[Any, int], str]:
    def fault(sample: Any, place: int) -> str:
        try:
            whole_field(sample, name, place)
        except ValueError as error:
            return str(error)
        return ""

    return fault


def _nested(sample: Any, place: int) -> str:
    if isinstance(sample, (list, tuple)):
        return f"the sample at place {place} is a {type(sample).__name__}: {SEVERAL}"
    return ""


def _of_a_rollout(sample: Any, place: int) -> str:
    if (rollout := read_field(sample, "rollout_id")) is not None:
        return f"sample {read_field(sample, 'index')} has rollout_id {rollout!r}: {SEVERAL}"
    return ""


def _repeated(collected: Collected) -> str:
    places: dict[int, int] = {}
    for place, sample in enumerate(collected.samples):
        index = whole_field(sample, "index", place)
        if (first := places.setdefault(index, place)) != place:
            return (
                f"index {index} is that of the samples at places {first} and {place}; every sample needs an index of "
                "its own, as MILES' data source numbers them"
            )
    return ""


def _mixed(collected: Collected) -> str:
    for number, group in enumerate(collected.groups or ()):
        prompts = {str(read_field(sample, "group_index")) for sample in group}
        if len(prompts) > 1:
            return (
                f"group {number} holds samples of group_index {sorted(prompts)}, and one group answers one prompt; "
                "let nothing else reorder samples before this hook"
            )
    return ""


def _empty(sample: Any, place: int) -> str:
    try:
        to_sample(sample, place)
    except ValueError as error:
        return str(error)
    return ""


def _too_long(collected: Collected) -> str:
    capacity = collected.settings.capacity
    for sample in collected.planned if collected.settings.core.sequence_packing else ():
        if sample.length > capacity:
            return (
                f"sample {sample.id} has {sample.length:,} tokens but core.packing_max_tokens is {capacity:,}; raise "
                f"it to {sample.length:,} or more, or leave the sample out"
            )
    return ""


def _without_routes(collected: Collected) -> str:
    if not collected.settings.counts_experts:
        return ""
    for sample, planned in zip(collected.complete, collected.planned, strict=True):
        if read_field(sample, "rollout_routed_experts") is None:
            return f"sample {planned.id} has no routes; record them during rollout, or plan without routes"
    return ""


def _malformed(collected: Collected) -> str:
    return str(collected.counts) if isinstance(collected.counts, RoutingError) else ""


#: Every row, in the order they are asked.
DATA: tuple[Refusal[Collected], ...] = (
    _row("nested-samples", lambda c: _first(_nested, c.samples)),
    _row("sample-index", lambda c: _first(_field("index"), c.samples)),
    _row("repeated-index", _repeated),
    _row("sample-group", lambda c: _first(_field("group_index"), c.samples)),
    _row("several-of-a-rollout", lambda c: _first(_of_a_rollout, c.samples)),
    _row("mixed-group", _mixed),
    _row("sample-tokens", lambda c: _first(_empty, c.complete)),
    _row("sample-too-long", _too_long),
    _row("missing-routes", _without_routes),
    _row("malformed-routes", _malformed),
)
