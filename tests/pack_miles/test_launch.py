"""Ranks that die, runs that are interrupted and resumed, and launchers: nobody hangs and nothing is left over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.miles_config import write_toml
from support.miles_ranks import alive, children
from support.miles_runs import LIMIT, TINY, command, environment, events, moments, run, started, wait_for, weights

#: A run long enough to be interrupted, and one that ends by itself.
LONG = TINY | {"miles.num_rollout": 5000, "run.checkpoint_every": 2}
SHORT = TINY | {"miles.num_rollout": 6, "run.checkpoint_every": 2}

#: What "within seconds" is held to, on a machine that may be busy.
SECONDS = 15.0


def ranks_of(pid: int, count: int) -> list[int]:
    """Return the processes of the ranks, once all of them are up."""
    return wait_for(lambda: (found := children(pid)) and len(found) >= count and found, "the start of the ranks")


def checkpoints(folder: Path, count: int) -> bool:
    return len(list((folder / "out" / "checkpoints").glob("collection_*[0-9]"))) >= count


def rank_processes(pid: int) -> list[int]:
    """Return the spawned ranks among the descendants: those that run multiprocessing's own entry."""
    found = []
    for child in children(pid):
        line = Path(f"/proc/{child}/cmdline").read_bytes().decode()
        if "spawn_main" in line:
            found.append(child)
    return found


def test_a_killed_rank_ends_the_run_and_a_resume_gives_the_same_weights(tmp_path: Path) -> None:
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    interrupted.mkdir()
    whole.mkdir()
    with started(command("train", str(write_toml(interrupted, LONG)))) as process:
        wait_for(lambda: checkpoints(interrupted, 2), "the second checkpoint")
        everyone = children(process.pid)
        victim = rank_processes(process.pid)[1]
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        _, told = process.communicate(timeout=SECONDS)
        assert time.monotonic() - begin < SECONDS
        assert process.returncode == 1
        assert "killed by SIGKILL" in told
        assert "rank 0: lost another rank" in told
        assert "pair.cc" not in told
        assert "--run.resume true" in told
        # Python's own resource tracker ends a moment after the process it served.
        wait_for(lambda: not any(alive(pid) for pid in everyone), "the end of every process", 5.0)
    # A line torn by the kill must not harm what is appended after it.
    log = interrupted / "out" / "training_contract_rank1.jsonl"
    with log.open("a") as file:
        file.write('{"event":"packing","fill_fra')
    done = events_count(interrupted)
    resumed = run("train", str(interrupted / "run.toml"), "--run.resume", "true", "--miles.num_rollout", str(done))
    assert resumed.returncode == 0, resumed.stderr
    assert run("train", str(write_toml(whole, LONG)), "--miles.num_rollout", str(done)).returncode == 0
    for one, other in zip(weights(interrupted / "out"), weights(whole / "out"), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    for one, other in zip(moments(interrupted / "out"), moments(whole / "out"), strict=True):
        assert all(torch.equal(one[place][name], other[place][name]) for place in one for name in one[place])
    audited = run("audit", str(interrupted / "out"))
    assert audited.returncode == 0, audited.stdout
    assert "training_contract_rank1.jsonl" in audited.stdout + audited.stderr, "the torn line is reported"


def events_count(folder: Path) -> int:
    """Return a number of collections beyond the newest checkpoint, so that the resumed run has work to do."""
    newest = sorted((folder / "out" / "checkpoints").glob("collection_*[0-9]"))[-1]
    return int(newest.name.split("_")[1]) + 2


def test_ranks_started_apart_fail_by_themselves_when_one_is_killed(tmp_path: Path) -> None:
    file = str(write_toml(tmp_path, LONG))
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        started(command("train", file), RANK="0", **meeting) as first,
        started(command("train", file), RANK="1", **meeting) as second,
    ):
        wait_for(lambda: checkpoints(tmp_path, 1), "the first checkpoint")
        second.kill()
        _, told = first.communicate(timeout=SECONDS)
        assert first.returncode == 1
        assert "rank 0: lost another rank" in told
    assert events(tmp_path / "out", 0)[-1]["event"] == "run_failed"


