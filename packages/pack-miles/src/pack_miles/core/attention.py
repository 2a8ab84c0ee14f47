"""Attention for OLMo-core layers where its flash kernels cannot run, and a check of how it calls flash-attention 4."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from pack_torch import PackedBatch, get_attention
from pack_torch.flash import missing_4
from torch import Tensor, nn

from pack_miles.core.library import Library, load
from pack_miles.errors import InputError

#: What flash-attention 4 must be told by name. Its fourth positional parameter is not the same in all releases.
BY_KEYWORD = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@cache
def segment_backend() -> type[nn.Module]:
    """Return the class of an OLMo-core attention backend that runs anywhere: one call per document length.

    It is a subclass of Core's `TorchAttentionBackend`, which refuses rows of documents; without document lengths it is
    that class. Exact in every precision, with sliding windows and gradients; no attention sinks, no dropout.
    """
    base: Any = load().TorchBackend

    class SegmentAttentionBackend(base):  # type: ignore[misc]
        """Core's torch attention, each document of a packed row by itself."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(
            self,
            qkv: Any,
            cu_doc_lens: Tensor | None = None,
            max_doc_len: int | None = None,
            sinks: Tensor | None = None,
            **others: Any,
        ) -> Tensor:
            """Return `[B, T, heads, size]` for `(q, k, v)` of such shapes; documents run over the flattened batch."""
            if cu_doc_lens is None:
                return base.forward(self, qkv, sinks=sinks, **others)  # type: ignore[no-any-return]
            given = [name for name, value in {"sinks": sinks, **others}.items() if value is not None]
            if given or self.dropout_p or isinstance(qkv, Tensor):
                what = ", ".join(given) or ("packed QKV" if isinstance(qkv, Tensor) else f"dropout {self.dropout_p}")
                raise NotImplementedError(f"segment attention of packed documents does not take {what}")
            q, k, v = (part.flatten(0, 1) for part in qkv)
            lengths = torch.diff(cu_doc_lens).tolist()
            # Only the lengths of this row matter to attention.
            row = PackedBatch(torch.zeros(sum(lengths), dtype=torch.int64, device=q.device), lengths)
            window = None if self.window_size == (-1, -1) else self.window_size[0] + 1
            scale = self.head_dim**-0.5 if self.scale is None else self.scale
            # The function scales by the root of the head size; what is asked beyond that goes into the queries.
            factor = scale * self.head_dim**0.5
            q = q if factor == 1.0 else q * factor
            attended = get_attention("segment")(q, k, v, row, window=window)
            return attended.view(*qkv[0].shape)

    return SegmentAttentionBackend


def use_segment(core: nn.Module) -> None:
    """Give every attention layer of a built model the segment backend in place of Core's torch attention."""
    library = load()
    for module in core.modules():
        if isinstance(module, library.Attention) and type(module.backend) is library.TorchBackend:
            # Same state, other forward: whatever the constructor worked out stays as it is.
            module.backend.__class__ = segment_backend()


def check_flash_4(library: Library, kernel: Callable[..., Any] | None = None) -> None:
    """Raise unless Core hands flash-attention 4 its document boundaries by name, and the kernel takes those names.

    flash-attention 4 put a parameter between `v` and `cu_seqlens_q` in one of its pre-releases: handed over by place,
    the boundaries land in it. Core's own function is run with a kernel that only looks at what it is given.

    Args:
        library: OLMo-core.
        kernel: `flash_attn_varlen_func`; None takes the installed one.

    Raises:
        InputError: says what was bound how, or what is not installed.
    """
    seen: dict[str, Any] = {}

    def look(*arguments: Any, **named: Any) -> list[Tensor]:
        seen.update(arguments=arguments, named=named)
        return [arguments[0]]

    original = inspect.unwrap(library.dispatch_flash_4)
    watching = SimpleNamespace(flash_attn_varlen_func=look, flash_attn_func=look)
    probe = FunctionType(
        original.__code__, {**original.__globals__, "flash_attn_4": watching}, None, original.__defaults__
    )
    probe.__kwdefaults__ = original.__kwdefaults__
    rows, boundaries = torch.zeros(1, 3, 1, 8), torch.tensor([0, 2, 3], dtype=torch.int32)
    probe(rows, rows, rows, cu_seqlens=boundaries, max_seqlen=2, causal=True)
    named = seen["named"]
    wrong = [name for name in BY_KEYWORD if name not in named]
    if len(seen["arguments"]) != 3 or wrong:
        raise InputError(
            f"ai2-olmo-core {library.version} calls flash-attention 4 with {len(seen['arguments'])} arguments by place "
            f"and without the names {', '.join(wrong) or 'it should'}; its releases disagree on the places, so use a "
            "Core that binds them by name (3.0.0 does), or attention_backend = flash_2"
        )
    if kernel is None:
        lack = missing_4()
        if lack:
            raise InputError(f"attention_backend = 'flash_4': {lack}")
        return
    parameters = inspect.signature(kernel).parameters
    unknown = [name for name in named if name not in parameters]
    if unknown:
        raise InputError(
            f"this flash-attention 4 does not take {', '.join(unknown)}, which ai2-olmo-core {library.version} gives "
            "it; install flash-attn-4 4.0.0b10 or newer"
        )
