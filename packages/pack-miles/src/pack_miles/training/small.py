"""The small model as the trainer asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs
import torch
from pack_torch import (
    ModelConfig,
    ModelOutput,
    PackedBatch,
    SmallModel,
    full_state,
    load_balancing_loss,
    load_full_state,
    router_z_loss,
)
from torch import Tensor

from pack_miles.settings.geometry import Geometry


@attrs.frozen
class RouterWeights:
    """What the routers' auxiliary losses weigh: the load-balancing loss of a forward's tokens, and the z-loss."""

    load_balancing: float = 0.0
    z: float = 0.0


class SmallPolicy(SmallModel):
    """A `SmallModel` that satisfies `pack_miles.training.policy.Policy`: same weights, same calls.

    Args:
        config: sizes.
        router_weights: of the auxiliary losses that a training forward adds, as OLMo-core's does.
        options: those of `SmallModel`.
    """

    def __init__(self, config: ModelConfig, *, router_weights: RouterWeights | None = None, **options: Any) -> None:
        """Build the model."""
        super().__init__(config, **options)
        self.router_weights = router_weights or RouterWeights()

    @property
    def geometry(self) -> Geometry:
        """The sizes it was built with."""
        own = self.config
        return Geometry(
            own.num_hidden_layers, own.vocab_size, own.moe_layers, own.n_routed_experts, own.num_experts_per_tok
        )

    def auxiliary_losses(self) -> list[str]:
        """Return the router losses that are on, by the names of their options."""
        weights = {
            "router_aux_loss_weight": self.router_weights.load_balancing,
            "router_z_loss_weight": self.router_weights.z,
        }
        return [name for name, weight in weights.items() if weight]

    def dividing(self, loss_div_factor: float) -> Adding:
        """Return this model for training: its backward adds the router losses, divided by the factor."""
        return Adding(self, loss_div_factor)

    def stochastic(self) -> list[str]:
        """Return what draws random numbers in training."""
        return [f"dropout {self.config.dropout:g}"] if self.config.dropout > 0 else []

    def full_state(self) -> dict[str, Tensor]:
        """Return a copy of every parameter, all experts gathered; every rank of the expert group calls it."""
        return full_state(self)

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's share of what `full_state` returned."""
        load_full_state(self, state)


@attrs.frozen(eq=False)
class Adding:
    """A model whose backward adds its router losses to whatever loss is made of its output, with weight 1."""

    model: SmallPolicy
    loss_div_factor: float

    def __call__(self, batch: PackedBatch) -> ModelOutput:
        """Return the model's output for the batch, the router losses riding on it."""
        if not (torch.is_grad_enabled() and self.model.auxiliary_losses()):
            return cast(ModelOutput, self.model(batch))
        output: ModelOutput = self.model(batch, router_logits=True)
        weights, total = self.model.router_weights, output.hidden.new_zeros(())
        logits = cast(Tensor, output.router_logits)
        if weights.load_balancing:
            routes = output.routes[:, list(self.model.config.moe_layers)]
            total = total + weights.load_balancing * load_balancing_loss(logits, routes, batch.doc_lens).numerator
        if weights.z:
            total = total + weights.z * router_z_loss(logits, batch.doc_lens).numerator
        hidden = cast(Tensor, _Riding.apply(output.hidden, total / self.loss_div_factor))  # type: ignore[no-untyped-call]
        return attrs.evolve(output, hidden=hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[rows, V]` for `[rows, D]`."""
        return self.model.logits(hidden)


class _Riding(torch.autograd.Function):
    """Passes a tensor through and gives a loss that rides on it the gradient 1 in the backward."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        """Return the carrier."""
        ctx.kind = (loss.dtype, loss.device)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the carrier's gradient as it came, and 1 for the loss."""
        dtype, device = ctx.kind
        return gradients[0], torch.ones((), dtype=dtype, device=device)
