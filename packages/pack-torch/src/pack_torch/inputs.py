"""What each kind of model takes of a batch: one function a kind, looked up by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pack_torch.batch import PackedBatch
from pack_torch.huggingface import check_model, form_of

if TYPE_CHECKING:
    from pack_torch.rows import Batch


def model_inputs(batch: Batch, for_: str | nn.Module) -> dict[str, Any]:
    """Return the arguments for a model, or for a kind of model by name; see `Batch.model_inputs`."""
    if isinstance(for_, nn.Module):
        check_model(for_, batch)
    form = form_of(for_) if isinstance(for_, nn.Module) else for_
    if form not in FORMS:
        raise ValueError(f"for_ is {form!r} but must be a model or one of {', '.join(FORMS)}")
    return FORMS[form](batch) | dict(batch.payloads)


def _tokens(batch: Batch) -> dict[str, Any]:
    return {"input_ids": batch.input_ids, "position_ids": _positions(batch)}


def _positions(batch: Batch) -> Tensor:
    name = batch.format.model_positions(batch.columns)
    return batch.position_ids if name is None else batch.columns[name].permute(2, 0, 1)  # [n, B, L]


def _allowed(batch: Batch) -> dict[str, Any]:
    return _tokens(batch) | {"attention_mask": batch.dense_mask()[:, None]}


def _added(batch: Batch) -> dict[str, Any]:
    allowed = batch.dense_mask()[:, None]
    # Every row sees itself, so no row of the softmax is empty and minus infinity is safe.
    mask = torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -torch.inf)
    return _tokens(batch) | {"attention_mask": mask}


def _blocks(batch: Batch) -> dict[str, Any]:
    return _tokens(batch) | {"attention_mask": batch.block_mask()}


def _lengths(batch: Batch) -> tuple[Tensor, int]:
    """Return the boundaries a kernel is told, padding of a static row included, and the longest stretch."""
    _check_lengths(batch)
    if batch.documents is None:
        return batch.cu_seqlens, batch.max_seqlen
    # The padding is a stretch of its own here, or its rows would hold what the kernel left there, NaN perhaps, and
    # NaN times a gradient of 0 is NaN. After it come stretches of nothing, so that the shape stays.
    missing = batch.documents + 2 - batch.cu_seqlens.numel()
    return pad(batch.cu_seqlens, (0, missing), value=batch.rows), batch.rows


def _flash(batch: Batch) -> dict[str, Any]:
    ends, longest = _lengths(batch)
    return _tokens(batch) | {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _varlen(batch: Batch) -> dict[str, Any]:
    ends, longest = _lengths(batch)
    return _tokens(batch) | {"cu_seqlens": ends, "max_seqlen": longest}


def _nested(batch: Batch) -> dict[str, Any]:
    _check_lengths(batch)
    tokens, positions = batch.input_ids[0, : batch.tokens], batch.position_ids[0, : batch.tokens]
    return {"input_ids": jagged(tokens, batch.cu_seqlens), "position_ids": jagged(positions, batch.cu_seqlens)}


def _torchtune(batch: Batch) -> dict[str, Any]:
    return {"tokens": batch.input_ids, "input_pos": batch.position_ids, "mask": batch.dense_mask()}


def _pack_torch(batch: Batch) -> dict[str, Any]:
    if not batch.flat or batch.own_mask or batch.rows != batch.tokens:
        raise ValueError(
            "a PackedBatch is one row of real tokens under the usual mask; collate with mask='varlen', not static, and "
            "without a mask function"
        )
    reach = batch.reach[0] if batch.shares_prompts else None
    return {"batch": PackedBatch(batch.input_ids[0], batch.doc_lens, reach=reach)}


#: Kinds of model to what they take.
FORMS: MappingProxyType[str, Callable[[Batch], dict[str, Any]]] = MappingProxyType(
    {
        "hf": _allowed,
        "sdpa": _allowed,
        "eager": _added,
        "flex": _blocks,
        "flash": _flash,
        "varlen": _varlen,
        "nested": _nested,
        "torchtune": _torchtune,
        "pack_torch": _pack_torch,
    }
)


#: What other kinds of model take without an error and get wrong, and which get it right: keywords that say where
#: documents end are ignored without flash attention, and eager attention adds a mask of truth values to its scores.
SILENT: MappingProxyType[str, str] = MappingProxyType(
    {"flash": "models with flash attention", "hf": "models with sdpa attention"}
)


def warn_of_silence(form: str) -> None:
    """Warn whoever calls the caller that a model was not given, if others than those of a form would be silent."""
    if form in SILENT:
        warnings.warn(
            f"model_inputs() cannot know the model, and what it gives is only right for {SILENT[form]}; in others "
            f"documents see each other. Give it the model, model_inputs(model), or say model_inputs({form!r})",
            stacklevel=3,
        )


def _check_lengths(batch: Batch) -> None:
    if batch.shares_prompts:
        raise ValueError(
            "branches share prompts in this batch, and lengths cannot say that a branch sees its prompt but not the "
            "branch before it; collate with mask='flex' or 'dense', or give a format with shared=False"
        )
    if batch.own_mask:
        raise ValueError(
            "the batch has a mask function of its own, which lengths cannot say; collate with mask='flex' or 'dense'"
        )


def jagged(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the documents of a flat tensor as one jagged nested tensor over these very offsets."""
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
