"""What an optimizer step is divided by: counts that add up over packs and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal, get_args

import attrs

from pack_torch.rollout import Rollout as Rollout
from pack_torch.scored import Sample

Reduction = Literal["token", "response", "group", "constant"]
MaskedSamples = Literal["count", "skip", "miles"]

#: A sum of shares of groups that comes back from a collective as float64 is this close to a whole number.
SHARE_TOLERANCE = 1e-6


def check_reduction(reduction: str) -> None:
    """Raise unless there is such a reduction."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction {reduction!r} is not one of {', '.join(get_args(Reduction))}")


def _check_masked_samples(choice: str) -> None:
    if choice not in get_args(MaskedSamples):
        raise ValueError(f"masked_samples {choice!r} is not one of {', '.join(get_args(MaskedSamples))}")


@attrs.frozen
class GroupSizes:
    """How many responses each group has in the whole optimizer step. Adds up with `+` over packs and ranks.

    A group may be cut over packs and ranks, so no pack can count it. Whoever knows the step's samples counts once, or
    every rank counts its own and the counts are added; after that the weight of a response is a local matter.

    Args:
        sizes: responses by group id.
        masked_samples: `count` when fully masked responses are counted too, `skip` when they are not.

    >>> GroupSizes({"a": 2}) + GroupSizes({"a": 1, "b": 4})
    GroupSizes(sizes={'a': 3, 'b': 4}, masked_samples='count')
    """

    sizes: Mapping[str | int, int] = attrs.field(factory=dict)
    masked_samples: Literal["count", "skip"] = attrs.field(
        default="count", validator=attrs.validators.in_(("count", "skip"))
    )

    def __add__(self, other: GroupSizes) -> GroupSizes:
        """Return the counts of both together.

        Raises:
            ValueError: one of them counts fully masked responses and the other does not.
        """
        if self.masked_samples != other.masked_samples:
            raise ValueError(
                f"group sizes counted with masked_samples {self.masked_samples!r} and {other.masked_samples!r} do not "
                "add up; count all of a step in one way"
            )
        return GroupSizes(dict(Counter(self.sizes) + Counter(other.sizes)), self.masked_samples)

    def share(self, rollout: Sample) -> Fraction:
        """Return the part of its group that a response makes up: one over the group's size, or 0 when skipped.

        Raises:
            ValueError: the sample has no group, or the group was not counted.
        """
        group = _group(rollout)
        if self.masked_samples == "skip" and rollout.active_tokens == 0:
            return Fraction(0)
        if self.sizes.get(group, 0) < 1:
            raise ValueError(
                f"sample {rollout.id!r} is of group {group!r}, which group_sizes does not count; count all samples of "
                "the optimizer step"
            )
        return Fraction(1, self.sizes[group])


def _group(rollout: Sample) -> str | int:
    if rollout.group is None:
        raise ValueError(f"sample {rollout.id!r} has no group; the group reduction takes a mean within each group")
    return rollout.group


def group_sizes(rollouts: Sequence[Sample], *, masked_samples: MaskedSamples = "count") -> GroupSizes:
    """Return how many of these rollouts each group has.

    Args:
        rollouts: every sample of the optimizer step, or a rank's own, to be added to the other ranks'.
        masked_samples: `skip` leaves fully masked responses out; `count` and `miles` do not.

    Raises:
        ValueError: a sample without group, or no such choice.

    >>> group_sizes([Rollout(i, [1, 2], 1, group=i % 2) for i in range(3)]).sizes
    {0: 2, 1: 1}
    """
    _check_masked_samples(masked_samples)
    skip = masked_samples == "skip"
    counted = Counter(_group(rollout) for rollout in rollouts if rollout.active_tokens or not skip)
    return GroupSizes(dict(counted), "skip" if skip else "count")


