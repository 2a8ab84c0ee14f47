"""Attention backends by name: whether each keeps the documents of a packed row apart, and what else it can."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TypedDict

import attrs
import torch
from torch import Tensor

from pack_torch import flash, flex, jagged, sdpa, varlen
from pack_torch.batch import PackedBatch
from pack_torch.hardware import Capabilities, Hardware, hardware_of
from pack_torch.masks import check_window

#: query, key, value `[T, heads, head size]` and the batch they come from, to `[T, heads, head size]`. One that
#: declares a window or dropout takes `window` or `dropout` by keyword besides.
AttentionFunction = Callable[..., Tensor]

HALF = (torch.float16, torch.bfloat16)


def nothing_missing() -> str:
    """Return "": all it takes comes with torch."""
    return ""


class Options(TypedDict, total=False):
    """What a backend's function is told beside its inputs, and only when it is asked for."""

    window: int
    dropout: float


@attrs.frozen
class AttentionBackend:
    """Causal attention over a packed row, and what it can be trusted with.

    Args:
        name: what configuration calls it.
        keeps_documents_apart: no token sees another document's. One that cannot is refused for rows of several.
        description: one line for people.
        function: does the work.
        backward: gives gradients.
        forward_only: kinds of device where it gives none all the same.
        window: can hold a token to the last few of its own document.
        dropout: can drop attention weights.
        shares_prompts: takes rows in which several branches share a prompt.
        grouped_heads: takes fewer key and value heads than query heads.
        devices: kinds of device it runs on; empty means any.
        capabilities: CUDA compute capabilities it has kernels for; None means any.
        dtypes: what its kernels on a GPU take; empty means any.
        verified: kinds of device on which its results were compared with an independent reference.
        missing: what is to be installed or built before it runs here, "" when nothing; imports when called.
    """

    name: str
    keeps_documents_apart: bool
    description: str
    function: AttentionFunction
    backward: bool = attrs.field(default=True, kw_only=True)
    forward_only: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    window: bool = attrs.field(default=False, kw_only=True)
    dropout: bool = attrs.field(default=False, kw_only=True)
    shares_prompts: bool = attrs.field(default=False, kw_only=True)
    grouped_heads: bool = attrs.field(default=True, kw_only=True)
    devices: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    capabilities: Capabilities | None = attrs.field(default=None, kw_only=True)
    dtypes: tuple[torch.dtype, ...] = attrs.field(default=(), kw_only=True)
    verified: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    missing: Callable[[], str] = attrs.field(default=nothing_missing, kw_only=True, repr=False)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PackedBatch,
        *,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Return `[T, heads, head size]` attention of each row over its own document's past.

        Args:
            query: `[T, heads, head size]`.
            key: `[T, key heads, head size]`; query heads share them evenly when there are fewer.
            value: as key.
            batch: the row they come from.
            window: a token sees itself and the `window - 1` before it, in its own document; None sees all its past.
            dropout: share of attention weights to drop; the caller passes 0 outside training.

        Raises:
            ValueError: this backend cannot do that here; see `check`.
        """
        self.check(batch, window=window, dropout=dropout, dtype=query.dtype)
        if not self.grouped_heads and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"attention backend {self.name!r} needs as many key heads as query heads but got {key.shape[1]} and "
                f"{query.shape[1]}; repeat the keys and values, or use another backend"
            )
        options: Options = {}
        if window is not None:
            options["window"] = window
        if dropout:
            options["dropout"] = dropout
        return self.function(query, key, value, batch, **options)

    def check(
        self,
        batch: PackedBatch,
        *,
        window: int | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raise ValueError when this backend must not or cannot run on `batch`, where it lies, as torch stands now."""
        check_window(window)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout} but must be at least 0 and below 1")
        if batch.documents > 1 and not self.keeps_documents_apart:
            apart = ", ".join(backend.name for backend in BACKENDS.values() if backend.keeps_documents_apart)
            raise ValueError(
                f"attention backend {self.name!r} cannot keep documents apart but the row has {batch.documents}; "
                f"use one of {apart}, or put one sample in a row"
            )
        if batch.shares_prompts and not self.shares_prompts:
            able = ", ".join(backend.name for backend in BACKENDS.values() if backend.shares_prompts)
            raise ValueError(
                f"attention backend {self.name!r} knows documents by their lengths alone, but branches share prompts "
                f"in this row; use one of {able}, or a format with shared=False"
            )
        hardware = hardware_of(batch.input_ids.device)
        lack = self.lack(
            hardware, backward=torch.is_grad_enabled(), window=window is not None, dropout=dropout > 0, dtype=dtype
        )
        if lack:
            raise ValueError(f"attention backend {self.name!r} {lack}")

    def lack(
        self,
        hardware: Hardware,
        *,
        backward: bool = False,
        window: bool = False,
        dropout: bool = False,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Return why it cannot do this on such hardware, the first reason found, "" when it can."""
        if self.devices and hardware.kind not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {hardware.kind}"
        if hardware.capability is not None and self.capabilities and hardware.capability not in self.capabilities:
            return f"has kernels for compute capability {self.capabilities}, not for {hardware}"
        if backward and (not self.backward or hardware.kind in self.forward_only):
            return f"runs forward only on {hardware.kind}; run it under torch.no_grad(), or use segment to train"
        if window and not self.window:
            return "has no sliding window"
        if dropout and not self.dropout:
            return "has no dropout"
        if dtype is not None and self.dtypes and hardware.kind != "cpu" and dtype not in self.dtypes:
            return f"takes {' or '.join(map(str, self.dtypes))} on {hardware.kind}, not {dtype}"
        missing = self.missing()
        return f"is not available: {missing}" if missing else ""


BACKENDS = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            AttentionBackend(
                "segment",
                True,
                "one call per distinct document length; the reference on every device",
                sdpa.segment,
                window=True,
                dropout=True,
                verified=("cpu",),
            ),
            AttentionBackend(
                "dense",
                True,
                "one call with an explicit [T, T] mask; for tests; a NaN in one document reaches the others",
                sdpa.dense,
                shares_prompts=True,
                window=True,
                dropout=True,
                verified=("cpu",),
            ),
            AttentionBackend(
                "torch",
                False,
                "one call over the whole row; one sample a row only",
                sdpa.whole,
                dropout=True,
                verified=("cpu",),
            ),
            AttentionBackend(
                "flex",
                True,
                "torch's flex attention with a block mask; on a CPU forward only",
                flex.attend,
                shares_prompts=True,
                forward_only=("cpu",),
                window=True,
                devices=("cuda", "cpu"),
                capabilities=Capabilities((8, 0)),
                dtypes=(*HALF, torch.float32),
                verified=("cpu",),
                missing=flex.missing,
            ),
            AttentionBackend(
                "varlen",
                True,
                "torch's own variable-length kernel",
                varlen.attend,
                window=True,
                devices=("cuda",),
                capabilities=Capabilities((8, 0)),
                dtypes=HALF,
                missing=varlen.missing,
            ),
            AttentionBackend(
                "flash_2",
                True,
                "flash-attention 2",
                flash.attend_2,
                window=True,
                dropout=True,
                devices=("cuda",),
                capabilities=Capabilities((8, 0)),
                dtypes=HALF,
                missing=flash.missing_2,
            ),
            AttentionBackend(
                "flash_3",
                True,
                "flash-attention 3, for Hopper",
                flash.attend_3,
                window=True,
                devices=("cuda",),
                capabilities=Capabilities((9, 0), (9, 99)),
                dtypes=HALF,
                missing=flash.missing_3,
            ),
            AttentionBackend(
                "flash_4",
                True,
                "flash-attention 4, for Hopper and Blackwell",
                flash.attend_4,
                window=True,
                devices=("cuda",),
                capabilities=Capabilities((9, 0), (12, 99)),
                dtypes=HALF,
                missing=flash.missing_4,
            ),
            AttentionBackend(
                "nested",
                True,
                "scaled dot products over a jagged nested tensor",
                jagged.attend,
                grouped_heads=False,
                devices=("cuda",),
                capabilities=Capabilities((8, 0)),
                dtypes=HALF,
                missing=jagged.missing,
            ),
        )
    }
)


def get_attention(name: str) -> AttentionBackend:
    """Return the backend called `name`.

    Raises:
        ValueError: no such backend; lists those there are.

    >>> get_attention("segment").keeps_documents_apart, get_attention("torch").keeps_documents_apart
    (True, False)
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
