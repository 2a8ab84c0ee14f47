"""Counts of expert ids where the ids already lie: what was recorded, and what the routers of a forward executed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import add

import torch
from pack_core.errors import RoutingError
from pack_core.kernels import counting
from pack_core.lengths import Lengths, as_lengths, label
from pack_core.recording import recording
from pack_core.routes import check_shape
from pack_core.routing import check_samples, count_sample
from pack_core.types import DispatchCounts
from torch import Tensor

from pack_torch.batch import PackedBatch

#: Added to every count of a layer that holds an id that is no expert: no sum of true counts makes up for it.
_SPOILT = -(2**40)


def observed_counts(routes: Tensor, *, experts: int, layers: Sequence[int]) -> Tensor:
    """Return how often each expert was chosen, on the device of `routes` and without waiting for it.

    The trainer adds the results of a step's forwards up there and reads the sum once, by `read_counts`.

    Args:
        routes: `[T, decoder layers, top_k]`, any integer width, as `ModelOutput.routes`.
        experts: routed experts of a layer.
        layers: the layers to count; the others, where dense ones hold -1, are not looked at.

    Returns:
        `[layers, experts]` int64. A layer with an id that is no expert comes out far below zero, which `read_counts`
        refuses: raising here would mean waiting for the device.

    >>> observed_counts(torch.tensor([[[-1, -1], [0, 3]], [[-1, -1], [3, 1]]]), experts=4, layers=[1])
    tensor([[1, 1, 0, 2]])
    """
    return document_counts(routes, None, 1, experts=experts, layers=layers)[0]


def batch_counts(batch: PackedBatch, *, experts: int, layers: Sequence[int]) -> Tensor:
    """Return how often each document of a packed row sends its tokens to each expert, on the row's device.

    Args:
        batch: with routes, each document's synthetic final row among them.
        experts: routed experts of a layer.
        layers: the layers to count.

    Returns:
        `[documents, layers, experts]` int64, spoilt as that of `observed_counts` by an id that is no expert.

    Raises:
        RoutingError: the batch has no routes.

    >>> from pack_torch import Rollout, build_batch
    >>> rollouts = [Rollout("a", [1, 2], 1, routes=[[[3, 2]]]), Rollout("b", [1], 0, routes=torch.zeros(0, 1, 2).int())]
    >>> batch_counts(build_batch(rollouts, [0, 1], replay=True), experts=4, layers=[0]).tolist()
    [[[1, 1, 1, 1]], [[1, 1, 0, 0]]]
    """
    if batch.routes is None:
        raise RoutingError("the batch has no routes to count; build it with replay=True")
    return document_counts(batch.routes, batch.document_ids, batch.documents, experts=experts, layers=layers)


def document_counts(
    routes: Tensor, document_ids: Tensor | None, documents: int, *, experts: int, layers: Sequence[int]
) -> Tensor:
    """Return the counts of each document of a row, as `batch_counts`, from its routes alone.

    Args:
        routes: `[T, decoder layers, top_k]`.
        document_ids: `[T]` int64 on the same device, each below `documents`; None takes the row as one document.
        documents: how many there are.
        experts: routed experts of a layer.
        layers: the layers to count.

    Raises:
        RoutingError: the routes have another rank or are no integers, or a layer does not exist.

    >>> document_counts(torch.tensor([[[2]], [[0]]]), torch.tensor([0, 1]), 2, experts=3, layers=[0]).tolist()
    [[[0, 0, 1]], [[1, 0, 0]]]
    """
    _check_integers(routes, "the row")
    if routes.dim() != 3 or not layers or not all(0 <= layer < routes.shape[1] for layer in layers):
        raise RoutingError(
            f"routes have shape {list(routes.shape)} and layers {list(layers)} are to be counted; give "
            "[tokens, layers, top_k] and at least one of its layers"
        )
    # By slices, not by a tensor of layer numbers: moving one to the device would wait for it.
    ids = torch.stack([routes[:, layer] for layer in layers], dim=1).to(torch.int64)
    known = (ids >= 0) & (ids < experts)
    width = experts + 1  # the last place of a layer takes the ids that are no experts
    cells = torch.where(known, ids, experts)
    cells += (torch.arange(len(layers), device=routes.device) * width)[:, None]
    if document_ids is not None:
        cells += (document_ids * (len(layers) * width))[:, None, None]
    counts = _scatter(cells.flatten(), documents * len(layers) * width).view(documents, len(layers), width)
    return counts[..., :-1] + (counts[..., -1:] > 0) * _SPOILT


def read_counts(counts: Tensor, layers: Sequence[int]) -> list[list[int]]:
    """Return counts as numbers, `[layers][places]`, waiting for their device once.

    Args:
        counts: `[layers, places]`, the sum of what `observed_counts` returned.
        layers: the numbers of the layers, for the error.

    Raises:
        RoutingError: a layer held an id that is no expert; names the layer.

    >>> read_counts(observed_counts(torch.tensor([[[0, 7]]]), experts=4, layers=[0]), [0])
    Traceback (most recent call last):
    pack_core.errors.RoutingError: layer 0 was routed to an expert that does not exist; ...
    """
    read: list[list[int]] = counts.tolist()
    for layer, of_layer in zip(layers, read, strict=True):
        if min(of_layer) < 0:
            raise RoutingError(
                f"layer {layer} was routed to an expert that does not exist; check the number of experts, and that the "
                "layer is not dense"
            )
    return read


def dispatch_counts(
    routes: Sequence[Tensor | None],
    lengths: Lengths,
    *,
    layers: int,
    experts: int,
    top_k: int,
    dense_layers: Iterable[int] = (),
    layer_stride: int = 1,
    owners: Sequence[int] | None = None,
    ids: Sequence[str | int] | None = None,
) -> DispatchCounts:
    """Return what `pack_core.routing.dispatch_counts` does, for tensors on any device.

    Routes on a CPU are counted there by NumPy. Others are counted where they lie, and only the counts are copied, with
    one wait for the device for all samples.

    Args:
        routes: of each sample the expert ids `[length - 1, layers, top_k]`, of any integer width.
        lengths, layers, experts, top_k, dense_layers, layer_stride, owners, ids: as there.

    Raises:
        RoutingError: as there.

    >>> dispatch_counts([torch.tensor([[[3, 2]]])], [2], layers=1, experts=4, top_k=2).of(0)
    array('i', [1, 1, 1, 1])
    """
    how = recording(
        layers=layers, experts=experts, top_k=top_k, dense_layers=dense_layers, layer_stride=layer_stride, owners=owners
    )
    tokens = as_lengths(lengths, ids=ids)
    check_samples(routes, tokens)
    counts: list[array[int]] = []
    waiting: dict[int, Tensor] = {}
    for position, (recorded, length) in enumerate(zip(routes, tokens, strict=True)):
        name = label(position, ids)
        if recorded is None or length == 1 or _lies_on_cpu(recorded):
            counts.append(count_sample(_as_numpy(recorded, name), length, how, name=name))
            continue
        _check_integers(recorded, name)
        check_shape(recorded.shape, length - 1, how, name)
        shaped = recorded.reshape(length - 1, how.layers, how.top_k)
        waiting[position] = observed_counts(shaped, experts=how.experts, layers=how.selected)
        counts.append(how.synthetic())
    for position, found in _fetched(waiting).items():
        if min(found) < 0:
            # Counted again the slow way, which raises and says where.
            count_sample(_as_numpy(routes[position], ""), tokens[position], how, name=label(position, ids))
        folded = counting().fold(array("i", found), how.owners, how.places)
        counts[position] = array("i", map(add, counts[position], folded))
    return how.dispatch(array("i", chain.from_iterable(counts)))


def _lies_on_cpu(routes: Tensor) -> bool:
    return routes.device.type == "cpu"


def _fetched(waiting: dict[int, Tensor]) -> dict[int, list[int]]:
    if not waiting:
        return {}
    device = next(iter(waiting.values())).device
    stacked = torch.stack([counts.flatten().to(device) for counts in waiting.values()])
    return dict(zip(waiting, stacked.tolist(), strict=True))


def _as_numpy(routes: Tensor | None, name: str) -> object:
    if routes is None:
        return None
    _check_integers(routes, name)
    return routes.detach().cpu().numpy()


def _check_integers(routes: Tensor, name: str) -> None:
    if routes.is_floating_point() or routes.is_complex() or routes.dtype == torch.bool:
        raise RoutingError(f"{name} has routes of {routes.dtype}; expert ids are integers, convert them where recorded")


def _scatter(cells: Tensor, size: int) -> Tensor:
    # Unlike bincount, scatter_add_ knows its size beforehand and does not wait for the device.
    counts = torch.zeros(size, dtype=torch.int64, device=cells.device)
    return counts.scatter_add_(0, cells, torch.ones((), dtype=torch.int64, device=cells.device).expand(len(cells)))
