"""For the Trainer of transformers and TRL: a collator it takes, and datasets packed ahead; imports none of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol, TypeVar

import attrs
import torch
from pack_core import pack
from torch import Tensor, nn

from pack_torch.collate import PackCollator
from pack_torch.formats import Format, Sft
from pack_torch.huggingface import boundaries_of
from pack_torch.pack import Pack, build_pack

#: How a model reads documents, to the collator's mask.
MASK_OF = {"mask": "dense", "blocks": "flex", "lengths": "varlen"}
IGNORED = -100


@attrs.frozen
class TrainerCollator:
    """What `Trainer(data_collator=...)` takes: from packs to the arguments of the model's forward, labels included.

    The model is always told where documents end, in the form its attention reads, and never by positions alone. One
    that cannot be told, such as one with recurrent layers, is refused at the first batch.

    Trainer shifts labels over the whole row, so they come one row later than a pack holds them. Its loss divides by
    the labels of all rows and ranks, which makes a packed step that of the same documents one a row.

    Args:
        model: that is trained, before it is wrapped.
        format: what the documents are, where `pack_batches` packed them; packs know themselves.
        capacity: length of the rows, likewise; None: the longest of the batch. Flash attention takes one long row.
        device: where masks are made. Flex attention's is a function of tensors that Trainer does not move, so on a GPU
            say which, and load in the main process (`dataloader_num_workers=0`).

    Raises:
        ValueError: an attention whose form is not known.

    >>> from types import SimpleNamespace
    >>> class Told(nn.Module):  # stands for a causal model of transformers
    ...     config = SimpleNamespace(_attn_implementation="flash_attention_2")
    ...     def forward(self, input_ids, position_ids, labels=None, **told): ...
    >>> row = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}
    >>> inputs = TrainerCollator(Told())([row])
    >>> inputs["position_ids"].tolist(), inputs["labels"].tolist(), inputs["cu_seq_lens_q"].tolist()
    ([[0, 1, 2, 0, 1]], [[-100, 2, 3, -100, 5]], [0, 3, 5])
    """

    model: nn.Module = attrs.field(repr=False)
    format: Format = attrs.field(factory=lambda: Sft(label_mode="tokens"))
    capacity: int | None = None
    device: torch.device | str | None = None
    collate: PackCollator = attrs.field(init=False)

    @collate.default
    def _by_attention(self) -> PackCollator:
        return PackCollator(mask=MASK_OF[boundaries_of(self.model)])

    def __call__(self, examples: Sequence[Pack | Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch.

        Raises:
            ValueError: rows that say where documents end by positions alone or not at all, a format without labels,
                labels that the shift over the row would lose, or a model that cannot be told.
        """
        batch = self.collate(self._packs(examples))
        if self.device is not None:
            batch = batch.to(self.device)
        if batch.labels is None:
            raise ValueError(
                f"{type(batch.format).__name__} has no labels, but a loss of its own; take PackCollator and a loop of "
                "yours, or override compute_loss"
            )
        return batch.model_inputs(self.model) | {"labels": _moved(batch.labels)}

    def _packs(self, examples: Sequence[Pack | Mapping[str, Any]]) -> list[Pack]:
        rows = [one if isinstance(one, Pack) else self._documents(one) for one in examples]
        ready = [one for one in rows if isinstance(one, Pack)]
        if len(ready) == len(rows):
            return ready
        tokens = [sum(self.format.lengths(one)) for one in rows if not isinstance(one, Pack)]
        length = max(tokens) if self.capacity is None else self.capacity
        return [one if isinstance(one, Pack) else build_pack(one, format=self.format, capacity=length) for one in rows]

    def _documents(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "seq_lengths" not in row:
            raise ValueError(
                f"a row has the fields {', '.join(row)} but no seq_lengths; where documents end is not read off "
                "positions, which many models ignore: give packs, or rows of pack_batches"
            )
        ends = list(accumulate(row["seq_lengths"], initial=0))
        fields = {name: value for name, value in row.items() if name not in ("seq_lengths", "position_ids")}
        return [
            {name: value[start:stop] if name in self.format.fields else value[i] for name, value in fields.items()}
            for i, (start, stop) in enumerate(pairwise(ends))
        ]


def _moved(labels: Tensor) -> Tensor:
    """Return the labels one row later, where a model that shifts them over the row expects them."""
    if bool((labels[:, -1] != IGNORED).any()):
        raise ValueError(
            "the last row has a label, which models that shift labels over the whole row would lose; give labels "
            f"that end with {IGNORED}, or a capacity with one token to spare"
        )
    return torch.cat([torch.full_like(labels[:, :1], IGNORED), labels[:, :-1]], dim=1)


class Mapped(Protocol):
    """A dataset with the `map` of Hugging Face datasets, streaming ones among them."""

    def map(self, function: Any, *, batched: bool, **options: Any) -> Any:
        """Return the dataset of what the function makes of each batch of columns."""


Data = TypeVar("Data", bound=Mapped)


def pack_batches(
    dataset: Data,
    seq_length: int,
    strategy: str = "best_fit_decreasing",
    map_kwargs: Mapping[str, Any] | None = None,
    *,
    overlong: str = "error",
    tokens: str = "input_ids",
    document_fields: Sequence[str] = (),
) -> Data:
    """Return the dataset with its documents packed into rows, ahead of training; with the shape of TRL's
    `pack_dataset`.

    Every row has `seq_lengths`, the tokens of each document in it. Lists per token come end to end; all else a
    document carries comes as a list with one entry a document. Nothing vanishes: what can be neither is an error.
    Documents are packed within each batch of `map`, so the last row of each is short; `PackedIterable` has no such
    seams, and counts what `overlong` loses; nor has `pack_torch.offline.pack_dataset`, which plans over all documents.

    Args:
        dataset: of Hugging Face datasets: a `Dataset`, `DatasetDict` or `IterableDataset`.
        seq_length: most tokens of a row.
        strategy: of `pack_core.pack`; `concat_split` fills every row and cuts documents.
        map_kwargs: for `dataset.map`: `batch_size`, `num_proc`, ...
        overlong: what becomes of longer documents: `error`, `drop`, `truncate` or `split`.
        tokens: the column whose lengths count.
        document_fields: columns of lists that belong to the whole document.

    Raises:
        ValueError: a list with another length than its document, or a document without tokens.
        PackError: a document longer than a row, unless told what becomes of it; an unknown option.

    >>> class Columns(dict):  # stands for a dataset
    ...     def map(self, function, *, batched):
    ...         return Columns(function(self))
    >>> rows = Columns(input_ids=[[1, 2], [3, 4, 5], [6]], weight=[0.5, 1.0, 2.0])
    >>> pack_batches(rows, 4)
    {'input_ids': [[3, 4, 5, 6], [1, 2]], 'weight': [[1.0, 2.0], [0.5]], 'seq_lengths': [[3, 1], [2]]}
    """
    packed: Data = dataset.map(
        partial(
            _packed, tokens=tokens, whole=tuple(document_fields), capacity=seq_length, strategy=strategy, over=overlong
        ),
        batched=True,
        **(map_kwargs or {}),
    )
    return packed


def _packed(
    columns: Mapping[str, Sequence[Any]],
    *,
    tokens: str,
    whole: tuple[str, ...],
    capacity: int,
    strategy: str,
    over: str,
) -> dict[str, list[Any]]:
    if tokens not in columns:
        raise ValueError(f"the dataset has no column {tokens!r} but {', '.join(columns)}; say tokens=...")
    lengths = [len(one) for one in columns[tokens]]
    if 0 in lengths:
        raise ValueError(f"document {lengths.index(0)} of a batch has no tokens; filter empty documents out")
    listed = {name for name, values in columns.items() if name not in whole and _is_listed(name, values, lengths)}
    packing = pack(lengths, capacity=capacity, strategy=strategy, overlong=over)
    order = list(packing.order)
    cuts = dict(zip(packing.parts.places, zip(packing.parts.starts, packing.parts.stops, strict=True), strict=True))
    spans = [cuts.get(place, (0, lengths[document])) for place, document in enumerate(order)]
    bounds = list(pairwise(packing.offsets))
    found: dict[str, list[Any]] = {}
    for name, values in columns.items():
        parts = [
            values[document][start:stop] if name in listed else values[document]
            for document, (start, stop) in zip(order, spans, strict=True)
        ]
        rows = [parts[first:last] for first, last in bounds]
        found[name] = [list(chain.from_iterable(row)) for row in rows] if name in listed else rows
    found["seq_lengths"] = [[stop - start for start, stop in spans[first:last]] for first, last in bounds]
    return found


def _is_listed(name: str, values: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Whether a column has a value per token: it has lists, and then all must be as long as their documents."""
    if not all(hasattr(one, "__len__") and not isinstance(one, (str, bytes, Mapping)) for one in values):
        return False
    for number, (one, length) in enumerate(zip(values, lengths, strict=True)):
        if len(one) != length:
            raise ValueError(
                f"document {number} of a batch has {length:,} tokens but {len(one):,} values of {name!r}; name the "
                "column in document_fields where it belongs to the whole document, or remove it"
            )
    return True