def test_ranks_of_different_runs_all_say_so_and_end(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    file = str(write_toml(tmp_path, LONG))
    other = ["--miles.lr", "0.5", "--core.expert_parallel_size", "1", "--miles.num_rollout", "7"]
    with (
        started(command("train", file), RANK="0", **meeting) as first,
        started(command("train", file, *other), RANK="1", **meeting) as second,
    ):
        _, told = first.communicate(timeout=LIMIT)
        second.communicate(timeout=LIMIT)
        assert (first.returncode, second.returncode) == (1, 1)
    assert "configuration differs between ranks: rank 0 has" in told
    assert "miles.num_rollout differs between ranks: rank 0 has 5000, rank 1 has 7" in told
    assert "run.resume" not in told.replace("--run.resume", "")
    failures = [events(tmp_path / "out", rank, "run_failed")[0]["error"] for rank in range(2)]
    assert failures[0] == failures[1]


def test_a_rank_that_stands_still_ends_the_run_when_its_time_is_over(tmp_path: Path) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG | {"run.timeout_seconds": 4.0})))) as process:
        wait_for(lambda: checkpoints(tmp_path, 1), "the first checkpoint")
        everyone = children(process.pid)
        os.kill(rank_processes(process.pid)[1], signal.SIGSTOP)
        process.communicate(timeout=4.0 + SECONDS)
        assert process.returncode == 1
        wait_for(lambda: not any(alive(pid) for pid in everyone), "the end of every process", 5.0)


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG)))) as process:
        wait_for(lambda: checkpoints(tmp_path, 1), "the first checkpoint")
        ranks = rank_processes(process.pid)
        assert len(ranks) == 2
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(rank) for rank in ranks), "the end of the ranks", SECONDS)


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG)))) as process:
        wait_for(lambda: checkpoints(tmp_path, 1), "the first checkpoint")
        everyone = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, told = process.communicate(timeout=SECONDS)
        assert process.returncode == 130
        assert "stopped by SIGINT; all ranks are stopped; the newest checkpoint is" in told
        assert "Traceback" not in told
        wait_for(lambda: not any(alive(pid) for pid in everyone), "the end of every process", 5.0)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_can_be_stopped_while_its_ranks_start(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG)))) as process:
        wait_for(lambda: len(rank_processes(process.pid)) == 2, "the start of the ranks")
        everyone = children(process.pid)
        os.kill(process.pid, number)
        _, told = process.communicate(timeout=SECONDS)
        assert process.returncode == status
        assert told == f"stopped by {number.name}; all ranks are stopped\n"
        wait_for(lambda: not any(alive(pid) for pid in everyone), "the end of every process", 5.0)


def test_a_damaged_checkpoint_is_named_with_its_remedy_and_no_loop(tmp_path: Path) -> None:
    file = str(write_toml(tmp_path, SHORT | {"miles.num_rollout": 4}))
    assert run("train", file).returncode == 0
    nothing = run("train", file, "--run.resume", "true")
    assert nothing.returncode == 0
    assert "nothing to do" in nothing.stdout
    newest = tmp_path / "out" / "checkpoints" / "collection_000004"
    torn = newest / "rank1.pt"
    torn.write_bytes(torn.read_bytes()[:100])
    told = run("train", file, "--run.resume", "true", "--miles.num_rollout", "6")
    assert told.returncode == 1
    assert f"{torn} cannot be read" in told.stderr
    assert f"remove {newest} and resume from the one before" in told.stderr
    assert "go on with" not in told.stderr
    for part in newest.iterdir():
        part.unlink()
    newest.rmdir()
    again = run("train", file, "--run.resume", "true", "--miles.num_rollout", "6")
    assert again.returncode == 0, again.stderr
    assert "pack-miles report" in again.stdout


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    told = run("train", str(write_toml(tmp_path, SHORT)), "--output.root", "/proc/nope")
    assert told.returncode != 0
    assert "/proc/nope" in told.stderr
    assert "Traceback" not in told.stderr


def test_torchrun_and_spawn_give_the_same_bits(tmp_path: Path) -> None:
    for name in ("spawned", "launched"):
        (tmp_path / name).mkdir()
        write_toml(tmp_path / name, SHORT)
    assert run("train", str(tmp_path / "spawned" / "run.toml")).returncode == 0
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"),
            *("--master-port", str(free_port()), "-m", "pack_miles", "train"),
            str(tmp_path / "launched" / "run.toml"),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    for one, other in zip(weights(tmp_path / "spawned" / "out"), weights(tmp_path / "launched" / "out"), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run.ranks": 4, "core.expert_parallel_size": 4}, "ranks"),
        ({"miles.lr": 2e-3}, "configuration"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_toml(tmp_path, SHORT | {"miles.num_rollout": 1})
    file = str(tmp_path / "run.toml")
    assert run("train", file).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "checkpoints").rglob("*")}
    write_toml(tmp_path, SHORT | changes)
    told = run("train", file, "--run.resume", "true")
    assert told.returncode == 2
    assert words in told.stderr
    assert "Traceback" not in told.stderr
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "checkpoints").rglob("*")}
    assert before == after


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
