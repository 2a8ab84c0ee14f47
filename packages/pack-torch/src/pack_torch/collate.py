"""From packs to what a forward takes: a loader's `collate_fn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

import attrs

from pack_torch.masks import MaskFunction
from pack_torch.pack import Pack, lay_packs
from pack_torch.rows import Batch as Batch
from pack_torch.rows import Lay, lay_flat, lay_padded


@attrs.frozen
class Form:
    """How a mask wants packs laid out, and what models are then given unless they ask for something else."""

    lay: Lay
    flat: bool
    inputs: str


#: What `PackCollator` takes as `mask`.
MASKS = MappingProxyType(
    {
        "varlen": Form(lay_flat, True, "flash"),
        "nested": Form(lay_flat, True, "nested"),
        "flex": Form(lay_padded, False, "flex"),
        "dense": Form(lay_padded, False, "hf"),
    }
)


@attrs.frozen
class PackCollator:
    """Makes one batch of a list of packs. It knows nothing of formats and masks but where to look them up.

    Args:
        mask: how attention is told where documents end. `varlen` and `nested`: all packs in one row `[1, ΣT]`, with the
            documents' lengths. `flex` and `dense`: a row for each pack, filled up to its capacity,
            `[packs, capacity]`, with a block mask or a tensor, made when asked for, where the batch then lies.
        mask_fn: takes the batch and returns a mask function of (batch, head, query row, key row), in place of the
            format's; with `flex` and `dense`.
        static: `varlen` rows are filled up to the capacities of their packs too, so that shapes stay for compilers and
            CUDA graphs; needs `max_documents`. The other rows are always filled up.
        max_documents: the most documents of a batch, for `static`: kernels are told as many boundaries, always.

    Raises:
        ValueError: no such mask, or options that do not go together.

    >>> from pack_torch import Sft, build_pack
    >>> packs = [build_pack([{"input_ids": one}], format=Sft(label_mode="tokens"), capacity=4) for one in ([1, 2], [3])]
    >>> PackCollator(mask="varlen")(packs)["input_ids"].tolist(), PackCollator(mask="flex")(packs)["input_ids"].tolist()
    ([[1, 2, 3]], [[1, 2, 0, 0], [3, 0, 0, 0]])
    """

    mask: str = attrs.field(default="varlen")
    mask_fn: Callable[[Batch], MaskFunction] | None = None
    static: bool = False
    max_documents: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check that the options go together."""
        if self.mask not in MASKS:
            raise ValueError(f"mask is {self.mask!r} but must be one of {', '.join(MASKS)}")
        if self.mask_fn is not None and MASKS[self.mask].flat:
            raise ValueError(
                f"mask is {self.mask!r}, which tells documents by their lengths and has no place for a mask function; "
                "use 'flex' or 'dense'"
            )
        if (self.static and self.mask == "varlen") != (self.max_documents is not None):
            raise ValueError(
                f"max_documents is {self.max_documents} with mask {self.mask!r} and static {self.static}; it goes with "
                "a static varlen row, which needs it"
            )

    def __call__(self, packs: Sequence[Pack]) -> Batch:
        """Return the batch.

        Raises:
            ValueError: no pack, packs of different fields or capacities, or more documents than `max_documents`.
        """
        form = MASKS[self.mask]
        _check_alike(packs)
        length = packs[0].capacity
        if form.flat:
            length = sum([pack.capacity if self.static else pack.tokens for pack in packs])
        batch = lay_packs(
            packs,
            form.lay,
            length,
            flat=form.flat,
            form=form.inputs,
            mask_fn=self.mask_fn,
            documents=self.max_documents,
        )
        if self.max_documents is not None and len(batch.doc_lens) > self.max_documents:
            raise ValueError(
                f"the batch has {len(batch.doc_lens):,} documents but max_documents is {self.max_documents:,}; raise "
                "it, or limit the documents of a pack"
            )
        return batch


def _check_alike(packs: Sequence[Pack]) -> None:
    if not packs:
        raise ValueError("there are no packs; a batch has at least one")
    first = packs[0]
    columns, values = first.encoded.columns.keys(), first.encoded.values.keys()
    for number, pack in enumerate(packs):
        encoded = pack.encoded
        if encoded.columns.keys() != columns or encoded.values.keys() != values:
            odd = {*encoded.columns, *encoded.values} ^ {*columns, *values}
            fault = f"{', '.join(sorted(odd))} in one of them only"
            if not odd:
                fault = (
                    f"{', '.join(sorted(encoded.columns.keys() ^ columns))} with a value per token in one of them only"
                )
            raise ValueError(
                f"pack {number} and pack 0 do not have the same fields: {fault}; give every document of a dataset the "
                "same"
            )
        if pack.capacity != first.capacity:
            raise ValueError(
                f"pack {number} has capacity {pack.capacity:,} and pack 0 {first.capacity:,}; rows of a batch have "
                "one length, so build all packs with one capacity"
            )
