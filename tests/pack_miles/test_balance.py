import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from pack_core import DispatchCounts, Sample, Topology, plan, rebuild, samples_of
from pack_miles.contract import events
from pack_miles.contract.events import Event
from pack_miles.reporting.balance import LoadPicture, Planning
from pack_miles.reporting.figures import svg
from pack_miles.reporting.gain import Gain
from pack_miles.reporting.load_figures import MOST_PACKS, MOST_RANKS, draw_loads
from pack_miles.reporting.page import render_page
from pack_miles.reporting.planning_report import order_told, planning_figures, planning_rows
from pack_miles.reporting.report import key_figures, print_report, summarize
from pack_miles.reporting.summary import Report, RunSummary
from rich.console import Console
from support.log_runs import CAPACITY, COUNTED, PROMPTS, STEPS, as_logs, draw_counts, make_run
from support.page_links import Links

SEED = 17
BLOCK = 8 * PROMPTS // STEPS

Packs = Sequence[Sequence[Sequence[int]]]


@pytest.fixture(scope="module")
def routed() -> dict[int, list[Event]]:
    return make_run(3, seed=SEED, pack_order="balanced", routes=True)


def summed(run: dict[int, list[Event]]) -> RunSummary:
    (found,) = summarize(as_logs(run)).runs
    return found


def planning_of(run: dict[int, list[Event]]) -> Planning:
    planning = summed(run).planning
    assert planning is not None
    return planning


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def changed(run: dict[int, list[Event]], kind: type[Event], **fields: Any) -> dict[int, list[Event]]:
    """Return the run with fields of every event of a kind replaced."""
    return {
        rank: [msgspec.structs.replace(e, **fields) if isinstance(e, kind) else e for e in own]
        for rank, own in run.items()
    }


def plans(run: dict[int, list[Event]]) -> list[tuple[events.Plan, list[Sample], DispatchCounts]]:
    found = [event for event in run[0] if isinstance(event, events.Plan)]
    samples = [samples_of(event.record) for event in found]
    return [(e, own, draw_counts(SEED, e.rollout_id, own)) for e, own in zip(found, samples, strict=True)]


def expert_work(packs: Packs, counts: DispatchCounts) -> int:
    """Add up, slowly, over packs and layers the most loaded of the two destinations of every replica."""
    work = 0
    for p in range(len(packs[0])):
        for layer in range(len(COUNTED)):
            loads = []
            for first in range(0, len(packs), 2):
                held = [i for rank in (first, first + 1) for i in packs[rank][p]]
                loads += [sum(counts.of(i)[2 * layer + d] for i in held) for d in range(2)]
            work += max(loads)
    return work


def token_work(packs: Packs, lengths: Sequence[int], power: int = 1) -> int:
    return sum(max(sum(lengths[i] ** power for i in own[p]) for own in packs) for p in range(len(packs[0])))


def arrival_packs(samples: list[Sample]) -> list[Packs]:
    made = plan(samples, topology=Topology(4, 2), capacity=CAPACITY, step_samples=BLOCK)
    return [step.packs for step in made.steps]


