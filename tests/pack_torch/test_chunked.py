"""Chunked log-probabilities and entropy: the plain values and gradients, without the plain memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import chunked_log_probs
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, WIDTH, VOCABULARY = 7, 5, 11


def inputs(dtype: torch.dtype, seed: int = 0, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(VOCABULARY, (rows,), generator=draw)


def plain(hidden: Any, weight: Any, targets: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
    logs = logits.log_softmax(-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def test_two_tokens_by_hand() -> None:
    # Logits (log 3, 0): probabilities 3/4 and 1/4; at temperature 2: sqrt(3) to 1.
    hidden, weight = torch.eye(1, dtype=torch.float64), torch.tensor([[3.0], [1.0]], dtype=torch.float64).log()

    for target, share in ((0, 0.75), (1, 0.25)):
        values, entropy = chunked_log_probs(hidden, weight, torch.tensor([target]), entropy=True)
        assert float(values.exp()) == pytest.approx(share, abs=1e-15)
        assert float(entropy) == pytest.approx(0.5623351446188083, abs=1e-15)
    warm, nothing = chunked_log_probs(hidden, weight, torch.tensor([0]), temperature=2.0)
    assert float(warm.exp()) == pytest.approx(3**0.5 / (1 + 3**0.5), abs=1e-15)
    assert nothing is None


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.integers(1, 9), st.sampled_from([1.0, 0.7, 2.0]), st.booleans(), st.integers(0, 99))
def test_values_and_gradients_equal_the_plain_ones_in_float64(
    rows: int, chunk: int, temperature: float, entropy: bool, seed: int
) -> None:
    hidden, weight, targets = inputs(torch.float64, seed, rows)
    draw = torch.Generator().manual_seed(seed + 1)
    by_value, by_spread = (torch.randn(rows, generator=draw, dtype=torch.float64) for _ in range(2))

    values, spread = chunked_log_probs(hidden, weight, targets, chunk=chunk, temperature=temperature, entropy=entropy)
    expected, expected_spread = plain(hidden, weight, targets, temperature)
    total, wanted = (values * by_value).sum(), (expected * by_value).sum()
    if entropy:
        torch.testing.assert_close(spread, expected_spread, rtol=1e-12, atol=1e-12)
        total, wanted = total + (spread * by_spread).sum(), wanted + (expected_spread * by_spread).sum()
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    for found, right in zip(
        torch.autograd.grad(total, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_equal_finite_differences(entropy: bool) -> None:
    hidden, weight, targets = inputs(torch.float64)

    def outputs(rows: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, spread = chunked_log_probs(rows, head, targets, chunk=3, temperature=1.3, entropy=entropy)
        return (values,) if spread is None else (values, spread)

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


def test_entropy_alone_and_log_probs_alone_have_gradients() -> None:
    hidden, weight, targets = inputs(torch.float64)
    values, spread = chunked_log_probs(hidden, weight, targets, chunk=2, entropy=True)
    plain_values, plain_spread = plain(hidden, weight, targets, 1.0)

    for found, right in ((values, plain_values), (spread, plain_spread)):
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), hidden, retain_graph=True),
            torch.autograd.grad(right.sum(), hidden, retain_graph=True),
        )


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, targets = inputs(torch.float64)

    chunked_log_probs(hidden.detach(), weight, targets, chunk=2)[0].sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    weight.grad = None
    chunked_log_probs(hidden, weight.detach(), targets, chunk=2)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        assert not chunked_log_probs(hidden, weight, targets)[0].requires_grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrow_dtypes_agree_with_the_plain_ones(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = inputs(dtype)

    values, spread = chunked_log_probs(hidden, weight, targets, chunk=2, temperature=0.9, entropy=True)
    expected, expected_spread = plain(hidden, weight, targets, 0.9)

    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(spread, expected_spread, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((values + spread).sum(), (hidden, weight))
    right = torch.autograd.grad((expected + expected_spread).sum(), (hidden, weight))
    for mine, theirs in zip(found, right, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_far_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)

    values, spread = chunked_log_probs(hidden, weight, torch.tensor([0, 0]), chunk=1, entropy=True)
    (values + spread).sum().backward()

    assert values.tolist() == [0.0, -2e4]
    assert spread.tolist() == [0.0, 0.0]
    assert bool(torch.isfinite(hidden.grad).all())
    assert bool(torch.isfinite(weight.grad).all())


class LargestTensor(TorchDispatchMode):
    """The most entries any operation's result had, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor):
                self.entries = max(self.entries, one.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_operation_makes_more_than_a_chunk_of_logits(dtype: torch.dtype) -> None:
    rows, width, vocabulary, chunk = 64, 3, 500, 4
    hidden, weight = torch.randn(rows, width).to(dtype).requires_grad_(), torch.randn(vocabulary, width).to(dtype)
    weight.requires_grad_()
    sizes = {}
    for chunked in (True, False):
        with LargestTensor() as largest:
            targets = torch.zeros(rows, dtype=torch.int64)
            if chunked:
                values, spread = chunked_log_probs(hidden, weight, targets, chunk=chunk, entropy=True)
            else:
                values, spread = plain(hidden, weight, targets, 1.0)
            (values + spread).sum().backward()
        sizes[chunked] = largest.entries

    assert sizes == {True: chunk * vocabulary, False: rows * vocabulary}


def test_mistakes_are_named() -> None:
    hidden, weight, targets = inputs(torch.float64)

    with pytest.raises(ValueError, match=r"give \[S, D\] and \[V, D\]"):
        chunked_log_probs(hidden, weight[:, :2], targets)
    with pytest.raises(ValueError, match=r"hidden is torch\.float64 and head_weight torch\.float32"):
        chunked_log_probs(hidden, weight.float(), targets)
    with pytest.raises(ValueError, match="one int64 for each of the 7 rows"):
        chunked_log_probs(hidden, weight, targets[:3])
    with pytest.raises(ValueError, match="targets are 11 to 11 but the head has 11 tokens"):
        chunked_log_probs(hidden, weight, torch.full((ROWS,), 11))
    with pytest.raises(ValueError, match="chunk is 0 rows"):
        chunked_log_probs(hidden, weight, targets, chunk=0)
    with pytest.raises(ValueError, match="temperature is 0"):
        chunked_log_probs(hidden, weight, targets, temperature=0)
