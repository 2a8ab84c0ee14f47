"""One rank of a run, from its first collection to its last: sample, reward, plan, train, write down.

sampled rollouts ──► the collection ──► plan ──► this rank's column ──► actor ──► events
"""

import statistics
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import msgspec
import torch
from pack_core import Plan, decode, encode
from pack_torch import build_groups

from pack_miles import standing
from pack_miles.asynchronous.post import Post
from pack_miles.asynchronous.source import from_workers
from pack_miles.contract import events
from pack_miles.contract.sink import ContractSink, contract_path
from pack_miles.core.source import read_source
from pack_miles.planning import Loads, plan_collection
from pack_miles.reporting.progress import Progress
from pack_miles.samples import RolloutRow, write_rows
from pack_miles.scoring_pass import decide
from pack_miles.settings.config import Config
from pack_miles.standing import Standing
from pack_miles.tasks import TASKS, Task
from pack_miles.training import checkpoint
from pack_miles.training.actor import Actor
from pack_miles.training.collection import advantages, collect, describe, rewards, to_rollout
from pack_miles.training.collectives import World
from pack_miles.training.policy import DTYPES, Policy, build_policies
from pack_miles.training.tracking import Tracker, end_collection, tracking

#: What a run's first event names the versions of.
_OURS = ("pack-core", "pack-torch", "pack-miles", "torch")
_PACKAGES = {"small": _OURS, "olmo_core": (*_OURS, "ai2-olmo-core")}


#: Brings a collection, in arrival order, the same to every rank; all ranks call it together.
RowSource = Callable[[int], list[RolloutRow]]


@attrs.frozen
class Clocks:
    """The times a run may look at: `now` in unix seconds, `tick` in seconds from any origin."""

    now: Callable[[], float]
    tick: Callable[[], float]


def train_rank(
    config: Config,
    world: World,
    clocks: Clocks,
    sink: ContractSink,
    progress: Progress,
    device: torch.device,
    post: Post | None = None,
) -> None:
    """Run one rank to the end of the configured collections; every rank of the world must call it.

    `post` is where collections come from with `miles.fully_async`.

    Raises:
        RankError: on every rank, for what went wrong on any.
        DisagreementError: on every rank, when log-probabilities that must agree do not.
    """
    actor: Actor | None = None
    try:
        _meet(config, world)
        task = TASKS[str(config.data.task)]
        actor, policy = build(config, task, world, sink, clocks.tick, device)
        with tracking(config, world, sink) as tracker:
            source = _rollouts_of(config, task, actor, policy, clocks, post)
            _train(config, source, actor, clocks, progress, tracker)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        sink.write(events.RunFailed(rank=world.rank, step=actor.completed_steps if actor else 0, error=told))
        raise


def _meet(config: Config, world: World) -> None:
    """Check, before any other collective, that all ranks are about to run the same thing into the same folder."""
    newest = world.agreed(lambda: standing.latest(Path(config.output.root)))
    world.same(
        {
            "configuration": config.digest,
            "miles.num_rollout": config.miles.num_rollout,
            "run.checkpoint_every": config.run.checkpoint_every,
            "run.resume": str(config.run.resume),
            "the newest checkpoint": newest.name if newest else "none",
            "the file of model.source": world.agreed(lambda: _source(config)),
        }
    )
    # Rank 0 has opened its contract file by now: a folder without it is another node's own.
    first = contract_path(Path(config.output.root), 0)

    def look() -> None:
        if not first.exists():
            raise ValueError(f"output.root = {config.output.root!r} is not one folder that all ranks see; share it")

    world.agreed(look)


def _source(config: Config) -> str:
    """Return a digest of the file that describes the model, "" where the run file itself does."""
    return read_source(config.model.source or "").digest if config.model.format == "olmo_core" else ""


def _rollouts_of(
    config: Config, task: Task, actor: Actor, policy: Policy, clocks: Clocks, post: Post | None
) -> RowSource:
    """Return what brings a collection to every rank: rollout workers, or else the ranks themselves."""
    if not config.miles.fully_async:
        return lambda rollout_id: _sample(config, task, rollout_id, actor, policy)
    if post is None:
        raise ValueError("miles.fully_async = true, but nobody deals rollouts out to this rank; start it on Ray")
    return lambda rollout_id: from_workers(config, rollout_id, actor, post, clocks.tick)


