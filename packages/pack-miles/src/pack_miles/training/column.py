"""A rank's own samples become packs, as many of them as on every other rank."""

from collections.abc import Sequence
from typing import Any

import attrs
from pack_core import Packing, Plan, equalize, pack
from pack_torch import PackedBatch

from pack_miles.training.collectives import World


@attrs.frozen
class ColumnOptions:
    """How a rank packs its column.

    `step_samples` is this rank's samples of one optimizer step; `max_documents=1` is the one-sample-a-row path.
    """

    step_samples: int
    capacity: int
    equalize: str
    max_documents: int | None


def pack_column(
    ids: Sequence[str | int], lengths: Sequence[int], options: ColumnOptions, world: World
) -> list[list[list[int]]]:
    """Return, for each optimizer step, this rank's packs as indices into its own samples.

    Every rank packs alone; one collective over all steps finds the largest pack count of each step, and every rank
    splits its packs to that count. Equal sample counts mean that no pack is ever empty.

    Raises:
        RankError: on every rank, when any rank cannot pack its samples.
    """
    blocks = world.agreed(lambda: _pack_blocks(ids, lengths, options))
    counts = world.largest([len(packing) for packing in blocks])
    steps = []
    for block, (packing, count) in enumerate(zip(blocks, counts, strict=True)):
        first = block * options.step_samples
        equal = equalize(
            packing,
            lengths[first : first + options.step_samples],
            count=count,
            method=options.equalize,
            max_documents=options.max_documents,
        )
        steps.append([[first + place for place in places] for places in equal])
    return steps


def packs_of(plan: Plan, world: World) -> list[list[list[int]]]:
    """Return the plan's packs of this rank, step by step, as places in its own column.

    Position p of the plan's order is this rank's place `p // ranks`.
    """
    place = {index: position // world.size for position, index in enumerate(plan.order)}
    return [[[place[index] for index in pack] for pack in step.packs[world.rank]] for step in plan.steps]


def describe(batches: Sequence[PackedBatch], capacity: int) -> dict[str, Any]:
    """Return what a `packing` event says of the rows of one update on this rank."""
    tokens = sum(batch.tokens for batch in batches)
    samples = sum(batch.documents for batch in batches)
    return {
        "samples": samples,
        "packs": len(batches),
        "model_tokens": tokens,
        "max_pack_tokens": max(batch.tokens for batch in batches),
        "token_budget": capacity,
        "fill_fraction": tokens / (len(batches) * capacity),
        "samples_per_pack": samples / len(batches),
    }


def _pack_blocks(ids: Sequence[str | int], lengths: Sequence[int], options: ColumnOptions) -> list[Packing]:
    size = options.step_samples
    if not lengths or len(lengths) % size:
        raise ValueError(
            f"this rank has {len(lengths)} samples, which is not a positive multiple of the {size} it needs for each "
            "optimizer step; give every rank whole steps"
        )
    return [
        pack(
            lengths[first : first + size],
            capacity=options.capacity,
            max_documents=options.max_documents,
            ids=ids[first : first + size],
        )
        for first in range(0, len(lengths), size)
    ]
