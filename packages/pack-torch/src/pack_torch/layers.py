"""The layers of the small model: attention, dense and routed MLPs, and the block that joins them.

Shapes: T tokens of the row, D hidden size, H heads, E experts.
"""

from __future__ import annotations

from typing import cast

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import dropout, linear, rms_norm, silu, softplus

from pack_torch.attention import AttentionBackend
from pack_torch.batch import PackedBatch
from pack_torch.config import ModelConfig
from pack_torch.experts import Experts, Routing
from pack_torch.precision import wide
from pack_torch.recurrence import kimi_delta_attention, short_convolution

NORM_EPSILON = 1e-6


@attrs.frozen(eq=False)
class Context:
    """What every block of one forward shares, so that running a block again needs nothing else."""

    batch: PackedBatch
    cos: Tensor  # [T, 1, head size / 2]
    sin: Tensor
    routing: Routing
    router_logits: list[Tensor] | None = None  # one block's, which appends [T, E] where it routes; None keeps nothing


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


class KimiDeltaAttention(nn.Module):
    """Linear attention by the delta rule, with a decay of its own for every channel; memory ends with the document.

    Queries, keys and values pass a short causal convolution and SiLU, queries and keys are normed to length 1. The
    logarithm of a channel's decay is -exp(A_log) softplus(gate + dt_bias). What is read is normed per head and gated.

    Kimi Linear (Kimi Team, 2025, arXiv 2510.26692, section 4).
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Make room for the weights."""
        super().__init__()
        self.heads, self.size = config.num_attention_heads, config.linear_head_dim
        hidden, width = config.hidden_size, config.num_attention_heads * config.linear_head_dim
        self.qkv = weight(3 * width, hidden, dtype=dtype)
        self.taps = weight(3 * width, config.linear_conv_kernel_dim, dtype=dtype)
        self.decay_narrow = weight(self.size, hidden, dtype=dtype)
        self.decay_wide = weight(width, self.size, dtype=dtype)
        self.A_log = weight(self.heads, dtype=dtype)
        self.dt_bias = weight(width, dtype=dtype)
        self.beta = weight(self.heads, hidden, dtype=dtype)
        self.gate_narrow = weight(self.size, hidden, dtype=dtype)
        self.gate_wide = weight(width, self.size, dtype=dtype)
        self.norm = weight(self.size, dtype=dtype)
        self.out = weight(hidden, width, dtype=dtype)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Return `[T, D]` for `[T, D]`."""
        heads = (-1, self.heads, self.size)
        lengths = context.batch.doc_lens
        mixed = short_convolution(linear(hidden, self.qkv), self.taps, lengths, activation="silu")
        query, key, value = (part.view(heads) for part in mixed.tensor_split(3, dim=-1))
        steps = wide(linear(linear(hidden, self.decay_narrow), self.decay_wide)) + wide(self.dt_bias)
        decay = -wide(self.A_log).exp().unsqueeze(1) * softplus(steps).view(heads)  # [T, H, K]
        beta = wide(linear(hidden, self.beta)).sigmoid()  # [T, H]
        read = kimi_delta_attention(query, key, value, decay, beta, lengths, l2norm=True)
        gate = linear(linear(hidden, self.gate_narrow), self.gate_wide).sigmoid()
        return linear(norm(read, self.norm).flatten(1) * gate, self.out)


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

    With a latent width, tokens are projected down before they are sent to experts and up once their shares are summed.
    Ids may come from a record, shares never do: they are read from the live scores at those ids, so the router learns.
    """

    def __init__(self, config: ModelConfig, layer: int, group: ProcessGroup | None, dtype: torch.dtype) -> None:
        """Make room for the weights."""
        super().__init__()
        self.layer = layer
        self.router = weight(config.n_routed_experts, config.hidden_size, dtype=dtype)
        latent = config.moe_latent_dim
        self.experts = Experts(
            config.n_routed_experts, latent or config.hidden_size, config.moe_intermediate_size, group, dtype
        )
        self.latent_in = None if latent is None else weight(latent, config.hidden_size, dtype=dtype)
        self.latent_out = None if latent is None else weight(config.hidden_size, latent, dtype=dtype)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Return `[T, D]` for `[T, D]`."""
        logits = wide(linear(hidden, self.router))  # [T, E]
        if context.router_logits is not None:
            context.router_logits.append(logits)
        scores = torch.softmax(logits, dim=-1)
        dispatch = context.routing.choose(self.layer, scores)
        chosen = scores.gather(1, dispatch.ids)
        shares = (chosen / chosen.sum(dim=-1, keepdim=True)).to(hidden.dtype)
        if self.latent_in is None or self.latent_out is None:
            return cast(Tensor, self.experts(hidden, dispatch, shares))
        return linear(self.experts(linear(hidden, self.latent_in), dispatch, shares), self.latent_out)


class Block(nn.Module):
    """Full or linear attention, then a dense or routed MLP, each on a normed input and added back."""

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
        full = config.layer_type(layer) == "full_attention"
        self.attention = Attention(config, backend, dtype) if full else KimiDeltaAttention(config, dtype)
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
    """Return `hidden` `[..., D]` over its root mean square, times `scale` `[D]` (RMSNorm, Zhang and Sennrich, 2019)."""
    return rms_norm(hidden, scale.shape, scale, NORM_EPSILON)
