"""Stand-ins for the operations of OLMo-core that run on a GPU only; everything else of Core runs as it is.

Each replaces one leaf: a kernel, a stream, a copy. `replace_gpu_leaves` fails loudly when a name it replaces is gone.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from pack_torch import gated_delta_rule, kimi_delta_attention, short_convolution
from torch import Tensor, nn

ROUTED = "olmo_core.nn.moe.v2"

#: What the last replacement put back needs: owner, name, what was there.
_replaced: list[tuple[Any, str, Any]] = []


class Stream:
    """A CUDA stream, or an event of one, on a machine that has none: everything is done when it is asked for."""

    def wait_stream(self, other: Stream) -> None:
        """Wait for nothing."""

    def wait_event(self, event: Stream) -> None:
        """Wait for nothing."""

    def record_event(self, event: Stream | None = None) -> Stream:
        """Return an event that has happened."""
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""


class GatedNorm(nn.Module):
    """fla's `FusedRMSNormGated`: rms(x) * weight * activation(gate)."""

    def __init__(
        self,
        size: int,
        eps: float,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make room for the weight."""
        super().__init__()
        self.activation = {"swish": nn.functional.silu, "sigmoid": torch.sigmoid}[activation]
        self.eps, self.weight = eps, nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Fill the weight with ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm over the last axis."""
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return normed * self.activation(gate)


def lengths_of(rows: Tensor, boundaries: Tensor | None) -> list[int]:
    """Tokens of each document: one document when there are no boundaries."""
    assert rows.shape[0] == 1
    return [rows.shape[1]] if boundaries is None else torch.diff(boundaries).tolist()


def delta_attention(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """fla's `chunk_kda`, by the loop over tokens of `pack_torch.recurrence`."""
    boundaries = options.pop("cu_seqlens")
    assert options == {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_experimental_kernels": False,
    }, options
    decay = -A_log.exp().unsqueeze(1) * nn.functional.softplus(g + dt_bias.view(g.shape[2:]))
    rows = (part[0] for part in (q, k, v, decay, beta))
    return kimi_delta_attention(*rows, lengths_of(q, boundaries), l2norm=True, backend="torch").unsqueeze(0), None


def delta_rule(*, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
    """fla's `chunk_gated_delta_rule`, by the loop over tokens of `pack_torch.recurrence`."""
    boundaries = options.pop("cu_seqlens")
    assert options == {"use_qk_l2norm_in_kernel": True}, options
    rows = (part[0] for part in (q, k, v, g, beta))
    return gated_delta_rule(*rows, lengths_of(q, boundaries), l2norm=True, backend="torch").unsqueeze(0), None


def convolution(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, cu_seqlens: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """fla's `causal_conv1d`, by `pack_torch.recurrence`."""
    lengths = lengths_of(x, cu_seqlens)
    return short_convolution(x[0], weight, lengths, bias, activation, backend="torch").unsqueeze(0), None


def permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int, map_type: str) -> tuple[Tensor, Tensor]:
    """Transformer Engine's `moe_permute`: rows by expert, and where each (token, choice) pair went."""
    assert map_type == "index"
    order = routing_map.reshape(-1).argsort(stable=True)
    assert order.numel() == num_out_tokens
    return inp.index_select(0, order // routing_map.shape[1]), order.argsort()


def unpermute(
    inp: Tensor, row_id_map: Tensor, restore_shape: torch.Size, map_type: str, merging_probs: Tensor | None = None
) -> Tensor:
    """Transformer Engine's `moe_unpermute`: the weighted sum of each token's rows."""
    assert map_type == "index"
    rows = inp.index_select(0, row_id_map).view(restore_shape[0], -1, restore_shape[-1])
    weighed = rows if merging_probs is None else rows * merging_probs.unsqueeze(-1)
    return weighed.sum(dim=1).to(inp.dtype)


def grouped_product(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False, **options: Any) -> Tensor:
    """Grouped matrix product: the rows of each expert times its matrix."""
    assert all(value is None for value in options.values()), options
    parts = torch.split_with_sizes(a, batch_sizes.tolist())
    # Experts without a row take part, so that their gradient is zero rather than missing.
    return torch.cat(
        [rows @ (matrix.T if trans_b else matrix) for rows, matrix in zip(parts, b.unbind(0), strict=True)]
    )


def copy_to_host(buffer: Tensor, event: Any = None, return_event: bool = True) -> tuple[Tensor, Stream, Stream]:
    """The copy to pinned memory: here it is there already."""
    return buffer, Stream(), Stream()


def replace(owner: Any, name: str, value: Any) -> None:
    """Put `value` in place of a name that must be there."""
    assert hasattr(owner, name), f"{owner.__name__}.{name} is gone; look at what OLMo-core calls instead"
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def replace_gpu_leaves() -> None:
    """Replace the leaves, once; `put_back` undoes it."""
    if _replaced:
        return
    for name in ("fla", "fla.modules"):
        assert name not in sys.modules, "fla is installed here; use its own modules"
    modules = ModuleType("fla.modules")
    modules.__dict__["FusedRMSNormGated"] = GatedNorm
    sys.modules.update({"fla": ModuleType("fla"), "fla.modules": modules})
    find = importlib.import_module
    replace(find("olmo_core.nn.attention.kda"), "has_fla", lambda: True)
    replace(find("olmo_core.nn.attention.kda"), "dispatch_chunk_kda", delta_attention)
    replace(find("olmo_core.nn.attention.recurrent"), "has_fla", lambda: True)
    replace(find("olmo_core.nn.attention.recurrent"), "dispatch_chunk_gated_delta_rule", delta_rule)
    replace(find("olmo_core.nn.convolution"), "dispatch_causal_conv1d", convolution)
    for module in (find(f"{ROUTED}.no_ep"), find(f"{ROUTED}.ep_sync_1d")):
        replace(module, "moe_permute_no_compile", permute)
        replace(module, "moe_unpermute_no_compile", unpermute)
        replace(module, "async_copy_to_cpu", copy_to_host)
        replace(module, "requires_host_side_split_sizes", lambda: True)
    replace(find(f"{ROUTED}.routed_experts"), "requires_host_side_split_sizes", lambda: True)
    replace(find(f"{ROUTED}.routed_experts"), "gmm", grouped_product)
    replace(find("olmo_core.nn.ddp.block").OLMoDDPTransformerBlock, "get_dense_stream", lambda block: Stream())
    replace(find("olmo_core.nn.ddp.model").OLMoDDPModel, "_training_dtype", torch.float32)
    replace(torch.cuda, "current_stream", Stream)


def put_back() -> None:
    """Undo `replace_gpu_leaves`."""
    while _replaced:
        owner, name, value = _replaced.pop()
        setattr(owner, name, value)
    for name in ("fla", "fla.modules"):
        sys.modules.pop(name, None)
