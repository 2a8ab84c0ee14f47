"""What single ranks do in tests of balanced order: two updates over recorded rollouts, and everything they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from pack_core import digest
from pack_miles.contract.sink import ContractSink, contract_path
from pack_miles.planning import plan_collection
from pack_miles.samples import RolloutRow, read_rows
from pack_miles.settings.config import Config, load_config
from pack_miles.tasks import TASKS
from pack_miles.training import trainer
from pack_miles.training.actor import Actor
from pack_miles.training.collection import advantages, to_rollout
from pack_miles.training.collectives import RankError, World
from pack_miles.training.policy import DTYPES
from pack_torch import PackedBatch
from support.miles_runs import events


@attrs.define(eq=False)
class Recording(Actor):
    """An actor that keeps the scores of every sample."""

    scores: dict[str | int, torch.Tensor] = attrs.field(factory=dict)

    def _score_row(self, batch: PackedBatch) -> PackedBatch:
        scored = Actor._score_row(self, batch)
        self.scores |= {rollout.id: rollout.old_log_probs for rollout in scored.rollouts}
        return scored


def recording_actor(rank: int, config: Config, sink: ContractSink) -> Recording:
    """Return an actor of this rank, the clock of which stands still."""
    world = World(rank, config.run.ranks)
    actor, _ = trainer.build(config, TASKS["sort"], world, sink, lambda: 0.0, torch.device("cpu"))
    return Recording(**{field.name: getattr(actor, field.name) for field in attrs.fields(Actor)})


def train_recorded(rank: int, file: str, rollouts: str, out: str, flags: list[tuple[str, str]]) -> dict[str, Any]:
    """Take the updates of one recorded collection and return scores, gradients, moments, parameters and versions."""
    config = load_config(file, [*flags, ("output.root", out)])
    rows = list(read_rows(rollouts))
    gradients: list[dict[str, torch.Tensor]] = []
    with ContractSink(contract_path(Path(out), rank), rank) as sink:
        actor = recording_actor(rank, config, sink)

        def keep(*_: object) -> None:
            named = actor.model.named_parameters()
            gradients.append({name: one.grad.clone() for name, one in named if one.grad is not None})

        actor.optimizer.register_step_pre_hook(keep)
        plan, loads = follow(actor, config, rows)
    state = actor.optimizer.state_dict()["state"]
    return {
        "scores": actor.scores,
        "gradients": gradients,
        "moments": {f"{key} of {n}": one[key] for n, one in state.items() for key in ("exp_avg", "exp_avg_sq")},
        "parameters": dict(actor.model.state_dict()),
        "packs": [step.packs_per_rank for step in plan.steps],
        "order": plan.order,
        "digest": plan.digest,
        "predicted": loads,
        "observed": events(Path(out), rank, "expert_balance"),
        "samples": [sorted(rows[index].index for index in block(plan.order, config, step)) for step in range(2)],
    }


def block(order: tuple[int, ...], config: Config, step: int) -> tuple[int, ...]:
    """Return the samples of one optimizer step as the order has them."""
    return order[step * config.step_samples : (step + 1) * config.step_samples]


def follow(actor: Actor, config: Config, rows: list[RolloutRow], *, spoil: str = "") -> Any:
    """Plan the rows on this rank and train on its column.

    With `spoil`, "loads" expects one choice more than there is, "routes" replays another expert pair than was counted.
    """
    plan, loads, _ = plan_collection(config, rows, lambda: 0.0, step=0, rollout_id=0)
    gains, world = advantages(config, rows), actor.world
    order = plan.order[world.rank :: world.size]
    column = [to_rollout(rows[index], gains[index], DTYPES[config.model.dtype]) for index in order]
    if spoil == "loads" and loads is not None:
        loads[0][1][0][1][0] += 1
    if spoil == "routes":
        column = [attrs.evolve(one, routes=elsewhere(one.routes)) if one.id == 5 else one for one in column]
    actor.train(0, column, plan, loads if world.rank == 0 else None)
    return plan, loads


def elsewhere(routes: torch.Tensor) -> torch.Tensor:
    """Return routes in which one token of layer 2 that had both its experts on one rank has both on the other."""
    changed = routes.clone()
    token = int((routes[:, 2] // 2 == routes[:, 2, :1] // 2).all(dim=1).nonzero()[0])
    changed[token, 2] = (routes[token, 2] + 2) % 4
    return changed


def train_spoilt(rank: int, file: str, rollouts: str, out: str, spoil: str) -> dict[str, Any]:
    """Train with loads or routes that are not those planned; return what is said and whether anything moved."""
    config = load_config(file, [("output.root", out)])
    with ContractSink(contract_path(Path(out), rank), rank) as sink:
        actor = recording_actor(rank, config, sink)
        before = [parameter.detach().clone() for parameter in actor.model.parameters()]
        told = ""
        try:
            follow(actor, config, list(read_rows(rollouts)), spoil=spoil)
        except RankError as error:
            told = str(error)
    still = all(torch.equal(one, other) for one, other in zip(before, actor.model.parameters(), strict=True))
    return {"told": told, "still": still, "balance": events(Path(out), rank, "expert_balance")}


def plan_with_own_clock(rank: int, file: str, rollouts: str, out: str, without_routes: bool) -> Any:
    """Plan as the trainer does, by a clock that leaps on rank 0 and breaks elsewhere; return digest, loads or error."""
    config = load_config(file, [("output.root", out), ("core.expert_balance_search_seconds", "1.5")])
    ticks = iter(range(10**6))

    def tick() -> float:
        if rank:
            raise AssertionError("only rank 0 looks at its clock")
        return float(next(ticks))

    rows = list(read_rows(rollouts))
    if without_routes and rank == 0:
        rows[3].rollout_routed_experts = None
    with ContractSink(contract_path(Path(out), rank), rank) as sink:
        actor = recording_actor(rank, config, sink)
        try:
            plan, loads = trainer._plan(config, 0, rows, actor, trainer.Clocks(tick, tick))
        except RankError as error:
            return str(error)
    assert plan.digest == digest(plan.order, plan.steps)
    return plan.digest, plan.traces[0].stop, loads is not None
