"""Writes that fail: told in one message, and leaving nothing behind that the next attempt does not want."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_core import PackError
from pack_torch.cli import main
from pack_torch.offline import DatasetError, find_files, pack_dataset, write_rows

TABLE = pa.table({"input_ids": [[1, 2, 3], [4]]})


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command where no file may grow past 4 KiB, as if a disk were full."""
    limited = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", sys.executable, "-m", "pack_torch", *arguments]
    return subprocess.run(limited, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("given", "out", "processes"),
    [("in.arrow", "out.arrow", "1"), ("in.arrow", "out.jsonl", "2"), ("in.parquet", "out", "1")],
)
def test_a_full_disk_is_one_message_and_leaves_no_half_file(
    given: str, out: str, processes: str, tmp_path: Path
) -> None:
    table = pa.table({"input_ids": [list(range(n, n + 200)) for n in range(500)]})
    pq.write_table(table, tmp_path / "in.parquet")
    with pa.ipc.new_file(str(tmp_path / "in.arrow"), table.schema) as writer:
        writer.write_table(table)
    told = run(tmp_path, "pack", given, out, "--capacity", "400", "--processes", processes)
    assert told.returncode == 2
    assert told.stdout == ""
    (line,) = told.stderr.splitlines()
    assert line.startswith(f"error: {out}/")
    assert "File too large" in line
    assert line.endswith("; mend that, and give the same command again")
    assert sorted(tmp_path.glob(f"{out}/.*")) == sorted(tmp_path.glob(f"{out}/.manifest.json"))
    assert not list(tmp_path.glob(f"{out}/part-*"))
    assert main(["pack", str(tmp_path / given), str(tmp_path / out), "--capacity", "400"]) == 0


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    (tmp_path / "file").touch()
    assert main(["pack", str(tmp_path / "in.parquet"), str(tmp_path / "file" / "out"), "--capacity", "4"]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/file/out: Not a directory; mend that, and give the same command again\n"
    )


@pytest.mark.parametrize("processes", [0, -1, 2.5, "2", None])
def test_writing_takes_a_process_or_more(processes: Any, tmp_path: Path) -> None:
    with pytest.raises(PackError, match=f"processes is {processes!r}.*; it must be .*at least 1"):
        write_rows(pack_dataset(TABLE, 4), tmp_path / "rows", processes=processes)
    assert not list(tmp_path.iterdir())


def test_files_hold_a_token_or_more(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="part_tokens is 0; it must be at least 1"):
        write_rows(pack_dataset(TABLE, 4), tmp_path / "rows", part_tokens=0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategy", "best"], "strategy is 'best'; it must be one of"),
        (["--overlong", "cut"], "overlong is 'cut'; it must be one of"),
        (["--align", "9"], "align is 9 but capacity is 8"),
        (["--add", "cu_seqlens"], "add names 'cu_seqlens'; it may name 'seq_lengths'"),
        (["--picture", "x.pdf"], "x.pdf ends in '.pdf'; a picture is a .png or a .svg"),
        (["--picture", "none/x.png"], "none/x.png: the picture cannot be written: there is no folder none"),
    ],
)
def test_options_are_checked_before_any_document_is_read(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "no such documents", "out", "--capacity", "8", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_an_error_leaves_no_copy_of_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    arguments = ["pack", str(tmp_path / "in.parquet"), str(tmp_path / "out"), "--capacity"]
    assert main([*arguments, "2"]) == 2
    assert "document 0 with 3 tokens" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]
    (tmp_path / "out").mkdir()  # one that was there stays
    assert main([*arguments, "2"]) == 2
    assert list((tmp_path / "out").iterdir()) == []
    assert main([*arguments, "4"]) == 0
    assert sorted(os.listdir(tmp_path / "out")) == [".manifest.json", "part-00000-of-00001.parquet"]


def test_an_error_removes_no_documents_that_are_mapped_in_place(tmp_path: Path) -> None:
    with pa.ipc.new_file(str(tmp_path / "in.arrow"), TABLE.schema) as writer:
        writer.write_table(TABLE)
    assert main(["pack", str(tmp_path / "in.arrow"), str(tmp_path / "out"), "--capacity", "2"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in.arrow"]


def test_what_killed_processes_left_half_written_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    (folder := tmp_path / "out").mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    here = platform.node().replace(".", "-")
    kept = (f"{os.getppid()}-{here}", f"{ended.pid}-elsewhere")
    for process in (f"{ended.pid}-{here}", *kept):
        for name in ("staged-x.arrow", "part-00000-of-00001.parquet"):
            (folder / f".{name}.{process}.partial").write_bytes(b"half")
    find_files(tmp_path / "in.parquet").stage(folder)
    (staged,) = folder.glob(".staged-*.arrow")
    left = [f".{name}.{one}.partial" for name in ("part-00000-of-00001.parquet", "staged-x.arrow") for one in kept]
    assert sorted(os.listdir(folder)) == sorted([*left, staged.name])


@pytest.mark.parametrize("text", ['{"a":', "", "[1]", "\udcff"])
def test_a_damaged_manifest_is_told_with_the_remedy(text: str, tmp_path: Path) -> None:
    packed = pack_dataset(TABLE, 4)
    write_rows(packed, tmp_path / "rows")
    (tmp_path / "rows" / ".manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(
        DatasetError, match=r"rows/.manifest.json is damaged, .*; delete the folder, or give another one"
    ):
        write_rows(packed, tmp_path / "rows")


def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    text = """
import pyarrow as pa
from pack_torch.offline import pack_dataset, write_rows
write_rows(pack_dataset(pa.table({"input_ids": [[1, 2, 3]]}), 4), "rows", processes=2)
"""
    (tmp_path / "script.py").write_text(text)
    told = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert told.returncode == 1
    assert told.stderr.rstrip().endswith('in a script it must stand under if __name__ == "__main__":')
