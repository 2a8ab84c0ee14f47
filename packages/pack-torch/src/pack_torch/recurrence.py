"""Token mixers with a memory, which starts empty at every document: short convolution, gated delta rule, Kimi delta.

Shapes: T tokens of the row, D channels, W taps, H heads, K key size, V value size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from pack_torch.fla_kernels import choose_kernel, convolve_with_fla, delta_rule_with_fla
from pack_torch.precision import wide

#: `auto` takes the fla kernels where they can run and the torch loop elsewhere; the others insist.
Backend = Literal["auto", "torch", "fla"]

#: Under the root of a squared norm, as in fla's l2norm: a zero vector stays zero.
L2_EPSILON = 1e-6


def short_convolution(
    x: Tensor,
    weight: Tensor,
    doc_lens: Sequence[int],
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Return the causal depthwise convolution of every document by itself.

    y[t, d] = bias[d] + sum over w of weight[d, w] x[t - (W - 1) + w, d], where rows before the document's first count
    as zero; the last tap is the token's own. This is `nn.Conv1d(groups=D)` over W - 1 rows of padding, per document.

    Args:
        x: `[T, D]`.
        weight: `[D, W]`.
        doc_lens: tokens of each document; they sum to T.
        bias: `[D]`.
        activation: None, or `silu` to apply it to the sum.
        backend: `auto`, `torch` or `fla`.

    Returns:
        `[T, D]` in the dtype of `x`; computed in float32, or in float64 for float64.

    Raises:
        ValueError: shapes or lengths that do not fit, an unknown activation, or a backend that cannot run here.

    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> short_convolution(x, torch.tensor([[10.0, 1.0]]), (2, 1)).squeeze(1).tolist()  # 3 does not see 2
    [1.0, 12.0, 3.0]
    """
    lengths = _check_lengths(doc_lens, x, "x", 2)
    _check_shape("weight", weight, (x.shape[1], None), "D of x, taps")
    if weight.shape[1] < 1:
        raise ValueError("weight has 0 taps; a convolution needs at least the token's own")
    if bias is not None:
        _check_shape("bias", bias, (x.shape[1],), "D of x")
    if activation not in (None, "silu"):
        raise ValueError(f"activation {activation!r} is not one of None, 'silu'")
    if choose_kernel("short_convolution", backend, x) == "fla":
        return convolve_with_fla(x, weight, lengths, bias, activation)
    taps, shift = wide(weight), None if bias is None else wide(bias)
    # One document a call, for a vectorized kernel may round the same number differently at another place of a row.
    convolved = [_convolve(rows, taps, shift) for rows in torch.split_with_sizes(wide(x), lengths)]
    return torch.cat([silu(rows) if activation else rows for rows in convolved]).to(x.dtype)


def _convolve(rows: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    length, reach = rows.shape[0], taps.shape[1] - 1
    padded = torch.cat((rows.new_zeros(reach, rows.shape[1]), rows))
    total = padded[:length] * taps[:, 0]
    for tap in range(1, reach + 1):
        total = total + padded[tap : tap + length] * taps[:, tap]
    return total if bias is None else total + bias


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    doc_lens: Sequence[int],
    scale: float | None = None,
    l2norm: bool = False,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Return what each token reads from a memory that starts empty at its document's first token.

    Per head, with the memory S `[K, V]` zero before the first token of every document:
    S <- exp(g_t) S; S <- S + beta_t k_t (v_t - S^T k_t)^T; o_t = scale S^T q_t.

    Args:
        q: `[T, H, K]` queries.
        k: `[T, H, K]` keys.
        v: `[T, H, V]` values.
        g: `[T, H]` logarithm of the share of the memory that is kept, at most 0.
        beta: `[T, H]` how much of the old value is replaced, usually 0 to 1.
        doc_lens: tokens of each document; they sum to T.
        scale: of the queries; None is K ** -0.5.
        l2norm: first divide every query and key by sqrt(its squared norm + 1e-6).
        backend: `auto`, `torch` or `fla`. The torch loop takes T steps and keeps every memory for the backward.

    Returns:
        `[T, H, V]` in the dtype of `v`; computed in float32, or in float64 where an input is float64.

    Raises:
        ValueError: shapes or lengths that do not fit, or a backend that cannot run here.

    Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464, equation 10).

    >>> one = torch.ones(2, 1, 1)
    >>> gated_delta_rule(one, one, one, torch.full((2, 1), -0.5), torch.full((2, 1), 0.5), (1, 1)).flatten().tolist()
    [0.5, 0.5]
    """
    lengths = _check_delta(q, k, v, g, beta, doc_lens, tuple(q.shape[:2]))
    factor = q.shape[2] ** -0.5 if scale is None else scale
    if choose_kernel("gated_delta_rule", backend, q, k, v, g, beta) == "fla":
        return delta_rule_with_fla("gated_delta_rule", q, k, v, g, beta, lengths, factor, l2norm)
    return _delta(q, k, v, g.unsqueeze(2), beta, lengths, factor, l2norm)


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    doc_lens: Sequence[int],
    scale: float | None = None,
    l2norm: bool = False,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Return what each token reads from a memory whose every channel forgets at its own pace, empty at each document.

    Per head, with the memory S `[K, V]` zero before the first token of every document:
    S <- Diag(exp(g_t)) S; S <- S + beta_t k_t (v_t - S^T k_t)^T; o_t = scale S^T q_t.
    With one decay for all channels it is `gated_delta_rule`.

    Args:
        q: `[T, H, K]` queries.
        k: `[T, H, K]` keys.
        v: `[T, H, V]` values.
        g: `[T, H, K]` logarithm of the share of each channel that is kept, at most 0.
        beta: `[T, H]` how much of the old value is replaced, usually 0 to 1.
        doc_lens: tokens of each document; they sum to T.
        scale: of the queries; None is K ** -0.5.
        l2norm: first divide every query and key by sqrt(its squared norm + 1e-6).
        backend: `auto`, `torch` or `fla`. The torch loop takes T steps and keeps every memory for the backward.

    Returns:
        `[T, H, V]` in the dtype of `v`; computed in float32, or in float64 where an input is float64.

    Raises:
        ValueError: shapes or lengths that do not fit, or a backend that cannot run here.

    Kimi Linear (Kimi Team, 2025, arXiv 2510.26692, equation 1).

    >>> one = torch.ones(2, 1, 1)
    >>> read = kimi_delta_attention(one, one, one, torch.zeros(2, 1, 1), torch.full((2, 1), 0.5), (2,))
    >>> read.flatten().tolist()  # 0 + 0.5 (1 - 0), then 0.5 + 0.5 (1 - 0.5)
    [0.5, 0.75]
    """
    lengths = _check_delta(q, k, v, g, beta, doc_lens, tuple(q.shape))
    factor = q.shape[2] ** -0.5 if scale is None else scale
    if choose_kernel("kimi_delta_attention", backend, q, k, v, g, beta) == "fla":
        return delta_rule_with_fla("kimi_delta_attention", q, k, v, g, beta, lengths, factor, l2norm)
    return _delta(q, k, v, g, beta, lengths, factor, l2norm)


