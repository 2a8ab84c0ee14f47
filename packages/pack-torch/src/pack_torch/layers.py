"""The layers of the small model: attention, dense and routed MLPs, and the block that joins them.

Shapes: T tokens of the row, D hidden size, H heads, E experts.
"""

from __future__ import annotations

from typing import cast

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import dropout, linear, rms_norm, silu

from pack_torch.attention import AttentionBackend
from pack_torch.batch import PackedBatch
from pack_torch.config import ModelConfig
from pack_torch.experts import Experts, Routing

NORM_EPSILON = 1e-6


@attrs.frozen(eq=False)
class Context:
    """What every block of one forward shares, so that running a block again needs nothing else."""

    batch: PackedBatch
    cos: Tensor  # [T, 1, head size / 2]
    sin: Tensor
    routing: Routing


def rotation(position_ids: Tensor, size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine `[T, 1, size / 2]` of every position's angles; angles are taken in float64.

    RoPE (Su et al., 2021, section 3.2.2).

    >>> cos, sin = rotation(torch.tensor([0, 1]), 2, 10000.0, torch.float64)
    >>> cos[:, 0, 0].tolist() == [1.0, torch.tensor(1.0, dtype=torch.float64).cos().item()]
    True
    """
    steps = torch.arange(0, size, 2, dtype=torch.float64, device=position_ids.device)
    angles = position_ids.to(torch.float64).unsqueeze(1) * theta ** (-steps / size)
    return angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)


def _rotate(heads: Tensor, context: Context) -> Tensor:
    first, second = heads.tensor_split(2, dim=-1)  # [T, H, head size / 2] each
    cos, sin = context.cos, context.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an unfilled parameter; `draw_weights` fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


class Attention(nn.Module):
    """Causal self-attention inside each document."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype) -> None:
        """Make room for the weights."""
        super().__init__()
        self.heads, self.backend, self.window = config.num_attention_heads, backend, config.sliding_window
        self.qkv = weight(3 * config.hidden_size, config.hidden_size, dtype=dtype)
        self.out = weight(config.hidden_size, config.hidden_size, dtype=dtype)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Return `[T, D]` for `[T, D]`."""
        tokens, size = hidden.shape
        query, key, value = linear(hidden, self.qkv).view(tokens, 3, self.heads, size // self.heads).unbind(1)
        query, key = _rotate(query, context), _rotate(key, context)
        attended = self.backend(query, key, value, context.batch, window=self.window)
        return linear(attended.reshape(tokens, size), self.out)


class DenseMLP(nn.Module):
    """SwiGLU on every token (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Make room for the weights."""
        super().__init__()
        self.gate_up = weight(2 * config.intermediate_size, config.hidden_size, dtype=dtype)
        self.down = weight(config.hidden_size, config.intermediate_size, dtype=dtype)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Return `[T, D]` for `[T, D]`."""
        gate, up = linear(hidden, self.gate_up).tensor_split(2, dim=-1)
        return linear(silu(gate) * up, self.down)


class MoEMLP(nn.Module):
    """A softmax router over experts: each token's top-k, their shares summing to one.

    Ids may come from a record, shares never do: they are read from the live scores at those ids, so the router learns.
    """

    def __init__(self, config: ModelConfig, layer: int, group: ProcessGroup | None, dtype: torch.dtype) -> None:
        """Make room for the weights."""
        super().__init__()
        self.layer = layer
        self.router = weight(config.n_routed_experts, config.hidden_size, dtype=dtype)
        self.experts = Experts(
            config.n_routed_experts, config.hidden_size, config.moe_intermediate_size, group=group, dtype=dtype
        )

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Return `[T, D]` for `[T, D]`."""
        logits = linear(hidden, self.router)  # [T, E]
        scores = torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
        dispatch = context.routing.choose(self.layer, scores)
        chosen = scores.gather(1, dispatch.ids)
        shares = (chosen / chosen.sum(dim=-1, keepdim=True)).to(hidden.dtype)
        return cast(Tensor, self.experts(hidden, dispatch, shares))


class Block(nn.Module):
    """Attention, then a dense or routed MLP, each on a normed input and added back."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        backend: AttentionBackend,
        group: ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        """Make the layer's parts."""
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = weight(config.hidden_size, dtype=dtype)
        self.attention = Attention(config, backend, dtype)
        self.mlp_norm = weight(config.hidden_size, dtype=dtype)
        dense = layer in config.dense_layers_indices
        self.mlp = DenseMLP(config, dtype) if dense else MoEMLP(config, layer, group, dtype)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Return `[T, D]` for `[T, D]`."""
        hidden = hidden + self._drop(self.attention(norm(hidden, self.attention_norm), context))
        return hidden + self._drop(self.mlp(norm(hidden, self.mlp_norm), context))

    def _drop(self, hidden: Tensor) -> Tensor:
        return dropout(hidden, self.dropout) if self.dropout > 0 and self.training else hidden


def norm(hidden: Tensor, scale: Tensor) -> Tensor:
    """Return `hidden` `[T, D]` over its root mean square, times `scale` `[D]` (RMSNorm, Zhang and Sennrich, 2019)."""
    return rms_norm(hidden, scale.shape, scale, NORM_EPSILON)
