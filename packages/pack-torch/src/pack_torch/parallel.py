"""Process groups of a topology, and the few collectives training needs: one gradient reduction an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist
from pack_core import Topology
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter


@attrs.frozen(eq=False)
class Groups:
    """The process groups this rank is in. A group of one rank is None, and None never communicates.

    Args:
        topology: ranks and expert-parallel degree.
        world: every rank; dense gradients are summed over it.
        expert: the ranks of this rank's replica, which share one complete expert set; tokens travel inside it.
        expert_data: the ranks that hold the same experts as this one; expert gradients are summed over it.
    """

    topology: Topology
    world: ProcessGroup | None = None
    expert: ProcessGroup | None = None
    expert_data: ProcessGroup | None = None


class ShardedModel(Protocol):
    """A model that tells its experts, which differ inside a replica, from everything else."""

    def dense_parameters(self) -> list[Parameter]:
        """Return the parameters every rank holds."""

    def expert_parameters(self) -> list[Parameter]:
        """Return this rank's share of the experts."""


def build_groups(topology: Topology, timeout: timedelta | None = None) -> Groups:
    """Return this rank's process groups. Every rank calls it, once, with the same topology.

    Replicas are contiguous ranks; `expert_data` joins the ranks that are the same destination of different replicas.
    New groups do not take over the world's `timeout`, so give it again.

    Raises:
        ValueError: the running world does not have `topology.ranks` ranks.

    >>> build_groups(Topology(ranks=1)).world is None
    True
    """
    running = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if running != topology.ranks:
        raise ValueError(f"the topology has {topology.ranks} ranks but {running} are running; start that many")
    if topology.ranks == 1:
        return Groups(topology)
    ranks = range(topology.ranks)
    replicas = [[r for r in ranks if topology.replica(r) == replica] for replica in range(topology.replicas)]
    twins = [[r for r in ranks if topology.destination(r) == place] for place in range(topology.expert_parallel)]
    return Groups(topology, dist.group.WORLD, _join(replicas, timeout), _join(twins, timeout))


def _join(partition: Sequence[list[int]], timeout: timedelta | None) -> ProcessGroup | None:
    # Making a group is collective over the world: every rank makes every group, in one order, and keeps its own.
    own = None
    for ranks in partition:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


def exchange(rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup | None) -> Tensor:
    """Return the rows the other ranks of `group` sent here; gradients travel back the same way.

    Every rank of the group calls it, also with nothing to send, and its gradient makes every rank communicate again.

    Args:
        rows: `[sum(send), ...]`, those for rank 0 of the group first.
        send: rows for each rank.
        receive: rows from each rank.
        group: None returns `rows`.

    Returns:
        `[sum(receive), ...]`, those of rank 0 first.

    >>> exchange(torch.ones(2, 3), [2], [2], None).shape
    torch.Size([2, 3])
    """
    if group is None:
        return rows
    return _Exchange.apply(rows, send, receive, group)  # type: ignore[no-any-return, no-untyped-call]


def exchange_counts(counts: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return `[ranks, ...]` what every rank of `group` counted for this one.

    Args:
        counts: `[ranks, ...]` int64, row d for rank d of the group.
        group: None returns `counts`.
    """
    if group is None:
        return counts
    sent = counts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def reduce_gradients(model: ShardedModel, groups: Groups) -> None:
    """Sum every gradient over the ranks that share its parameter. Call it once, after the last pack's backward.

    One all-reduce for the dense parameters and one for the experts, however many packs there were; none where the
    group is None. A parameter without a gradient counts as zeros. Sums, not means: losses already are divided by the
    global denominator.
    """
    _sum_gradients(model.dense_parameters(), groups.world)
    _sum_gradients(model.expert_parameters(), groups.expert_data)


def _sum_gradients(parameters: list[Parameter], group: ProcessGroup | None) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if group is None or not parameters:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(gradients, torch.split_with_sizes(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def gradient_norm(model: ShardedModel, groups: Groups) -> float:
    """Return the L2 norm of the whole model's gradient, the same on every rank; call it after `reduce_gradients`.

    Computed in float64. With an expert group it costs one all-reduce of one number: experts elsewhere count too.
    """
    experts = _squares(model.expert_parameters())
    if groups.expert is not None:
        dist.all_reduce(experts, group=groups.expert)
    return float((experts + _squares(model.dense_parameters())).sqrt())


def _squares(parameters: Iterable[Parameter]) -> Tensor:
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def clip_gradients(model: ShardedModel, max_norm: float, groups: Groups) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before.

    A norm that is not finite leaves the gradients as they are, for the caller to refuse the step.

    Args:
        model: after `reduce_gradients`.
        max_norm: above 0; 0 or less never scales.
        groups: this rank's.
    """
    norm = gradient_norm(model, groups)
    if 0 < max_norm < norm < float("inf"):
        for parameter in [*model.dense_parameters(), *model.expert_parameters()]:
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / norm)
    return norm
