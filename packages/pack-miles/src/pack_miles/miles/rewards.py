"""How MILES normalizes the rewards of a rollout: what the installed one does, and the same by `group_index`.

MILES has done it in two ways. Older versions cut the list into `n_samples_per_prompt` neighbours, so whoever reorders
samples first corrupts the advantages without an error; newer ones look at `group_index`, and order does not matter.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from numbers import Real
from typing import Any

import attrs

from pack_miles.errors import InputError
from pack_miles.miles.samples import read_field

#: Rewards as they came, and as they train.
Rewards = tuple[list[Any], list[Any]]
Rule = Callable[[Any, Sequence[Any]], Rewards]

#: Estimators whose rewards MILES normalizes, and those of them that are divided by a deviation.
NORMALIZED = ("grpo", "gspo", "reinforce_plus_plus_baseline")
SCALED = ("grpo", "gspo")
STD_EPSILON = 1e-6


@attrs.frozen
class ProbeSample:
    """The least that MILES' normalization asks of a sample."""

    index: int
    group_index: int
    reward: float
    rollout_id: int | None = None

    def get_reward_value(self, args: Any) -> float:
        """Return the reward, as MILES' sample does."""
        return self.reward


PROBE_ARGS = Namespace(
    advantage_estimator="grpo",
    rewards_normalization=True,
    grpo_std_normalization=False,
    n_samples_per_prompt=2,
    rollout_batch_size=2,
    reward_key=None,
)
#: Two groups dealt out in turn: their means are 1 and 12, those of neighbours 5 and 8.
PROBE = tuple(ProbeSample(place, place % 2, reward) for place, reward in enumerate([0.0, 10.0, 2.0, 14.0]))
BY_GROUP = [-1.0, -2.0, 1.0, 2.0]


def installed_rule() -> Rule | None:
    """Return the normalization of the installed MILES, custom callbacks left out; None where it is not to be found."""
    if (newer := _attribute("miles.ray.rollout.train_data_conversion", "_post_process_rewards")) is not None:
        return lambda args, samples: newer(args, samples, custom_reward_post_process_func=None)
    manager = _attribute("miles.ray.rollout", "RolloutManager")
    # Ray wraps an actor's class and keeps the original beside it.
    inner = getattr(getattr(manager, "__ray_metadata__", None), "modified_class", manager)
    older = getattr(inner, "_post_process_rewards", None)
    if older is None:
        return None
    return lambda args, samples: older(Namespace(args=args, custom_reward_post_process_func=None), samples)


def normalizes_by_group(rule: Rule | None) -> bool:
    """Return whether a rule looks at `group_index`, found by trying it on two groups dealt out in turn.

    >>> normalizes_by_group(grouped_rewards), normalizes_by_group(None)
    (True, False)
    """
    if rule is None:
        return False
    try:
        return list(rule(PROBE_ARGS, list(PROBE))[1]) == BY_GROUP
    except Exception:  # whatever a foreign function does with the probe, it does not pass
        return False


def miles_rewards(args: Any, samples: Sequence[Any]) -> Rewards:
    """Return what the installed MILES makes of the rewards when no callback is given.

    Raises:
        InputError: MILES is not to be found, or it normalizes by prompt sizes, which no callback is told.
    """
    if read_field(args, "multi_lora") or read_field(args, "multi_lora_n_adapters"):
        raise InputError(
            "--custom-reward-post-process-path is given and several LoRA adapters are trained, whose rewards MILES "
            "normalizes by prompt sizes that no callback is told; leave the flag out"
        )
    rule = installed_rule()
    if rule is None:
        raise InputError(
            "how this MILES normalizes rewards was not found, so its own behaviour cannot be kept; leave "
            "--custom-reward-post-process-path out, or turn pack_order = 'balanced' or expert_balanced_packing on"
        )
    return rule(args, samples)


def grouped_rewards(args: Any, samples: Sequence[Any]) -> Rewards:
    """Return rewards as they came, and less the mean of their `group_index`, in the order of the samples.

    One vote a rollout: samples that share a `rollout_id` (else their `index`) count once. As MILES does, GRPO and GSPO
    divide by the group's unbiased deviation plus 1e-6 where several rollouts differ, in float32; other estimators
    than `NORMALIZED`, and runs with `--disable-rewards-normalization`, keep rewards as they are.

    Raises:
        ValueError: samples of one rollout have different rewards, or one has no `group_index` or no number as reward.

    >>> grouped_rewards(PROBE_ARGS, PROBE)
    ([0.0, 10.0, 2.0, 14.0], [-1.0, -2.0, 1.0, 2.0])
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator not in NORMALIZED or not args.rewards_normalization:
        return raw, raw
    groups: dict[int, dict[int, list[int]]] = {}
    for place, sample in enumerate(samples):
        if not isinstance(raw[place], Real):
            raise ValueError(
                f"sample {sample.index} has reward {raw[place]!r}; give a number, or choose one by reward_key"
            )
        rollout = sample.index if read_field(sample, "rollout_id") is None else sample.rollout_id
        if sample.group_index is None:
            raise ValueError(f"sample {sample.index} has no group_index; rewards are compared within one")
        groups.setdefault(int(sample.group_index), {}).setdefault(rollout, []).append(place)
    scaled = args.advantage_estimator in SCALED and bool(args.grpo_std_normalization)
    normalized = [0.0] * len(raw)
    for rollouts in groups.values():
        for places, value in zip(rollouts.values(), _centred(raw, rollouts, scaled), strict=True):
            for place in places:
                normalized[place] = value
    return raw, normalized


def _centred(raw: Sequence[float], rollouts: Mapping[int, Sequence[int]], scaled: bool) -> list[float]:
    import torch

    for rollout, places in rollouts.items():
        if any(raw[place] != raw[places[0]] for place in places):
            rewards = [raw[place] for place in places]
            raise ValueError(f"the samples of rollout {rollout!r} have rewards {rewards}; one rollout has one reward")
    votes = torch.tensor([raw[places[0]] for places in rollouts.values()], dtype=torch.float)
    centred = votes - votes.mean()
    if scaled and len(votes) > 1 and (deviation := votes.std()) > 0:
        centred = centred / (deviation + STD_EPSILON)
    values: list[float] = centred.tolist()
    return values


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None
