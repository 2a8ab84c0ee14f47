"""Packs as one forward takes them: tensors of several packs, and everything derived from where documents lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from pack_torch.formats.columns import Array, counting
from pack_torch.formats.encoded import Encoded
from pack_torch.formats.format import Format
from pack_torch.inputs import model_inputs, warn_of_silence
from pack_torch.intervals import dense_of, reach_block_mask
from pack_torch.masks import MaskFunction
from pack_torch.scored import ScoredSample
from pack_torch.scoring import Score, merged
from pack_torch.tallies import add_metrics

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


#: Parts, what pads them, and the length of a row, to one tensor of all.
Lay = Callable[[Sequence[Array], float | None, int], Tensor]


@attrs.frozen(eq=False)
class Batch:
    """What `PackCollator` makes of packs: B rows of L tokens, padding included.

    Every loss and metric of this package takes it, whatever its format: see `ScoredBatch`.

    Args:
        columns: `[B, L, ...]` per token, by the format's names.
        position_ids: `[B, L]` int64 of each token in its document; padding counts from 0 on its own.
        packs: the structure of each pack, with the values its documents carry.
        format: what the documents are.
        flat: all packs lie end to end in one row; else each has a row.
        form: what `model_inputs` makes unless told otherwise.
        mask_fn: batch to the mask function that takes the place of the format's; None keeps that.
        payloads: what else the model takes.
        infos: what travels along with each pack: counts, which `metrics` adds up.
        documents: of a static row, the most documents it tells the kernel of; None: as many as there are.
        capacity: of each pack, what `metrics` say how full they are by.

    >>> from pack_torch import PackCollator, Sft, build_pack
    >>> packs = [build_pack([{"input_ids": one}], format=Sft(label_mode="tokens"), capacity=4) for one in ([1, 2], [3])]
    >>> batch = PackCollator(mask="dense")(packs)
    >>> batch["input_ids"].tolist(), batch.document_ids.tolist()
    ([[1, 2, 0, 0], [3, 0, 0, 0]], [[0, 0, -1, -1], [0, -1, -1, -1]])
    >>> sorted(batch.model_inputs("sdpa"))
    ['attention_mask', 'input_ids', 'position_ids']
    """

    columns: Mapping[str, Tensor] = attrs.field(repr=False)
    position_ids: Tensor = attrs.field(repr=False)
    packs: tuple[Encoded, ...]
    format: Format
    flat: bool
    form: str
    mask_fn: Callable[[Batch], MaskFunction] | None = None
    payloads: Mapping[str, Tensor] = attrs.field(factory=dict, repr=False)
    infos: tuple[Mapping[str, Any], ...] = attrs.field(default=(), repr=False)
    documents: int | None = None
    capacity: int = 0
    _score: Score | None = attrs.field(default=None, repr=False, alias="score")

    def __getitem__(self, name: str) -> Tensor:
        """Return a column, `[B, L, ...]`."""
        if name not in self.columns:
            raise KeyError(f"the batch has no column {name!r} but {', '.join(self.columns)}")
        return self.columns[name]

    @property
    def input_ids(self) -> Tensor:
        """`[B, L]`, whatever the format calls them."""
        return self.columns[self.format.tokens]

    @property
    def labels(self) -> Tensor | None:
        """`[B, L]` what each row predicts, where the format has such a column."""
        return self.columns.get(getattr(self.format, "labels", ""))

    @property
    def rows(self) -> int:
        """B x L, rows of logits that a forward gives."""
        return self.position_ids.numel()

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(pack.tokens for pack in self.packs)

    @property
    def doc_lens(self) -> tuple[int, ...]:
        """Tokens of every document, packs in order."""
        return tuple(length for pack in self.packs for length in pack.doc_lens)

    @property
    def shares_prompts(self) -> bool:
        """Whether branches share prompts somewhere, so that lengths alone do not say who sees whom."""
        return any(pack.shares_prompts for pack in self.packs)

    @property
    def values(self) -> Mapping[str, tuple[Any, ...]]:
        """What documents carry beside their tokens, by name, one entry per row of the dataset."""
        names = self.packs[0].values
        return {name: tuple(one for pack in self.packs for one in pack.values[name]) for name in names}

    @cached_property
    def metrics(self) -> dict[str, int]:
        """Counts, those of the packs' `info` included, that `add_metrics` adds up over batches and ranks."""
        packs = [pack for pack in self.packs if not pack.weightless]
        lens = [length for pack in packs for length in pack.doc_lens]
        own = {
            "packs": len(packs),
            "rows": sum(pack.rows for pack in packs),
            "documents": len(lens),
            "tokens": sum(lens),
            "capacity": len(packs) * self.capacity,
            "padding": self.rows - sum(lens),
            "longest_document": max(lens, default=0),
        }
        counts = [{name: one for name, one in info.items() if type(one) is int} for info in self.infos]
        return add_metrics([own, *counts])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Row of the flattened batch where each pack begins."""
        if not self.flat:
            return tuple(range(0, self.rows, self.position_ids.shape[1]))
        ends = np.cumsum([0, *(pack.tokens for pack in self.packs)])
        return tuple(ends[:-1].tolist())

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """`[documents + 1]` int32 boundaries of the documents of a flat batch, padding not among them.

        Raises:
            ValueError: every pack has a row of its own.
        """
        if not self.flat:
            raise ValueError("documents do not lie end to end in rows with padding; collate with mask='varlen'")
        ends = np.zeros(len(self.doc_lens) + 1, np.int32)
        np.cumsum(self.doc_lens, out=ends[1:])
        return torch.from_numpy(ends).to(self.position_ids.device)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document, a Python int."""
        return max(self.doc_lens)

    @cached_property
    def document_ids(self) -> Tensor:
        """`[B, L]` int64 document of each token, counted from 0 in its row; -1 for padding."""
        filled = np.full(self.rows, -1)
        count = 0
        for start, pack in zip(self.starts, self.packs, strict=True):
            np.add(pack.document_ids, count, out=filled[start : start + pack.tokens])
            count += len(pack.doc_lens) if self.flat else 0
        return torch.from_numpy(filled).view(self.position_ids.shape).to(self.position_ids.device)

    @cached_property
    def reach(self) -> Tensor:
        """`[B, L]` int64: the place in its row after the last one that may see each token; padding sees itself."""
        width = self.position_ids.shape[1]
        filled = counting(self.rows) % width + 1
        for start, pack in zip(self.starts, self.packs, strict=True):
            np.add(pack.reach, start % width, out=filled[start : start + pack.tokens])
        return torch.from_numpy(filled).view(self.position_ids.shape).to(self.position_ids.device)

    @cached_property
    def mask_function(self) -> MaskFunction:
        """What flex attention calls a `mask_mod`: the given one, or the format's."""
        return self.format.mask_mod(self) if self.mask_fn is None else self.mask_fn(self)

    @property
    def own_mask(self) -> bool:
        """Whether somebody's own mask function takes the place of the usual one, which lengths can express."""
        return self.mask_fn is not None or type(self.format).mask_mod is not Format.mask_mod

    def dense_mask(self) -> Tensor:
        """Return `[B, L, L]` bool, True where attention is allowed."""
        count, width = self.position_ids.shape
        return dense_of(self.mask_function, count, width, self.position_ids.device)

    @cached_property
    def _blocks(self) -> BlockMask:
        from torch.nn.attention.flex_attention import create_block_mask

        if not self.own_mask:
            return reach_block_mask(self.reach, self.mask_function)
        count, width = self.position_ids.shape
        return create_block_mask(self.mask_function, count, None, width, width, device=self.position_ids.device)

    def block_mask(self) -> BlockMask:
        """Return flex attention's block mask of all rows, made on first use."""
        return self._blocks

    def model_inputs(self, for_: str | nn.Module | None = None) -> dict[str, Any]:
        """Return the arguments of a model's forward, and none that it does not know.

        Args:
            for_: the model itself, which says how it reads documents, or a name of `pack_torch.inputs.FORMS`: `hf`,
                `sdpa`, `eager`, `flex`, `flash`, `varlen`, `nested`, `torchtune`, `pack_torch`. None: by the
                collator's mask, with a warning where another kind of model would take that without a word and let
                documents see each other.

        Raises:
            ValueError: what was collated cannot be told to such a model; says why and what to do.
        """
        if for_ is None:
            warn_of_silence(self.form)
        return model_inputs(self, self.form if for_ is None else for_)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch with all its tensors on a device; all that is derived follows them there."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; a loader with `pin_memory=True` calls this."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        return attrs.evolve(
            self,
            columns={name: move(column) for name, column in self.columns.items()},
            position_ids=move(self.position_ids),
            payloads={name: move(values) for name, values in self.payloads.items()},
            score=self._scored.on(move),  # found before it moves: a GPU would wait to say how many there are
        )

    @cached_property
    def _scored(self) -> Score:
        if self._score is not None:
            return self._score
        flat = {name: column.flatten(0, 1) for name, column in self.columns.items()}
        found = []
        for start, pack in zip(self.starts, self.packs, strict=True):
            own: dict[str, Any] = {name: column[start : start + pack.tokens] for name, column in flat.items()}
            scored = self.format.scored(attrs.evolve(pack, columns=own))
            found.append(scored.emptied() if pack.weightless else scored)
        return merged(found, self.starts, self.packs)

    @property
    def rollouts(self) -> tuple[ScoredSample, ...]:
        """The samples: documents, answers of a pair, completions of a prompt. What losses call rollouts."""
        return self._scored.samples

    @property
    def response_lens(self) -> tuple[int, ...]:
        """Scored tokens of each sample."""
        return tuple(sample.response_length for sample in self.rollouts)

    @property
    def chosen(self) -> frozenset[str | int] | None:
        """Ids of the preferred samples of pairs; None where there are no pairs."""
        return self._scored.chosen

    def score_map(self) -> tuple[Tensor, Tensor]:
        """Return `[S]` rows of the flattened logits, and `[S]` the token that each predicts."""
        return self._scored.rows, self._scored.targets

    def concat(self, name: str) -> Tensor:
        """Return `[S]` of a field with one value per scored token: `loss_mask`, `advantages`, ...

        Raises:
            ValueError: the documents came without it.
        """
        if name == "loss_mask":
            return self._scored.active
        if name not in self._scored.fields:
            known = ", ".join(["loss_mask", *self._scored.fields])
            raise ValueError(
                f"the documents have no {name} per scored token, only {known}; see token_fields of the format"
            )
        return self._scored.fields[name]

    def split(self, values: Tensor) -> list[Tensor]:
        """Return one tensor per sample of a `[S]` tensor.

        Raises:
            ValueError: `values` does not have S entries.
        """
        if values.shape[:1] != (sum(self.response_lens),):
            raise ValueError(
                f"values have shape {list(values.shape)} but the samples have {sum(self.response_lens):,} scored tokens"
            )
        return list(torch.split_with_sizes(values, list(self.response_lens)))


def lay_flat(parts: Sequence[Array], pad: float | None, length: int) -> Tensor:
    """Return `[1, length, ...]`: the parts end to end, then `pad`, or the numbers from 0 on where it is None."""
    filled = _empty(1, length, parts)
    total = sum(map(len, parts))
    np.concatenate(parts, out=filled[0, :total])
    if total < length:
        filled[0, total:] = counting(length - total) if pad is None else pad
    return torch.from_numpy(filled)


def lay_padded(parts: Sequence[Array], pad: float | None, length: int) -> Tensor:
    """Return `[B, length, ...]`: each part on a row of its own, then `pad`, or the numbers from 0 on."""
    filled, numbers = _empty(len(parts), length, parts), counting(length)
    for row, part in enumerate(parts):
        size = len(part)
        filled[row, :size] = part
        if size < length:
            filled[row, size:] = numbers[: length - size] if pad is None else pad
    return torch.from_numpy(filled)


def _empty(rows: int, length: int, parts: Sequence[Array]) -> Array:
    dtype = parts[0].dtype
    if len({part.dtype for part in parts}) > 1:  # whole numbers in one pack and fractions in the next
        dtype = np.result_type(*parts)
    return np.empty((rows, length, *parts[0].shape[1:]), dtype)
