"""`pack-miles train` on real OLMo-core models: dense on two ranks, and latent experts spread over two, replayed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.miles_ranks import alive, children
from support.miles_runs import events, started, wait_for, weights
from support.olmo_cases import dense_config
from support.olmo_experts import expert_config
from support.olmo_runs import (
    ALONE,
    APART,
    WITH_LEAVES,
    assert_same_bits,
    assert_same_run,
    pack_miles,
    train,
    with_tests,
    write_run,
)

#: Experts on two ranks, recorded choices replayed, recomputation on, a z-loss, and a KL penalty off the advantages.
EXPERTS: dict[str, Any] = {
    "core__expert_parallel_size": 2,
    "core__activation_checkpointing": True,
    "miles__use_rollout_routing_replay": True,
    "miles__kl_coef": 0.05,
}

#: What "within seconds" is held to, on a machine that may be busy.
SECONDS = 15.0


def changes(options: dict[str, Any]) -> dict[str, Any]:
    return {place.replace(".", "__"): value for place, value in options.items()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished packed run of a dense model on two ranks."""
    return train(tmp_path_factory.mktemp("dense") / "run", dense_config(), run__checkpoint_every=1)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished packed run of delta attention, full attention and latent experts on two ranks that share them."""
    folder = tmp_path_factory.mktemp("experts") / "run"
    return train(folder, expert_config(z_loss_weight=0.1), leaves=True, run__checkpoint_every=1, **EXPERTS)


def test_a_dense_run_passes_its_audit_and_scores_as_it_trains(dense: Path) -> None:
    audited = pack_miles("audit", str(dense))
    assert audited.returncode == 0, audited.stdout + audited.stderr
    updates = events(dense, 0, "optimizer")
    assert [update["step"] for update in updates] == [1, 2, 3, 4]
    assert {update["scoring_pass"] for update in updates} == {"standalone"}
    assert max(update["local_microbatches"] for update in updates) > 1
    assert events(dense, 0, "run_started")[0]["versions"]["ai2-olmo-core"] == "3.0.0"
    (check,) = events(dense, 0, "scoring_check")
    assert check["step"] == 0
    assert check["max_abs"] == 0.0
    assert max(score["max_abs"] for score in events(dense, 0, "scores")) < 1e-6, "sampling and scoring agree"
    passes = {
        kind: [(e["step"], e["model_tokens"], e["samples"]) for e in events(dense, 0, "packing") if e["pass"] == kind]
        for kind in ("scoring", "training")
    }
    assert passes["scoring"] == passes["training"]


def test_a_dense_run_learns_what_one_rank_learns_from_one_sample_a_row(dense: Path, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", dense_config(), **changes(ALONE))
    assert_same_run(dense, alone)
    moved = weights(dense)[0]["core.blocks.0.attention.w_q.weight"]
    first = torch.load(dense / "checkpoints" / "collection_000001" / "rank0.pt", weights_only=True)["model"]
    assert float((moved - first["core.blocks.0.attention.w_q.weight"]).abs().max()) > 1e-4, "and it learns at all"


def test_an_interrupted_dense_run_goes_on_to_the_same_bits_and_checks_anew(dense: Path, tmp_path: Path) -> None:
    once = {"miles__num_rollout": 1}
    first = train(tmp_path / "first", dense_config(), run__checkpoint_every=1, **once)
    file = str(tmp_path / "first" / "run.toml")
    resumed = pack_miles("train", file, "--run.resume", "true", "--miles.num_rollout", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_bits(first, dense)
    assert [check["step"] for check in events(first, 0, "scoring_check")] == [0, 2]
    assert pack_miles("audit", str(first)).returncode == 0


def test_a_run_does_not_go_on_with_another_model_file(tmp_path: Path) -> None:
    one_rank = {"run__ranks": 1, "miles__num_rollout": 1}
    train(tmp_path / "run", dense_config(), **one_rank)
    write_run(tmp_path / "run", dense_config(qk_norm=False), **one_rank)
    file = str(tmp_path / "run" / "run.toml")
    told = pack_miles("train", file, "--run.resume", "true", "--miles.num_rollout", "2")
    assert told.returncode == 1
    assert "model.json' is not the file that" in told.stderr
    assert [event["step"] for event in events(tmp_path / "run" / "out", 0, "optimizer")] == [1, 2]


def test_a_killed_rank_of_a_replica_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    file = write_run(tmp_path / "run", expert_config(), miles__num_rollout=5000, **EXPERTS)
    with started([*WITH_LEAVES, "train", str(file)], **with_tests()) as process:
        log = tmp_path / "run" / "out" / "training_contract_rank1.jsonl"
        wait_for(lambda: log.exists() and '"event":"optimizer"' in log.read_text(), "the first update")
        everyone = children(process.pid)
        ranks = [pid for pid in everyone if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes().decode()]
        assert len(ranks) == 2
        begin = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        _, told = process.communicate(timeout=SECONDS)
        assert time.monotonic() - begin < SECONDS
        assert process.returncode == 1
        assert "rank 1 was killed by SIGKILL" in told
        wait_for(lambda: not any(alive(pid) for pid in everyone), "the end of every process", 5.0)


def test_experts_on_two_ranks_pass_the_audit_with_routes_replayed(experts: Path) -> None:
    audited = pack_miles("audit", str(experts))
    assert audited.returncode == 0, audited.stdout + audited.stderr
    for rank in range(2):
        assert [event["step"] for event in events(experts, rank, "optimizer")] == [1, 2, 3, 4]
    assert max(score["max_abs"] for score in events(experts, 0, "scores")) < 1e-6, "replayed as they were sampled"
    ranks = weights(experts)
    own = [name for name in ranks[0] if ".routed_experts." in name]
    assert len(own) == 4
    for name in ranks[0]:
        assert torch.equal(ranks[0][name], ranks[1][name]) == (name not in own), name


def test_experts_on_two_ranks_learn_what_one_rank_learns_from_one_sample_a_row(experts: Path, tmp_path: Path) -> None:
    # The z-loss is a sum over tokens: alike only if every forward divides it by the step's tokens, not by its own.
    alone = EXPERTS | {"core__activation_checkpointing": False} | changes(ALONE)
    assert_same_run(experts, train(tmp_path / "alone", expert_config(z_loss_weight=0.1), leaves=True, **alone))
    norms = [event["gradient_norm"] for event in events(experts, 0, "optimizer")]
    others = [event["gradient_norm"] for event in events(tmp_path / "alone" / "out", 0, "optimizer")]
    assert norms == pytest.approx(others, rel=1e-6)


def test_an_interrupted_run_of_shared_experts_goes_on_to_the_same_bits(experts: Path, tmp_path: Path) -> None:
    options = EXPERTS | {"run__checkpoint_every": 1, "miles__num_rollout": 1}
    first = train(tmp_path / "first", expert_config(z_loss_weight=0.1), leaves=True, **options)
    more = ("--run.resume", "true", "--miles.num_rollout", "2")
    resumed = pack_miles("train", str(tmp_path / "first" / "run.toml"), *more, leaves=True)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_bits(first, experts)


def test_routers_execute_the_loads_that_a_balanced_plan_counted(tmp_path: Path) -> None:
    balanced = {"run__ranks": 4, "core__expert_balanced_packing": True, "core__expert_balance_search_seconds": 30.0}
    root = train(tmp_path / "run", expert_config(), leaves=True, **EXPERTS | {"miles__kl_coef": 0.0} | balanced)
    told = events(root, 0, "expert_balance")
    assert [event["step"] for event in told] == [1, 2, 3, 4]
    for event in told:
        assert event["layers"] == [1, 2], "the layers that route, by the model's own file"
        assert event["mismatched_layers"] == []
    audited = pack_miles("audit", str(root))
    assert audited.returncode == 0, audited.stdout + audited.stderr


def test_one_step_a_collection_is_checked_then_skipped_then_checked_as_the_interval_says(tmp_path: Path) -> None:
    once = {"miles__global_batch_size": 16, "miles__num_rollout": 3, "core__scoring_check_interval": 2}
    root = train(tmp_path / "run", dense_config(), run__ranks=1, **changes(APART) | once)
    updates = events(root, 0, "optimizer")
    assert [update["scoring_pass"] for update in updates] == ["checked", "skipped", "checked"]
    assert {update["local_microbatches"] for update in updates} == {16}, "one sample a row"
    assert [check["step"] for check in events(root, 0, "scoring_check")] == [0, 2]
    assert max(check["max_abs"] for check in events(root, 0, "scoring_check")) < 1e-6
