"""How routes were recorded, and which layers and places of them count."""

from array import array
from collections.abc import Iterable, Sequence

import attrs

from pack_core.errors import PackError, RoutingError
from pack_core.lengths import as_integer
from pack_core.types import DispatchCounts


@attrs.frozen
class Recording:
    """How routes were recorded and which layers of them count.

    Attributes:
        layers: layers of the recorded axis, dense ones too.
        top_k: experts a token is sent to.
        selected: numbers of the layers to count, ascending.
        routed_layers: how many layers route.
        owners: the place of each expert, `[experts]`.
        places: how many places there are.
    """

    layers: int
    top_k: int
    selected: tuple[int, ...]
    routed_layers: int
    owners: tuple[int, ...]
    places: int

    @property
    def experts(self) -> int:
        """Experts of a routed layer."""
        return len(self.owners)

    def synthetic(self) -> "array[int]":
        """Return the counts of the final row alone: experts 0..top_k-1 in each layer, `[layers, places]` flat."""
        once = array("i", bytes(4 * self.places))
        for expert in range(self.top_k):
            once[self.owners[expert]] += 1
        return once * len(self.selected)

    def dispatch(self, counts: "array[int]") -> DispatchCounts:
        """Return the counts of samples end to end as a value."""
        return DispatchCounts(self.selected, self.routed_layers, self.places, counts)


def recording(
    *,
    layers: int,
    experts: int,
    top_k: int,
    dense_layers: Iterable[int] = (),
    layer_stride: int = 1,
    owners: Sequence[int] | None = None,
) -> Recording:
    """Return how routes were recorded, checked; the arguments are those of `dispatch_counts`.

    >>> recording(layers=6, experts=4, top_k=2, dense_layers=[0], layer_stride=2).selected
    (1, 3, 5)
    """
    try:
        layers, experts = as_integer(layers, "layers"), as_integer(experts, "experts")
        top_k, layer_stride = as_integer(top_k, "top_k"), as_integer(layer_stride, "layer_stride")
        dense = {as_integer(layer, "a dense layer", least=0) for layer in dense_layers}
    except PackError as error:
        raise RoutingError(str(error)) from None
    if top_k > experts:
        raise RoutingError(f"top_k is {top_k} but there are {experts} experts; a token goes to each at most once")
    if dense and max(dense) >= layers:
        raise RoutingError(
            f"dense layer {max(dense)} does not exist; there are {layers} layers, 0 to {layers - 1}, counted from the "
            "first decoder layer, dense ones too"
        )
    routed = tuple(layer for layer in range(layers) if layer not in dense)
    if not routed:
        raise RoutingError(f"all {layers} layers are dense, so no layer routes; take the routed ones off dense_layers")
    table = tuple(range(experts)) if owners is None else as_owners(owners, experts)
    return Recording(layers, top_k, routed[::layer_stride], len(routed), table, max(table) + 1)


def as_owners(table: Sequence[int], experts: int) -> tuple[int, ...]:
    """Return a table of owners, checked: one place an expert, none above their number.

    >>> as_owners([0, 0, 1, 1], 4)
    (0, 0, 1, 1)
    """
    if len(table) != experts:
        raise RoutingError(f"the table of owners has {len(table)} entries; it needs one for each of {experts} experts")
    try:
        if set(map(type, table)) <= {int} and min(table) >= 0 and max(table) < experts:
            return tuple(table)  # every entry was just looked at, at the speed of C
        places = [as_integer(place, f"the owner of expert {expert}", least=0) for expert, place in enumerate(table)]
    except PackError as error:
        raise RoutingError(str(error)) from None
    if max(places) >= experts:
        raise RoutingError(
            f"the owner of expert {places.index(max(places))} is {max(places)}; {experts} experts have at most that "
            f"many owners, numbered 0 to {experts - 1}"
        )
    return tuple(places)
