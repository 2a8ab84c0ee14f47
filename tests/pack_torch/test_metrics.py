"""Metrics of samples by hand over every mask kind, the same from any cut, and sums over ranks."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from hypothesis import given, settings
from pack_torch import SampleMetrics, build_batch, policy_loss, sample_metrics, token_kl, total_metrics
from support.loss_cases import NAN, RandomStep, random_steps, rollout, row_of_every_mask_kind, spread_out

LOG_PROBS = [-1.0, -2.0, -0.5, -3.0, -4.0]


def test_every_mask_kind_by_hand() -> None:
    log_probs, batch = row_of_every_mask_kind(LOG_PROBS)
    entropy = torch.tensor(spread_out([0.5, 1.5, 2.0, 0.25, 0.5]), requires_grad=True)
    kl = torch.tensor(spread_out([0.1, 0.2, 0.0, -0.5, 0.25]), dtype=torch.float64)
    clipped = torch.tensor([True, True, False, True, True, True, False, True])  # masked ones do not count

    metrics = sample_metrics(log_probs, batch, entropy=entropy, kl=kl, clipped=clipped)

    by_hand = {  # samples, tokens, response, active, log-probability, entropy, KL, clipped
        "a": (1, 5, 3, 2, -3.0, 2.0, pytest.approx(0.3), 1),
        "b": (1, 4, 2, 0, 0.0, 0.0, 0.0, 0),
        "c": (1, 2, 0, 0, 0.0, 0.0, 0.0, 0),
        "d": (1, 3, 1, 1, -0.5, 2.0, 0.0, 1),
        "e": (1, 4, 2, 2, -7.0, 0.75, -0.25, 1),
    }
    assert list(metrics) == list(by_hand)
    assert {name: attrs.astuple(one) for name, one in metrics.items()} == by_hand
    assert (metrics["a"] + metrics["b"]).means() == pytest.approx(  # two samples, two active tokens, nine tokens
        {
            "tokens": 4.5,
            "response_tokens": 2.5,
            "active_tokens": 1.0,
            "log_prob": -1.5,
            "entropy": 1.0,
            "kl": 0.15,
            "clipped": 0.5,
        }
    )
    assert metrics["a"].means()["active_tokens"] == 2.0
    assert metrics["a"].means()["tokens"] == 5.0
    assert total_metrics(metrics.values()).means() == pytest.approx(
        {
            "tokens": 18 / 5,
            "response_tokens": 8 / 5,
            "active_tokens": 1.0,
            "log_prob": -10.5 / 5,
            "entropy": 4.75 / 5,
            "kl": 0.05 / 5,
            "clipped": 3 / 5,
        }
    )


def test_a_sample_without_an_active_token_has_finite_means() -> None:
    batch = build_batch([rollout("m", None, [0])], [0])

    means = sample_metrics(torch.tensor([NAN]), batch, kl=torch.tensor([math.inf]))["m"].means()

    assert means == {"tokens": 3.0, "response_tokens": 1.0, "active_tokens": 0.0, "log_prob": 0.0, "kl": 0.0}


@settings(deadline=None, max_examples=40)
@given(random_steps())
def test_any_cut_gives_the_metrics_of_each_sample_alone(step: RandomStep) -> None:
    found: dict[str | int, SampleMetrics] = {}
    clipped = 0
    for values, batch in step.rows():
        loss = policy_loss(values, batch)
        clipped += int(loss.clipped)
        found |= sample_metrics(
            values, batch, kl=token_kl(values, batch.concat("ref_log_probs")), clipped=loss.clipped_tokens
        )

    assert found.keys() == {sample.id for sample in step.rollouts}
    assert total_metrics(found.values()).clipped == clipped
    for values, sample in zip(step.values, step.rollouts, strict=True):
        kept = [t for t in range(sample.response_length) if sample.loss_mask[t]]
        gaps = [float(sample.ref_log_probs[t] - values[t]) for t in kept]
        one = found[sample.id]
        assert one.log_prob == pytest.approx(sum(float(values[t]) for t in kept), abs=1e-12)
        assert one.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in gaps), abs=1e-9)
        assert (one.tokens, one.response_tokens, one.active_tokens) == (
            sample.response_length + 1,
            sample.response_length,
            len(kept),
        )


def test_sums_are_ready_for_a_summing_collective() -> None:
    log_probs, batch = row_of_every_mask_kind(LOG_PROBS)
    ones = list(sample_metrics(log_probs, batch, entropy=torch.ones(8)).values())
    ranks = [total_metrics(ones[:2]), total_metrics(ones[2:])]

    reduced = [sum(column) for column in zip(*(rank.sums().values() for rank in ranks), strict=True)]

    assert SampleMetrics(**dict(zip(ranks[0].sums(), reduced, strict=True))) == total_metrics(ones)


def test_mistakes_are_named() -> None:
    log_probs, batch = row_of_every_mask_kind(LOG_PROBS)
    one = SampleMetrics(1, 3, 2, 1, -1.0)

    with pytest.raises(ValueError, match=r"kl have shape \[2\] but the samples have 8"):
        sample_metrics(log_probs, batch, kl=torch.zeros(2))
    with pytest.raises(ValueError, match="kl measured on one side only"):
        one + attrs.evolve(one, kl=0.5)
    with pytest.raises(ValueError, match="there are no samples"):
        total_metrics([])
    twins = [rollout("a", None, [1]), rollout("a", None, [1])]
    with pytest.raises(ValueError, match="two samples of id 'a'"):
        sample_metrics(torch.zeros(2), build_batch(twins, [0, 1]))
