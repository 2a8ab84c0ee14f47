"""A collection: rollouts sampled from the policy on all ranks, rewarded, and turned into tensors with advantages."""

import statistics
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

import torch
from pack_torch import Rollout, grpo_advantages

from pack_miles.contract import events
from pack_miles.samples import RolloutRow
from pack_miles.settings.config import Config
from pack_miles.tasks import Task
from pack_miles.training.collectives import World
from pack_miles.training.policy import Policy
from pack_miles.training.sampling import sample


def collect(
    config: Config, task: Task, rollout_id: int, policy: Policy, version: int, world: World
) -> list[RolloutRow]:
    """Return the whole collection in arrival order, on every rank: each samples its share, all gather.

    Args:
        config: the run's.
        task: what is asked, and what an answer earns.
        rollout_id: the collection's number; with `data.seed` it decides every prompt and every draw.
        policy: the weights to sample from, with all experts on this rank.
        version: the optimizer updates these weights have seen.
        world: every rank takes part.
    """
    shares = world.gather(_sample_share(config, task, rollout_id, policy, version, world))
    return sorted((row for share in shares for row in share), key=_index)


def _index(row: RolloutRow) -> int:
    assert isinstance(row.index, int)  # the sampler numbers its rows
    return row.index


def _sample_share(
    config: Config, task: Task, rollout_id: int, policy: Policy, version: int, world: World
) -> list[RolloutRow]:
    """Return this rank's rows: every prompt group whole, groups dealt out in turn."""
    count = config.miles.rollout_batch_size
    groups = range(rollout_id * count, (rollout_id + 1) * count)
    return sample_groups(config, task, [one for one in groups if one % world.size == world.rank], policy, version)


def sample_groups(config: Config, task: Task, groups: Sequence[int], policy: Policy, version: int) -> list[RolloutRow]:
    """Return the rows of prompt groups, every group whole.

    Each prompt and each sample draws from a seed of its own, so it matters to nothing else who samples a group, when,
    and with which others.

    Args:
        config: the run's.
        task: what is asked, and what an answer earns.
        groups: their numbers, counted through the whole run.
        policy: the weights to sample from, with all experts on this rank.
        version: the optimizer updates these weights have seen.
    """
    miles, seed = config.miles, config.data.seed
    own = [group for group in groups for _ in range(miles.n_samples_per_prompt)]
    indices = [group * miles.n_samples_per_prompt + n % miles.n_samples_per_prompt for n, group in enumerate(own)]
    prompts = {group: task.prompt(Random(_seed(seed, "prompt", group))) for group in own}
    draws = [_draws(_seed(seed, "sample", index), miles.rollout_max_response_len) for index in indices]
    drawn = sample(
        policy,
        [prompts[group] for group in own],
        torch.stack(draws) if draws else torch.zeros(0, 1),
        end=task.end,
        temperature=miles.rollout_temperature,
    )
    return [
        RolloutRow(
            tokens=one.tokens,
            response_length=one.response_length,
            loss_mask=[1] * one.response_length,
            rollout_log_probs=one.log_probs,
            rollout_routed_experts=one.routes.tolist(),
            reward=task.reward(prompts[group], one.tokens[len(prompts[group]) :]),
            index=index,
            group_index=group,
            weight_versions=[str(version)],
        )
        for index, group, one in zip(indices, own, drawn, strict=True)
    ]


def _draws(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def advantages(config: Config, rows: Sequence[RolloutRow]) -> list[float]:
    """Return the GRPO advantage of every row: rewards compared inside `group_index`, wherever a group's rows stand."""
    groups = [row.group_index for row in rows]
    return grpo_advantages(rewards(rows), groups, std_normalization=config.miles.grpo_std_normalization)


def rewards(rows: Sequence[RolloutRow]) -> list[float]:
    """Return the rewards of rows that have all been judged.

    Raises:
        ValueError: a row has no reward; it is named.
    """
    for row in rows:
        if row.reward is None:
            raise ValueError(f"sample {row.index!r} has no reward")
    return [row.reward for row in rows if row.reward is not None]


def to_rollout(row: RolloutRow, advantage: float, dtype: torch.dtype) -> Rollout:
    """Return a row as tensors, its advantage spread over its response tokens."""
    if row.index is None:
        raise ValueError("a row has no index; the trainer tells samples apart by it")
    return Rollout(
        id=row.index,
        tokens=torch.tensor(row.tokens),
        response_length=row.response_length,
        loss_mask=_tensor(row.loss_mask, torch.bool),
        group=row.group_index,
        routes=_tensor(row.rollout_routed_experts, torch.int32),
        advantages=torch.full((row.response_length,), advantage, dtype=dtype),
        rollout_log_probs=_tensor(row.rollout_log_probs, dtype),
        reward=row.reward,
        weight_versions=tuple(row.weight_versions or ()),
    )


def _tensor(values: Sequence[object] | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values, dtype=dtype)


def describe(rows: Sequence[RolloutRow], rollout_id: int, step: int, seconds: float) -> events.Rollout:
    """Return the event in which rank 0 tells of a collection."""
    given = rewards(rows)
    return events.Rollout(
        rank=0,
        step=step,
        rollout_id=rollout_id,
        samples=len(rows),
        reward_mean=statistics.fmean(given),
        reward_std=statistics.pstdev(given),
        reward_min=min(given),
        reward_max=max(given),
        response_tokens=sum(row.response_length for row in rows),
        model_tokens=sum(len(row.tokens) for row in rows),
        seconds=seconds,
    )


def _seed(*parts: int | str) -> int:
    """Return a seed that depends on all parts and is the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest(), "little")
