"""Every loss x every reduction x every kind of mask, against numbers worked out by hand.

Six samples, all kinds of mask. L is log 2, and every log-probability is a multiple of it, so that every ratio
is a power of 2. What masked tokens hold is NaN. Old log-probabilities are -4 L everywhere.

| kind   | mask  | prompt | advantage | new         | ratio  | reference | rollout    | entropy |
| full   | 1 1   | p      |  1        | -L, -5 L    | 8, 1/2 | -4 L, -4 L | -5 L, -3 L | 2, 4    |
| hole   | 1 0 1 | p      | -1        | -7 L, -3 L  | 1/8, 2 | -2 L, -4 L | -8 L, -4 L | 1, 3    |
| masked | 0 0   | q      |           |             |        |           |            |         |
| empty  |       | q      |           |             |        |           |            |         |
| one    | 1     | q      | -1        | -2 L        | 4      | -4 L      | -2 L       | 5       |
| dead   | 0     | r      |           |             |        |           |            |         |

Limits of the ratio are 0.8 and 1.28, the dual clip is 3, importance weights are held within 0.4 and 3. Prompt p has two
responses, q three, and nothing of r trains. A row of the table below is the numerator of one sample: its token losses
added up (`token`, and `constant` too), their mean (`response`), and that mean over the responses of its prompt
(`group`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from pack_torch import (
    GroupSizes,
    PackedBatch,
    Rollout,
    build_batch,
    dpo_loss,
    entropy_bonus,
    group_sizes,
    grpo_advantages,
    importance_weights,
    kl_loss,
    normalization,
    policy_loss,
    sft_loss,
)
from support.loss_cases import NAN, rollout
from torch import Tensor

L = math.log(2)
REDUCTIONS = ["token", "response", "group", "constant"]
KINDS = ["full", "hole", "masked", "empty", "one", "dead"]

NEW = {
    "full": [-L, -5 * L],
    "hole": [-7 * L, NAN, -3 * L],
    "masked": [NAN, NAN],
    "empty": [],
    "one": [-2 * L],
    "dead": [NAN],
}
ENTROPY = {"full": [2.0, 4.0], "hole": [1.0, NAN, 3.0], "masked": [NAN, NAN], "empty": [], "one": [5.0], "dead": [NAN]}
#: Less the mean of their prompt, 2, 1 and 7, these are the advantages 1, -1, 1/2, 1/2, -1 and 0.
REWARDS = {"full": 3.0, "hole": 1.0, "masked": 1.5, "empty": 1.5, "one": 0.0, "dead": 7.0}


def sample(name: str, group: str, mask: list[int], ref: list[float], sampled: list[float], advantage: float) -> Rollout:
    kept = [bool(one) for one in mask]
    return rollout(
        name,
        group,
        mask,
        advantages=[advantage if one else NAN for one in kept],
        old_log_probs=[-4 * L if one else NAN for one in kept],
        ref_log_probs=ref,
        rollout_log_probs=sampled,
    )


def samples(advantages: Sequence[float] = (1, -1, NAN, NAN, -1, NAN)) -> list[Rollout]:
    first, second, third, fourth, fifth, sixth = advantages
    return [
        sample("full", "p", [1, 1], [-4 * L, -4 * L], [-5 * L, -3 * L], first),
        sample("hole", "p", [1, 0, 1], [-2 * L, NAN, -4 * L], [-8 * L, NAN, -4 * L], second),
        sample("masked", "q", [0, 0], [NAN, NAN], [NAN, NAN], third),
        sample("empty", "q", [], [], [], fourth),
        sample("one", "q", [1], [-4 * L], [-2 * L], fifth),
        sample("dead", "r", [0], [NAN], [NAN], sixth),
    ]


#: Loss -> kind of mask -> numerator under token, response, group.
BY_HAND: dict[str, dict[str, tuple[float, float, float]]] = {
    # A = 1: 8 is held at 1.28, 1/2 is not held. A = -1: 1/8 is held at 0.8, 2 and 4 are not held.
    "ppo": {
        "full": (-1.28 - 0.5, -0.89, -0.445),
        "hole": (0.8 + 2, 1.4, 0.7),
        "one": (4, 4, 4 / 3),
    },
    "ppo, dual clip": {
        "full": (-1.28 - 0.5, -0.89, -0.445),
        "hole": (0.8 + 2, 1.4, 0.7),
        "one": (3, 3, 1),
    },
    # Advantages from rewards 3 and 1 of p (mean 2), 1.5, 1.5 and 0 of q (mean 1).
    "grpo": {
        "full": (-1.28 - 0.5, -0.89, -0.445),
        "hole": (0.8 + 2, 1.4, 0.7),
        "one": (4, 4, 4 / 3),
    },
    # One ratio a sample: sqrt(8 / 2) = 2, held at 1.28; sqrt(2 / 8) = 1/2, held at 0.8; 4.
    "gspo": {
        "full": (-1.28 - 1.28, -1.28, -0.64),
        "hole": (0.8 + 0.8, 0.8, 0.4),
        "one": (4, 4, 4 / 3),
    },
    # Limits 0.4 and 2.5: neither 2 nor 1/2 is held.
    "gspo, wide limits": {
        "full": (-2 - 2, -2, -1),
        "hole": (0.5 + 0.5, 0.5, 0.25),
        "one": (4, 4, 4 / 3),
    },
    "gspo, dual clip": {
        "full": (-1.28 - 1.28, -1.28, -0.64),
        "hole": (0.8 + 0.8, 0.8, 0.4),
        "one": (3, 3, 1),
    },
    # -A times the held ratio times the log-probability; held are 8, 1/2, 1/8, 2 and 4, all of them.
    "cispo": {
        "full": (1.28 * L + 0.8 * 5 * L, 2.64 * L, 1.32 * L),
        "hole": (-0.8 * 7 * L - 1.28 * 3 * L, -4.72 * L, -2.36 * L),
        "one": (-1.28 * 2 * L, -2.56 * L, -2.56 * L / 3),
    },
    "reinforce": {
        "full": (L + 5 * L, 3 * L, 1.5 * L),
        "hole": (-7 * L - 3 * L, -5 * L, -2.5 * L),
        "one": (-2 * L, -2 * L, -2 * L / 3),
    },
    # Anchored on its own forward every ratio is 1.
    "ppo, scoring skipped": {
        "full": (-1 - 1, -1, -0.5),
        "hole": (1 + 1, 1, 0.5),
        "one": (1, 1, 1 / 3),
    },
    # Against the rollout's own the ratios are 16 and 1/4; 2 and 2; 1.
    "ppo, old from the rollout": {
        "full": (-1.28 - 0.25, -0.765, -0.3825),
        "hole": (2 + 2, 2, 1),
        "one": (1, 1, 1 / 3),
    },
    # Weights 2 and 1/2; 16, held at 3, and 1; 1/4, held at 0.4.
    "ppo, weights clamped": {
        "full": (-1.28 * 2 - 0.5 / 2, -1.405, -0.7025),
        "hole": (0.8 * 3 + 2, 2.2, 1.1),
        "one": (4 * 0.4, 1.6, 1.6 / 3),
    },
    # The same, and 0 in place of 3 and 0.4.
    "ppo, weights masked": {
        "full": (-1.28 * 2 - 0.5 / 2, -1.405, -0.7025),
        "hole": (0 + 2, 1, 0.5),
        "one": (0, 0, 0),
    },
    "sft": {
        "full": (L + 5 * L, 3 * L, 1.5 * L),
        "hole": (7 * L + 3 * L, 5 * L, 2.5 * L),
        "one": (2 * L, 2 * L, 2 * L / 3),
    },
    # Reference less new: -3 L and L; 5 L and -L; -2 L.
    "k1": {
        "full": (3 * L - L, L, L / 2),
        "hole": (-5 * L + L, -2 * L, -L),
        "one": (2 * L, 2 * L, 2 * L / 3),
    },
    "k2": {
        "full": ((9 + 1) / 2 * L**2, 2.5 * L**2, 1.25 * L**2),
        "hole": ((25 + 1) / 2 * L**2, 6.5 * L**2, 3.25 * L**2),
        "one": (2 * L**2, 2 * L**2, 2 * L**2 / 3),
    },
    "k3": {
        "full": ((1 / 8 - 1 + 3 * L) + (2 - 1 - L), 1 / 16 + L, 1 / 32 + L / 2),
        "hole": ((32 - 1 - 5 * L) + (1 / 2 - 1 + L), 15.25 - 2 * L, 7.625 - L),
        "one": (1 / 4 - 1 + 2 * L, 2 * L - 0.75, (2 * L - 0.75) / 3),
    },
    # 31 - 5 L = 27.5 is held at 10.
    "low_var": {
        "full": ((1 / 8 - 1 + 3 * L) + (2 - 1 - L), 1 / 16 + L, 1 / 32 + L / 2),
        "hole": (10 + (1 / 2 - 1 + L), 4.75 + L / 2, 2.375 + L / 4),
        "one": (1 / 4 - 1 + 2 * L, 2 * L - 0.75, (2 * L - 0.75) / 3),
    },
    "entropy": {
        "full": (-2 - 4, -3, -1.5),
        "hole": (-1 - 3, -2, -1),
        "one": (-5, -5, -5 / 3),
    },
}


def expected(loss: str, kind: str, reduction: str) -> float:
    token, response, group = BY_HAND[loss].get(kind, (0, 0, 0))  # masked, empty and dead add nothing
    return {"token": token, "response": response, "group": group, "constant": token}[reduction]


Loss = Callable[[Tensor, PackedBatch, dict[str, Any]], Any]


def policy(kind: str, **fixed: Any) -> Loss:
    return lambda log_probs, batch, options: policy_loss(log_probs, batch, kind=kind, **fixed, **options)


def anchored(log_probs: Tensor, batch: PackedBatch, options: dict[str, Any]) -> Any:
    return policy_loss(log_probs, batch, old_log_probs=log_probs.detach(), **options)


def from_rollout(log_probs: Tensor, batch: PackedBatch, options: dict[str, Any]) -> Any:
    return policy_loss(log_probs, batch, old_log_probs=batch.concat("rollout_log_probs"), **options)


def weighted(outside: Any) -> Loss:
    def loss(log_probs: Tensor, batch: PackedBatch, options: dict[str, Any]) -> Any:
        old, sampled, mask = (batch.concat(name) for name in ("old_log_probs", "rollout_log_probs", "loss_mask"))
        weights = importance_weights(old, sampled, mask, 0.4, 3.0, outside=outside)
        return policy_loss(log_probs, batch, weights=weights.values, **options)

    return loss


def divergence(kind: Any) -> Loss:
    return lambda log_probs, batch, options: kl_loss(log_probs, batch, kind=kind, **options)


LOSSES: dict[str, Loss] = {
    "ppo": policy("ppo"),
    "ppo, dual clip": policy("ppo", dual_clip=3.0),
    "grpo": policy("ppo"),
    "gspo": policy("gspo"),
    "gspo, wide limits": policy("gspo", eps_clip=0.6, eps_clip_high=1.5),
    "gspo, dual clip": policy("gspo", dual_clip=3.0),
    "cispo": policy("cispo"),
    "reinforce": policy("reinforce"),
    "ppo, scoring skipped": anchored,
    "ppo, old from the rollout": from_rollout,
    "ppo, weights clamped": weighted("clamp"),
    "ppo, weights masked": weighted("zero"),
    "sft": lambda log_probs, batch, options: sft_loss(log_probs, batch, **options),
    **{kind: divergence(kind) for kind in ("k1", "k2", "k3", "low_var")},
    "entropy": lambda entropy, batch, options: entropy_bonus(entropy, batch, **options),
}


def numerator(loss: str, reduction: str, pack: Sequence[str], sizes: GroupSizes) -> tuple[Tensor, Tensor]:
    """The numerator of the samples of these names in one row, and the gradient by what it was given."""
    step = samples(grpo_advantages(list(REWARDS.values()), list("ppqqqr"))) if loss == "grpo" else samples()
    values = ENTROPY if loss == "entropy" else NEW
    given = torch.tensor([one for name in pack for one in values[name]], dtype=torch.float64, requires_grad=True)
    batch = build_batch(step, [KINDS.index(name) for name in pack])
    options = {"reduction": reduction, "group_sizes": sizes if reduction == "group" else None}
    found = LOSSES[loss](given, batch, options)
    found.numerator.backward()
    kept = batch.concat("loss_mask")
    assert found.active_tokens == int(kept.sum())
    assert bool(given.grad.isfinite().all())
    assert not bool(given.grad[~kept].any())
    return found.numerator.detach(), given.grad


def test_no_loss_is_without_a_row() -> None:
    assert BY_HAND.keys() == LOSSES.keys()
    assert all(list(rows) == ["full", "hole", "one"] for rows in BY_HAND.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", list(BY_HAND))
def test_the_numerator_of_one_sample(loss: str, reduction: str, kind: str) -> None:
    found, gradient = numerator(loss, reduction, [kind], GroupSizes({"p": 2, "q": 3, "r": 1}))

    assert float(found) == pytest.approx(expected(loss, kind, reduction), rel=1e-12, abs=1e-12)
    if kind not in BY_HAND[loss]:
        assert not bool(gradient.any())


#: Five active tokens, six samples, three prompts; eight tokens stand for a response under `constant`.
DENOMINATORS = {"token": 5, "response": 6, "group": 3, "constant": 48}


@pytest.mark.parametrize(
    "packs",
    [["full hole masked empty one dead"], ["one empty", "hole", "dead masked full"], KINDS],
    ids=["1", "3", "6"],
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", list(BY_HAND))
def test_the_loss_of_the_step_however_it_is_cut(loss: str, reduction: str, packs: list[str]) -> None:
    step = samples()
    sizes = group_sizes(step)
    below = normalization(step, group_sizes=sizes).denominator(reduction, length=8 if reduction == "constant" else None)
    assert below == DENOMINATORS[reduction]

    total = sum(float(numerator(loss, reduction, pack.split(), sizes)[0]) for pack in packs) / below

    by_hand = sum(expected(loss, kind, reduction) for kind in KINDS) / DENOMINATORS[reduction]
    assert total == pytest.approx(by_hand, rel=1e-12, abs=1e-12)


def test_sums_of_steps_written_out() -> None:
    # The same once more as plain numbers, so that the table cannot be wrong alike in its rows and its sums.
    step = samples()
    sizes = group_sizes(step)
    for loss, reduction, value in [
        ("ppo", "token", 5.02 / 5),
        ("ppo", "response", 4.51 / 6),
        ("ppo", "group", (0.255 + 4 / 3) / 3),
        ("ppo", "constant", 5.02 / 48),
        ("gspo", "response", 3.52 / 6),
        ("cispo", "token", -6.72 * L / 5),
        ("reinforce", "token", -6 * L / 5),
        ("sft", "token", 18 * L / 5),
        ("k1", "token", 0),
        ("entropy", "response", -10 / 6),
    ]:
        found, _ = numerator(loss, reduction, KINDS, sizes)
        assert float(found) / DENOMINATORS[reduction] == pytest.approx(value, rel=1e-12, abs=1e-12)


#: Scores, new less reference over active tokens: full 3 L - L, hole -5 L + L, one 2 L, and 0 of nothing. Half the
#: difference is the margin m, the loss log(1 + exp(-m)). A pair has no reduction but the sum over pairs.
PAIRS = [
    ("full", "hole", 3 * L, math.log(9 / 8)),
    ("hole", "one", -3 * L, math.log(9)),
    ("full", "masked", L, math.log(3 / 2)),
    ("masked", "full", -L, math.log(3)),
    ("one", "empty", L, math.log(3 / 2)),
    ("empty", "hole", 2 * L, math.log(5 / 4)),
    ("full", "one", 0, math.log(2)),
    ("masked", "empty", 0, math.log(2)),
]


@pytest.mark.parametrize(("chosen", "rejected", "margin", "loss"), PAIRS)
def test_the_preference_of_one_kind_over_another(chosen: str, rejected: str, margin: float, loss: float) -> None:
    step = dict(zip(KINDS, samples(), strict=True))
    for row in ([chosen, rejected], [rejected, chosen]):
        pair = [attrs.evolve(step[name], group="pair") for name in row]
        given = torch.tensor([one for name in row for one in NEW[name]], dtype=torch.float64, requires_grad=True)

        found = dpo_loss(given, build_batch(pair, [0, 1]), chosen={chosen}, beta=0.5)
        found.numerator.backward()

        assert float(found.numerator.detach()) == pytest.approx(loss, rel=1e-12)
        assert found.margins.tolist() == pytest.approx([margin], abs=1e-12)
        assert bool(given.grad.isfinite().all())
