import io
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from pack_miles.contract import events
from pack_miles.contract.log import read_logs
from pack_miles.reporting.figures import draw_fill, draw_forwards, draw_packs, draw_rewards, draw_times, smooth, svg
from pack_miles.reporting.page import render_page, write_page
from pack_miles.reporting.report import key_figures, labels, print_report, summarize
from pack_miles.reporting.summary import Block, PackPicture, Report
from rich.console import Console
from support.log_runs import STEPS, as_logs, make_run, write_run
from support.page_links import Links


def printed(report: Report, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_adds_up_what_the_events_say() -> None:
    run = make_run(20)
    (found,) = summarize(as_logs(run)).runs
    packing = [e for own in run.values() for e in own if isinstance(e, events.Packing)]
    training = [e for e in packing if e.pass_ == "training"]
    rewards = [e.reward_mean for e in run[0] if isinstance(e, events.Rollout)]

    assert (found.name, found.ranks, found.expert_parallel, found.status) == ("demo", 4, 2, "finished")
    assert (len(found.collections), len(found.updates), found.capacity) == (20, 20 * STEPS, 512)
    assert found.reward_first == pytest.approx((rewards[0] + rewards[1]) / 2)
    assert found.reward_last == pytest.approx((rewards[-1] + rewards[-2]) / 2)
    assert found.forwards == sum(e.packs for e in packing if e.rank == 0)
    assert found.forwards_single == sum(e.samples for e in packing if e.rank == 0) == 20 * STEPS * 2 * 8
    first = [e for e in training if e.step == 1]
    assert found.updates[0].fill == tuple(e.model_tokens / (e.packs * 512) for e in first)
    assert found.updates[0].fill_mean == pytest.approx(sum(found.updates[0].fill) / 4)
    assert found.updates[0].max_pack_tokens == max(e.max_pack_tokens for e in first)


def test_seconds_are_the_slowest_ranks_and_scoring_is_shared_by_its_updates() -> None:
    run = make_run(1)
    (found,) = summarize(as_logs(run)).runs
    timings = [e.seconds for own in run.values() for e in own if isinstance(e, events.ScoreTiming)]
    assert [row.score_seconds for row in found.updates] == [pytest.approx(max(timings) / STEPS)] * STEPS
    elapsed = [
        e.elapsed_seconds for own in run.values() for e in own if isinstance(e, events.Optimizer) and e.step == 2
    ]
    assert found.updates[1].train_seconds == max(elapsed)
    tokens = sum(e.model_tokens for e in run[0] if isinstance(e, events.Rollout))
    assert found.tokens_per_second == pytest.approx(tokens / (found.score_seconds + found.train_seconds))


def test_log_prob_differences_are_weighted_by_tokens() -> None:
    (found,) = summarize(as_logs(make_run(2))).runs
    # 400 tokens at 2e-7, 300 at 4e-7, 300 at 3e-7
    assert found.log_prob_mean == pytest.approx(2.9e-7)
    assert (found.log_prob_max, found.checks, found.check_mean, found.check_max) == (2e-6, 2, 1e-8, 3e-7)


def test_a_repeated_update_counts_once() -> None:
    before, after = make_run(3, finish=False, seed=1), make_run(4, first=2)
    (found,) = summarize(as_logs({rank: [*before[rank], *after[rank]] for rank in before})).runs
    assert [row.step for row in found.updates] == list(range(1, 4 * STEPS + 1))
    assert [row.rollout_id for row in found.collections] == [0, 1, 2, 3]
    assert found.starts == 2
    repeated = next(event for event in after[0] if isinstance(event, events.Rollout))
    assert found.collections[2].reward_mean == repeated.reward_mean


def test_pictures_show_the_packs_of_the_first_and_the_last_update() -> None:
    run = make_run(2)
    (found,) = summarize(as_logs(run)).runs
    assert [picture.step for picture in found.pictures] == [1, 2 * STEPS]
    for picture in found.pictures:
        for rank, packs in enumerate(picture.ranks):
            sizes = [sum(block.length for block in pack) for pack in packs]
            (said,) = [
                e
                for e in run[rank]
                if isinstance(e, events.Packing) and e.step == picture.step and e.pass_ == "training"
            ]
            assert (len(sizes), sum(sizes), max(sizes)) == (said.packs, said.model_tokens, said.max_pack_tokens)


def test_a_run_that_failed_says_where_and_why() -> None:
    run = make_run(1, finish=False)
    run[2].append(events.RunFailed(rank=2, step=2, error="out of memory"))
    (found,) = summarize(as_logs(run)).runs
    assert found.status == "failed on rank 2: out of memory"


def failed(errors: dict[int, str]) -> str:
    """Return the status of a run of four ranks of which those given end with these errors, the others without."""
    run = make_run(1, finish=False)
    for rank, error in errors.items():
        run[rank].append(events.RunFailed(rank=rank, step=2, error=error))
    return summarize(as_logs(run)).runs[0].status


CLOSED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:5"
)
RESET = "DistBackendError: [3] is setting up: Connection reset by peer\nException raised from recv at x.hpp:9"
LATE = "RuntimeError: [/pytorch/gloo/unbound_buffer.cc:78] Timed out waiting 120000ms for recv operation to complete"


