"""Rows to try a model on: one document taken out of a batch, documents made to order, and what each row gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from pack_torch.batch import PackedBatch
from pack_torch.rollout import Rollout
from pack_torch.slicing import scored_rows, target_log_probs

#: A packed row to its log-probabilities `[S]`, or to an object with `hidden` whose `logits` the callable gives.
ModelFunction = Callable[[PackedBatch], Any]


def score(model_fn: ModelFunction, batch: PackedBatch) -> Tensor:
    """Return `[S]` log-probabilities of the batch's response tokens, by one call of `model_fn`.

    Args:
        model_fn: returns `[S]` itself, or an object with `hidden` `[T, D]` and has `logits(rows)`.
        batch: built from rollouts.

    Raises:
        TypeError: it returned neither.
        ValueError: a tensor of another shape.

    >>> from pack_torch.batch import build_batch
    >>> score(lambda batch: torch.zeros(3), build_batch([Rollout("a", [1, 2, 3, 4], 3)], [0])).tolist()
    [0.0, 0.0, 0.0]
    """
    output = model_fn(batch)
    expected = sum(batch.response_lens)
    if not isinstance(output, Tensor):
        if not (hasattr(output, "hidden") and hasattr(model_fn, "logits")):
            raise TypeError(
                f"the model returned {type(output).__name__}; return one log-probability per response token, or an "
                "object with `hidden` from a model that has `logits`"
            )
        rows = scored_rows(batch.doc_lens, batch.response_lens).to(batch.input_ids.device)
        output = target_log_probs(model_fn.logits(output.hidden.index_select(0, rows)), batch.input_ids[rows + 1])
    if tuple(output.shape) != (expected,):
        raise ValueError(
            f"the model returned shape {list(output.shape)} but the samples have {expected:,} response tokens; return "
            "one log-probability for each, samples in the row's order"
        )
    return output


def alone(batch: PackedBatch, document: int) -> PackedBatch:
    """Return a row of one document of the batch, with its own rollout and routes.

    >>> alone(PackedBatch(torch.tensor([1, 2, 3]), (1, 2)), 1).input_ids.tolist()
    [2, 3]
    """
    start = sum(batch.doc_lens[:document])
    rows = slice(start, start + batch.doc_lens[document])
    return PackedBatch(
        batch.input_ids[rows],
        (batch.doc_lens[document],),
        batch.rollouts[document : document + 1],
        None if batch.routes is None else batch.routes[rows],
    )


def join(rollouts: Sequence[Rollout], routes: Tensor | None = None) -> PackedBatch:
    """Return the row of these rollouts; their recorded routes are laid along it only as `routes` `[T, ...]`."""
    return PackedBatch(
        torch.cat([rollout.tokens for rollout in rollouts]), tuple(r.length for r in rollouts), tuple(rollouts), routes
    )


def reveal(batch: PackedBatch) -> PackedBatch:
    """Return the batch with every token but the first of each document a response token, so that each row is seen."""
    whole = [
        Rollout(rollout.id, rollout.tokens, rollout.length - 1, group=rollout.group, routes=rollout.routes)
        for rollout in batch.rollouts
    ]
    return attrs.evolve(batch, rollouts=tuple(whole))


def with_tokens(batch: PackedBatch, tokens: Tensor) -> PackedBatch:
    """Return the batch with other tokens `[T]`, its routes and everything else as before."""
    parts = torch.split_with_sizes(tokens, list(batch.doc_lens))
    rollouts = [attrs.evolve(r, tokens=part) for r, part in zip(batch.rollouts, parts, strict=True)]
    return attrs.evolve(batch, input_ids=tokens, rollouts=tuple(rollouts))


def with_constant_routes(batch: PackedBatch) -> PackedBatch:
    """Return the batch with every recorded row of routes alike, so that no row can be taken for another's."""

    def level(routes: Tensor | None) -> Tensor | None:
        if routes is None:
            return None
        return torch.arange(routes.shape[-1], dtype=routes.dtype, device=routes.device).expand(routes.shape).clone()

    rollouts = [attrs.evolve(rollout, routes=level(rollout.routes)) for rollout in batch.rollouts]
    return attrs.evolve(batch, rollouts=tuple(rollouts), routes=level(batch.routes))


def other_tokens(tokens: Tensor, known: Tensor) -> Tensor:
    """Return tokens that differ from `tokens` at every place, each drawn from the ids in `known`.

    Raises:
        ValueError: `known` holds fewer than two ids.

    >>> other_tokens(torch.tensor([4, 9, 6]), torch.tensor([4, 6, 9])).tolist()
    [6, 4, 9]
    """
    ids: Tensor = torch.unique(known)
    if ids.numel() < 2:
        raise ValueError("the row holds one token id only, so no token can be changed; give rows of real text")
    return ids[(torch.searchsorted(ids, tokens) + 1) % ids.numel()]


def differs(first: Tensor, second: Tensor, tolerance: float) -> Tensor:
    """Return bool like the inputs: off by more than tolerance * max(1, |second|), or NaN in one of them only.

    >>> differs(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([1.0, 3.0, torch.nan]), 0.1).tolist()
    [False, True, False]
    """
    off = (first - second).abs() > tolerance * second.abs().clamp(min=1)
    return torch.where(first.isnan() | second.isnan(), first.isnan() != second.isnan(), off)


def _as_rows(value: Any, tokens: int) -> Tensor | None:
    """Return `[tokens, ...]` of a floating tensor that has one row per token, with a batch axis of 1 or without."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    rows = value[0] if value.dim() > 1 and value.shape[0] == 1 and value.shape[1] == tokens else value
    return rows if rows.dim() > 0 and rows.shape[0] == tokens else None


@contextmanager
def recording(module: nn.Module, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Fill a dictionary, while the block runs, with what every submodule gives for a row of `tokens` tokens.

    Keys are module names in the order they finish; values are `[tokens, ...]`. Modules whose output does not have one
    row per token are left out, and so are a module's second and later calls.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else getattr(output, "hidden", output)
            rows = _as_rows(value, tokens)
            if rows is not None and name not in found:
                found[name] = rows.detach().clone()

        return hook

    handles = [one.register_forward_hook(keep(name)) for name, one in module.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def editing(layer: nn.Module, tokens: int, edit: Callable[[Tensor], Tensor]) -> Iterator[list[bool]]:
    """Change, while the block runs, every input of `layer` that has one row per token; the list tells of each change.

    Args:
        layer: whose inputs.
        tokens: rows to look for.
        edit: `[tokens, ...]` to the same shape.
    """
    done: list[bool] = []

    def changed(value: Any) -> Any:
        rows = _as_rows(value, tokens)
        if rows is None:
            return value
        done.append(True)
        return edit(rows).view(value.shape)

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(changed(value) for value in inputs), {name: changed(value) for name, value in named.items()}

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield done
    finally:
        handle.remove()
