"""The sizes of the small model."""

from __future__ import annotations

from collections.abc import Iterable

import attrs


def _as_tuple(layers: Iterable[int]) -> tuple[int, ...]:
    return tuple(layers)


@attrs.frozen
class ModelConfig:
    """The sizes of a `SmallModel`; names are those of the usual model configuration files.

    `sliding_window` counts the token itself: it sees that many tokens of its own document at most; None, all its past.

    Raises:
        ValueError: sizes that do not fit together; names both.

    >>> ModelConfig(16, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
    ...             moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2).moe_layers
    (1, 2)
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    dense_layers_indices: tuple[int, ...] = attrs.field(default=(0,), converter=_as_tuple)
    dropout: float = 0.0
    rope_theta: float = 10000.0
    sliding_window: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check that the sizes fit together."""
        for field in attrs.fields(ModelConfig):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{field.name} is {value} but must be at least 1")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_attention_heads "
                f"{self.num_attention_heads}, for positions turn pairs inside a head"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is over n_routed_experts {self.n_routed_experts}"
            )
        for layer in self.dense_layers_indices:
            if not 0 <= layer < self.num_hidden_layers:
                raise ValueError(f"dense_layers_indices names {layer} but layers are 0 to {self.num_hidden_layers - 1}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout} but must be at least 0 and below 1")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that route, in order."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.dense_layers_indices)
