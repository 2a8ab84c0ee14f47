"""A step whose prompts are cut over ranks and packs: two processes, real collectives, one loss and one gradient."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from pack_torch import Rollout, SmallModel, build_batch, response_log_probs
from support.ranks import Run
from support.torch_cases import CONFIG, make_rollouts, record_routes
from support.torch_work import reduce_over_ranks
from torch import Tensor

#: Prompt 0 is samples 0, 3 and 6: two packs of rank 0 and one of rank 1. No prompt is whole on a rank.
#: Sample 2 of prompt 2 is fully masked, sample 4 of prompt 1 is empty.
PACKS = [[[0, 2], [4, 6]], [[1], [3, 5, 7]]]


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    regrouped = [attrs.evolve(rollout, group=place % 3) for place, rollout in enumerate(make_rollouts())]
    return record_routes(SmallModel(CONFIG, seed=3, dtype=torch.float64), regrouped)


def alone(rollouts: list[Rollout], reduction: str, skip: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss in one process, one sample a row, written out: no numerator, no count of the package."""
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    sums: list[Tensor] = []
    lengths: list[int] = []
    for place, rollout in enumerate(rollouts):
        log_probs = response_log_probs(model, build_batch(rollouts, [place], replay=True))[rollout.loss_mask]
        advantages, old = rollout.advantages[rollout.loss_mask], rollout.old_log_probs[rollout.loss_mask]
        ratio = (log_probs - old).exp()
        sums.append(-torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.28)).sum())
        lengths.append(log_probs.numel())
    counted = [place for place, length in enumerate(lengths) if length or not skip]
    means = {place: sums[place] / max(lengths[place], 1) for place in counted}
    prompts: dict[Any, list[Tensor]] = {}
    for place in counted:
        prompts.setdefault(rollouts[place].group, []).append(means[place])
    loss = {
        "token": lambda: sum(sums) / sum(lengths),
        "response": lambda: sum(means.values()) / len(counted),
        "group": lambda: sum(sum(own) / len(own) for own in prompts.values()) / len(prompts),
        "constant": lambda: sum(sums) / (6 * len(counted)),
    }[reduction]()
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("expert_parallel", [1, 2])
@pytest.mark.parametrize(
    ("reduction", "masked_samples"),
    [("group", "count"), ("group", "skip"), ("response", "count"), ("token", "count"), ("constant", "skip")],
)
def test_prompts_cut_over_ranks_and_packs_give_the_loss_and_gradient_of_one_process(
    run_on_ranks: Run, rollouts: list[Rollout], reduction: str, masked_samples: str, expert_parallel: int
) -> None:
    loss, gradients = alone(rollouts, reduction, masked_samples == "skip")

    for found in run_on_ranks(2, reduce_over_ranks, rollouts, PACKS, reduction, masked_samples, expert_parallel):
        assert found["own groups"] != round(found["own groups"])  # no rank holds whole prompts alone
        assert found["loss"] == pytest.approx(loss, rel=1e-12)
        assert found["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-9, atol=1e-12)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


def test_the_two_choices_for_masked_responses_differ(rollouts: list[Rollout]) -> None:
    assert alone(rollouts, "group", False)[0] != pytest.approx(alone(rollouts, "group", True)[0], rel=1e-3)
