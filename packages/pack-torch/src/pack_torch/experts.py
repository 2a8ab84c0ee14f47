"""Routed experts: who chooses them, how tokens reach them over ranks, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import silu

from pack_torch.parallel import exchange, exchange_counts


@attrs.frozen(eq=False)
class Dispatch:
    """Where one layer sends every (token, choice) pair of this rank's row, and what it gets from others.

    Args:
        ids: `[T, top_k]` int64 experts of each token.
        order: `[T * top_k]` the pairs sorted by expert, so by rank too.
        inverse: `[T * top_k]` the way back.
        send: pairs for each rank of the expert group.
        receive: pairs from each rank.
        regroup: `[pairs received]` from by-rank to by-expert; None when there is one rank and nothing to regroup.
        restore: `[pairs received]` the way back.
        rows: pairs for each of this rank's experts.
    """

    ids: Tensor
    order: Tensor
    inverse: Tensor
    send: list[int]
    receive: list[int]
    regroup: Tensor | None
    restore: Tensor | None
    rows: list[int]


def build_dispatches(ids: Tensor, experts: int, group: ProcessGroup | None) -> list[Dispatch]:
    """Return one dispatch per layer; ranks tell each other how many pairs come, all layers in one exchange.

    Args:
        ids: `[layers, T, top_k]` int64, each 0..experts-1.
        experts: routed experts of a layer, of which rank d of the group holds the d-th equal share.
        group: the expert group, every rank of which calls this; None when one rank holds all experts.

    >>> [dispatch] = build_dispatches(torch.tensor([[[1, 0], [1, 2]]]), experts=4, group=None)
    >>> dispatch.order.tolist(), dispatch.rows  # expert 0: pair 1; expert 1: pairs 0 and 2; expert 2: pair 3
    ([1, 0, 2, 3], [1, 2, 1, 0])
    """
    layers, ranks = ids.shape[0], 1 if group is None else dist.get_world_size(group)
    pairs = ids.reshape(layers, -1)
    order = pairs.argsort(dim=1, stable=True)
    inverse = order.argsort(dim=1)
    # Count every layer at once: expert e of layer l is cell l * experts + e.
    cells = pairs + experts * torch.arange(layers, device=ids.device).unsqueeze(1)
    counts = torch.bincount(cells.reshape(-1), minlength=layers * experts).view(layers, ranks, experts // ranks)
    arriving = exchange_counts(counts.transpose(0, 1), group).transpose(0, 1)  # [layers, source rank, own expert]
    return [
        Dispatch(
            ids=ids[layer],
            order=order[layer],
            inverse=inverse[layer],
            send=counts[layer].sum(dim=1).tolist(),
            receive=arriving[layer].sum(dim=1).tolist(),
            rows=arriving[layer].sum(dim=0).tolist(),
            **_regrouping(arriving[layer]),
        )
        for layer in range(layers)
    ]


def _regrouping(arriving: Tensor) -> dict[str, Tensor | None]:
    ranks, experts = arriving.shape
    if ranks == 1:
        return {"regroup": None, "restore": None}
    own = torch.arange(experts, device=arriving.device).repeat(ranks)
    regroup = torch.repeat_interleave(own, arriving.reshape(-1)).argsort(stable=True)
    return {"regroup": regroup, "restore": regroup.argsort()}


class Routing:
    """The choices of every routed layer during one forward: replayed, or made once and kept.

    It lives for one forward and travels as an argument, so a recomputation of a block, whenever and on whatever thread
    it happens, finds the same experts by layer and row and sends no counts again.
    """

    def __init__(self, experts: int, top_k: int, group: ProcessGroup | None) -> None:
        """Start with no layer chosen; every layer will choose for itself."""
        self.experts, self.top_k, self.group = experts, top_k, group
        self.dispatches: dict[int, Dispatch] = {}

    def replay(self, routes: Tensor, layers: Sequence[int]) -> None:
        """Fix the choices of `layers` to those of `routes` `[T, decoder layers, top_k]`."""
        if layers:
            ids = routes.to(torch.int64)[:, list(layers)].transpose(0, 1)
            self.dispatches = dict(zip(layers, build_dispatches(ids, self.experts, self.group), strict=True))

    def choose(self, layer: int, scores: Tensor) -> Dispatch:
        """Return the layer's dispatch; from the best of `scores` `[T, experts]` unless it is already known."""
        if layer not in self.dispatches:
            ids = scores.detach().topk(self.top_k, dim=-1).indices
            [self.dispatches[layer]] = build_dispatches(ids.unsqueeze(0), self.experts, self.group)
        return self.dispatches[layer]

    def table(self, tokens: int, layers: int, device: torch.device) -> Tensor:
        """Return int32 `[tokens, layers, top_k]` experts as chosen; layers that do not route hold -1."""
        table = torch.full((tokens, layers, self.top_k), -1, dtype=torch.int32, device=device)
        for layer, dispatch in self.dispatches.items():
            table[:, layer] = dispatch.ids.to(torch.int32)
        return table


class Experts(nn.Module):
    """This rank's share of a layer's SwiGLU experts.

    Args:
        count: routed experts of the layer, over all ranks of the group.
        hidden: D.
        intermediate: F, the width inside one expert.
        group: None holds all of them.
        dtype: of the weights.
    """

    def __init__(
        self, count: int, hidden: int, intermediate: int, group: ProcessGroup | None, dtype: torch.dtype
    ) -> None:
        """Make room for the weights; the model fills them from its seed."""
        super().__init__()
        ranks = 1 if group is None else dist.get_world_size(group)
        if count % ranks:
            raise ValueError(f"{count} experts do not divide over {ranks} ranks; choose a degree that divides them")
        self.group = group
        self.count = count
        self.first = 0 if group is None else count // ranks * dist.get_rank(group)
        self.gate_up = nn.Parameter(torch.empty(count // ranks, hidden, 2 * intermediate, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count // ranks, intermediate, hidden, dtype=dtype))

    def forward(self, hidden: Tensor, dispatch: Dispatch, weights: Tensor) -> Tensor:
        """Return `[T, D]`: for each token the weighted sum of what its experts, here or elsewhere, make of it.

        Args:
            hidden: `[T, D]`.
            dispatch: of this layer.
            weights: `[T, top_k]` share of each choice.
        """
        top_k = weights.shape[1]
        pairs = hidden.index_select(0, dispatch.order // top_k)  # [T * k, D] by expert
        arrived = exchange(pairs, dispatch.send, dispatch.receive, self.group)
        if dispatch.regroup is not None and dispatch.restore is not None:
            made = self._compute(arrived.index_select(0, dispatch.regroup), dispatch.rows)
            made = made.index_select(0, dispatch.restore)
        else:
            made = self._compute(arrived, dispatch.rows)
        returned = exchange(made, dispatch.receive, dispatch.send, self.group)
        by_token = returned.index_select(0, dispatch.inverse).view(*weights.shape, -1)  # [T, k, D]
        return (by_token * weights.unsqueeze(-1)).sum(dim=1)

    def _compute(self, hidden: Tensor, rows: list[int]) -> Tensor:
        # Experts without a row still take part, so that their gradient is zero rather than missing.
        made = []
        for part, gate_up, down in zip(
            torch.split_with_sizes(hidden, rows), self.gate_up.unbind(0), self.down.unbind(0), strict=True
        ):
            gate, up = (part @ gate_up).tensor_split(2, dim=-1)
            made.append((silu(gate) * up) @ down)
        return torch.cat(made)
