import io
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from pack_miles import events
from pack_miles.figures import draw_fill, draw_packs, draw_rewards, draw_times, smooth, svg
from pack_miles.log import read_logs
from pack_miles.page import render_page, write_page
from pack_miles.report import key_figures, print_report, summarize
from pack_miles.summary import Block, PackPicture, Report
from rich.console import Console
from support.log_runs import STEPS, as_logs, make_run, write_run


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
    assert f"{run.reward_first:.3f} → {run.reward_last:.3f}" in text
    assert f"{run.forwards:,} instead of {run.forwards_single:,}" in text
    assert "not a wall time" in text
    assert len(text.splitlines()) <= 24


def test_runs_stand_side_by_side() -> None:
    logs = [*as_logs(make_run(2, name="one"), Path("a")), *as_logs(make_run(2, packing=False, name="two"), Path("b"))]
    text = printed(summarize(logs))
    assert re.search(r"one\s+┃ two", text)
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
    printed(report)
    write_page(report, tmp_path / "report.html")


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
    pack = (Block("a", 3, None),)
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


class Links(HTMLParser):
    """Collects every id, every link and every tag left open."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._attributes(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "srcset", "action"):
                self.links.append(value or "")


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
    assert text.count("<svg") == 2 * 6


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
