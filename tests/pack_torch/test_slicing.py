"""Which rows score a response, and that the head sees those and no others."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pack_torch import (
    PackedBatch,
    Rollout,
    SmallModel,
    build_batch,
    response_log_probs,
    scored_rows,
    scored_targets,
)
from pack_torch.slicing import target_log_probs
from support.torch_cases import CONFIG, make_rollouts


class Fixed:
    """A model whose hidden states are given and whose head is a matrix; it keeps what the head saw."""

    def __init__(self, hidden: torch.Tensor, head: torch.Tensor) -> None:
        self.hidden, self.head = hidden, head
        self.seen: list[int] = []

    def __call__(self, batch: PackedBatch) -> SimpleNamespace:
        return SimpleNamespace(hidden=self.hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(hidden.shape[0])
        return hidden @ self.head


def test_rows_of_three_documents_by_hand() -> None:
    # Ends 5, 13 and 15; responses of 3, 5 and 0: rows [1, 4), [7, 12) and none.
    assert scored_rows([5, 8, 2], [3, 5, 0]).tolist() == [1, 2, 3, 7, 8, 9, 10, 11]
    assert scored_rows([5], [0]).tolist() == []
    assert scored_rows([2, 2], [1, 1]).tolist() == [0, 2]
    assert scored_rows([5, 8], [3, 5]).dtype == torch.int64


@given(st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), min_size=1))
def test_a_response_token_is_scored_from_the_row_before_it_in_its_document(
    shapes: list[tuple[int, int]],
) -> None:
    rows, first = [], 0
    for length, response in shapes:
        rows += [first + place - 1 for place in range(length) if place >= length - response]
        first += length

    assert scored_rows([n for n, _ in shapes], [r for _, r in shapes]).tolist() == rows


def test_a_response_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"document 1 has 3 tokens and a response of 3.*at least one token"):
        scored_rows([4, 3], [2, 3])


def test_targets_are_the_response_tokens_in_order() -> None:
    rollouts = [Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5, 6], 0), Rollout("c", [7, 8], 1)]

    assert scored_targets(build_batch(rollouts, [2, 1, 0])).tolist() == [8, 2, 3]


def test_log_probabilities_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(9.0), 0.0]], dtype=torch.float64)

    assert target_log_probs(logits, torch.tensor([1, 1])).exp().tolist() == pytest.approx([0.75, 0.1])
    # At temperature 2 odds of 9 to 1 become 3 to 1.
    assert target_log_probs(logits, torch.tensor([0, 0]), temperature=2.0).exp().tolist()[1] == pytest.approx(0.75)
    assert target_log_probs(logits.half(), torch.tensor([1, 1])).dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        target_log_probs(torch.zeros(1, 2), torch.tensor([0]), temperature=temperature)


def test_last_rows_get_exactly_no_gradient_and_the_head_sees_scored_rows_only() -> None:
    draw = torch.Generator().manual_seed(0)
    batch = build_batch(
        [Rollout("a", [1, 2, 3, 0, 1], 3), Rollout("b", [4, 5, 2], 0), Rollout("c", [3, 1, 2], 2)], range(3)
    )
    hidden = torch.randn(11, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    model = Fixed(hidden, torch.randn(4, 6, generator=draw, dtype=torch.float64))

    log_probs = response_log_probs(model, batch)
    log_probs.sum().backward()

    whole = torch.log_softmax((hidden @ model.head).detach(), dim=-1)
    by_hand = [(1, 3), (2, 0), (3, 1), (8, 1), (9, 2)]
    assert torch.allclose(log_probs, torch.stack([whole[row, token] for row, token in by_hand]), rtol=0, atol=1e-14)
    assert model.seen == [5]
    scored = [row for row, _ in by_hand]
    for row in range(11):
        assert bool((hidden.grad[row] != 0).any()) == (row in scored)


def test_the_small_models_head_runs_on_scored_rows_only() -> None:
    model = SmallModel(CONFIG, seed=0)
    shapes: list[tuple[int, ...]] = []
    model.head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))

    batch = build_batch(make_rollouts(), range(8))
    assert response_log_probs(model, batch).shape == (28,)

    assert shapes == [(3 + 5 + 2 + 6 + 0 + 7 + 1 + 4, CONFIG.vocab_size)]


def test_a_pack_whose_responses_are_all_empty_scores_nothing_and_has_a_gradient() -> None:
    model = SmallModel(CONFIG, seed=0)

    log_probs = response_log_probs(model, build_batch([Rollout("a", [1, 2], 0)], [0]))
    log_probs.sum().backward()

    assert log_probs.shape == (0,)
    assert all(float(p.grad.abs().max()) == 0.0 for p in model.parameters())