def test_a_lost_connection_is_told_last() -> None:
    assert (
        failed({0: CLOSED, 1: RESET, 2: "ValueError: no reward", 3: LATE}) == "failed on rank 2: ValueError: no reward"
    )
    assert failed({0: CLOSED, 3: "RankError: rank 1: TimeoutError: the reward timed out"}) == (
        "failed on rank 3: RankError: rank 1: TimeoutError: the reward timed out"
    )


def test_where_only_connections_were_lost_the_silent_ranks_are_the_likely_cause() -> None:
    assert failed({0: CLOSED, 1: RESET, 3: LATE}) == (
        "failed on rank 0, 1, 3: RuntimeError: Connection closed by peer [127.0.0.1]:5; "
        "the likely cause is rank 2: no run_failed recorded"
    )
    assert failed({0: RESET, 1: CLOSED, 2: CLOSED, 3: LATE}) == (
        "failed on rank 0, 1, 2, 3: DistBackendError: [3] is setting up: Connection reset by peer"
    )


def test_an_error_of_several_ranks_names_them() -> None:
    assert failed({1: "ValueError: x", 2: "ValueError: x"}) == "failed on rank 1, 2: ValueError: x"


def test_a_status_is_one_short_line() -> None:
    long = failed({1: "ValueError: \U0001f4a1 first\n\x1b[31m" + "much " * 200})
    assert long.startswith("failed on rank 1: ValueError: first [31mmuch much")
    assert long.endswith("…")
    assert len(long) <= 160
    assert failed({1: "\n"}) == "failed on rank 1: no reason recorded"


def test_missing_logs_are_told_and_nothing_is_claimed_of_them() -> None:
    report = summarize(as_logs({1: make_run(3)[1]}))
    (run,) = report.runs
    assert (run.ranks, run.missing) == (4, (0, 2, 3))
    assert run.status == "finished; logs of rank 0, 2, 3 are missing"
    figures = dict(key_figures(run))
    assert figures["run"].startswith("3 collections, 6 updates, 4 ranks")
    assert figures["mean reward, first → last tenth"] == "unknown without the log of rank 0"
    assert figures["training throughput"].endswith("rank 1 only")
    assert "rollout" not in figures["time"]
    page = render_page(report)
    assert "logs of rank 0, 2, 3 are missing" in page
    assert "all ranks" not in page + printed(report)
    most = {rank: own for rank, own in make_run(1).items() if rank != 2}
    assert summarize(as_logs(most)).runs[0].status == "finished; the log of rank 2 is missing"
    assert summarize(as_logs(most | {2: []})).runs[0].missing == (2,)


