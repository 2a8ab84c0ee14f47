"""Runs from end to end: what is written, what it proves, and that packing changes nothing but the rows."""

import json
from pathlib import Path
from typing import Any

import pack_core
import pytest
import torch
from support.miles_config import write_toml
from support.miles_runs import TINY, events, moments, run, weights


def train(folder: Path, **changes: Any) -> Path:
    """Train to the end and return the run's folder."""
    folder.mkdir(exist_ok=True)
    changed = {place.replace("__", "."): value for place, value in changes.items()}
    told = run("train", str(write_toml(folder, TINY | changed)), "--debug")
    assert told.returncode == 0, told.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four ranks, expert parallel degree 2, with its collections saved."""
    return train(
        tmp_path_factory.mktemp("four"),
        run__ranks=4,
        run__save_rollouts=True,
        core__activation_checkpointing=True,
        miles__rollout_batch_size=8,
        miles__global_batch_size=16,
    )


def test_a_run_of_four_ranks_passes_its_own_audit(four_ranks: Path) -> None:
    audited = run("audit", str(four_ranks))
    assert audited.returncode == 0, audited.stdout + audited.stderr
    for rank in range(4):
        told = events(four_ranks, rank)
        assert told[0]["event"] == "run_started"
        assert told[-1]["event"] == "run_finished"
        assert [event["step"] for event in told if event["event"] == "optimizer"] == [1, 2, 3, 4, 5, 6]


def test_several_packs_are_one_update(four_ranks: Path) -> None:
    updates = events(four_ranks, 0, "optimizer")
    assert max(update["local_microbatches"] for update in updates) > 1
    # Adam counts its own steps: one per update, whatever the number of packs.
    for state in moments(four_ranks):
        assert {int(moment["step"]) for moment in state.values()} == {len(updates)}


def test_dense_weights_are_alike_on_all_ranks_and_experts_on_twins(four_ranks: Path) -> None:
    ranks = weights(four_ranks)
    experts = [name for name in ranks[0] if "experts" in name]
    assert experts
    for name in ranks[0]:
        for rank, twin in ((1, 0), (2, 0), (3, 1)):
            alike = torch.equal(ranks[rank][name], ranks[twin][name])
            assert alike or (name in experts and rank == 1), f"{name} differs between ranks {twin} and {rank}"
    assert any(not torch.equal(ranks[0][name], ranks[1][name]) for name in experts)


def test_scoring_and_training_run_over_the_very_same_packs(four_ranks: Path) -> None:
    for rank in range(4):
        passes: dict[str, list[Any]] = {"scoring": [], "training": []}
        for event in events(four_ranks, rank, "packing"):
            kept = {key: value for key, value in event.items() if key != "pass"}
            passes[event["pass"]].append(kept)
        assert passes["scoring"] == passes["training"]
        assert len(passes["training"]) == 6


def test_the_first_update_is_checked_and_agrees(four_ranks: Path) -> None:
    (check,) = events(four_ranks, 0, "scoring_check")
    assert check["step"] == 0
    assert check["active_tokens"] == events(four_ranks, 0, "optimizer")[0]["normalization"]["active_tokens"]
    assert check["max_abs"] == 0.0
    scores = events(four_ranks, 0, "scores")
    assert max(score["max_abs"] for score in scores) < 1e-4, "replayed, the trainer gives what the rollout saw"


def test_a_plan_event_and_the_saved_rollouts_give_the_same_plan_again(four_ranks: Path) -> None:
    for event in events(four_ranks, 0, "plan"):
        record = event["record"]
        file = four_ranks / "rollouts" / f"{event['rollout_id']:06d}.jsonl.gz"
        samples = pack_core.samples_of(record)
        plan = pack_core.rebuild(record, samples)
        assert pack_core.verify(plan, samples) == []
        told = run("plan", str(four_ranks.parent / "run.toml"), "--rollouts", str(file), "--json")
        assert told.returncode == 0, told.stderr
        assert record["digest"] in json.dumps(json.loads(told.stdout))


def test_the_report_is_one_page_without_network(four_ranks: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    told = run("report", str(four_ranks), "--html", str(page))
    assert told.returncode == 0, told.stderr
    text = page.read_text()
    assert text.count("<svg") >= 5
    assert "src=" not in text
    assert "<script" not in text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed run in float64 on one rank, the yardstick of the comparisons below."""
    return train(tmp_path_factory.mktemp("whole"), **ALONE)


ALONE = {"run__ranks": 1, "core__expert_parallel_size": 1, "model__dtype": "float64", "miles__num_rollout": 2}


