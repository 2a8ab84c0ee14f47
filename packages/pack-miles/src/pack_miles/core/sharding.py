"""The routed experts of an OLMo-core model spread over ranks, and its weights gathered to one whole and shared out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from pack_core import Topology
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from pack_miles.core.replay import blocks
from pack_miles.errors import InputError

#: What recomputation puts into the names of a block's parameters.
WRAPPED = "_checkpoint_wrapped_module."


def shard_experts(core: Any, topology: Topology, group: ProcessGroup | None = None) -> Any:
    """Keep this rank's share of every layer's routed experts, and exchange tokens with the ranks that hold the others.

    Every rank calls it on a model with the same weights, before an optimizer sees them; the degree then changes no
    result. Replicas are contiguous ranks, as everywhere here.

    Args:
        core: a built `OLMoDDPModel`.
        topology: ranks and expert-parallel degree; degree 1 leaves the model as it is.
        group: the ranks of this replica, over which tokens travel; None makes one, with the default timeout.

    Raises:
        InputError: no layer has routed experts, or the degree does not divide them.
    """
    degree = topology.expert_parallel
    if degree == 1:
        return core
    found = routed_experts(core)
    if not found:
        raise InputError(f"expert_parallel_size = {degree} but no layer has routed experts; set it to 1")
    for layer, experts in found.items():
        if experts.num_experts % degree:
            raise InputError(
                f"blocks.{layer} has {experts.num_experts} experts, which do not divide over expert_parallel_size = "
                f"{degree}; choose a degree that divides them"
            )
    whole = {layer: dict(experts.named_parameters()) for layer, experts in found.items()}
    kind = next(core.parameters()).device.type
    mesh = init_device_mesh(kind, (topology.replicas, degree), mesh_dim_names=("ep_dp", "ep_mp"))
    core.apply_ep(dp_mesh=None, ep_mesh=mesh, ep_mp_group=group)
    place = mesh["ep_mp"].get_local_rank()
    with torch.no_grad():
        for layer, experts in found.items():
            for name, parameter in experts.named_parameters():
                parameter.copy_(whole[layer][name].tensor_split(degree)[place])
    return core


def routed_experts(core: Any) -> dict[int, Any]:
    """Return the routed experts of every layer that has some, by layer."""
    found = {layer: getattr(block, "routed_experts", None) for layer, block in blocks(core).items()}
    return {layer: experts for layer, experts in found.items() if experts is not None}


def gather_state(model: nn.Module, experts: Iterable[nn.Parameter], group: ProcessGroup | None) -> dict[str, Tensor]:
    """Return a copy of every parameter by name, those of `experts` gathered over `group`, whose ranks all call it.

    Names are the same with recomputation and without.
    """
    own = {id(parameter) for parameter in experts}
    return {
        name: _gather(parameter.detach(), group) if id(parameter) in own else parameter.detach().clone()
        for name, parameter in _named(model).items()
    }


def scatter_state(
    model: nn.Module, experts: Iterable[nn.Parameter], group: ProcessGroup | None, state: Mapping[str, Tensor]
) -> None:
    """Set every parameter from what `gather_state` returned, those of `experts` to this rank's share; all or none.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs; names it.
    """
    own, parameters = {id(parameter) for parameter in experts}, _named(model)
    differing = sorted(parameters.keys() ^ state.keys())
    if differing:
        raise ValueError(
            f"the state and the model differ in {differing[0]} ({len(differing)} in all); were they alike?"
        )
    shares = {name: _share(state[name], group) if id(p) in own else state[name] for name, p in parameters.items()}
    for name, parameter in parameters.items():
        if shares[name].shape != parameter.shape:
            raise ValueError(
                f"{name} has shape {list(shares[name].shape)} in the state but {list(parameter.shape)} in the model; "
                "was it saved from a model of other sizes?"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shares[name])


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.replace(WRAPPED, ""): parameter for name, parameter in model.named_parameters()}


def _gather(share: Tensor, group: ProcessGroup | None) -> Tensor:
    if group is None:
        return share.clone()
    parts = [torch.empty_like(share) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, share.contiguous(), group=group)
    return torch.cat(parts)


def _share(whole: Tensor, group: ProcessGroup | None) -> Tensor:
    return whole if group is None else whole.chunk(dist.get_world_size(group))[dist.get_rank(group)]