def test_one_is_no_plural() -> None:
    report = summarize(as_logs(make_run(1, ranks=1)))
    text = printed(report) + render_page(report)
    assert "1 collection, 2 updates, 1 rank" in text
    assert "all ranks" not in text
    (axes,) = draw_packs(report.runs[0].pictures[0]).axes
    assert re.fullmatch(r"Update 1: 32 samples in \d+ packs on 1 rank, \d+% full", axes.get_title(loc="left"))


def test_table_and_page_say_the_same_numbers() -> None:
    for first, last, told in (
        (0.1234, 0.8765, "0.12 → 0.88 (+0.76)"),
        (0.5012, 0.5038, "0.501 → 0.504 (+0.003)"),
        (0.5, 0.4999, "0.500 → 0.500 (+0.000)"),
    ):
        run = make_run(2)
        means = iter([first, last])
        run[0] = [
            msgspec.structs.replace(e, reward_mean=next(means)) if isinstance(e, events.Rollout) else e for e in run[0]
        ]
        report = summarize(as_logs(run))
        assert told in printed(report)
        assert f"<b>{told[: told.index(' (')]}</b>" in render_page(report)
        assert draw_rewards(report.runs[0]).axes[0].get_title(loc="left") == f"Mean reward {told[: told.index(' (')]}"
    (share,) = re.findall(r"\((−[\d.]+%)\)", printed(report))
    assert f"<b>{share}</b>" in render_page(report)


def test_runs_of_one_name_are_told_apart_by_folder() -> None:
    logs = [*as_logs(make_run(1), Path("runs/a/x")), *as_logs(make_run(1, seed=2), Path("runs/b/x"))]
    report = summarize(logs)
    assert labels(report) == ("demo (a/x)", "demo (b/x)")
    page = render_page(report)
    assert "<h1>demo (a/x), demo (b/x)</h1>" in page
    assert "<h2>demo (b/x)</h2>" in page
    assert "<th>demo (b/x)</th>" in page
    nested = [*as_logs(make_run(1), Path("runs")), *as_logs(make_run(1), Path("runs/again"))]
    assert labels(summarize(nested)) == ("demo (runs)", "demo (runs/again)")
    assert labels(summarize(as_logs(make_run(1)))) == ("demo",)


def test_a_run_without_packing_says_one_sample_a_row() -> None:
    report = summarize(as_logs(make_run(12, packing=False, ranks=2)))
    (run,) = report.runs
    page = render_page(report)
    assert "Reinforcement learning, one sample a row, from the contract log" in page
    assert "forwards of one rank, one sample a row" in page
    assert "<b>0%</b>" not in page
    assert "instead of" not in page + printed(report)
    titles = [draw(run).axes[0].get_title(loc="left") for draw in (draw_forwards, draw_fill)]
    assert all("one sample a row" in title for title in titles)
    (picture,) = run.pictures
    (axes,) = draw_packs(picture).axes
    assert "32 samples, one a row, on 2 ranks" in axes.get_title(loc="left")
    assert "(the first 12 rows of each rank are drawn)" in axes.get_title(loc="left")
    grey = [bar for bar in axes.patches if bar.get_width() == picture.capacity]  # type: ignore[attr-defined]
    assert len(grey) == 2 * 12


def test_neighbouring_blocks_of_one_colour_answer_one_prompt() -> None:
    # Groups 0 and 8 would have one colour by their place alone.
    row = tuple(Block(str(group), 3, group) for group in (0, 8, 8, 1, 9, 2, 3, 4, 5, 6, 7))
    (axes,) = draw_packs(PackPicture(step=1, capacity=40, ranks=((row,),))).axes
    colours = [bar.get_facecolor() for bar in axes.patches if bar.get_width() == 3]  # type: ignore[attr-defined]
    same = [left == right for left, right in pairwise(colours)]
    assert same == [False, True, *[False] * 8]
    page = render_page(summarize(as_logs(make_run(1))))
    assert "neighbouring blocks of one colour answer the same prompt; colours repeat after eight prompts; " in page
    assert "the number in a block is its tokens" in page