def test_the_table_adds_up_what_the_packs_do(routed: dict[int, list[Event]]) -> None:
    before = {"packs of a rank": 0, "expert work": 0, "token work": 0, "pair work": 0}
    after, bound = dict(before), dict(before)
    for event, samples, counts in plans(routed):
        lengths = [sample.length for sample in samples]
        planned = [step.packs for step in rebuild(event.record, samples, counts).steps]
        for sums, steps in ((before, arrival_packs(samples)), (after, planned)):
            for packs in steps:
                sums["packs of a rank"] += len(packs[0])
                sums["expert work"] += expert_work(packs, counts)
                sums["token work"] += token_work(packs, lengths)
                sums["pair work"] += token_work(packs, lengths, power=2)
        for start in range(0, len(samples), BLOCK):
            own = lengths[start : start + BLOCK]
            bound["packs of a rank"] += -(-sum(own) // (4 * CAPACITY))
            bound["token work"] += max(-(-sum(own) // 4), max(own))
            bound["pair work"] += max(-(-sum(n * n for n in own) // 4), max(own) ** 2)
            for place in range(2 * len(COUNTED)):
                column = [counts.of(i)[place] for i in range(start, start + BLOCK)]
                other = [counts.of(i)[place ^ 1] for i in range(start, start + BLOCK)]
                if place % 2 == 0:
                    bound["expert work"] += max(-(-max(sum(column), sum(other)) // 2), *column, *other)
    rows = {row[0]: row[1:] for row in planning_rows(planning_of(routed))}
    for title in before:
        over = before[title] - bound[title]
        assert rows[title] == (
            f"{before[title]:,}",
            f"{after[title]:,}",
            f"{bound[title]:,}",
            f"{100 * (after[title] - bound[title]) / bound[title]:.1f} %",
            f"{100 * (before[title] - after[title]) / over:.1f} %",
        )
        assert after[title] < before[title]


def test_skew_and_largest_load_stand_beside_the_works(routed: dict[int, list[Event]]) -> None:
    skews, largest = [], 0
    for event, samples, counts in plans(routed):
        for step in rebuild(event.record, samples, counts).steps:
            of_step = []
            for first in (0, 2):
                for p in range(step.packs_per_rank):
                    held = [i for rank in (first, first + 1) for i in step.packs[rank][p]]
                    loads = [[sum(counts.of(i)[2 * k + d] for i in held) for d in range(2)] for k in range(3)]
                    of_step.append(sum(map(max, loads)) / (sum(map(sum, loads)) / 2))
                    largest = max(largest, *map(max, loads))
            skews.append(of_step)
    rows = {row[0]: row[2] for row in planning_rows(planning_of(routed))}
    assert rows["dispatch skew, mean"] == f"{sum(sum(one) / len(one) for one in skews) / len(skews):.3f}"
    assert rows["dispatch skew, largest"] == f"{max(map(max, skews)):.3f}"
    assert rows["largest load, one layer"] == f"{largest:,}"


def test_seconds_stops_and_proposals_are_those_of_the_events(routed: dict[int, list[Event]]) -> None:
    run = summed(routed)
    assert run.planning is not None
    told = dict(planning_figures(run, run.planning))
    # Counting takes 2 ms a collection, planning 30, 40 and 50 ms, and a collection has two updates.
    counting, planned = 3 * 0.002, 0.03 + 0.04 + 0.05
    share = (counting + planned) / (run.score_seconds + run.train_seconds)
    assert told["seconds an update"] == (
        f"counting {counting / 6:.3f}, planning {planned / 6:.3f}; {share:.1%} of those in scoring and training"
    )
    traces = [trace for event, _, _ in plans(routed) for trace in event.record["traces"]]
    assert run.planning.stops == {
        stop: sum(trace["stop"] == stop for trace in traces) for stop in {trace["stop"] for trace in traces}
    }
    assert sum(run.planning.stops.values()) == 6
    mean = sum(trace["proposals"] for trace in traces) / 6
    assert told["proposals an update"] == f"{mean:.1f} scored fully, on average"
    assert told["expert figures"] == "about 3 of 6 routed layers (layers 1, 3, 5)"
    assert told["observed loads equal predicted"] == "yes, in all 6 updates that recorded them"


def test_layers_that_differ_from_the_plan_are_named(routed: dict[int, list[Event]]) -> None:
    run = {
        rank: [
            msgspec.structs.replace(e, mismatched_layers=[3, 5]) if isinstance(e, events.ExpertBalance) and e.step == 4
            else e
            for e in own
        ]
        for rank, own in routed.items()
    }  # fmt: skip
    text = printed(summarize(as_logs(run)))
    assert "observed loads equal predicted: no, not in 1 of 6 updates (update 4: layer 3, 5)" in text
    every = changed(routed, events.ExpertBalance, mismatched_layers=[1])
    assert "not in 6 of 6 updates (update 1: layer 1; " in printed(summarize(as_logs(every)))
    assert "; and 2 more)" in printed(summarize(as_logs(every)))


def test_loads_are_drawn_by_rank_and_pack_before_and_after(routed: dict[int, list[Event]]) -> None:
    pictures = planning_of(routed).pictures
    assert [picture.step for picture in pictures] == [1, 6]
    for picture, (event, samples, counts), place in zip(pictures, plans(routed)[::2], (0, 1), strict=True):
        planned = rebuild(event.record, samples, counts).steps[place].packs
        for grid, packs in ((picture.before, arrival_packs(samples)[place]), (picture.after, planned)):
            assert len(grid) == 4
            for rank, row in enumerate(grid):
                first = rank - rank % 2
                for p, load in enumerate(row):
                    held = [i for one in (first, first + 1) for i in packs[one][p]]
                    assert load == sum(counts.of(i)[2 * layer + rank % 2] for i in held for layer in range(3))
        assert sum(map(sum, picture.before)) == sum(map(sum, picture.after))
        assert (picture.destinations, picture.layers, picture.routed_layers) == (2, COUNTED, 6)


def test_without_routes_the_tokens_of_packs_are_drawn() -> None:
    run = make_run(2, seed=SEED, pack_order="balanced")
    planning = planning_of(run)
    assert [picture.step for picture in planning.pictures] == [1, 4]
    for picture, (event, samples, _), place in zip(planning.pictures, plans(run), (0, 1), strict=True):
        lengths = [sample.length for sample in samples]
        planned = rebuild(event.record, samples).steps[place].packs
        for grid, packs in ((picture.before, arrival_packs(samples)[place]), (picture.after, planned)):
            assert [list(row) for row in grid] == [[sum(lengths[i] for i in one) for one in own] for own in packs]
        after = next(gain.after for gain in picture.gains if gain.name == "attention_token_work")
        assert after == sum(max(column) for column in zip(*picture.after, strict=True))
        assert not picture.experts
    text = render_page(summarize(as_logs(run)))
    assert "Token work is the sum of the framed loads." in text
    assert "tokens of every rank and pack" in text
    assert "expert" not in text.split("What planning changed")[1].split("How full, how long")[0]
    assert order_told(planning) == "balanced by lengths"


def loads_picture(before: Any, after: Any, destinations: int = 2) -> LoadPicture:
    works = (Gain("packs_per_rank", 3, 2, 2), Gain("critical_work_proxy", 200, 150, 120))
    return LoadPicture(7, before, after, destinations, works, (1, 4), 4)


def frames(axes: Axes) -> list[tuple[int, int]]:
    """Return rank and pack of every framed cell."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    return [(round(patch.get_y()), round(patch.get_x())) for patch in found]


def test_one_scale_serves_both_panels_and_the_most_loaded_rank_is_framed() -> None:
    picture = loads_picture(((5, 40, 7), (90, 2, 7)), ((60, 20), (10, 70)))
    left, right, bars, _ = draw_loads(picture).axes
    assert [axes.collections[0].get_clim() for axes in (left, right)] == [(0, 90), (0, 90)]
    assert frames(left) == [(1, 0), (0, 1), (0, 2)]
    assert frames(right) == [(0, 0), (1, 1)]
    assert [text.get_text() for text in left.texts] == ["5", "40", "7", "90", "2", "7"]
    titles = [axes.get_title(loc="left") for axes in (left, right, bars)]
    assert titles == ["arrival order: 3 packs", "as planned: 2 packs", "work, % of arrival order"]
    assert left.get_ylim() == (2, 0)


def test_bars_are_percents_of_arrival_order_and_the_bound_is_a_line() -> None:
    bars = draw_loads(loads_picture(((4, 4, 4), (4, 4, 4)), ((6, 6), (6, 6)))).axes[2]
    heights = [round(bar.get_height(), 6) for bar in bars.patches if isinstance(bar, Rectangle)]
    assert heights == [100, round(200 / 3, 6), 100, 75]
    lines = [collection.get_segments()[0][0][1] for collection in bars.collections]  # type: ignore[attr-defined]
    assert lines == [pytest.approx(200 / 3), pytest.approx(60)]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["packs", "expert\nwork"]
    assert bars.get_ylim()[0] == 0


def test_replicas_are_parted_by_lines() -> None:
    rows = tuple((rank, rank + 1) for rank in range(6))
    left = draw_loads(loads_picture(rows, rows)).axes[0]
    assert [line.get_ydata()[0] for line in left.lines] == [2, 4]  # type: ignore[index]
    assert len(draw_loads(loads_picture(rows, rows, destinations=0)).axes[0].lines) == 0


def test_a_picture_of_too_many_ranks_or_packs_says_so() -> None:
    figure = draw_loads(loads_picture(((3,) * 50,) * 80, ((4,) * 45,) * 80))
    (title,) = [text.get_text() for text in figure.texts]
    drawn = f"the first {MOST_RANKS} of 80 ranks and {MOST_PACKS} packs of a rank are drawn"
    assert title == f"Update 7: expert choices of every rank and pack ({drawn})"
    assert figure.axes[0].collections[0].get_array().size == MOST_RANKS * MOST_PACKS  # type: ignore[union-attr]
    assert svg(figure, "x").count("<image") == 0


def test_a_log_without_balanced_plans_draws_nothing_new() -> None:
    run = make_run(2)
    report = summarize(as_logs(run))
    text = printed(report) + render_page(report)
    for word in ("What planning changed", "loads0", "reordered", "planned", "removable", "observed"):
        assert word not in text
    told = dict(key_figures(report.runs[0]))["order of the samples"]
    works = [(work, bound) for event, _, _ in plans(run) for work, bound in zip(
        event.record["work"], event.record["bounds"], strict=True)]  # fmt: skip
    tokens = sum(work["attention_token_work"] for work, _ in works)
    bound = sum(bound["attention_token_work"] for _, bound in works)
    assert told.startswith("arrival; over the bound: packs of a rank ")
    assert f"token work {100 * (tokens - bound) / bound:.0f} %" in told


def test_seconds_that_were_not_recorded_are_not_told(routed: dict[int, list[Event]]) -> None:
    run = changed(routed, events.Plan, planning_seconds=0.0, counting_seconds=0.0)
    found = summed(run)
    assert found.planning is not None
    assert dict(planning_figures(found, found.planning))["seconds an update"] == "none recorded"


def test_a_log_without_plans_or_loads_says_nothing_false(routed: dict[int, list[Event]]) -> None:
    none = {rank: [e for e in own if not isinstance(e, events.Plan)] for rank, own in routed.items()}
    assert summed(none).planning is None
    assert dict(key_figures(summed(none)))["order of the samples"] == "none recorded"
    assert "unknown without the log of rank 0" in dict(key_figures(summed({1: routed[1]})))["order of the samples"]
    unseen = {rank: [e for e in own if not isinstance(e, events.ExpertBalance)] for rank, own in routed.items()}
    assert "observed" not in printed(summarize(as_logs(unseen)))
    # Loads that were not written leave the tokens to draw, and the caption speaks of those.
    bare = changed(routed, events.Plan, loads_before=None, loads_after=None)
    assert [picture.experts for picture in planning_of(bare).pictures] == [False, False]
    assert "Loads are summed over" not in render_page(summarize(as_logs(bare)))


@pytest.mark.parametrize("loads", [[], [[]], [[[[1, 2]]]], [[[[1], [2, 3]], [[1, 2], [3]]]] * 2])
def test_loads_of_another_shape_are_not_drawn(routed: dict[int, list[Event]], loads: Any) -> None:
    run = changed(routed, events.Plan, loads_after=loads)
    assert [picture.experts for picture in planning_of(run).pictures] == [False, False]
    render_page(summarize(as_logs(run)))


BROKEN = [{}, {"pack_order": "arrival"}, {"traces": []}, {"work": []}, {"bounds": "x"}, {"traces": [{"stop": "x"}]}]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_record_that_cannot_be_read_leaves_the_rest(routed: dict[int, list[Event]], broken: dict[str, Any]) -> None:
    def spoiled(event: Event) -> Event:
        if not isinstance(event, events.Plan) or event.rollout_id != 1:
            return event
        return msgspec.structs.replace(event, record={**event.record, **broken} if broken else {})

    planning = planning_of({rank: [spoiled(event) for event in own] for rank, own in routed.items()})
    assert [update.step for update in planning.updates] == [1, 2, 5, 6]


def test_updates_that_did_not_run_are_left_out(routed: dict[int, list[Event]]) -> None:
    stopped = {
        rank: [e for e in own if isinstance(e, events.Plan | events.Rollout) or e.update <= 3]
        for rank, own in routed.items()
    }
    planning = planning_of(stopped)
    assert [update.step for update in planning.updates] == [1, 2, 3]
    assert [picture.step for picture in planning.pictures] == [1, 3]
    assert planning.planning_seconds == pytest.approx(0.03 + 0.04)


def test_the_page_shows_loads_and_says_what_they_are_not(routed: dict[int, list[Event]]) -> None:
    report = summarize(as_logs(routed))
    text = render_page(report)
    part = text.split("What planning changed")[1].split("How full, how long")[0]
    assert part.count("<svg") == 2
    assert "Counts are not seconds." in part
    assert "Loads are summed over 3 of 6 routed layers (layers 1, 3, 5);" in part
    assert "a bound that no order can beat and that need not be reachable" in part
    for row in planning_rows(planning_of(routed)):
        assert f"<tr><th>{row[0]}</th>" + "".join(f"<td>{cell}</td>" for cell in row[1:]) in part
    page = Links()
    page.feed(text)
    page.close()
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert text == render_page(summarize(as_logs(routed)))


def test_runs_side_by_side_have_a_table_each(routed: dict[int, list[Event]]) -> None:
    lengths, plain = make_run(1, pack_order="balanced", name="lengths"), make_run(1, name="plain")
    logs = [*as_logs(routed, Path("a")), *as_logs(lengths, Path("b")), *as_logs(plain, Path("c"))]
    text = printed(summarize(logs))
    assert "Planning of demo (a): 6 reordered updates, works added up" in text
    assert "Planning of lengths (b): 2 reordered updates" in text
    assert "Planning of plain" not in text
    assert text.count("│ expert work") == 1
