"""What the ranks of multi-process tests run; importable, so that spawned processes find it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from pack_core import Topology
from pack_torch import (
    ModelConfig,
    Normalization,
    Rollout,
    SmallModel,
    build_batch,
    build_groups,
    clip_gradients,
    full_gradients,
    full_state,
    group_sizes,
    load_full_state,
    normalization,
    policy_loss,
    reduce_gradients,
    response_log_probs,
)
from support.torch_cases import CONFIG, accumulate, counted_collectives, train


def add_ranks(rank: int, base: int) -> int:
    """Base plus rank."""
    return base + rank


def fail_on_one(rank: int) -> None:
    """Rank 1 raises while rank 0 waits for it in a collective."""
    if rank == 1:
        raise ValueError("rank one has had enough")
    torch.distributed.barrier()


def never_end(rank: int, directory: str) -> None:
    """Write the process id, then outlast any test."""
    with open(os.path.join(directory, f"{rank}.pid"), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def train_variants(
    rank: int, rollouts: Sequence[Rollout], packs: Sequence[Sequence[Sequence[int]]], variants: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Two Adam steps per variant, over this rank's packs."""
    return [train(rollouts, packs[rank], **variant) for variant in variants]


def train_singly(rank: int, rollouts: Sequence[Rollout], variant: dict[str, Any]) -> dict[str, Any]:
    """Two Adam steps over this rank's column of two, one sample a row."""
    return train(rollouts, [[index] for index in range(rank, len(rollouts), 2)], **variant)


def count_collectives(
    rank: int, rollouts: Sequence[Rollout], cuts: Sequence[Sequence[Sequence[int]]], topology: Topology
) -> list[dict[str, Any]]:
    """For each cut into packs: collectives of the packs, of the reduction, and of clipping."""
    groups = build_groups(topology)
    found = []
    for packs in cuts:
        model = SmallModel(CONFIG, seed=3, dtype=torch.float64, expert_group=groups.expert)
        with counted_collectives() as calls:
            accumulate(model, rollouts, packs)
            during = list(calls)
            calls.clear()
            reduce_gradients(model, groups)
            reduction = list(calls)
            calls.clear()
            clip_gradients(model, 1.0, groups)
            found.append({"during": during, "reduction": reduction, "clipping": list(calls)})
    return found


def gather_state(rank: int, other: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state under EP 2 of a seed, and what it becomes once `other` is loaded."""
    groups = build_groups(Topology(2, 2))
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64, expert_group=groups.expert)
    drawn = full_state(model)
    load_full_state(model, other)
    return {"drawn": drawn, "loaded": full_state(model), "held": [p.shape[0] for p in model.expert_parameters()]}


def isolate(
    rank: int, rollouts: Sequence[Rollout], changed: Sequence[Rollout], recompute: bool, config: ModelConfig = CONFIG
) -> dict[str, Any]:
    """Hidden states and gradients under EP 2 before and after rank 0's second sample changes its tokens."""
    groups = build_groups(Topology(2, 2))
    found = []
    for version in (rollouts, changed):
        model = SmallModel(config, seed=3, dtype=torch.float64, recompute=recompute, expert_group=groups.expert)
        batch = build_batch(version, [0, 1, 2] if rank == 0 else [3, 4], replay=True)
        hidden = model(batch).hidden
        # Rank 0's loss is its first and third sample's, rank 1's all of its own.
        kept = batch.document_ids != 1 if rank == 0 else torch.ones(batch.tokens, dtype=torch.bool)
        hidden[kept].square().sum().backward()
        reduce_gradients(model, groups)
        found.append({"hidden": hidden.detach()[kept], "gradients": full_gradients(model)})
    return {"before": found[0], "after": found[1]}


def route_live(rank: int, rollouts: Sequence[Rollout], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Routes and gradients of live routing under EP 2, recompute off and on."""
    groups = build_groups(Topology(2, 2))
    found: dict[str, Any] = {}
    for recompute in (False, True):
        model = SmallModel(CONFIG, seed=3, dtype=torch.float64, recompute=recompute, expert_group=groups.expert)
        with counted_collectives() as calls:
            output = model(build_batch(rollouts, packs[rank]))
            output.hidden.square().sum().backward()
        reduce_gradients(model, groups)
        found["on" if recompute else "off"] = {
            "routes": output.routes,
            "gradients": full_gradients(model),
            "calls": calls,
        }
    return found


def reduce_over_ranks(
    rank: int,
    rollouts: Sequence[Rollout],
    packs: Sequence[Sequence[Sequence[int]]],
    reduction: Any,
    masked_samples: Any,
    expert_parallel: int,
) -> dict[str, Any]:
    """Loss of one step and its gradients, this rank knowing nothing of the others but what collectives tell it."""
    groups = build_groups(Topology(2, expert_parallel))
    own = [rollouts[index] for pack in packs[rank] for index in pack]
    counted: list[Any] = [None, None]
    dist.all_gather_object(counted, group_sizes(own, masked_samples=masked_samples))
    sizes = counted[0] + counted[1]
    mine = normalization(own, masked_samples=masked_samples, group_sizes=sizes)
    counts = torch.tensor([mine.samples, mine.active_tokens, mine.model_tokens, float(mine.groups)]).double()
    dist.all_reduce(counts)
    step = Normalization(*map(int, counts[:3]), groups=float(counts[3]))
    denominator = step.denominator(reduction, length=6 if reduction == "constant" else None)
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64, expert_group=groups.expert)
    loss = torch.zeros((), dtype=torch.float64)
    for pack in packs[rank]:
        batch = build_batch(rollouts, pack, replay=True)
        part = policy_loss(
            response_log_probs(model, batch),
            batch,
            reduction=reduction,
            group_sizes=sizes if reduction == "group" else None,
        )
        (part.numerator / denominator).backward()
        loss += part.numerator.detach() / denominator
    reduce_gradients(model, groups)
    dist.all_reduce(loss)
    return {"loss": float(loss), "gradients": full_gradients(model), "own groups": float(mine.groups)}
