"""Group-relative advantages from rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Added to the standard deviation so that a group of nearly equal rewards does not explode.
STD_EPSILON = 1e-6


def grpo_advantages(
    rewards: Sequence[float], groups: Sequence[str | int | None], *, std_normalization: bool = False
) -> list[float]:
    """Return each reward less the mean of its group, in the order given.

    Groups are found by id, never by adjacency: any permutation of the samples permutes the result and changes no value.

    Args:
        rewards: one per sample, finite.
        groups: the group id of each sample.
        std_normalization: also divide by the group's unbiased standard deviation plus 1e-6, where the group has more
            than one sample and the deviation is above 0.

    Raises:
        ValueError: different lengths, a sample without group, or a reward that is not finite; names the position.

    From GRPO (Shao et al., 2024, DeepSeekMath, section 4.1.1).

    >>> grpo_advantages([1.0, 5.0, 3.0, 5.0], ["a", "b", "a", "b"])
    [-1.0, 0.0, 1.0, 0.0]
    """
    if len(rewards) != len(groups):
        raise ValueError(f"there are {len(rewards):,} rewards and {len(groups):,} groups; give one of each per sample")
    members: dict[str | int, list[float]] = {}
    for position, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if group is None:
            raise ValueError(f"sample at position {position} has no group; advantages compare samples of one group")
        if not math.isfinite(reward):
            raise ValueError(f"sample at position {position} has reward {reward}; a reward is a finite number")
        members.setdefault(group, []).append(float(reward))
    means = {group: math.fsum(values) / len(values) for group, values in members.items()}
    scales = {group: _scale(values, means[group]) if std_normalization else 1.0 for group, values in members.items()}
    keys = [group for group in groups if group is not None]
    return [(float(reward) - means[group]) / scales[group] for reward, group in zip(rewards, keys, strict=True)]


def _scale(values: list[float], mean: float) -> float:
    if len(values) < 2:
        return 1.0
    # fsum is exact, so the order of the group's samples cannot change the last bit.
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return deviation + STD_EPSILON if deviation > 0 else 1.0