def assert_same_run(first: Path, second: Path) -> None:
    """Compare two runs of other rows or ranks: rewards exactly, whole weights to 1e-9 · max(1, |x|)."""
    for name in ("reward_mean", "response_tokens"):
        assert [e[name] for e in events(first, 0, "rollout")] == [e[name] for e in events(second, 0, "rollout")]
    for name, one in joined(first).items():
        other = joined(second)[name]
        assert one.dtype == torch.float64
        assert float(((one - other).abs() / one.abs().clamp(min=1)).max()) <= 1e-9, name


def joined(root: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights of a run, experts of the first replica's ranks one after another."""
    ranks = weights(root)
    replica = ranks[: events(root, 0, "run_started")[0]["expert_parallel_size"]]
    return {
        name: torch.cat([rank[name] for rank in replica]) if "experts" in name else value
        for name, value in ranks[0].items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"core__sequence_packing": False, "core__packing_max_tokens": None},
        {"core__activation_checkpointing": True, "core__packing_equalize": "balanced"},
        {"core__packing_max_tokens": 32},
        {"core__sequence_packing": False, "core__packing_max_tokens": None, "core__attention_backend": "torch"},
    ],
    ids=["one sample a row", "recompute", "smaller packs", "one sample a row, torch attention"],
)
def test_rows_do_not_change_what_is_learnt(whole: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    other = train(tmp_path, **ALONE | changes)
    assert_same_run(whole, other)
    packs = [sum(e["local_microbatches"] for e in events(root, 0, "optimizer")) for root in (whole, other)]
    assert packs[0] < packs[1] or changes.get("core__activation_checkpointing")


@pytest.mark.parametrize(
    "changes",
    [
        {"run__ranks": 4, "core__expert_parallel_size": 2, "core__activation_checkpointing": True},
        {
            "run__ranks": 2,
            "core__expert_parallel_size": 2,
            "core__sequence_packing": False,
            "core__packing_max_tokens": None,
        },
    ],
    ids=["four ranks, degree 2, recompute", "two ranks, degree 2, one sample a row"],
)
def test_ranks_do_not_change_what_is_learnt(whole: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    # Every sample draws from a seed of its own, so other ranks sample, pack and train the very same collection.
    assert_same_run(whole, train(tmp_path, **ALONE | changes))


def test_response_reduction_and_kl_in_the_advantages_do_not_depend_on_rows_either(tmp_path: Path) -> None:
    more = ALONE | {"miles__calculate_per_token_loss": False, "miles__kl_coef": 0.05}
    packed = train(tmp_path / "packed", **more)
    apart = train(tmp_path / "apart", **more | {"core__sequence_packing": False, "core__packing_max_tokens": None})
    assert_same_run(packed, apart)
    assert {e["reduction"] for e in events(packed, 0, "optimizer")} == {"response"}


def test_one_step_a_collection_is_checked_then_skipped_then_checked_after_a_resume(tmp_path: Path) -> None:
    once = {"miles__global_batch_size": 16, "core__max_policy_lag": 0, "run__checkpoint_every": 1}
    root = train(tmp_path, **ALONE | once)
    assert [e["scoring_pass"] for e in events(root, 0, "optimizer")] == ["checked", "skipped"]
    file = str(tmp_path / "run.toml")
    resumed = run("train", file, "--run.resume", "true", "--miles.num_rollout", "4")
    assert resumed.returncode == 0, resumed.stderr
    modes = [e["scoring_pass"] for e in events(root, 0, "optimizer")]
    assert modes == ["checked", "skipped", "checked", "skipped"]
    assert [e["step"] for e in events(root, 0, "scoring_check")] == [0, 2]
    assert run("audit", str(root)).returncode == 0


def test_anchoring_at_the_rollout_needs_no_scoring_and_learns_the_same(tmp_path: Path) -> None:
    once = ALONE | {"miles__global_batch_size": 16, "core__max_policy_lag": 0}
    skipped = train(tmp_path / "skipped", **once)
    anchored = train(tmp_path / "anchored", **once | {"miles__use_rollout_logprobs": True})
    # At unchanged weights rollout and training forward give the same log-probabilities up to rounding.
    assert_same_run(skipped, anchored)


def test_a_disagreement_with_the_rollout_stops_before_any_weight_moves(tmp_path: Path) -> None:
    file = write_toml(tmp_path, TINY | {"core.max_train_rollout_logprob_abs_diff": 0.0, "run.checkpoint_every": 1})
    told = run("train", str(file))
    assert told.returncode == 1
    assert "max_train_rollout_logprob_abs_diff is 0" in told.stderr
    assert told.stderr.count("differ by") == 1, "one rank speaks for all"
    for rank in range(2):
        assert events(tmp_path / "out", rank, "optimizer") == []
        assert events(tmp_path / "out", rank)[-1]["event"] == "run_failed"
    assert not (tmp_path / "out" / "checkpoints").exists()