def test_a_trend_is_drawn_from_ten_collections_on() -> None:
    for collections, smoothed in ((9, False), (10, True)):
        report = summarize(as_logs(make_run(collections)))
        _, said = draw_rewards(report.runs[0]).axes[0].get_legend_handles_labels()
        assert ("smoothed" in said) is smoothed
        page = render_page(report)
        assert ("The line smooths" in page) is smoothed
        assert "cut to the possible range" in page


def test_many_updates_are_drawn_as_steps_of_whole_collections() -> None:
    (run,) = summarize(as_logs(make_run(61, ranks=1))).runs
    assert len(run.updates) == 122
    (axes,) = draw_forwards(run).axes
    single, packed = (patch.get_data() for patch in axes.patches)  # type: ignore[attr-defined]
    assert set(single.values) == {64}  # 32 samples in scoring and in training
    assert len(packed.values) == 61
    means = [(run.updates[i].forwards + run.updates[i + 1].forwards) / 2 for i in range(0, 122, 2)]
    assert list(packed.values) == means
    assert list(packed.edges[:2]) == [0.5, 2.5]
    assert packed.edges[-1] == 122.5
    assert axes.get_xlabel() == "update (each step is the mean of 2)"
    (axes,) = draw_times(run).axes
    assert len(axes.patches) == 2
    (axes,) = draw_fill(run).axes
    assert axes.get_legend_handles_labels()[1] == ["all packs", "smoothed"]


def test_square_brackets_of_the_log_are_text_in_the_table() -> None:
    run = make_run(1, finish=False, name="[bold]x")
    run[0].append(events.RunFailed(rank=0, step=2, error="[Errno 28] [/x] disk full"))
    text = printed(summarize(as_logs(run)))
    assert "[bold]x" in text
    assert "[Errno 28] [/x] disk full" in text


def test_the_table_says_the_key_figures_on_one_screen() -> None:
    report = summarize(as_logs(make_run(20)))
    text = printed(report)
    (run,) = report.runs
    assert f"{run.reward_first:.2f} → {run.reward_last:.2f} (+0.7" in text
    assert f"{run.forwards:,} instead of {run.forwards_single:,}" in text
    assert "not a wall time" in text
    assert len(text.splitlines()) <= 24


def test_runs_stand_side_by_side() -> None:
    logs = [*as_logs(make_run(2, name="one"), Path("a")), *as_logs(make_run(2, packing=False, name="two"), Path("b"))]
    text = printed(summarize(logs))
    assert re.search(r"one \(a\)\s+┃ two \(b\)", text)
    assert "one sample a row" in text


def test_torn_lines_are_named_under_the_table(tmp_path: Path) -> None:
    write_run(tmp_path, make_run(1))
    path = tmp_path / "training_contract_rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    report = summarize(read_logs([tmp_path]))
    assert "torn line" in printed(report, width=400)
    assert "torn line" in render_page(report)


