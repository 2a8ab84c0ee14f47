"""When scoring is checked, what is compared, and what stops a run."""

import math

import pytest
import torch
from pack_miles.training.collectives import World
from pack_miles.training.scoring import DisagreementError, check_due, compare, gate, profile
from torch import Tensor

ALONE = World(rank=0, size=1)


def tensors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1])]
SCORED = tensors([-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0])


def test_the_mean_is_over_active_tokens_only() -> None:
    # One active token is 0.002 off, one masked token is 9 off: sum 0.002 over 5 active tokens.
    trained = tensors([-1.0, -11.0, -3.002], [-1.0, -1.0, -1.0])
    check = compare(SCORED, trained, MASKS, ALONE)
    assert check.active_tokens == 5
    assert check.mean_abs == pytest.approx(4e-4)
    assert check.max_abs == pytest.approx(2e-3)
    assert check.tokens_above_edge == 1
    gate(check, tolerance=1e-3, max_tolerance=None)
    gate(check, tolerance=1e-3, max_tolerance=2.1e-3)
    with pytest.raises(DisagreementError, match=r"scoring_check_tolerance is 0\.0001"):
        gate(check, tolerance=1e-4, max_tolerance=None)
    with pytest.raises(DisagreementError, match="scoring_check_max_tolerance"):
        gate(check, tolerance=1e-3, max_tolerance=1.9e-3)


def test_what_cannot_be_compared_is_an_error() -> None:
    with pytest.raises(ValueError, match="not finite"):
        compare(SCORED, tensors([-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]), MASKS, ALONE)
    with pytest.raises(ValueError, match="different tokens"):
        compare(SCORED, tensors([-1.0, -2.0], [-1.0, -1.0, -1.0]), MASKS, ALONE)
    with pytest.raises(DisagreementError, match="no token is active"):
        compare(SCORED, SCORED, [mask * 0 for mask in MASKS], ALONE)
    masked_nan = tensors([-1.0, math.nan, -3.0], [-1.0, -1.0, -1.0])
    assert compare(SCORED, masked_nan, MASKS, ALONE).max_abs == 0.0


def test_a_rollout_that_is_not_finite_is_no_small_difference() -> None:
    with pytest.raises(ValueError, match="not finite"):
        profile(SCORED, tensors([-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]), MASKS, ALONE)
    masked = tensors([-1.0, math.inf, -3.0], [-1.0, -1.0, -1.0])
    assert profile(SCORED, masked, MASKS, ALONE).max_abs == 0.0


def test_the_profile_counts_sizes_positions_and_lengths() -> None:
    # Differences 0.0005, 0.019 and 3.0 fall into the first class, the class ending at 0.02, and the overflow.
    trainer, rollout = tensors([-1.0, -1.0, -1.0]), tensors([-1.0005, -1.019, -4.0])
    found = profile(trainer, rollout, [torch.ones(3)], ALONE)
    assert found.histogram_counts == (1, 0, 0, 1, 0, 0, 0, 0, 0, 1)
    assert found.active_tokens == 3
    assert found.max_abs == pytest.approx(3.0)
    assert found.mean_abs == pytest.approx(3.0195 / 3)
    assert found.groups["first_third"] == (1, pytest.approx(0.0005))
    assert found.groups["last_third"] == (1, pytest.approx(3.0))
    assert found.groups["length_le_1024"][0] == 3
    assert found.groups["length_gt_4096"] == (0, 0.0)
    assert [found.quantile(share) for share in (0.3, 0.5, 0.99)] == [0.001, 0.02, None]


@pytest.mark.parametrize(
    ("length", "group"), [(1024, "length_le_1024"), (1025, "length_1025_4096"), (4097, "length_gt_4096")]
)
def test_lengths_are_classed_by_response_tokens(length: int, group: str) -> None:
    flat = [torch.zeros(length)]
    assert profile(flat, flat, [torch.ones(length)], ALONE).groups[group] == (length, 0.0)


def test_checks_are_due_first_and_then_whenever_a_multiple_of_the_interval_was_passed() -> None:
    def due(steps_a_collection: int, interval: int, begin: int = 0) -> list[int]:
        found: list[int] = []
        for completed in range(begin, begin + 24, steps_a_collection):
            if check_due(completed, found[-1] if found else None, interval):
                found.append(completed)
        return found

    assert due(1, 6) == [0, 6, 12, 18]
    assert due(1, 6, begin=7) == [7, 12, 18, 24, 30], "a resumed process checks at once, then keeps to the multiples"
    assert due(4, 6) == [0, 8, 12, 20], "6 was passed by update 8, 18 by update 20"
    assert due(2, 0) == [0]
