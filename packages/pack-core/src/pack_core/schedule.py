"""One optimizer step: samples to rank columns, columns to packs, packs to the same number on every rank."""

import operator
from collections.abc import Sequence

from pack_core.errors import CountError, PackError
from pack_core.lengths import Lengths, as_integer, as_lengths, check_fit
from pack_core.packing import equalize as equalize_packs
from pack_core.packing import pack
from pack_core.types import Schedule, Topology


def schedule(
    lengths: Lengths,
    order: Sequence[int],
    *,
    topology: Topology,
    capacity: int,
    equalize: str = "tokens",
    max_documents: int | None = None,
    ids: Sequence[str | int] | None = None,
) -> Schedule:
    """Return the packs of every rank for one optimizer step over the samples in `order`.

    Position p of the order goes to rank `p % ranks`, where it is local place `p // ranks`. Each rank packs its own
    column; then all ranks are split up to the largest count any rank needs. Because every rank holds the same number
    of samples, that count never leaves a pack empty.

    Args:
        lengths: tokens of each sample, `[samples]`.
        order: indices of this step's samples, `[step_samples]`, a positive multiple of the ranks; none twice.
        topology: the ranks.
        capacity: most tokens a pack may hold.
        equalize: `"tokens"`, `"samples"` or `"balanced"`, see `pack_core.equalize`.
        max_documents: most samples a pack may hold, or None.
        ids: names of the samples for error messages, `[samples]`.

    Raises:
        CountError: the ranks would not hold the same number of samples.
        LengthError: a sample is over `capacity`; it is named.
        PackError: `order` names a sample twice or one that does not exist, or an option is unknown.

    >>> schedule([15, 15, 2, 2], [0, 1, 2, 3], topology=Topology(ranks=2), capacity=16)
    Schedule(packs=(((0,), (2,)), ((1,), (3,))))
    """
    tokens = as_lengths(lengths, ids=ids)
    order = tuple(map(operator.index, order))
    _check_order(order, len(tokens), topology.ranks)
    names = [index if ids is None else ids[index] for index in order]
    check_fit([tokens[index] for index in order], as_integer(capacity, "capacity"), names)
    columns = [order[rank :: topology.ranks] for rank in range(topology.ranks)]
    held = [[tokens[index] for index in column] for column in columns]
    packings = [pack(column, capacity=capacity, max_documents=max_documents) for column in held]
    count = max(map(len, packings))
    return Schedule(
        tuple(
            tuple(
                tuple(column[place] for place in places)
                for places in equalize_packs(
                    packing, column_tokens, count=count, method=equalize, max_documents=max_documents
                )
            )
            for column, column_tokens, packing in zip(columns, held, packings, strict=True)
        )
    )


def _check_order(order: Sequence[int], samples: int, ranks: int) -> None:
    if not order or len(order) % ranks:
        raise CountError(
            f"{len(order)} samples do not give {ranks} ranks the same number each; use a positive multiple of {ranks}"
        )
    if min(order) < 0 or max(order) >= samples:
        raise PackError(
            f"order holds indices {min(order)} to {max(order)} but there are {samples} samples, 0 to {samples - 1}"
        )
    if len(set(order)) != len(order):
        first: dict[int, int] = {}
        for position, index in enumerate(order):
            if index in first:
                raise PackError(
                    f"order holds sample {index} at positions {first[index]} and {position}; each may be there once"
                )
            first[index] = position
