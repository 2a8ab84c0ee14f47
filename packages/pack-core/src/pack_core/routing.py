"""Recorded expert ids to counts: how many (token, expert choice) pairs of a sample go where, layer by layer."""

from array import array
from collections.abc import Iterable, Sequence

import attrs

from pack_core.errors import PackError, RoutingError
from pack_core.kernels import counting
from pack_core.lengths import Lengths, as_integer, as_lengths, label
from pack_core.recording import Recording, as_owners, recording
from pack_core.routes import read_routes, unknown_id
from pack_core.types import DispatchCounts

_MOST = 2**31 - 1


def dispatch_counts(
    routes: Sequence[object],
    lengths: Lengths,
    *,
    layers: int,
    experts: int,
    top_k: int,
    dense_layers: Iterable[int] = (),
    layer_stride: int = 1,
    owners: Sequence[int] | None = None,
    ids: Sequence[str | int] | None = None,
    kernels: str | None = None,
) -> DispatchCounts:
    """Return where the tokens of every sample go, by routed layer and expert.

    A sample of n tokens brings n-1 recorded rows, since its last token was sampled but never run. The trainer runs it
    all the same and sends it to experts 0..top_k-1 in each layer, so that row is counted too, for every sample.

    Args:
        routes: of each sample the expert ids `[length - 1, layers, top_k]`, row-major: `bytes` (one id a byte),
            `array.array`, `memoryview` or NumPy arrays of any integer width, flat or of those axes, or nested lists.
        lengths: tokens of each sample, `[samples]`.
        layers: layers of the recorded axis, dense ones too.
        experts: experts of a routed layer; ids are 0..experts-1.
        top_k: experts a token is sent to.
        dense_layers: the layers that do not route; their ids are not looked at.
        layer_stride: count every so manieth of the routed layers, from the first; the ids of others are not looked at.
        owners: the place of each expert; the counts come folded, as by `fold`, which plain Python does much faster.
        ids: names of the samples for error messages, `[samples]`.
        kernels: `"python"` or `"numpy"`, with the same result; None takes NumPy where it is installed.

    Raises:
        RoutingError: routes are missing, have the wrong shape or type, or hold an id that is no expert; names sample,
            row and layer.
        LengthError: a length is no whole number of at least 1.

    >>> counts = dispatch_counts([bytes([3, 2, 3, 1])], [3], layers=1, experts=4, top_k=2)
    >>> counts.of(0)
    array('i', [1, 2, 1, 2])
    """
    how = recording(
        layers=layers, experts=experts, top_k=top_k, dense_layers=dense_layers, layer_stride=layer_stride, owners=owners
    )
    tokens = as_lengths(lengths, ids=ids)
    check_samples(routes, tokens)
    counts = array("i")
    for position, (recorded, length) in enumerate(zip(routes, tokens, strict=True)):
        counts.extend(count_sample(recorded, length, how, name=label(position, ids), kernels=kernels))
    return how.dispatch(counts)


def count_sample(
    routes: object, length: int, how: Recording, *, name: str = "the sample", kernels: str | None = None
) -> "array[int]":
    """Return the counts of one sample, its synthetic final row included, `[len(how.selected), how.places]` flat.

    Args:
        routes: expert ids `[length - 1, layers, top_k]`, as `dispatch_counts` takes them.
        length: tokens of the sample.
        how: from `recording`.
        name: how an error calls the sample.
        kernels: as for `dispatch_counts`.

    Raises:
        RoutingError: as `dispatch_counts`.

    >>> count_sample([[[3, 2]]], 2, recording(layers=1, experts=4, top_k=2))
    array('i', [1, 1, 1, 1])
    """
    rows = length - 1
    if length * how.top_k > _MOST:
        raise RoutingError(f"{name} has {length:,} tokens, more than 32-bit counts of top-{how.top_k} hold; split it")
    view, layers, selected = read_routes(routes, rows, how, name)
    if rows == 0:
        return how.synthetic()
    shape = (rows, layers, how.top_k)
    counts = counting(kernels).count(view, shape, selected, how.owners, how.places)
    if counts is None:
        raise unknown_id(view, shape, selected, how, name)
    for layer in range(len(selected)):
        for expert in range(how.top_k):
            counts[layer * how.places + how.owners[expert]] += 1
    return counts


def owners(experts: int, expert_parallel: int) -> tuple[int, ...]:
    """Return the destination that owns each expert: contiguous ranges of equal size.

    Raises:
        RoutingError: the experts cannot be shared out equally.

    >>> owners(4, 2)
    (0, 0, 1, 1)
    """
    try:
        experts, expert_parallel = as_integer(experts, "experts"), as_integer(expert_parallel, "expert_parallel")
    except PackError as error:
        raise RoutingError(str(error)) from None
    if experts % expert_parallel:
        raise RoutingError(
            f"{experts} experts cannot be shared out equally over {expert_parallel} destinations (expert_parallel); "
            "use a degree that divides them, or give a table of owners"
        )
    share = experts // expert_parallel
    return tuple(expert // share for expert in range(experts))


def fold(counts: DispatchCounts, owners: Sequence[int], *, kernels: str | None = None) -> DispatchCounts:
    """Return the same counts by destination: those of an owner's experts added up.

    Args:
        counts: per expert.
        owners: the destination of each expert, `[experts]`, from `owners` or any table; they are numbered from 0 and
            the highest says how many there are.
        kernels: as for `dispatch_counts`.

    Raises:
        RoutingError: the table has another length, or holds what is no destination.

    >>> fold(dispatch_counts([bytes([3, 2])], [2], layers=1, experts=4, top_k=2), owners(4, 2)).of(0)
    array('i', [2, 2])
    """
    table = as_owners(owners, counts.places)
    places = max(table) + 1
    return attrs.evolve(counts, places=places, counts=counting(kernels).fold(counts.counts, table, places))


def check_samples(routes: Sequence[object], lengths: Sequence[int]) -> None:
    """Raise unless there are as many routes as lengths."""
    if len(routes) != len(lengths):
        raise RoutingError(
            f"{len(routes):,} routes but {len(lengths):,} lengths were given; give one of each a sample, None where "
            "routes are missing"
        )
