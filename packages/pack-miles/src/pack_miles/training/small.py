"""The small model as the trainer asks for one."""

from collections.abc import Mapping
from typing import Self

from pack_torch import SmallModel, full_state, load_full_state
from torch import Tensor

from pack_miles.settings.geometry import Geometry


class SmallPolicy(SmallModel):
    """A `SmallModel` that satisfies `pack_miles.training.policy.Policy`: same weights, same calls."""

    @property
    def geometry(self) -> Geometry:
        """The sizes it was built with."""
        own = self.config
        return Geometry(
            own.num_hidden_layers, own.vocab_size, own.moe_layers, own.n_routed_experts, own.num_experts_per_tok
        )

    def auxiliary_losses(self) -> list[str]:
        """Return none: the trainer asks the small model for no router loss."""
        return []

    def dividing(self, loss_div_factor: float) -> Self:
        """Return this model, which has nothing to divide."""
        return self

    def stochastic(self) -> list[str]:
        """Return what draws random numbers in training."""
        return [f"dropout {self.config.dropout:g}"] if self.config.dropout > 0 else []

    def full_state(self) -> dict[str, Tensor]:
        """Return a copy of every parameter, all experts gathered; every rank of the expert group calls it."""
        return full_state(self)

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's share of what `full_state` returned."""
        load_full_state(self, state)
