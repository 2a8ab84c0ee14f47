"""Hugging Face causal language models as the callable that `pack_torch.testing` takes. Imports nothing of theirs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from pack_torch.batch import PackedBatch
from pack_torch.slicing import scored_rows, target_log_probs

if TYPE_CHECKING:
    from pack_torch.rows import Batch

#: How a model is told where documents end: an additive mask, flex attention's block mask, or the documents' lengths.
Boundaries = Literal["mask", "blocks", "lengths"]

#: Layers that an explicit mask reaches as it is meant, or that take none.
PLAIN_LAYERS = {"full_attention", "linear_attention"}


class HuggingFaceModel(nn.Module):
    """A causal model of `transformers` that takes a `PackedBatch` and returns the response tokens' log-probabilities.

    The model gets `input_ids` and `position_ids` `[1, T]`, `use_cache=False`, and the documents in the form its
    attention reads: for `sdpa` and `eager` an additive mask `[1, 1, T, T]`; for `flex_attention` a block mask; for the
    flash implementations `cu_seq_lens_q`, `cu_seq_lens_k` `[documents + 1]` int32, `max_length_q` and `max_length_k`.
    Do not leave it to positions alone: the model then finds the documents itself, but not while it keeps a cache, which
    is its default. Linear-attention layers read no mask: ask the oracle whether yours leaks.

    Args:
        model: has `config` and gives `logits`; in evaluation mode, and not inside another wrapper.
        boundaries: `mask`, `blocks` or `lengths`; None goes by the model's attention implementation.
        temperature: logits are divided by it.

    Raises:
        ValueError: a forward that has no place for what it must be told, or an attention whose form is not known.

    >>> from types import SimpleNamespace
    >>> from pack_torch import Rollout, build_batch
    >>> class Uniform(nn.Module):  # a stand-in that finds four tokens equally likely
    ...     config = SimpleNamespace(_attn_implementation="sdpa")
    ...     def forward(self, input_ids, attention_mask, position_ids, use_cache, logits_to_keep):
    ...         return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), 4))
    >>> HuggingFaceModel(Uniform())(build_batch([Rollout("a", [1, 2, 3], 2)], [0])).exp().tolist()
    [0.25, 0.25]
    """

    def __init__(self, model: nn.Module, *, boundaries: Boundaries | None = None, temperature: float = 1.0) -> None:
        """Check that the model can be told where documents end."""
        super().__init__()
        self.model = model
        self.boundaries = boundaries_of(model) if boundaries is None else boundaries
        if self.boundaries not in get_args(Boundaries):
            raise ValueError(f"boundaries is {boundaries!r} but must be one of {list(get_args(Boundaries))}")
        self.temperature = temperature
        known, others = _arguments(model)
        _check_forward(_name(model), known, others, self.boundaries)
        self.keeps_logits = "logits_to_keep" in known
        self.may_cache = others or "use_cache" in known

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return `[S]` log-probabilities of the batch's response tokens, from its scored rows alone.

        Raises:
            ValueError: a document longer than the model's window where an explicit mask would do away with it; flex
                attention on a CPU with gradients; logits of another shape than was asked for.
        """
        rows = scored_rows(batch.doc_lens, batch.response_lens).to(batch.input_ids.device)
        named = self._told(batch)
        if self.keeps_logits:
            named["logits_to_keep"] = rows
        if self.may_cache:
            named["use_cache"] = False
        output = self.model(
            input_ids=batch.input_ids.unsqueeze(0), position_ids=batch.position_ids.unsqueeze(0), **named
        )
        expected = rows.numel() if self.keeps_logits else batch.tokens
        logits: Tensor = output.logits
        if logits.dim() != 3 or tuple(logits.shape[:2]) != (1, expected):
            raise ValueError(
                f"{_name(self.model)} gave logits of shape {list(logits.shape)} but [1, {expected}, vocabulary] was "
                "asked for; the adapter takes causal language models"
            )
        scored = logits[0] if self.keeps_logits else logits[0].index_select(0, rows)
        return target_log_probs(scored, batch.input_ids[rows + 1], temperature=self.temperature)

    def _told(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the keyword arguments that say where the documents end."""
        if self.boundaries == "lengths":
            lengths = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
            return {**lengths, "max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
        self._check_window(batch)
        if self.boundaries == "blocks":
            self._check_flex(batch)
            return {"attention_mask": batch.block_mask()}
        allowed = batch.dense_mask()
        dtype = next((one.dtype for one in self.model.parameters() if one.is_floating_point()), torch.float32)
        # Every row sees itself, so no row of the softmax is empty and minus infinity is safe.
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)
        return {"attention_mask": mask[None, None]}

    def _check_window(self, batch: PackedBatch) -> None:
        window = _window(self.model)
        if window is not None and batch.max_seqlen > window:
            longest = batch.doc_lens.index(batch.max_seqlen)
            raise ValueError(
                f"{batch.name(longest)} has {batch.max_seqlen:,} tokens but some layers of {_name(self.model)} see "
                f"{window:,}, and an explicit mask takes the place of theirs; give shorter documents, or load the "
                "model with a flash attention implementation"
            )

    def _check_flex(self, batch: PackedBatch) -> None:
        needed = torch.is_grad_enabled() and any(one.requires_grad for one in self.model.parameters())
        if batch.input_ids.device.type == "cpu" and needed:
            raise ValueError(
                "flex attention has no backward on a CPU; run under torch.no_grad(), which compares log-probabilities "
                "alone, or load the model with attn_implementation='sdpa'"
            )


def boundaries_of(model: nn.Module) -> Boundaries:
    """Return the form in which the model's attention implementation reads where documents end.

    Raises:
        ValueError: no implementation is named, or one whose form is not known.

    >>> from types import SimpleNamespace
    >>> model = nn.Identity()
    >>> model.config = SimpleNamespace(_attn_implementation="flash_attention_2")
    >>> boundaries_of(model)
    'lengths'
    """
    used = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if used in ("sdpa", "eager"):
        return "mask"
    if used == "flex_attention":
        return "blocks"
    # Kernels fetched by name say so with their repository, such as `kernels-community/flash-attn3`.
    if isinstance(used, str) and "flash" in used and not used.startswith("paged|"):
        return "lengths"
    raise ValueError(
        f"{_name(model)} has attention implementation {used!r}; load it with attn_implementation 'sdpa', 'eager', "
        f"'flex_attention' or a flash one, or say in which of the forms {list(get_args(Boundaries))} it reads documents"
    )


def form_of(model: nn.Module) -> str:
    """Return the form of `pack_torch.inputs` in which the model's attention implementation reads documents.

    Raises:
        ValueError: no implementation is named, or one whose form is not known.
    """
    read = boundaries_of(model)
    eager = getattr(model.config, "_attn_implementation", None) == "eager"
    return {"mask": "eager" if eager else "sdpa", "blocks": "flex", "lengths": "flash"}[read]


def keeps_state(model: nn.Module) -> bool:
    """Whether the model has layers that carry a state from token to token, which no mask reaches.

    >>> keeps_state(nn.Linear(1, 1))
    False
    """
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    layers = getattr(text, "layer_types", None) or ()
    recurrent = [kind for kind in layers if kind == "linear_attention" or not kind.endswith("attention")]
    return bool(recurrent or getattr(model, "_is_stateful", False))


def check_model(model: nn.Module, batch: Batch) -> None:
    """Raise unless the model can be told where the documents of the batch end.

    Raises:
        ValueError: layers with a state, a window that an explicit mask would do away with, or a forward without the
            arguments; says why and what to do.
    """
    name, read = _name(model), boundaries_of(model)
    if keeps_state(model) and batch.shares_prompts:
        raise ValueError(
            f"{name} has recurrent layers, whose state after a prompt would run on from one branch into the next, but "
            "branches share prompts in this batch; give a format with shared=False"
        )
    if keeps_state(model) and len(batch.doc_lens) > 1:
        raise ValueError(
            f"{name} has recurrent layers, which read no mask, so documents of one row may leak into each other; put "
            "one document in a row, or ask pack_torch.testing whether yours does and then name the form yourself, "
            f"for_={form_of(model)!r}"
        )
    _check_forward(name, *_arguments(model), read)
    window = _window(model)
    if read != "lengths" and window is not None and batch.max_seqlen > window:
        raise ValueError(
            f"a document has {batch.max_seqlen:,} tokens but some layers of {name} see {window:,}, and an explicit "
            "mask takes the place of theirs; give shorter documents, or load the model with flash attention"
        )


def _arguments(model: nn.Module) -> tuple[set[str], bool]:
    """Return the names the forward takes, and whether it takes others as well."""
    known = inspect.signature(model.forward).parameters
    return set(known), any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())


def _check_forward(name: str, known: set[str], others: bool, boundaries: Boundaries) -> None:
    # A forward may swallow what it does not know, so these must be named; the lengths reach attention unnamed.
    needed = ["input_ids", "position_ids", *([] if boundaries == "lengths" else ["attention_mask"])]
    missing = [argument for argument in needed if argument not in known]
    if missing:
        raise ValueError(
            f"{name}.forward takes no {' and no '.join(missing)}, so it cannot be told where the documents of a row "
            "begin; give the causal model itself, not a wrapper, or run it on one document a row"
        )
    if boundaries == "lengths" and not others and "cu_seq_lens_q" not in known:
        raise ValueError(
            f"{name}.forward takes neither cu_seq_lens_q nor other keyword arguments, so its attention never learns "
            "the documents' lengths; load it with attn_implementation='sdpa'"
        )


def _window(model: nn.Module) -> int | None:
    """Return the fewest tokens that some layer sees of the past, or None where all see everything."""
    config = getattr(model, "config", None)
    layers = getattr(config, "layer_types", None)
    if layers is not None and set(layers) <= PLAIN_LAYERS:
        return None
    spans = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((span for span in spans if isinstance(span, int)), default=None)


def _name(model: nn.Module) -> str:
    return type(model).__name__