@pytest.mark.parametrize("keep", [0, 1, 3, 8])
def test_a_log_of_any_length_can_be_reported(keep: int, tmp_path: Path) -> None:
    run = {rank: own[:keep] for rank, own in make_run(1).items()}
    report = summarize(as_logs(run))
    assert "status" in printed(report)
    write_page(report, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().rstrip().endswith("</html>")


def test_smoothing_takes_the_neighbours_there_are() -> None:
    assert smooth([1.0, 2.0, 6.0, 3.0], 1) == [1.5, 3.0, pytest.approx(11 / 3), 4.5]
    assert smooth([1.0, 2.0, 6.0], 9) == [3.0, 3.0, 3.0]


def test_every_sample_is_drawn_as_wide_as_it_is_long() -> None:
    blocks = (Block("a", 30, 0), Block("b", 50, 0), Block("c", 90, 1))
    picture = PackPicture(step=3, capacity=100, ranks=(((blocks[0], blocks[1]),), ((blocks[2],),)))
    (axes,) = draw_packs(picture).axes
    drawn = [(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_width() != 100]  # type: ignore[attr-defined]
    assert drawn == [(0, 30), (30, 50), (0, 90)]
    assert axes.get_title(loc="left") == "Update 3: 3 samples in 2 packs on 2 ranks, 85% full"
    texts = {text.get_text() for text in axes.texts}
    assert {"30", "50", "90", "80%", "90%", "limit"} <= texts
    colours = [bar.get_facecolor() for bar in axes.patches if bar.get_width() != 100]  # type: ignore[attr-defined]
    assert colours[0] == colours[1] != colours[2]


def test_a_picture_of_too_many_packs_says_what_it_leaves_out() -> None:
    pack = (Block("a", 3, None), Block("b", 1, None))
    many = PackPicture(step=1, capacity=8, ranks=((pack,),) * 200)
    (axes,) = draw_packs(many).axes
    assert "200 packs on 200 ranks" in axes.get_title(loc="left")
    assert "the first 64 ranks are drawn" in axes.get_title(loc="left")
    deep = PackPicture(step=1, capacity=8, ranks=((pack,) * 100,) * 2)
    (axes,) = draw_packs(deep).axes
    assert "the first 64 packs of rank 0 are drawn" in axes.get_title(loc="left")


def test_axes_say_what_they_measure() -> None:
    (run,) = summarize(as_logs(make_run(2))).runs
    said = [
        (axes.get_xlabel(), axes.get_ylabel())
        for draw in (draw_rewards, draw_fill, draw_times)
        for axes in draw(run).axes
    ]
    assert said == [("collection", "reward"), ("update", "filled share of capacity (%)"), ("update", "seconds")]


@pytest.fixture(scope="module")
def two_runs() -> str:
    return render_two_runs()


def render_two_runs() -> str:
    logs = [*as_logs(make_run(1), Path("a")), *as_logs(make_run(1, packing=False, name="other"), Path("b"))]
    return render_page(summarize(logs))


def test_the_same_runs_are_the_same_page(two_runs: str) -> None:
    assert two_runs == render_two_runs()


def test_the_page_stands_alone_and_is_well_formed(two_runs: str) -> None:
    text = two_runs
    page = Links()
    page.feed(text)
    page.close()
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert all(link.startswith("#") for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    used = {link[1:] for link in page.links} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert used <= set(page.ids)
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    # The run without packing has one picture of its rows.
    assert text.count("<svg") == 6 + 5


def test_text_of_the_log_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>&\"'"
    run = make_run(1, name=evil, start={"configuration": {"name": evil}, "versions": {evil: "1"}})
    run[0].append(events.RunFailed(rank=0, step=2, error=evil))
    text = render_page(summarize(as_logs(run, Path("<b>"))))
    assert "<script" not in text
    assert "<b>/" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_the_page_replaces_an_old_one_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "report.html"
    short = summarize(as_logs(make_run(0, finish=False)))
    write_page(short, path)
    before = path.read_text()
    assert before.startswith("<!doctype html>")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_page(short, path)
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_figure_keeps_its_shape_and_scales() -> None:
    (run,) = summarize(as_logs(make_run(1))).runs
    text = svg(draw_fill(run), "f")
    head = text[: text.index(">")]
    assert "viewBox=" in head
    assert not re.search(r"\b(width|height)=", head)
    assert "date" not in text.lower().replace("update", "")


def test_key_figures_are_never_empty() -> None:
    for run in (make_run(2), {0: make_run(1)[0][:1]}):
        for summary in summarize(as_logs(run)).runs:
            assert all(label and text for label, text in key_figures(summary))


def test_scores_of_an_overflowing_histogram_are_read() -> None:
    run = make_run(1)
    run[0] = [
        msgspec.structs.replace(event, p99_upper=None, max_abs=7.0) if isinstance(event, events.Scores) else event
        for event in run[0]
    ]
    assert summarize(as_logs(run)).runs[0].log_prob_max == 7.0
