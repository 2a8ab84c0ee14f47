"""One rank of a run, from its first collection to its last: sample, reward, plan, train, write down.

sampled rollouts ──► the collection ──► plan ──► this rank's column ──► actor ──► events
"""

import statistics
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import attrs
import msgspec
import torch
from pack_core import Plan, Sample, record
from pack_torch import (
    ModelConfig,
    Rollout,
    SmallModel,
    build_groups,
    full_state,
    load_full_state,
)

from pack_miles import checkpoint, events, standing
from pack_miles.actor import Actor
from pack_miles.collection import DTYPES, collect, describe, to_rollouts
from pack_miles.collectives import World
from pack_miles.config import Config
from pack_miles.planning import plan_samples
from pack_miles.progress import Progress
from pack_miles.samples import write_rows
from pack_miles.scoring_pass import decide
from pack_miles.sink import ContractSink
from pack_miles.standing import Standing
from pack_miles.tasks import TASKS, Task


@attrs.frozen
class Clocks:
    """The times a run may look at: `now` in unix seconds, `tick` in seconds from any origin."""

    now: Callable[[], float]
    tick: Callable[[], float]


def train_rank(
    config: Config, world: World, clocks: Clocks, sink: ContractSink, progress: Progress, device: torch.device
) -> None:
    """Run one rank to the end of the configured collections; every rank of the world must call it."""
    task = TASKS[str(config.data.task)]
    actor, policy = build(config, task, world, sink, clocks.tick, device)
    try:
        _train(config, task, actor, policy, clocks, progress)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        sink.write(events.RunFailed(rank=world.rank, step=actor.completed_steps, error=told))
        raise


def _train(config: Config, task: Task, actor: Actor, policy: SmallModel, clocks: Clocks, progress: Progress) -> None:
    begin, world = clocks.tick(), actor.world
    first = _resume(config, actor) if config.run.resume else 0
    actor.sink.write(_started(config, world, actor, clocks))
    for rollout_id in range(first, config.miles.num_rollout):
        collection = _collect(config, task, rollout_id, actor, policy, clocks)
        chosen = _plan(config, rollout_id, collection, actor)
        # The stride partition: position p of the order is rank p % ranks' sample at place p // ranks.
        column = [collection[index] for index in chosen.order][world.rank :: world.size]
        actor.train(rollout_id, column, chosen.digest, _own_packs(chosen, world))
        done = rollout_id + 1
        every = config.run.checkpoint_every
        if done == config.miles.num_rollout or (every and done % every == 0):
            _save(config, actor, done, clocks)
        progress.advance(done, _mean_reward(collection))
    actor.sink.write(
        events.RunFinished(
            rank=world.rank,
            step=actor.completed_steps,
            completed_steps=actor.completed_steps,
            rollouts=config.miles.num_rollout,
            seconds=clocks.tick() - begin,
        )
    )


def build(
    config: Config, task: Task, world: World, sink: ContractSink, tick: Callable[[], float], device: torch.device
) -> tuple[Actor, SmallModel]:
    """Return the actor of this rank and the policy it samples from, which holds every expert."""
    shape = ModelConfig(
        vocab_size=task.vocabulary,
        hidden_size=config.model.hidden_size,
        num_hidden_layers=config.model.num_hidden_layers,
        num_attention_heads=config.model.num_attention_heads,
        intermediate_size=config.model.intermediate_size,
        moe_intermediate_size=config.model.moe_intermediate_size,
        n_routed_experts=config.model.n_routed_experts,
        num_experts_per_tok=config.model.num_experts_per_tok,
        dense_layers_indices=config.model.dense_layers_indices,
        dropout=config.model.dropout,
    )
    dtype = DTYPES[config.model.dtype]
    groups = build_groups(config.topology, timedelta(seconds=config.run.timeout_seconds))

    def whole() -> SmallModel:
        return SmallModel(shape, seed=config.run.seed, dtype=dtype, attention="segment")

    model = SmallModel(
        shape,
        seed=config.run.seed,
        dtype=dtype,
        attention=config.core.attention_backend,
        recompute=config.core.activation_checkpointing,
        expert_group=groups.expert,
    ).to(device)
    miles = config.miles
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=miles.lr,
        betas=(miles.adam_beta1, miles.adam_beta2),
        eps=miles.adam_eps,
        weight_decay=miles.weight_decay,
    )
    reference = whole().to(device) if miles.kl_coef else None
    actor = Actor(config, model, reference, optimizer, groups, world, sink, tick, decide(config), device)
    return actor, whole()


