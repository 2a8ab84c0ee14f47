"""The weights of a sharded model as one whole: drawn from a seed, gathered, and loaded back for any degree."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pack_torch.experts import Experts

#: Weights that write into the residual stream; they start smaller the more of them there are.
RESIDUAL_WEIGHTS = ("out", "down")


def _owners(model: nn.Module) -> dict[str, Experts]:
    """Return the experts module of every parameter that one holds, by the parameter's name."""
    return {
        f"{path}.{name}": module
        for path, module in model.named_modules()
        if isinstance(module, Experts)
        for name, _ in module.named_parameters()
    }


def draw_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter from `seed`, alike on every rank and for every expert-parallel degree.

    Norms are 1, the embedding has deviation 1, the head 0.02 so that the first policy is nearly uniform; other weights
    have deviation 1/sqrt(inputs), those that write into the residual stream divided by sqrt(their number). The decay of
    linear attention starts with rates exp(A_log) uniform in 1 to 16 and steps softplus(dt_bias) log-uniform in 0.001 to
    0.1, as in Mamba (Gu and Dao, 2023, section 3.6), so that channels remember over a few to a thousand tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = _owners(model)
    residual = sum(name.rpartition(".")[2] in RESIDUAL_WEIGHTS for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ("A_log", "dt_bias"):
            _draw_decay(name.rpartition(".")[2], parameter, generator)
            continue
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            continue
        owner = owners.get(name)
        shape = list(parameter.shape) if owner is None else [owner.count, *parameter.shape[1:]]
        # All experts are drawn on every rank, or the numbers after them would depend on the degree.
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * _deviation(name, shape, residual)
        with torch.no_grad():
            parameter.copy_(_share(drawn, owner))


def _draw_decay(kind: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
    if kind == "A_log":
        drawn = (1 + 15 * drawn).log()
    else:
        steps = (math.log(0.001) + drawn * math.log(100)).exp()
        drawn = steps + (-torch.expm1(-steps)).log()  # the inverse of softplus
    with torch.no_grad():
        parameter.copy_(drawn)


def _deviation(name: str, shape: list[int], residual: int) -> float:
    if name == "embedding":
        return 1.0
    if name.startswith("head."):
        return 0.02
    scale = 1 / math.sqrt(residual) if name.rpartition(".")[2] in RESIDUAL_WEIGHTS else 1.0
    return scale / math.sqrt(shape[1])  # inputs are the second axis of both linear and expert weights


def _share(whole: Tensor, owner: Experts | None) -> Tensor:
    return whole if owner is None else whole[owner.first : owner.first + owner.gate_up.shape[0]]


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter by name, experts gathered over the expert group; the same on every rank of it.

    Every rank of the expert group calls it.

    Returns:
        Name to tensor; expert weights are `[experts of the layer, ...]`.

    >>> full_state(nn.Linear(2, 3, bias=False))["weight"].shape
    torch.Size([3, 2])
    """
    owners = _owners(model)
    return {name: gather(parameter.detach(), owners.get(name)) for name, parameter in model.named_parameters()}


def gather(share: Tensor, owner: Experts | None) -> Tensor:
    """Return a copy of the whole of which `share` is this rank's part, as `owner` spreads it; None spreads nothing."""
    if owner is None or owner.group is None:
        return share.clone()
    parts = [torch.empty_like(share) for _ in range(dist.get_world_size(owner.group))]
    dist.all_gather(parts, share.contiguous(), group=owner.group)
    return torch.cat(parts)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient by name, gathered as `full_state` does; a missing gradient is zeros."""
    owners = _owners(model)
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return {name: gather(gradient, owners.get(name)) for name, gradient in gradients.items()}


def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set every parameter from what `full_state` returned, under this or any other expert-parallel degree.

    Nothing is changed unless everything fits.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs; names it.

    >>> from pack_torch import ModelConfig, SmallModel
    >>> sizes = ModelConfig(8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
    ...                     moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2)
    >>> first, second = SmallModel(sizes, seed=0), SmallModel(sizes, seed=1)
    >>> load_full_state(second, full_state(first))
    >>> torch.equal(first.embedding, second.embedding)
    True
    """
    parameters = dict(model.named_parameters())
    owners = _owners(model)
    differing = sorted(parameters.keys() ^ state.keys())
    if differing:
        raise ValueError(f"the state and the model differ in {', '.join(differing)}; was it saved from another model?")
    shares = {name: _share(whole, owners.get(name)) for name, whole in state.items()}
    for name, parameter in parameters.items():
        owner = owners.get(name)
        expected = tuple(parameter.shape) if owner is None else (owner.count, *parameter.shape[1:])
        if tuple(state[name].shape) != expected:
            raise ValueError(
                f"{name} has shape {list(state[name].shape)} in the state but {list(expected)} in the model; was it "
                "saved from a model of other sizes?"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shares[name])
