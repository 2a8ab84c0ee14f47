"""Ranks as Ray actors, on a real Ray of this machine: the same bits as other engines, and nothing left over."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import pytest
import torch
from pack_miles.errors import InputError
from pack_miles.settings.config import load_config
from pack_miles.training.rank import run_rank
from pack_miles.training.ray_ranks import run_actors
from support.miles_config import write_toml
from support.miles_ranks import alive, children
from support.miles_runs import LIMIT, TINY, command, environment, events, run, started, wait_for, weights

SHORT = TINY | {"miles.num_rollout": 2}
ON_RAY = SHORT | {"run.engine": "ray"}
LONG = ON_RAY | {"miles.num_rollout": 5000, "run.checkpoint_every": 1}

#: What Ray's raylet starts beside ranks.
AGENTS = re.compile("ray::(DashboardAgent|RuntimeEnvAgent)|/agent.py|runtime_env/agent/main.py")

#: What "within seconds" is held to, on a machine that may be busy.
SECONDS = 25.0


def actors_of(pid: int) -> list[int]:
    """Return the processes of the ranks: Ray calls a worker by the actor it runs."""
    return [child for child in children(pid) if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::Rank")]


def trained(folder: Path) -> bool:
    return bool(list((folder / "out" / "checkpoints").glob("collection_*[0-9]")))


def over(everyone: list[int]) -> None:
    wait_for(lambda: not any(alive(pid) for pid in everyone), "the end of every process", 10.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ray_torchrun_and_spawned_runs_give_the_same_bits(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("spawn", "ray", "torchrun")}
    for name, folder in files.items():
        folder.mkdir()
        write_toml(folder, ON_RAY if name == "ray" else SHORT)
    told = run("train", str(files["ray"] / "run.toml"))
    assert told.returncode == 0, told.stderr
    assert told.stderr == ""
    assert run("train", str(files["spawn"] / "run.toml")).returncode == 0
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *meeting),
            *("-m", "pack_miles", "train", str(files["torchrun"] / "run.toml")),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    found = {name: weights(folder / "out") for name, folder in files.items()}
    assert [len(ranks) for ranks in found.values()] == [2, 2, 2]
    for name in ("ray", "torchrun"):
        for one, other in zip(found[name], found["spawn"], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[parameter], other[parameter]) for parameter in one)
    digests = {events(folder / "out", 0, "run_started")[0]["configuration_digest"] for folder in files.values()}
    assert len(digests) == 1
    assert not (files["spawn"] / "out" / "wandb").exists(), "off unless it is asked for"
    audited = run("audit", str(files["ray"] / "out"))
    assert audited.returncode == 0, audited.stdout


@contextmanager
def two_nodes() -> Iterator[str]:
    """Two nodes of one Ray on this machine, room for two ranks on each; yields the address."""
    import ray

    store = 100 * 2**20
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=store,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        address = ray.get_runtime_context().gcs_address
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", address, "--num-cpus", "2"]
        line += ["--node-ip-address", "127.0.0.1", "--object-store-memory", str(store), "--block"]
        with started([*line, "--disable-usage-stats"]) as node:
            wait_for(lambda: len([one for one in ray.nodes() if one["Alive"]]) == 2, "the second node")
            everyone = children(node.pid)
            try:
                yield address
            finally:
                for pid in everyone:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    finally:
        ray.shutdown()


def test_ranks_on_two_nodes_of_a_cluster_and_under_two_launchers_give_the_bits_of_one_node(tmp_path: Path) -> None:
    """Four ranks, and room for two on either node, so that both are used; rank 0 says where all of them meet."""
    folders = {name: tmp_path / name for name in ("spawn", "ray", "torchrun")}
    for name, folder in folders.items():
        folder.mkdir()
        write_toml(folder, (ON_RAY if name == "ray" else SHORT) | {"run.ranks": 4, "miles.num_rollout": 1})
    with two_nodes() as address:
        told = run("train", str(folders["ray"] / "run.toml"), RAY_ADDRESS=address)
    assert told.returncode == 0, told.stderr
    assert run("train", str(folders["spawn"] / "run.toml")).returncode == 0
    meeting = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port"]
    agent = [sys.executable, "-m", "torch.distributed.run", *meeting, str(free_port()), "--node-rank"]
    train = ["-m", "pack_miles", "train", str(folders["torchrun"] / "run.toml")]
    with started([*agent, "0", *train]) as first, started([*agent, "1", *train]) as second:
        for one in (first, second):
            _, words = one.communicate(timeout=LIMIT)
            assert one.returncode == 0, words
    found = {name: weights(folder / "out") for name, folder in folders.items()}
    assert [len(ranks) for ranks in found.values()] == [4, 4, 4]
    for name in ("ray", "torchrun"):
        for one, other in zip(found[name], found["spawn"], strict=True):
            assert all(torch.equal(one[parameter], other[parameter]) for parameter in other)


def test_a_killed_actor_ends_the_run_and_a_resume_tells_a_torn_checkpoint(tmp_path: Path) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG)))) as process:
        wait_for(lambda: trained(tmp_path), "the first checkpoint")
        everyone = children(process.pid)
        os.kill(actors_of(process.pid)[1], signal.SIGKILL)
        begin = time.monotonic()
        _, told = process.communicate(timeout=SECONDS)
        assert time.monotonic() - begin < SECONDS
        assert process.returncode == 1
        (other, lost) = re.findall(r"rank (\d)(?:: lost another rank| died: .*exit type: SYSTEM_ERROR)", told)
        assert {other, lost} == {"0", "1"}, told
        assert "the run is over and no rank is left; the newest checkpoint is" in told
        assert "Traceback" not in told
        over(everyone)
    newest = sorted((tmp_path / "out" / "checkpoints").glob("collection_*[0-9]"))[-1]
    torn = newest / "rank1.pt"
    torn.write_bytes(torn.read_bytes()[:100])
    again = run("train", str(tmp_path / "run.toml"), "--run.resume", "true")
    assert again.returncode == 1
    assert again.stderr.count(f"{torn} cannot be read") == 1, "what all ranks say alike is told once"
    assert "error: rank 0 stopped with exit status 1" in again.stderr


def test_an_actor_that_stands_still_ends_the_run_when_its_time_is_over(tmp_path: Path) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG | {"run.timeout_seconds": 6.0})))) as process:
        wait_for(lambda: trained(tmp_path), "the first checkpoint")
        everyone = children(process.pid)
        os.kill(actors_of(process.pid)[1], signal.SIGSTOP)
        _, told = process.communicate(timeout=6.0 + SECONDS)
        assert process.returncode == 1
        assert "did not answer within run.timeout_seconds = 6" in told
        over(everyone)


def test_ctrl_c_ends_all_actors_and_ray(tmp_path: Path) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG)))) as process:
        wait_for(lambda: trained(tmp_path), "the first checkpoint")
        everyone = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, told = process.communicate(timeout=SECONDS)
        assert process.returncode == 130
        assert told.startswith("stopped by SIGINT; all ranks are stopped; the newest checkpoint is")
        assert "Traceback" not in told
        over(everyone)


def test_a_run_can_be_stopped_while_ray_starts(tmp_path: Path) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG)))) as process:
        everyone = wait_for(lambda: children(process.pid), "the start of Ray")
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=SECONDS)
        assert process.returncode == 143
        assert told == "stopped by SIGTERM; all ranks are stopped\n"
        over(everyone)


def test_ranks_and_their_ray_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    with started(command("train", str(write_toml(tmp_path, LONG)))) as process:
        wait_for(lambda: len(actors_of(process.pid)) == 2, "the start of the ranks")
        # Ray's two agents notice the end of their raylet by themselves, within a minute; they are in this session.
        own = [pid for pid in children(process.pid) if not AGENTS.search(Path(f"/proc/{pid}/cmdline").read_text())]
        assert len(own) >= 4
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in own), "the end of every process", SECONDS)


def test_a_cluster_without_room_is_told_what_is_missing(tmp_path: Path) -> None:
    import ray

    config = load_config(write_toml(tmp_path, ON_RAY | {"run.timeout_seconds": 1.0, "run.ranks": 4}))
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        with pytest.raises(InputError, match=r"no room for run.ranks = 4 actors of 1 CPU .* has 1 CPU in all"):
            run_actors(run_rank, config, False, 5.0, Event())
        assert ray.is_initialized(), "a cluster that was there before is not this run's to end"
    finally:
        ray.shutdown()
