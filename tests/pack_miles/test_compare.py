"""Runs side by side: only on the same samples, cold updates apart, and a gain is told only where it stands out."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pack_miles.cli import main
from pack_miles.contract import events
from pack_miles.contract.events import Event
from pack_miles.contract.log import runs_of
from pack_miles.reporting.compare import Comparison, compare, told
from pack_miles.reporting.report import key_figures, labels, print_comparison, summarize
from pack_miles.reporting.shapes import Shapes, most_shapes
from rich.console import Console
from support.log_runs import STEPS, as_logs, make_run, write_run

#: Ten updates, of which the first four are cold.
COLLECTIONS, WARMUP = 5, 4


def timed(run: dict[int, list[Event]], cold: float, warm: list[float], planning: float = 0.0) -> dict[int, list[Event]]:
    """Return a run whose updates took these seconds: no scoring, `cold` for the first four, then `warm` in turn."""

    def one(event: Event) -> Event:
        if isinstance(event, events.Optimizer):
            place = event.step - WARMUP - 1
            seconds = cold if place < 0 else warm[place % len(warm)]
            return msgspec.structs.replace(event, elapsed_seconds=seconds / (1 + event.rank))  # rank 0 is the slowest
        if isinstance(event, events.ScoreTiming):
            return msgspec.structs.replace(event, seconds=0.0)
        if isinstance(event, events.Plan):
            return msgspec.structs.replace(event, counting_seconds=0.0, planning_seconds=planning)
        return event

    return {rank: [one(event) for event in own] for rank, own in run.items()}


def compared(*runs: dict[int, list[Event]], warmup: int = WARMUP) -> Comparison:
    logs = [log for number, run in enumerate(runs) for log in as_logs(run, Path(f"runs/{number}"))]
    report = summarize(logs)
    return compare(runs_of(logs), report.runs, labels(report), warmup)


def off(**changes: Any) -> dict[int, list[Event]]:
    return make_run(COLLECTIONS, packing=False, **changes)


def on(**changes: Any) -> dict[int, list[Event]]:
    return make_run(COLLECTIONS, **changes)


def test_warmed_seconds_stand_apart_from_cold_ones_and_the_net_counts_planning() -> None:
    found = compared(timed(off(), 9.0, [2.0]), timed(on(), 30.0, [1.0], planning=0.4))
    assert (found.refusal, found.updates, found.left_out) == ("", COLLECTIONS * STEPS - WARMUP, 0)
    one, other = found.runs
    assert (one.cold_seconds, one.warm_seconds, one.planning_seconds) == (9.0, 2.0, 0.0)
    assert (other.cold_seconds, other.warm_seconds, other.planning_seconds) == (30.0, 1.0, pytest.approx(0.4 / STEPS))
    (versus,) = found.versus
    assert versus.difference == pytest.approx(1.0 + 0.4 / STEPS - 2.0)
    assert found.differing == (("core.sequence_packing", (False, True)),)
    lines = told(found)
    assert lines[0] == "what differs: core.sequence_packing (False, True)"
    assert lines[1] == (
        "demo (1): 1 s of scoring and training an update instead of 2 s, 0.2 s of planning instead of 0 s: "
        "a net gain of 0.8 s an update, 40.0%"
    )
    assert lines[2].startswith("Over 6 updates of the same samples, the first 4 after every start left out")


def test_a_loss_is_called_a_loss() -> None:
    found = compared(timed(off(), 1.0, [1.0]), timed(on(), 1.0, [1.0], planning=0.5))
    assert "a net loss of 0.25 s an update, 25.0%" in told(found)[1]


def test_what_chance_between_updates_explains_is_no_gain() -> None:
    # Paired differences -0.5, 0.5, -0.4 twice: their mean is -0.13, its standard error 0.20.
    found = compared(timed(off(), 1.0, [2.0, 1.0, 1.5]), timed(on(), 1.0, [1.5, 1.5, 1.1]))
    (versus,) = found.versus
    assert versus.difference == pytest.approx(-0.4 / 3)
    assert versus.error == pytest.approx(0.2012, abs=1e-4)
    assert "no difference that stands out (-0.13 s ± 0.2 s an update)" in told(found)[1]


def test_runs_on_different_samples_are_not_compared() -> None:
    found = compared(on(), on(seed=1))
    assert found.refusal.startswith("their samples differ in every collection")
    (line,) = told(found)
    assert line.startswith("not compared: ")


def test_equal_lengths_with_other_rewards_are_other_samples() -> None:
    other = {
        rank: [
            msgspec.structs.replace(event, reward_mean=0.5) if isinstance(event, events.Rollout) else event
            for event in own
        ]
        for rank, own in on().items()
    }
    assert compared(on(), other).refusal.startswith("their samples differ in every collection")


def test_collections_that_came_to_differ_are_left_out_and_told() -> None:
    ours, other = on(), on(seed=1)
    mixed = {
        rank: [event for event in ours[rank] if event.update <= 3 * STEPS]
        + [event for event in other[rank] if event.update > 3 * STEPS and not isinstance(event, events.RunStarted)]
        for rank in ours
    }
    found = compared(ours, mixed)
    assert (found.updates, found.left_out) == (3 * STEPS - WARMUP, 2)
    assert "2 collections with other samples left out as well" in told(found)[-1]


def test_too_few_warm_updates_are_no_measurement() -> None:
    found = compared(on(), on(), warmup=COLLECTIONS * STEPS - 1)
    assert "10 updates of the same samples, 1 update after the first 9 of each start: too few" in found.refusal


def test_the_first_updates_after_a_resume_are_cold_too() -> None:
    again = make_run(COLLECTIONS, first=3)
    both = {rank: [event for event in own if event.update <= 3 * STEPS] + again[rank] for rank, own in on().items()}
    assert compared(on(), both, warmup=2).updates == COLLECTIONS * STEPS - 2 - 2


def test_a_log_without_plans_cannot_be_compared() -> None:
    found = compared(on(), {1: on()[1]})
    assert "demo (1) records no plan" in found.refusal


def test_options_that_only_say_where_and_how_a_run_is_watched_do_not_differ() -> None:
    changed = {"configuration": {"output": {"root": "b"}, "run": {"ranks": 4, "resume": True}, "core": {"a": 1}}}
    base = {"configuration": {"output": {"root": "a"}, "run": {"ranks": 4, "resume": False}, "core": {"a": 2}}}
    found = compared(on(start=base), on(start=changed))
    assert found.differing == (("core.a", (2, 1)),)


def test_shapes_are_counted_in_steps_of_1024_tokens_for_the_rank_that_sees_most() -> None:
    # Rank 0: 1, 2, then 3 and 2: three. Rank 1: 1 and 1, then 1: one.
    assert most_shapes([((1000, 1025), (900, 1)), ((2049, 2048), (1024, 1024))]) == 3
    assert Shapes(3, 3, 6).told() == "3 of 6 possible"
    assert Shapes(3, 2, 6).told() == "3 of 6 possible (arrival order: 2)"


def test_the_report_counts_the_shapes_of_the_packs_that_ran() -> None:
    run = make_run(2, capacity=5000)
    (found,) = summarize(as_logs(run)).runs
    largest = {
        rank: {
            -(-event.max_pack_tokens // 1024)
            for event in own
            if isinstance(event, events.Packing) and event.pass_ == "training"
        }
        for rank, own in run.items()
    }
    assert found.shapes is not None
    assert max(map(len, largest.values())) <= found.shapes.planned <= found.shapes.possible == 5
    assert found.shapes.planned == found.shapes.arrival
    small = dict(key_figures(summarize(as_logs(make_run(1))).runs[0]))
    assert small["shapes of one rank's rows"] == "1, the only one: no row is longer than 1,024 tokens"


def test_memory_is_the_largest_of_any_rank() -> None:
    run = make_run(1)
    for rank in run:
        memory = events.Memory(
            rank=rank, step=2, rollout_id=0, peak_allocated_bytes=rank * 2**30, peak_resident_bytes=2**29
        )
        run[rank].append(memory)
    figures = dict(key_figures(summarize(as_logs(run)).runs[0]))
    assert figures["memory of one rank at most"] == "3.00 GiB of the GPU, 0.50 GiB of the machine"
    assert dict(key_figures(summarize(as_logs(make_run(1))).runs[0]))["memory of one rank at most"] == "none recorded"


def test_the_command_prints_the_comparison_of_two_runs_and_none_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, run in (("off", timed(off(), 9.0, [2.0])), ("on", timed(on(), 9.0, [1.0]))):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, run)
    assert main(["report", str(tmp_path / "off"), str(tmp_path / "on"), "--warmup", "4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "On the same samples, seconds of an update" in text
    assert "a net gain of 1 s an update, 50.0%" in text
    assert main(["report", str(tmp_path / "off")]) == 0
    assert "compared" not in capsys.readouterr().out
    assert main(["report", str(tmp_path / "off"), "--warmup", "-1"]) == 2
    assert "must be a whole number of updates" in capsys.readouterr().err


def test_a_refusal_prints_no_table() -> None:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_comparison(compared(on(), on(seed=1)), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("not compared: their samples differ")
