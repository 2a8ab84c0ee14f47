from pathlib import Path

import pytest
from pack_miles.cli import main
from pack_miles.contract.events import Packing, RunFailed
from support.log_runs import make_run, write_run


def test_report_prints_the_key_figures_and_says_where_the_page_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", make_run(3))
    page = tmp_path / "page.html"

    assert main(["report", str(tmp_path / "run"), "--html", str(page)]) == 0

    out = capsys.readouterr().out
    assert "mean reward" in out
    assert out.rstrip().endswith(f"page: {page}")
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", make_run(2))
    (tmp_path / "file").write_text("")

    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "file" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_audit_passes_a_sound_run_and_names_what_a_broken_one_violates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = make_run(3)
    broken = {rank: list(own) for rank, own in sound.items()}
    broken[1].remove(next(event for event in broken[1] if isinstance(event, Packing)))
    write_run(tmp_path / "sound", sound)
    write_run(tmp_path / "broken", broken)

    assert main(["audit", str(tmp_path / "sound")]) == 0
    assert "no violations" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "broken")]) == 1
    assert "packing" in capsys.readouterr().out


def test_audit_of_a_run_that_failed_before_its_first_update_fails_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {rank: [own[0], RunFailed(rank=rank, step=0, error="no kernel")] for rank, own in make_run(1).items()}
    write_run(tmp_path / "failed", failed)

    assert main(["audit", str(tmp_path / "failed")]) == 1

    out = capsys.readouterr().out
    assert "nothing was proven" in out
    assert "failed on rank 0, 1, 2, 3: no kernel" in out
    assert "no violations" not in out


@pytest.mark.parametrize("command", ["report", "audit"])
def test_a_log_that_is_not_there_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
