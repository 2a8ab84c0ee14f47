"""What two real ranks do with a dataset that asks torch.distributed who they are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pack_torch import EvenPacks, PackCollator, PackedIterable, add_metrics
from support.iterable_cases import TOKENS, rows_of_lengths


def gather(mine: int) -> list[int]:
    """All ranks' numbers."""
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([mine]))
    return [int(one) for one in found]


def read_together(rank: int, lengths: list[int], policy: str) -> tuple[list[int], int, dict[str, int]]:
    """Numbers of the rows of this rank, its packs, and the metrics of all ranks."""
    dataset = PackedIterable(
        rows_of_lengths(lengths), format=TOKENS, capacity=4, window=1, strategy="next_fit", distributed=True
    )
    collate = PackCollator(mask="dense")
    packs = list(EvenPacks(dataset, gather, policy=policy, every=2))
    own = [row["input_ids"][0] for pack in packs if not pack.encoded.weightless for row in pack.documents()]
    everyone: list[dict[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, add_metrics(collate([pack]).metrics for pack in packs))
    return own, len(packs), add_metrics(one for one in everyone if one is not None)
