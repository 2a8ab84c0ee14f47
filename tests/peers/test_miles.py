"""Scoring, loss and reduction against MILES' own code, from its PyPI wheel, on the same packed rows."""

from argparse import Namespace

import pytest
import torch
from pack_core import pack
from pack_torch import PackedBatch, Rollout, build_batch, normalization, policy_loss, scored_rows, scored_targets
from torch import Tensor

LENGTHS = [5, 8, 6, 7]
RESPONSES = [3, 5, 2, 4]
VOCABULARY = 11
EPS_CLIP, EPS_CLIP_HIGH = 0.2, 0.28


@pytest.fixture
def rollouts() -> list[Rollout]:
    """Four samples: one with a masked token inside, one masked from end to end, ratios that clip on both sides."""
    generator = torch.Generator().manual_seed(17)
    made = []
    for number, (length, response) in enumerate(zip(LENGTHS, RESPONSES, strict=True)):
        mask = torch.ones(response, dtype=torch.bool)
        if number == 1:
            mask[1] = False
        if number == 2:
            mask[:] = False
        made.append(
            Rollout(
                id=number,
                tokens=torch.randint(VOCABULARY, (length,), generator=generator),
                response_length=response,
                loss_mask=mask,
                advantages=torch.full((response,), 1.0 if number % 2 == 0 else -1.0, dtype=torch.float64),
                old_log_probs=-2.4 + torch.linspace(-0.5, 0.5, response, dtype=torch.float64),
            )
        )
    return made


def their_log_probs(logits: Tensor, batch: PackedBatch) -> Tensor:
    """Return what MILES' response slicing scores, log-softmax by PyTorch."""
    from miles.backends.training_utils.loss import get_responses

    sliced = get_responses(
        logits[None],
        args=Namespace(qkv_format="thd", true_on_policy_mode=True, rollout_temperature=1.0, allgather_cp=False),
        unconcat_tokens=[rollout.tokens for rollout in batch.rollouts],
        total_lengths=[len(rollout.tokens) for rollout in batch.rollouts],
        response_lengths=[rollout.response_length for rollout in batch.rollouts],
    )
    return torch.cat([rows.log_softmax(-1).gather(-1, tokens[:, None])[:, 0] for rows, tokens in sliced])


def our_log_probs(logits: Tensor, batch: PackedBatch) -> Tensor:
    rows = logits[scored_rows(batch.doc_lens, batch.response_lens)]
    return rows.log_softmax(-1).gather(-1, scored_targets(batch)[:, None])[:, 0]


def packed(rollouts: list[Rollout]) -> list[PackedBatch]:
    return [build_batch(rollouts, places) for places in pack(LENGTHS, capacity=16)]


@pytest.mark.parametrize("reduction", ["token", "response"])
def test_loss_and_gradient_of_packed_rows_equal_miles(rollouts: list[Rollout], reduction: str) -> None:
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
    from miles.utils.ppo_utils import compute_policy_loss

    generator = torch.Generator().manual_seed(17)
    table = torch.randn(sum(LENGTHS), VOCABULARY, generator=generator, dtype=torch.float64) * 0.3
    results = []
    for ours in (True, False):
        logits = table.clone().requires_grad_()
        numerator, first = torch.zeros((), dtype=torch.float64), 0
        for batch in packed(rollouts):
            rows = logits[first : first + len(batch.input_ids)]
            first += len(batch.input_ids)
            if ours:
                part = policy_loss(
                    our_log_probs(rows, batch),
                    batch,
                    eps_clip=EPS_CLIP,
                    eps_clip_high=EPS_CLIP_HIGH,
                    reduction=reduction,
                ).numerator
            else:
                new = their_log_probs(rows, batch)
                losses, _ = compute_policy_loss(
                    batch.concat("old_log_probs") - new, batch.concat("advantages"), EPS_CLIP, EPS_CLIP_HIGH
                )
                reduce = get_sum_of_sample_mean(
                    list(batch.doc_lens),
                    list(batch.response_lens),
                    [rollout.loss_mask.double() for rollout in batch.rollouts],
                    calculate_per_token_loss=reduction == "token",
                )
                part = reduce(losses)
            numerator = numerator + part
        numerator.backward()
        results.append((numerator.detach(), logits.grad))
    (our_loss, our_gradient), (their_loss, their_gradient) = results
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-12, atol=1e-12)
    assert float(their_gradient.abs().max()) > 0.01, "a comparison of zeros proves nothing"


def test_the_only_difference_in_denominators_is_their_phantom_token(rollouts: list[Rollout]) -> None:
    # MILES counts max(active, 1) tokens a sample, so the fully masked one counts as one token there and as none here.
    theirs = sum(max(int(rollout.loss_mask.sum()), 1) for rollout in rollouts)
    assert theirs == 3 + 4 + 1 + 4
    assert normalization(rollouts).denominator("token") == theirs - 1


def test_scored_tokens_equal_miles_token_for_token(rollouts: list[Rollout]) -> None:
    for batch in packed(rollouts):
        logits = torch.randn(len(batch.input_ids), VOCABULARY, dtype=torch.float64)
        assert torch.equal(our_log_probs(logits, batch), their_log_probs(logits, batch))
