"""What a plan says about itself: changes, gaps, and how much of the removable was removed."""

from array import array
from collections.abc import Callable

import attrs
import pytest
from pack_core import Bounds, DispatchCounts, Sample, Topology, Work, WorkReport, headroom, plan

BEFORE = Work(4, 100, 900, 200, 60, 0.5, 400, 8, 1.5, 2.0, 40)
AFTER = Work(3, 70, 600, 200, 70, 0.7, 300, 6, 1.2, 1.4, 44)
REPORT = WorkReport(BEFORE, AFTER, Bounds(2, 60, 600, 250, 200, 220), (0, 2), 3)


def test_changes_are_in_percent_of_before() -> None:
    assert REPORT.change("packs_per_rank") == -25.0
    assert REPORT.change("attention_token_work") == pytest.approx(-30)
    assert REPORT.change("critical_work_proxy") == -25.0
    assert REPORT.change("skew_max") == pytest.approx(-30)
    assert REPORT.change("max_slot_assignments") == pytest.approx(10)


def test_gaps_are_in_percent_of_the_bound() -> None:
    assert REPORT.gap("packs_per_rank") == 50.0
    assert REPORT.gap("attention_token_work") == pytest.approx(100 * 10 / 60)
    assert REPORT.gap("attention_pair_work") == 0.0
    assert REPORT.gap("critical_work_proxy") == 20.0


def test_removable_and_removed() -> None:
    # 400 with a bound of 250: 150 of 400 are removable, of which 100 are gone.
    assert REPORT.removable("critical_work_proxy") == 37.5
    assert REPORT.removed("critical_work_proxy") == pytest.approx(100 * 100 / 150)
    assert REPORT.removable("attention_pair_work") == pytest.approx(100 / 3)
    assert REPORT.removed("attention_pair_work") == 100.0
    assert REPORT.bounds.routing_floor == 50


def test_what_is_not_known_or_was_nothing_is_none() -> None:
    plain = WorkReport(Work(2, 10, 50, 20, 10, 1.0), Work(2, 10, 50, 20, 10, 1.0), Bounds(2, 10, 50))
    for tell in (plain.change, plain.gap, plain.removable, plain.removed):
        assert tell("critical_work_proxy") is None
    assert (plain.change("attention_token_work"), plain.gap("attention_token_work")) == (0.0, 0.0)
    assert (plain.removable("attention_token_work"), plain.removed("attention_token_work")) == (0.0, None)
    without = attrs.evolve(REPORT, before=attrs.evolve(BEFORE, critical_work_proxy=0))
    assert without.change("critical_work_proxy") is None
    assert without.removable("critical_work_proxy") is None
    nowhere = attrs.evolve(REPORT, bounds=Bounds(2, 60, 600, 0, 0))
    assert nowhere.gap("critical_work_proxy") is None
    assert nowhere.removable("critical_work_proxy") == 100.0


@pytest.mark.parametrize("tell", [WorkReport.gap, WorkReport.removable, WorkReport.removed])
def test_a_figure_without_a_bound_is_an_error(tell: Callable[[WorkReport, str], float | None]) -> None:
    with pytest.raises(AttributeError, match="skew_mean"):
        tell(REPORT, "skew_mean")


def test_a_plan_reports_each_of_its_steps() -> None:
    # Step 0: 18 tokens to wait for in arrival order, 10 as planned and at best. Step 1 is even as it arrived.
    samples = [Sample(i, length) for i, length in enumerate([9, 1, 9, 1, 5, 5, 5, 5])]
    made = plan(samples, topology=Topology(2), capacity=10, step_samples=4, pack_order="balanced")
    first, second = made.report(0), made.report(1)
    assert first.change("attention_token_work") == pytest.approx(-100 * 8 / 18)
    assert (first.removed("attention_token_work"), first.gap("attention_token_work")) == (100.0, 0.0)
    assert second.before == second.after
    assert second.removable("attention_token_work") == 0.0
    assert headroom(samples, topology=Topology(2), capacity=10, step_samples=4) == (first, second)


def test_a_report_says_which_layers_it_is_about() -> None:
    counts = DispatchCounts((1, 3), 4, 2, array("i", [12, 0, 6, 6] * 8 + [2, 10, 6, 6] * 8))
    samples = [Sample(i, 6) for i in range(16)]
    (report,) = headroom(samples, topology=Topology(4, 2), capacity=12, step_samples=16, counts=counts)
    assert (report.layers, report.routed_layers) == ((1, 3), 4)
    # A replica holds 4 samples of a pack. Pack 0 is all of the first kind, 48 and 24 in the two layers; pack 1 all of
    # the second, 40 and 24. At best each layer halves its largest total: (8 * 12 + 8 * 2) / 2 and 16 * 6 / 2.
    assert report.before.critical_work_proxy == 48 + 24 + 40 + 24
    assert report.bounds.critical_work_proxy == 56 + 48
