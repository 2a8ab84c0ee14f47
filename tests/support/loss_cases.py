"""Five samples of every mask kind in two groups, and random steps cut at random, for the tests of the losses."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from pack_torch import PackedBatch, Rollout, build_batch
from torch import Tensor

NAN = math.nan


def rollout(name: str | int, group: str | int | None, mask: list[int], **fields: Any) -> Rollout:
    """A sample of two prompt tokens and as many response tokens as the mask has."""
    return Rollout(name, [1] * (len(mask) + 2), len(mask), loss_mask=mask, group=group, **fields)


def row_of_every_mask_kind(values: list[float], **fields: list[float]) -> tuple[Tensor, PackedBatch]:
    """Interior mask, fully masked, empty, one token, all active; NaN in `values` and `fields` wherever masked.

    `values` and each field hold the five active tokens only: two of `a`, one of `d`, two of `e`.
    """
    masks = {"a": [1, 0, 1], "b": [0, 0], "c": [], "d": [1], "e": [1, 1]}
    spread = {name: spread_out(tokens) for name, tokens in fields.items()}
    rollouts, start = [], 0
    for name, mask in masks.items():
        stop = start + len(mask)
        own = {field: tokens[start:stop] for field, tokens in spread.items()}
        rollouts.append(rollout(name, "p" if name in "ab" else "q", mask, **own))
        start = stop
    return torch.tensor(spread_out(values), dtype=torch.float64, requires_grad=True), build_batch(rollouts, range(5))


def spread_out(tokens: list[float]) -> list[float]:
    """The five active tokens at their places among the eight response tokens."""
    first, second, third, fourth, fifth = tokens
    return [first, NAN, second, NAN, NAN, third, fourth, fifth]


def active_only(tensor: Tensor) -> list[float]:
    """The five active tokens of eight; the others must be exactly 0."""
    assert tensor[[1, 3, 4]].tolist() == [0, 0, 0]
    return tensor[[0, 2, 5, 6, 7]].tolist()


def clipping_rollouts() -> list[Rollout]:
    """Six samples: an interior mask, one fully masked, responses of 1 and of 0 tokens; clipping on both sides."""
    draw = torch.Generator().manual_seed(17)

    def numbers(response: int, scale: float) -> Tensor:
        return torch.randn(response, generator=draw, dtype=torch.float64) * scale - 2.4

    made = []
    for number, response in enumerate([3, 5, 2, 4, 1, 0]):
        mask = torch.ones(response, dtype=torch.bool)
        if number == 1:
            mask[1] = False
        if number == 2:
            mask[:] = False
        made.append(
            Rollout(
                number,
                torch.ones(response + 2, dtype=torch.int64),
                response,
                loss_mask=mask,
                advantages=torch.full((response,), 1.0 if number % 3 else -1.0, dtype=torch.float64),
                old_log_probs=numbers(response, 0.5),
                rollout_log_probs=numbers(response, 0.5),
                ref_log_probs=numbers(response, 1.0),
            )
        )
    return made


@attrs.frozen
class RandomStep:
    """A step of rollouts with everything a loss reads, the current log-probabilities, and a cut into packs."""

    rollouts: list[Rollout]
    values: list[Tensor]
    packs: list[list[int]]

    def rows(self) -> list[tuple[Tensor, PackedBatch]]:
        return [(torch.cat([self.values[i] for i in pack]), build_batch(self.rollouts, pack)) for pack in self.packs]


@st.composite
def random_steps(draw: Any) -> RandomStep:
    """One to seven samples of 0 to 4 response tokens in three groups, masks at random, NaN where masked."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    responses = draw(st.lists(st.integers(0, 4), min_size=1, max_size=7))

    def numbers(mask: Tensor, scale: float, shift: float) -> Tensor:
        made = torch.randn(mask.shape, generator=generator, dtype=torch.float64) * scale + shift
        return made.where(mask, torch.tensor(NAN, dtype=torch.float64))

    rollouts, values = [], []
    for place, response in enumerate(responses):
        mask = torch.rand(response, generator=generator) > 0.4
        fields = {name: numbers(mask, 0.4, -2.0) for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")}
        advantages = numbers(mask, 1.0, 0.0)
        rollouts.append(
            Rollout(place, [1] * (response + 1), response, mask, group=place % 3, advantages=advantages, **fields)
        )
        values.append(numbers(mask, 0.4, -2.0))
    order = draw(st.permutations(range(len(responses))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order)))) | {len(order)})
    packs = [list(order[start:stop]) for start, stop in zip([0, *cuts], cuts, strict=False)]
    return RandomStep(rollouts, values, packs)


def naive_reduction(losses: list[list[float]], rollouts: list[Rollout], reduction: str) -> float:
    """The numerator of active token losses per sample, in plain Python; every response of a group counts."""
    total = 0.0
    for own, sample in zip(losses, rollouts, strict=True):
        mean = sum(own) / len(own) if own else 0.0
        siblings = sum(1 for other in rollouts if other.group == sample.group)
        total += {"token": sum(own), "constant": sum(own), "response": mean, "group": mean / siblings}[reduction]
    return total


def active_values(step: RandomStep, *fields: str) -> list[list[tuple[float, ...]]]:
    """Per sample and active token: the current value, then the fields'."""
    return [
        [
            tuple(float(column[token]) for column in (values, *(getattr(sample, field) for field in fields)))
            for token in range(sample.response_length)
            if sample.loss_mask[token]
        ]
        for values, sample in zip(step.values, step.rollouts, strict=True)
    ]