def _collect(
    config: Config, task: Task, rollout_id: int, actor: Actor, policy: SmallModel, clocks: Clocks
) -> list[Rollout]:
    """Return the collection sampled from the actor's weights as they are, on every rank; rank 0 writes it down."""
    begin = clocks.tick()
    load_full_state(policy, full_state(actor.model))
    rows = collect(config, task, rollout_id, policy, actor.completed_steps, actor.world)
    if actor.world.rank == 0:
        actor.sink.write(describe(rows, rollout_id, actor.completed_steps, clocks.tick() - begin))
        if config.run.save_rollouts:
            write_rows(Path(config.output.root) / "rollouts" / f"{rollout_id:06d}.jsonl.gz", rows)
    return to_rollouts(config, rows)


def _plan(config: Config, rollout_id: int, collection: list[Rollout], actor: Actor) -> Plan:
    """Return the collection's plan; rank 0 writes down every input of it."""
    samples = [Sample(id=r.id, length=r.length, group=r.group) for r in collection]
    chosen = plan_samples(config, samples)
    if actor.world.rank == 0:
        written = record(chosen, samples)
        actor.sink.write(events.Plan(rank=0, step=actor.completed_steps, rollout_id=rollout_id, record=written))
    return chosen


def _own_packs(chosen: Plan, world: World) -> list[list[list[int]]]:
    """Return the plan's packs of this rank, as places in its column: index p of the collection is at p // ranks."""
    place = {index: position // world.size for position, index in enumerate(chosen.order)}
    return [[[place[index] for index in pack] for pack in step.packs[world.rank]] for step in chosen.steps]


def _resume(config: Config, actor: Actor) -> int:
    """Bring the actor to where the newest checkpoint stands and return how many collections are done."""
    path = standing.latest(Path(config.output.root))
    if path is None:
        return 0
    state = checkpoint.load(path, actor.world)
    actor.model.load_state_dict(state["model"])
    actor.optimizer.load_state_dict(state["optimizer"])
    where = standing.read(path)
    actor.completed_steps = where.completed_steps
    return where.rollouts


def _save(config: Config, actor: Actor, done: int, clocks: Clocks) -> None:
    begin, world = clocks.tick(), actor.world
    where = Standing(
        rollouts=done,
        completed_steps=actor.completed_steps,
        world_size=world.size,
        configuration=config.digest,
    )
    state = {"model": actor.model.state_dict(), "optimizer": actor.optimizer.state_dict()}
    path = checkpoint.save(Path(config.output.root), where, state, config.run.checkpoint_keep, world)
    seconds = clocks.tick() - begin
    actor.sink.write(events.Checkpoint(rank=world.rank, step=actor.completed_steps, path=str(path), seconds=seconds))


def _started(config: Config, world: World, actor: Actor, clocks: Clocks) -> events.Event:
    return events.RunStarted(
        rank=world.rank,
        step=actor.completed_steps,
        configuration_digest=config.digest,
        name=config.name,
        world_size=world.size,
        expert_parallel_size=config.core.expert_parallel_size,
        resumed=config.run.resume,
        completed_steps=actor.completed_steps,
        versions={name: version(name) for name in ("pack-core", "pack-torch", "pack-miles", "torch")},
        configuration=msgspec.to_builtins(config.resolved()),
        time=clocks.now(),
    )


def _mean_reward(collection: list[Rollout]) -> float:
    return statistics.fmean(float(rollout.reward or 0.0) for rollout in collection)
