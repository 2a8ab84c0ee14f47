"""What a rank of a gloo world does with an OLMo-core model whose experts are spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pack_core import Topology
from pack_miles.core.model import CoreModel, build_core
from pack_miles.core.sharding import shard_experts
from pack_torch import build_batch, build_groups, normalization, policy_loss, reduce_gradients, response_log_probs
from support.olmo_cases import LEARNING_RATE, make_rollouts, nudge
from support.olmo_experts import ROUTED, expert_config
from support.olmo_leaves import replace_gpu_leaves
from torch import Tensor


def train_on_rank(rank: int, packs: Sequence[Sequence[Sequence[int]]], options: dict[str, Any]) -> dict[str, Any]:
    """Two AdamW steps over this rank's packs: scores, gradients of each step, and parameters, all by name.

    Args:
        rank: this one.
        packs: of every rank.
        options: `ranks`, `expert_parallel`, `replay`, `recompute`; `loss_div_factor` and router options where aux
            losses are on; `tokens` to give a sample other tokens, by its index.
    """
    replace_gpu_leaves()
    topology = Topology(options["ranks"], options["expert_parallel"])
    groups = build_groups(topology)
    core = build_core(expert_config(**options.get("router", {})), attention="segment", recompute=options["recompute"])
    # In float32 AdamW would blow up the last bits of the smallest gradients in its second step.
    core.to(torch.float64)
    nudge(core)
    model = CoreModel(shard_experts(core, topology), replay=options["replay"])
    rollouts = make_rollouts(ROUTED)
    for index in options.get("changed", ()):
        rollouts[index].tokens.copy_((rollouts[index].tokens + 1) % 25)
    denominator = normalization(rollouts).denominator("token")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6)
    seen: list[dict[str, Tensor]] = []
    scores: dict[int, Tensor] = {}
    factor = options.get("loss_div_factor")
    through = model if factor is None else model.dividing(factor)
    for _ in range(2):
        optimizer.zero_grad()
        for pack in packs[rank]:
            batch = build_batch(rollouts, pack, replay=options["replay"])
            log_probs = response_log_probs(through, batch)
            if not seen:
                scores.update(zip(pack, batch.split(log_probs.detach()), strict=True))
            (policy_loss(log_probs, batch).numerator / denominator).backward()
        reduce_gradients(model, groups)
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    own = {id(parameter) for parameter in model.expert_parameters()}
    return {
        "scores": scores,
        "gradients": seen,
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "experts": [name for name, p in model.named_parameters() if id(p) in own],
    }


def joined(answers: list[dict[str, Any]], key: str) -> list[dict[str, Tensor]] | dict[str, Tensor]:
    """Gradients or parameters of the whole model: dense ones of rank 0, experts of all ranks of a replica in order."""

    def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        experts = answers[0]["experts"]
        return {n: torch.cat([part[n] for part in parts]) if n in experts else value for n, value in parts[0].items()}

    if key == "gradients":
        return [join([answer[key][step] for answer in answers]) for step in range(2)]
    return join([answer[key] for answer in answers])


def refuse_on_rank(rank: int, degree: int) -> None:
    """Ask for a degree that does not fit; refused before any collective."""
    replace_gpu_leaves()
    shard_experts(build_core(expert_config(), attention="segment"), Topology(degree, degree))


def states_on_rank(rank: int) -> dict[str, dict[str, Tensor]]:
    """Gather the weights of a model whose experts are on two ranks; load twice them and gather again."""
    replace_gpu_leaves()
    topology = Topology(2, 2)
    groups = build_groups(topology)
    core = build_core(expert_config(), attention="segment")
    nudge(core)
    expected = {f"core.{name}": parameter.detach().clone() for name, parameter in core.named_parameters()}
    model = CoreModel(shard_experts(core, topology, groups.expert), expert_group=groups.expert)
    whole = model.full_state()
    model.load_full_state({name: 2 * value for name, value in whole.items()})
    return {"expected": expected, "whole": whole, "doubled": model.full_state()}
