"""Two optimizer updates of the model with every mixer, the first on checked scores, the second on its own forward's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from pack_core import Topology
from pack_torch import (
    Rollout,
    SmallModel,
    build_batch,
    build_groups,
    full_gradients,
    full_state,
    load_balancing_loss,
    normalization,
    policy_loss,
    reduce_gradients,
    response_log_probs,
    router_z_loss,
    scored_rows,
    scored_targets,
    target_log_probs,
)
from support.torch_cases import HYBRID, adam_moments

ROUTED = list(HYBRID.moe_layers)

#: Documents changed in turn, alike on all ranks: those that share experts run equally many forwards.
ROUNDS = 3


def update_twice(
    rollouts: Sequence[Rollout],
    packs: Sequence[Sequence[int]],
    *,
    topology: Topology | None = None,
    recompute: bool = False,
    attention: str = "segment",
    balance: float = 0.0,
    size: float = 0.0,
) -> dict[str, Any]:
    """Every number that two Adam updates over this rank's packs see and leave, in float64, routes as recorded.

    `balance` and `size` are the coefficients of the router's balancing loss, over each packed forward, and z loss.
    """
    groups = build_groups(topology or Topology(1))
    model = SmallModel(
        HYBRID, seed=3, dtype=torch.float64, attention=attention, recompute=recompute, expert_group=groups.expert
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    counts = normalization(rollouts)
    batches = [build_batch(rollouts, pack, replay=True) for pack in packs]
    found: dict[str, Any] = {"start": full_state(model), "updates": [], "counted": [], "off": []}
    for update in (1, 2):
        optimizer.zero_grad()
        anchors = [_scores(model, batch) if update == 1 else None for batch in batches]
        one: dict[str, Any] = {"policy": 0.0, "balance": 0.0, "size": 0.0, "log_probs": {}}
        for batch, anchor in zip(batches, anchors, strict=True):
            output = model(batch, router_logits=True)
            assert torch.equal(output.routes[:, ROUTED], batch.routes[:, ROUTED].int()), "not the recorded experts"
            rows = scored_rows(batch.doc_lens, batch.response_lens)
            scored = target_log_probs(model.logits(output.hidden[rows]), scored_targets(batch))
            if anchor is not None:
                found["off"].append(float((anchor - scored.detach()).abs().sum()))
            old = scored.detach() if anchor is None else anchor
            policy = policy_loss(scored, batch, old_log_probs=old).numerator / counts.denominator("token")
            balanced = load_balancing_loss(output.router_logits, output.routes[:, ROUTED], batch.doc_lens)
            sized = router_z_loss(output.router_logits, batch.doc_lens)
            found["counted"].append((balanced.tokens, balanced.documents))
            parts = {"balance": balance * balanced.numerator, "size": size * sized.numerator}
            parts = {"policy": policy} | {name: part / counts.model_tokens for name, part in parts.items()}
            torch.stack(list(parts.values())).sum().backward()
            for name, part in parts.items():
                one[name] += float(part.detach())
            split = batch.split(scored.detach())
            one["log_probs"] |= {r.id: values for r, values in zip(batch.rollouts, split, strict=True)}
        reduce_gradients(model, groups)
        one["gradients"] = full_gradients(model)
        optimizer.step()
        found["updates"].append(one)
    found["state"] = full_state(model)
    found |= adam_moments(model, optimizer)
    found["moved"] = _perturb(model, rollouts, packs[0])
    return found


def _scores(model: SmallModel, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return response_log_probs(model, batch)


def _perturb(model: SmallModel, rollouts: Sequence[Rollout], pack: Sequence[int]) -> list[tuple[bool, float]]:
    """For each document of the pack: whether changing it moves itself, and by how much it moves any other."""
    found = []
    before = build_batch(rollouts, pack, replay=True)
    with torch.no_grad():
        hidden = model(before).hidden
        for turn in range(ROUNDS):
            document = turn % len(pack)
            index = pack[document]
            tokens = (rollouts[index].tokens + 1) % HYBRID.vocab_size
            changed = [attrs.evolve(r, tokens=tokens) if i == index else r for i, r in enumerate(rollouts)]
            off = (model(build_batch(changed, pack, replay=True)).hidden - hidden).abs()
            own = before.document_ids == document
            others = float(off[~own].max()) if bool((~own).any()) else 0.0
            found.append((bool((off[own] > 0).any()), others))
    return found


def update_variants(
    rank: int, rollouts: Sequence[Rollout], packs: Sequence[Sequence[Sequence[int]]], variants: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`update_twice` of this rank's packs, once per variant."""
    return [update_twice(rollouts, packs[rank], **variant) for variant in variants]
