"""Files in, folders of rows out: every format, the command line, what it refuses, and a write that is killed."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_torch.cli import main
from pack_torch.offline import DatasetError, find_files, pack_dataset, write_rows
from support.offline_cases import chunked, command, documents, joined, lognormal, unpacked

LENGTHS = lognormal(300)

#: Writes many small files, slowly enough to be killed in the middle.
WRITER = """
import sys, time
from pack_torch.offline import pack_dataset, write_rows
from support.offline_cases import chunked, documents, lognormal

if __name__ == "__main__":
    packed = pack_dataset(chunked(documents(lognormal(6000)), range(0, 6000, 700)), 256)
    write_rows(packed, sys.argv[1], processes=int(sys.argv[2]), part_tokens=2048)
"""


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder by readers that are not the ones under test."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("part-*")):
        if path.suffix == ".parquet":
            rows += pq.read_table(path).to_pylist()
        elif path.suffix == ".arrow":
            rows += pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()
        else:
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            rows += map(json.loads, text.splitlines())
    return rows


def write_input(path: Path, columns: dict[str, list[Any]]) -> Path:
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=70)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=90)
    else:
        text = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".jsonl", ".jsonl.gz"])
def test_files_of_every_format_become_rows_of_every_format(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = documents(LENGTHS) | {"name": [f"d{d}" for d in range(len(LENGTHS))]}
    given = write_input(tmp_path / f"in{ending}", columns)
    for written in ("rows", "rows.arrow", "rows.jsonl", "rows.jsonl.gz"):
        arguments = ["pack", str(given), str(tmp_path / written), "--capacity", "256", "--per-document", "name"]
        assert main(arguments) == 0
        told = capsys.readouterr()
        assert told.err == ""
        assert f"documents   300 documents, {sum(LENGTHS):,} tokens" in told.out
        assert "lost        nothing" in told.out
        rows = read(tmp_path / written)
        for name in ("input_ids", "labels"):
            found = unpacked(rows, name)
            assert [joined(found[d]) for d in range(len(LENGTHS))] == columns[name]
        assert all([f"d{d}" for d in row["documents"]] == row["name"] for row in rows)
        assert not list((tmp_path / written).glob(".staged*"))


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    columns = documents([5, 6, 7, 8])
    for part in (1, 0):
        write_input(tmp_path / f"in{part}.jsonl", {name: rows[2 * part :][:2] for name, rows in columns.items()})
    (tmp_path / "notes.txt").write_text("not documents")
    assert find_files(tmp_path).lengths().tolist() == [5, 6, 7, 8]


def test_a_dry_run_writes_nothing_and_advises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = write_input(
        tmp_path / "in.jsonl", {"input_ids": [[1] * 60, [1] * 60, [1] * 40, [1] * 30], "text": ["x"] * 4}
    )
    assert (
        main(["pack", str(given), str(tmp_path / "out"), "--dry-run", "--capacity", "100", "--columns", "input_ids"])
        == 0
    )
    told = capsys.readouterr().out
    assert "left out    column text" in told
    assert "rows        2 rows of up to 100 tokens, 95.00 % full" in told
    assert "bound       no packing of these pieces has fewer than 2 rows: 0 over it" in told
    assert "advice      Take a capacity of " in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    assert main(["advise", str(given), "--columns", "input_ids", "--capacities", "50,100,200"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines() if "knee" in line] == ["100"]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("in.jsonl", "", "there are no documents in it"),
        ("in.jsonl", '{"input_ids": [1]}\n\n', "in.jsonl:2: the line is blank"),
        ("in.jsonl", '{"input_ids": [1]}\n{"input_ids": [1}\n', "in.jsonl:2: the line is no JSON"),
        ("in.jsonl", "[1, 2]\n", "in.jsonl:1: the line holds list, not an object"),
        ("in.jsonl", '{"input_ids": [1], "labels": [1]}\n{"input_ids": [1]}\n', "in.jsonl:2: the line has no 'labels'"),
        ("in.jsonl", '{"input_ids": [1]}\n{"input_ids": [1], "x": 1}\n', "in.jsonl:2: the line has column 'x'"),
        ("in.jsonl", '{"input_ids": [1]}\n{"input_ids": ["a"]}\n', "in.jsonl:2: 'input_ids' holds [\"a\"], while"),
        (
            "in.jsonl",
            '{"input_ids": [1, 2], "labels": [1]}\n',
            "document 0 has 2 values of 'input_ids' but 1 of 'labels'",
        ),
        ("in.jsonl", '{"text": "hello"}\n', "column 'text' holds text, not tokens; tokenize it first"),
        ("in.jsonl", '{"input_ids": []}\n', "nothing to pack: 1 document, none with a token"),
        ("in.parquet", "no such thing", "cannot be read as .parquet"),
        ("in.arrow", "no such thing", "is no Arrow file"),
        ("in.csv", "1,2", "files end in '.parquet', '.arrow', '.jsonl', '.jsonl.gz'"),
        ("in.jsonl.gz", "\x1f", "no JSON"),
    ],
)
def test_a_mistake_is_told_in_words_and_is_exit_status_2(
    name: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    for arguments in (["--capacity", "16", str(tmp_path / "out")], ["--capacity", "16", "out", "--dry-run"]):
        assert main(["pack", str(tmp_path / name), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert told in error
        assert "Traceback" not in error
    assert not list((tmp_path / "out").glob("part-*"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pack", "none.jsonl", "out", "--capacity", "8"], "none.jsonl: there is no such file or folder"),
        (["pack", "in.jsonl", "out"], "--capacity is missing"),
        (["pack", "in.jsonl", "--capacity", "8"], "required: OUT"),
        (["pack", "in.jsonl", "out", "--capacity", "0"], "must be a whole number of at least 1; got '0'"),
        (["pack", "in.jsonl", "out", "--capacity", "2"], "document 0 with 3 tokens; raise the capacity to 3 or more"),
        (["pack", "in.jsonl", "out", "--capacity", "8", "--columns", "tokens"], "there is no column 'tokens'"),
        (["pack", "in.jsonl", "out.csv", "--capacity", "8"], "ends in '.csv'; rows are written as"),
        (["pack", "in.jsonl", ".", "--capacity", "8"], "is there already and was not written by this command"),
        (["pack", "in.jsonl", "out", "--capacity", "8", "--stratgy", "bfd"], "unrecognized arguments: --stratgy"),
        (["advise", "in.jsonl", "--picture", "x.pdf"], "a picture is a .png or a .svg"),
        ([], "required: COMMAND"),
    ],
)
def test_arguments_that_cannot_be_are_told_with_the_remedy(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_input(tmp_path / "in.jsonl", {"input_ids": [[1, 2, 3], [4]]})
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("module", "extra"), [("matplotlib", "plot"), ("pyarrow", "offline")])
def test_a_missing_extra_is_named(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_input(tmp_path / "in.jsonl", {"input_ids": [[1, 2, 3], [4]]})
    for name in [name for name in sys.modules if name.startswith(("pack_torch.offline", module))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["advise", str(given), "--picture", str(tmp_path / "x.png")]) == 2
    assert f"this needs {module}; install it with: pip install 'pack-torch[{extra}]'" in capsys.readouterr().err


def test_the_command_runs_as_a_module(tmp_path: Path) -> None:
    given = write_input(tmp_path / "in.jsonl", {"input_ids": [[1, 2, 3], [4]]})
    told = command("pack", given, tmp_path / "rows", "--capacity", "4")
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    assert "1 row of up to 4 tokens, 100.00 % full" in told.stdout
    assert read(tmp_path / "rows")[0]["input_ids"] == [1, 2, 3, 4]


def test_a_folder_is_taken_up_only_by_the_same_write(tmp_path: Path) -> None:
    table = chunked(documents(LENGTHS), [100])
    packed = pack_dataset(table, 256)
    first = write_rows(packed, tmp_path / "rows", part_tokens=1024)
    kept = {path: path.read_bytes() for path in first.paths}
    assert first.found == 0
    first.paths[1].unlink()
    first.paths[3].write_bytes(first.paths[3].read_bytes()[:-20])  # as a machine that lost its power may leave it
    again = write_rows(packed, tmp_path / "rows", part_tokens=1024)
    assert again.found == len(kept) - 2
    assert {path: path.read_bytes() for path in again.paths} == kept
    others: list[tuple[Any, dict[str, Any], str]] = [
        (pack_dataset(table, 255), {}, "capacity was 256 and is now 255"),
        (pack_dataset(table, 256, "next_fit"), {}, "strategy was 'best_fit_decreasing' and is now 'next_fit'"),
        (pack_dataset(table, 256, columns=["labels"]), {}, "columns was"),
        (packed, {"part_tokens": 2048}, "part_tokens was 1024 and is now 2048"),
        (pack_dataset(chunked({n: r[::-1] for n, r in documents(LENGTHS).items()}, [100]), 256), {}, "documents was"),
    ]
    for other, changed, told in others:
        with pytest.raises(DatasetError, match=told):
            write_rows(other, tmp_path / "rows", **{"part_tokens": 1024} | changed)
    assert {path: path.read_bytes() for path in again.paths} == kept


def test_what_a_kill_left_while_staging_is_cleared_and_a_whole_copy_is_taken(tmp_path: Path) -> None:
    given = write_input(tmp_path / "in.jsonl", {"input_ids": [[1, 2, 3], [4]]})
    folder = tmp_path / "rows"
    find_files(given).stage(folder)
    (copy,) = folder.iterdir()
    before = copy.stat().st_mtime_ns
    find_files(given).stage(folder)
    assert copy.stat().st_mtime_ns == before
    copy.with_name(f"{copy.name}.1.partial").write_bytes(b"half")
    assert main(["pack", str(given), str(folder), "--capacity", "4"]) == 0
    assert sorted(os.listdir(folder)) == [".manifest.json", "part-00000-of-00001.parquet"]
    assert read(folder)[0]["input_ids"] == [1, 2, 3, 4]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_write_is_taken_up_and_ends_as_one_that_was_not(processes: int, tmp_path: Path) -> None:
    script, folder = tmp_path / "writer.py", tmp_path / "killed.jsonl.gz"
    script.write_text(WRITER)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, script, folder, str(processes)], env=os.environ | {"PYTHONPATH": paths})
    try:
        wait_for(lambda: len(list(folder.glob("part-*"))) >= 3)
        others = children(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not any(map(running, others)))
    packed = pack_dataset(chunked(documents(lognormal(6000)), range(0, 6000, 700)), 256)
    seen: list[tuple[int, int]] = []
    written = write_rows(packed, folder, part_tokens=2048, progress=lambda done, total: seen.append((done, total)))
    assert 3 <= written.found < len(written.paths), "killed in the middle"
    assert seen[0] == (8 * written.found, len(packed))
    assert seen[-1] == (len(packed), len(packed))
    whole = write_rows(packed, tmp_path / "whole.jsonl.gz", part_tokens=2048)
    assert [path.read_bytes() for path in written.paths] == [path.read_bytes() for path in whole.paths]
    assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "whole.jsonl.gz")), "nothing is left over"
    assert len(read(folder)) == len(packed)


def children(pid: int) -> list[int]:
    """Return the processes that write for another one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(entry.name))
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