@attrs.frozen
class Normalization:
    """What one optimizer step divides by. Counts add up with `+`: over samples, packs and ranks.

    Args:
        samples: all samples, fully masked ones included unless they were counted with `skip`.
        active_tokens: response tokens that train; a fully masked sample adds none, or one if counted with `miles`.
        model_tokens: tokens run through the model, prompts included.
        groups: the shares of groups these samples make up; a whole number over a whole step. Exact fractions, or a
            float that came back from a collective. 0 when groups were not counted.

    >>> Normalization(2, 7, 20) + Normalization(1, 0, 5)
    Normalization(samples=3, active_tokens=7, model_tokens=25, groups=0)
    """

    samples: int = 0
    active_tokens: int = 0
    model_tokens: int = 0
    groups: Fraction | float = attrs.field(default=0, repr=str)

    def __add__(self, other: Normalization) -> Normalization:
        """Return the counts of both together."""
        return Normalization(
            self.samples + other.samples,
            self.active_tokens + other.active_tokens,
            self.model_tokens + other.model_tokens,
            self.groups + other.groups,
        )

    def denominator(self, reduction: Reduction, *, length: int | None = None) -> int:
        """Return what the numerators of a whole optimizer step are divided by.

        Args:
            reduction: `token` divides by active tokens, `response` by samples, `group` by groups, `constant` by
                samples times `length`.
            length: tokens that stand for one response under `constant`, the same in every step; only there.

        Raises:
            ValueError: not one token of the step trains, no such reduction, a length missing or out of place, groups
                that were not counted or do not come out whole.

        >>> Normalization(4, 9, 20).denominator("constant", length=100)
        400
        """
        check_reduction(reduction)
        if (length is not None) != (reduction == "constant"):
            raise ValueError(f"length is {length} with reduction {reduction!r}; constant needs one, no other takes one")
        if self.active_tokens == 0:
            raise ValueError(
                f"none of the step's {self.samples:,} samples has a token that trains; every loss mask is 0, so drop "
                "the step or look at what masks them"
            )
        if length is not None:
            if length < 1:
                raise ValueError(f"length is {length:,} but a response is divided by at least 1 token")
            return self.samples * length
        if reduction == "group":
            return self._whole_groups()
        return self.active_tokens if reduction == "token" else self.samples

    def _whole_groups(self) -> int:
        if self.groups == 0:
            raise ValueError("groups were not counted; call normalization(rollouts, group_sizes=...)")
        whole = round(self.groups)
        if abs(float(self.groups) - whole) > SHARE_TOLERANCE:
            raise ValueError(
                f"the step's samples make up {float(self.groups):.6g} groups, not a whole number: a sample of some "
                "group is missing here or was not counted in group_sizes"
            )
        return whole


def normalization(
    rollouts: Sequence[Sample], *, masked_samples: MaskedSamples = "count", group_sizes: GroupSizes | None = None
) -> Normalization:
    """Return the counts of these rollouts.

    Args:
        rollouts: any part of an optimizer step; the parts' counts add up, if all are counted in one way.
        masked_samples: what a response without one active token, an empty one too, adds. `count`: one sample and no
            token. `skip`: neither. `miles`: one sample and one token, as MILES' trainer counts; a step without any
            active token is then no error.
        group_sizes: of the whole step, for the `group` reduction.

    Raises:
        ValueError: no such choice, or `group_sizes` that were counted another way.

    >>> normalization([Rollout("a", [1, 2, 3], 2, loss_mask=[1, 0]), Rollout("b", [1, 2], 1, loss_mask=[0])])
    Normalization(samples=2, active_tokens=1, model_tokens=5, groups=0)
    """
    _check_masked_samples(masked_samples)
    skip = masked_samples == "skip"
    if group_sizes is not None and skip != (group_sizes.masked_samples == "skip"):
        raise ValueError(
            f"masked_samples is {masked_samples!r} but group_sizes were counted with {group_sizes.masked_samples!r}; "
            "count both in one way"
        )
    active = [rollout.active_tokens for rollout in rollouts]
    return Normalization(
        samples=sum(1 for tokens in active if tokens or not skip),
        active_tokens=sum(max(tokens, 1) if masked_samples == "miles" else tokens for tokens in active),
        model_tokens=sum(rollout.length for rollout in rollouts),
        groups=0 if group_sizes is None else sum((group_sizes.share(r) for r in rollouts), Fraction()),
    )
