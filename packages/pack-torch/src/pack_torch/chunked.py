"""Log-probabilities and entropy of a large vocabulary, a few rows at a time."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pack_torch.precision import wide, wide_dtype


def chunked_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = 256,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each target and, if asked, the entropy, without ever holding `[S, V]` logits.

    Logits of `chunk` rows at a time are computed, used and dropped; backward computes them again. What it costs: one
    more multiplication by the head, so the head's arithmetic grows by a third (three products become four). What it
    saves: memory is two or three times `[chunk, V]` in the wide dtype in place of three to seven times `[S, V]`, plus
    the gradients that any way needs. Gradients are exact, summed over chunks in the wide dtype (float32, or float64 for
    float64 inputs) and rounded once: for a bfloat16 head that sum is one float32 `[V, D]` during backward.

    Args:
        hidden: `[S, D]` of the scored rows.
        head_weight: `[V, D]`, same dtype and device; logits are `hidden @ head_weight.T`.
        targets: `[S]` int64, each in `[0, V)`.
        chunk: rows at a time; more is faster up to a point and takes more memory. It does not change the values beyond
            rounding.
        temperature: logits are divided by it, as they are when sampling.
        entropy: also return the entropy in nats of each row's distribution, with its gradient.

    Returns:
        `[S]` log-probabilities in float32 or wider, and `[S]` entropies or None.

    Raises:
        ValueError: shapes or dtypes that do not fit, a target outside the vocabulary, a chunk under 1, a temperature
            not above 0.

    >>> values, spread = chunked_log_probs(torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([0, 3]), entropy=True)
    >>> values.exp(), spread.exp()
    (tensor([0.2500, 0.2500]), tensor([4., 4.]))
    """
    _check(hidden, head_weight, targets, chunk, temperature)
    values, spread = cast(
        tuple[Tensor, Tensor],
        _ChunkedLogProbs.apply(hidden, head_weight, targets, chunk, temperature, entropy),  # type: ignore[no-untyped-call]
    )
    return values, spread if entropy else None


def _check(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk: int, temperature: float) -> None:
    if hidden.dim() != 2 or head_weight.dim() != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and head_weight {list(head_weight.shape)}; give [S, D] and [V, D]"
        )
    if hidden.dtype != head_weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype} and head_weight {head_weight.dtype}; give both in one float dtype")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets are {targets.dtype} of shape {list(targets.shape)}; give one int64 for each of the "
            f"{hidden.shape[0]:,} rows of hidden"
        )
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < head_weight.shape[0]:
        raise ValueError(
            f"targets are {int(targets.min())} to {int(targets.max())} but the head has {head_weight.shape[0]:,} tokens"
        )
    if chunk < 1:
        raise ValueError(f"chunk is {chunk} rows but must be at least 1")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature} but must be above 0; greedy sampling has no log-probabilities")


def _scaled_logits(hidden: Tensor, head_weight: Tensor, temperature: float) -> Tensor:
    """Return a new tensor of logits in the wide dtype, which the caller may overwrite."""
    logits = wide(hidden @ head_weight.T)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _ChunkedLogProbs(torch.autograd.Function):
    """Keeps the inputs and one or two numbers per row; backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk: int, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        totals = hidden.new_empty(rows, dtype=wide_dtype(hidden.dtype))  # log of the sum of exponentials
        picked, means = torch.empty_like(totals), torch.zeros_like(totals)
        for first in range(0, rows, chunk):
            part = slice(first, first + chunk)
            logits = _scaled_logits(hidden[part], head_weight, temperature)
            picked[part] = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1)
            top = logits.amax(1, keepdim=True)
            if entropy:
                shares = (logits - top).exp_()
                sums = shares.sum(1)
                # The mean logit; a logit of minus infinity has no share, and 0 times it would be NaN.
                means[part] = shares.mul_(logits.clamp_(min=torch.finfo(logits.dtype).min)).sum(1) / sums
            else:
                sums = logits.sub_(top).exp_().sum(1)
            totals[part] = sums.log() + top.squeeze(1)
        ctx.save_for_backward(hidden, head_weight, targets, totals, means)
        ctx.chunk, ctx.temperature, ctx.entropy = chunk, temperature, entropy
        spread = totals - means
        if not entropy:
            ctx.mark_non_differentiable(spread)
        return picked - totals, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor, by_spread: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, targets, totals, means = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(head_weight, dtype=totals.dtype) if ctx.needs_input_grad[1] else None
        for first in range(0, hidden.shape[0], ctx.chunk):
            part = slice(first, first + ctx.chunk)
            logits = _scaled_logits(hidden[part], head_weight, ctx.temperature)
            gradient = (logits - totals[part].unsqueeze(1)).exp_()  # probabilities, then the gradient in their place
            factor = by_value[part].to(totals.dtype).unsqueeze(1)
            if ctx.entropy:
                # dH/dz = -p (z - mean of z), d log p(target)/dz = [target] - p.
                logits.clamp_(min=torch.finfo(logits.dtype).min).sub_(means[part].unsqueeze(1))
                logits.mul_(by_spread[part].to(totals.dtype).unsqueeze(1)).add_(factor)
                gradient.mul_(logits).neg_()
            else:
                gradient.mul_(-factor)
            del logits
            gradient.scatter_add_(1, targets[part].unsqueeze(1), factor)
            if ctx.temperature != 1.0:
                gradient.div_(ctx.temperature)
            narrow = gradient.to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[part] = narrow @ head_weight
            if to_weight is not None:
                if to_weight.dtype == hidden.dtype:
                    to_weight.addmm_(narrow.T, hidden[part])
                else:
                    to_weight += narrow.T @ hidden[part]
        weight_gradient = None if to_weight is None else to_weight.to(head_weight.dtype)
        return to_hidden, weight_gradient, None, None, None, None