def _delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int], scale: float, l2norm: bool
) -> Tensor:
    """Return `[T, H, V]`; `g` is `[T, H, K]`, or `[T, H, 1]` for one decay per head."""
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in (q, k, v, g, beta)) else torch.float32
    parts = [torch.split_with_sizes(part.to(dtype), lengths) for part in (q, k, v, g, beta)]
    read = [_scan(*rows, scale=scale, l2norm=l2norm) for rows in zip(*parts, strict=True)]
    return torch.cat(read).to(v.dtype)


def _scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, l2norm: bool) -> Tensor:
    if l2norm:
        q, k = (part / (part.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt() for part in (q, k))
    kept = g.exp().unsqueeze(3)  # [n, H, K or 1, 1]
    # Products and sums instead of matmul: those round alike whatever else the process computes.
    query, key = (q * scale).unsqueeze(3), k.unsqueeze(3)  # [n, H, K, 1]
    strength = beta.unsqueeze(2)  # [n, H, 1]
    memory = v.new_zeros(k.shape[1], k.shape[2], v.shape[2])
    read = []
    for step in range(v.shape[0]):
        memory = kept[step] * memory
        known = (key[step] * memory).sum(1)  # [H, V]
        memory = memory + key[step] * (strength[step] * (v[step] - known)).unsqueeze(1)
        read.append((query[step] * memory).sum(1))
    return torch.stack(read)


def _check_lengths(doc_lens: Sequence[int], rows: Tensor, name: str, axes: int) -> list[int]:
    if rows.dim() != axes:
        raise ValueError(f"{name} has shape {list(rows.shape)} but needs {axes} axes, the first one tokens")
    lengths = [operator.index(length) for length in doc_lens]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"doc_lens are {lengths}; give at least one document, each of at least one token")
    if sum(lengths) != rows.shape[0]:
        raise ValueError(
            f"doc_lens sum to {sum(lengths):,} but {name} has {rows.shape[0]:,} rows; every row belongs to one document"
        )
    return lengths


def _check_shape(name: str, values: Tensor, expected: tuple[int | None, ...], meaning: str) -> None:
    fits = values.dim() == len(expected) and all(
        wanted is None or found == wanted for found, wanted in zip(values.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name} has shape {list(values.shape)} but must be [{wanted}] ({meaning})")


def _check_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, doc_lens: Sequence[int], decay: tuple[int, ...]
) -> list[int]:
    lengths = _check_lengths(doc_lens, q, "q", 3)
    tokens, heads, _ = q.shape
    _check_shape("k", k, tuple(q.shape), "tokens, heads and key size of q")
    _check_shape("v", v, (tokens, heads, None), "tokens and heads of q; repeat q and k where v has more heads")
    _check_shape("g", g, decay, "tokens, heads" if len(decay) == 2 else "tokens, heads and key size of q")
    _check_shape("beta", beta, (tokens, heads), "tokens and heads of q")
    return lengths
