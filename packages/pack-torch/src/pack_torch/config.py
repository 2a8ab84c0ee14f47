"""The sizes of the small model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import attrs

LayerType = Literal["full_attention", "linear_attention"]


def _as_tuple(layers: Iterable[int]) -> tuple[int, ...]:
    return tuple(layers)


def _as_types(types: Iterable[LayerType] | None) -> tuple[LayerType, ...] | None:
    return None if types is None else tuple(types)


@attrs.frozen
class ModelConfig:
    """The sizes of a `SmallModel`; names are those of the usual model configuration files.

    `sliding_window` counts the token itself: it sees that many tokens of its own document at most; None, all its past.
    `layer_types` says how each layer mixes tokens: `full_attention`, or `linear_attention` for Kimi delta attention,
    whose heads are `linear_key_head_dim` wide (None: as those of full attention) behind convolutions over
    `linear_conv_kernel_dim` tokens. None is full attention everywhere.
    `moe_latent_dim` is the width experts see, below `hidden_size`; None, the full one, which the router always sees.

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
    layer_types: tuple[LayerType, ...] | None = attrs.field(default=None, converter=_as_types)
    linear_key_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    moe_latent_dim: int | None = None

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
        self._check_mixers()
        if self.moe_latent_dim is not None and self.moe_latent_dim >= self.hidden_size:
            raise ValueError(
                f"moe_latent_dim {self.moe_latent_dim} must be below hidden_size {self.hidden_size}; None gives the "
                "experts the full width"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout} but must be at least 0 and below 1")

    def _check_mixers(self) -> None:
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers but num_hidden_layers is {self.num_hidden_layers}"
            )
        for layer, kind in enumerate(self.layer_types):
            if kind not in get_args(LayerType):
                raise ValueError(
                    f"layer_types has {kind!r} for layer {layer} but must be one of {', '.join(get_args(LayerType))}"
                )

    def layer_type(self, layer: int) -> LayerType:
        """How `layer` mixes tokens."""
        return "full_attention" if self.layer_types is None else self.layer_types[layer]

    @property
    def linear_head_dim(self) -> int:
        """The width of a head of Kimi delta attention: of its queries, keys and values."""
        return self.linear_key_head_dim or self.hidden_size // self.num_attention_heads

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that route, in order."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.dense_layers_indices)
