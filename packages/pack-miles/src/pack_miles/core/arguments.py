"""What a forward of OLMo-core must be told of a packed row, and what it must not be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pack_torch import Normalization, PackedBatch
from torch import Tensor, nn

from pack_miles.errors import InputError

#: What Core reads document boundaries from. It takes either alone without a word, and then masks nothing.
BOUNDARIES = ("doc_lens", "max_doc_lens")


def document_arguments(batch: PackedBatch) -> dict[str, Any]:
    """Return the keyword arguments that tell a forward of OLMo-core where the documents of a row are.

    >>> arguments = document_arguments(PackedBatch(torch.tensor([1, 2, 3, 4, 5]), (3, 2)))
    >>> arguments["doc_lens"].tolist(), arguments["doc_lens"].dtype, arguments["max_doc_lens"]
    ([[3, 2]], torch.int32, [3])
    """
    # On the CPU: Core adds the lengths up there and moves the result.
    return {"doc_lens": torch.tensor([batch.doc_lens], dtype=torch.int32), "max_doc_lens": [batch.max_seqlen]}


def check_arguments(tokens: Tensor, named: Mapping[str, Any]) -> None:
    """Raise unless the arguments of a forward of OLMo-core keep the documents of its rows apart.

    Args:
        tokens: `[B, T]`.
        named: the keyword arguments.

    Raises:
        InputError: one of `doc_lens` and `max_doc_lens` without the other, or neither; lengths that do not cover every
            row exactly; a longest document that is not the longest; a label across a boundary.

    >>> check_arguments(torch.zeros(1, 5), {"doc_lens": torch.tensor([[3, 2]])})
    Traceback (most recent call last):
    pack_miles.errors.InputError: a forward was given doc_lens without max_doc_lens; OLMo-core then masks nothing ...
    """
    given = [name for name in BOUNDARIES if named.get(name) is not None]
    if len(given) == 1:
        missing = next(name for name in BOUNDARIES if name not in given)
        raise InputError(
            f"a forward was given {given[0]} without {missing}; OLMo-core then masks nothing and says nothing, so give "
            "both (document_arguments makes them)"
        )
    if not given:
        raise InputError(
            "a forward was given no doc_lens and max_doc_lens; give both, also for a row of one document, or build "
            "CoreModel(packed=False) for one sample a row"
        )
    lengths = torch.as_tensor(named["doc_lens"]).reshape(tokens.shape[0], -1).tolist()
    longest = list(named["max_doc_lens"])
    for row, (documents, most) in enumerate(zip(lengths, longest, strict=True)):
        if sum(documents) != tokens.shape[1] or min(documents) < 0:
            raise InputError(
                f"doc_lens of row {row} are {documents} and sum to {sum(documents):,}, but the row has "
                f"{tokens.shape[1]:,} tokens; they must cover it exactly (padding is a document of its own)"
            )
        if max(documents) != most:
            raise InputError(f"max_doc_lens of row {row} is {most:,} but its longest document has {max(documents):,}")
    labels = named.get("labels")
    if labels is not None:
        _check_labels(labels, lengths, int(named.get("ignore_index", -100)))


def _check_labels(labels: Tensor, lengths: Sequence[Sequence[int]], ignored: int) -> None:
    for row, documents in enumerate(lengths):
        ends = torch.tensor([length for length in documents if length]).cumsum(0) - 1
        wrong = ends[(labels[row].cpu()[ends] != ignored)]
        if wrong.numel():
            raise InputError(
                f"labels of row {row} give position {int(wrong[0])}, the last of its document, a target, which is "
                f"another document's first token; set it to {ignored}"
            )


def auxiliary_denominator(counts: Normalization, *, ranks: int = 1, averaged: bool = False) -> float:
    """Return the `loss_div_factor` of every forward of an optimizer step, from the step's counts over all ranks.

    Core adds the routers' auxiliary gradients to each forward's with weight 1 and divides them by this alone; left to
    itself it divides by the tokens of the forward, so that twice as many packs would weigh twice as much. All tokens
    of the step, therefore, where gradients are summed over ranks; that over the ranks where they are averaged.

    Args:
        counts: of the whole step.
        ranks: in the world.
        averaged: gradients are averaged over ranks, as DDP and FSDP do, not summed.

    >>> auxiliary_denominator(Normalization(8, 300, 1000), ranks=4, averaged=True)
    250.0
    """
    return counts.model_tokens / (ranks if averaged else 1)


def check_forward(core: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raise as `check_arguments` does; a pre-hook of a model's forward."""
    check_arguments(arguments[0] if arguments else named["input_ids"], named)