def _train(
    config: Config,
    source: RowSource,
    actor: Actor,
    clocks: Clocks,
    progress: Progress,
    tracker: Tracker | None,
) -> None:
    begin, world, sink = clocks.tick(), actor.world, actor.sink
    dtype = DTYPES[config.model.dtype]
    first = _resume(config, actor) if config.run.resume else 0
    sink.write(_started(config, world, actor, clocks))
    progress.begin(first)
    for rollout_id in range(first, config.miles.num_rollout):
        rows = _collect(config, source, rollout_id, actor, clocks)
        chosen, loads = _plan(config, rollout_id, rows, actor, clocks)
        gains = advantages(config, rows)
        # The stride partition: position p of the order is rank p % ranks' sample at place p // ranks.
        column = [to_rollout(rows[index], gains[index], dtype) for index in chosen.order[world.rank :: world.size]]
        actor.train(rollout_id, column, chosen, loads)
        end_collection(tracker, sink, rollout_id, actor.completed_steps, actor.device)
        done = rollout_id + 1
        every = config.run.checkpoint_every
        if done == config.miles.num_rollout or (every and done % every == 0):
            _save(config, actor, done, clocks)
        progress.advance(done, statistics.fmean(rewards(rows)))
    sink.write(
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
) -> tuple[Actor, Policy]:
    """Return the actor of this rank and the policy it samples from, which holds every expert."""
    groups = build_groups(config.topology, timedelta(seconds=config.run.timeout_seconds))
    policies = build_policies(config, task.vocabulary, groups, device)
    miles = config.miles
    optimizer = torch.optim.AdamW(
        policies.model.parameters(),
        lr=miles.lr,
        betas=(miles.adam_beta1, miles.adam_beta2),
        eps=miles.adam_eps,
        weight_decay=miles.weight_decay,
    )
    decision = decide(config)
    actor = Actor(config, policies.model, policies.reference, optimizer, groups, world, sink, tick, decision, device)
    return actor, policies.sampler


def _sample(config: Config, task: Task, rollout_id: int, actor: Actor, policy: Policy) -> list[RolloutRow]:
    """Return the collection sampled by all ranks from the actor's weights as they are."""
    policy.load_full_state(actor.model.full_state())
    return collect(config, task, rollout_id, policy, actor.completed_steps, actor.world)


def _collect(config: Config, source: RowSource, rollout_id: int, actor: Actor, clocks: Clocks) -> list[RolloutRow]:
    """Return the collection, on every rank; rank 0 writes it down."""
    begin = clocks.tick()
    rows = source(rollout_id)
    if actor.world.rank == 0:
        actor.sink.write(describe(rows, rollout_id, actor.completed_steps, clocks.tick() - begin))
        if config.run.save_rollouts:
            write_rows(Path(config.output.root) / "rollouts" / f"{rollout_id:06d}.jsonl.gz", rows)
    return rows


def _plan(
    config: Config, rollout_id: int, rows: list[RolloutRow], actor: Actor, clocks: Clocks
) -> tuple[Plan, list[Loads] | None]:
    """Return the collection's plan and, on rank 0, the expert loads it foresees where it follows routes.

    Rank 0 alone looks at its clock, plans, and writes down every input; what all ranks follow are its plan's bytes.
    """
    foreseen: list[Loads] | None = None

    def first() -> bytes:
        nonlocal foreseen
        step = actor.completed_steps
        chosen, foreseen, told = plan_collection(
            config, rows, clocks.tick, step=step, rollout_id=rollout_id, geometry=actor.model.geometry
        )
        actor.sink.write(told)
        return encode(chosen)

    chosen = decode(actor.world.from_first(first))
    return chosen, foreseen


def _resume(config: Config, actor: Actor) -> int:
    """Bring the actor to where the newest checkpoint stands and return how many collections are done."""
    path = standing.latest(Path(config.output.root))
    if path is None:
        raise ValueError(f"output.root = {config.output.root!r} holds no checkpoint to resume")
    where = actor.world.agreed(lambda: standing.read(path))
    state = checkpoint.load(path, actor.world)
    if state.get("source", "") != _source(config):
        raise ValueError(
            f"model.source = {config.model.source!r} is not the file that {path} was trained with; restore it, or "
            "start anew in another folder"
        )
    actor.model.load_state_dict(state["model"])
    actor.optimizer.load_state_dict(state["optimizer"])
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
    state: dict[str, Any] = {"model": actor.model.state_dict(), "optimizer": actor.optimizer.state_dict()}
    if source := _source(config):
        state["source"] = source
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
        versions={name: version(name) for name in _PACKAGES[config.model.format]},
        configuration=msgspec.to_builtins(config.resolved()),
        time=clocks.now(),
    )
