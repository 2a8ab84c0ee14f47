import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pack_core import Topology
from pack_miles.settings.config import Config, load_config
from pack_miles.settings.options import Option, spell
from pack_miles.settings.sections import OPTIONS, PLACES, Miles, Output
from support.miles_config import SMALL, make_config, write_toml


def test_a_run_file_is_read_into_typed_values_with_the_documented_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        schema_version = 1
        name = "first-run"
        [output]
        root = "runs/a"
        [data]
        task = "sort"
        [trainer]
        sequence_packing = true
        packing_max_tokens = 6144
        max_sequence_length = 4096
        [async]
        max_policy_lag = 3
        [inference]
        rollout_batch_size = 16
        [optimizer]
        lr = 1
        """
    )

    config = load_config(path)

    assert config.name == "first-run"
    assert config.output.root == str(tmp_path / "runs/a")
    assert (config.core.sequence_packing, config.core.packing_max_tokens) == (True, 6144)
    assert config.core.max_policy_lag == 3
    assert (config.miles.rollout_batch_size, config.miles.n_samples_per_prompt) == (16, 8)
    assert config.miles.lr == 1.0
    assert isinstance(config.miles.lr, float)
    assert (config.core.scoring_check_interval, config.core.scoring_check_tolerance) == (50, 1e-3)
    assert (config.miles.eps_clip, config.miles.eps_clip_high) == (0.2, 0.28)
    assert (config.miles.adam_beta1, config.miles.adam_beta2, config.miles.adam_eps) == (0.9, 0.95, 1e-8)
    assert config.model.dense_layers_indices == (0,)


def test_the_derived_numbers_follow_the_options(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    assert config.collection_samples == 16
    assert config.step_samples == 8
    assert config.steps_per_collection == 2
    assert config.capacity == 128
    assert config.max_documents is None
    assert config.topology == Topology(ranks=4, expert_parallel=2)
    assert config.reduction == "token"
    assert config.qkv_format == "thd"
    assert config.moe_layers == (1, 2)


def test_without_packing_a_row_holds_one_sample_up_to_the_sequence_length(tmp_path: Path) -> None:
    config = make_config(tmp_path, core__sequence_packing=False, core__packing_max_tokens=None)

    assert (config.capacity, config.max_documents, config.qkv_format) == (64, 1, "bshd")


def test_the_packing_limit_defaults_to_the_sequence_length(tmp_path: Path) -> None:
    config = make_config(tmp_path, core__packing_max_tokens=None)

    assert config.core.packing_max_tokens is None
    assert config.capacity == 64
    assert config.resolved()["core"]["packing_max_tokens"] == 64


def test_the_step_defaults_to_the_collection(tmp_path: Path) -> None:
    config = make_config(tmp_path, miles__global_batch_size=None)

    assert (config.step_samples, config.steps_per_collection) == (16, 1)


def test_the_loss_reduction_is_named_by_what_it_is_a_mean_over(tmp_path: Path) -> None:
    assert make_config(tmp_path, miles__calculate_per_token_loss=False).reduction == "response"


@pytest.mark.parametrize("place", sorted(PLACES))
def test_every_place_sets_its_option(tmp_path: Path, place: str) -> None:
    one = PLACES[place]
    value = example_of(one)

    config = load_config(write_toml(tmp_path, {"output.root": "out", place: value}))

    got = getattr(getattr(config, one.section), one.key)
    expected = str(tmp_path / value) if one.path else tuple(value) if isinstance(value, list) else value
    assert got == expected


def example_of(one: Option) -> Any:
    """Return a value that differs from the default."""
    if one.choices:
        return next(choice for choice in one.choices if choice != one.default)
    if one.kind is bool:
        return not one.default
    if one.kind is int:
        return (one.default or 4) + 1
    if one.kind is float:
        return 0.75
    return [1, 2] if one.kind is tuple else "text"


def test_two_places_that_agree_are_fine(tmp_path: Path) -> None:
    path = write_toml(tmp_path, {"output.root": "out", "optimizer.eps_clip": 0.1, "trainer.eps_clip": 0.1})

    assert load_config(path).miles.eps_clip == 0.1


def test_flags_win_over_the_file_and_the_last_flag_wins_across_places(tmp_path: Path) -> None:
    path = write_toml(tmp_path, {"output.root": "out", "trainer.max_policy_lag": 2})
    flags = [("core.max_policy_lag", "5"), ("async.max_policy_lag", "7"), ("trainer.max_policy_lag", "6")]

    assert load_config(path, flags).core.max_policy_lag == 6
    assert load_config(path, flags[:2]).core.max_policy_lag == 7


def test_a_flag_may_take_an_option_away_and_name_the_run(tmp_path: Path) -> None:
    path = write_toml(tmp_path, SMALL)

    config = load_config(path, [("trainer.packing_max_tokens", "none"), ("name", "other")])

    assert config.core.packing_max_tokens is None
    assert config.name == "other"


def test_the_text_of_a_flag_is_read_by_the_type_of_its_option(tmp_path: Path) -> None:
    path = write_toml(tmp_path, SMALL)
    flags = [
        ("model.dense_layers_indices", "0,2"),
        ("core.sequence_packing", "false"),
        ("miles.lr", "2e-3"),
        ("miles.kl_coef", "1"),
    ]

    config = load_config(path, flags)

    assert config.model.dense_layers_indices == (0, 2)
    assert config.core.sequence_packing is False
    assert (config.miles.lr, config.miles.kl_coef) == (0.002, 1.0)
    assert load_config(path, [("model.dense_layers_indices", "[]")]).model.dense_layers_indices == ()


def test_relative_paths_are_relative_to_the_file_and_those_of_flags_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").mkdir()
    path = write_toml(tmp_path / "examples", {"output.root": "../runs/x", "data.prompt_data": "p.jsonl"})
    monkeypatch.chdir(tmp_path)

    config = load_config(path)

    assert config.output.root == str(tmp_path / "runs/x")
    assert config.data.prompt_data == str(tmp_path / "examples/p.jsonl")
    assert load_config(path, [("output.root", "here")]).output.root == str(tmp_path / "here")
    assert load_config(path, [("output.root", "/abs")]).output.root == "/abs"


@st.composite
def option_values(draw: st.DrawFn) -> tuple[Option, Any]:
    one = draw(st.sampled_from([one for one in OPTIONS if not one.path]))
    low = 0 if one.limits.low is None else one.limits.low
    if one.choices:
        return one, draw(st.sampled_from(one.choices))
    if one.kind is bool:
        return one, draw(st.booleans())
    if one.kind is int:
        return one, draw(st.integers(int(low), 10**9))
    if one.kind is float:
        return one, draw(st.floats(low, 0.99, exclude_min=one.limits.above, allow_subnormal=False))
    if one.kind is tuple:
        return one, draw(st.lists(st.integers(0, 99), unique=True, max_size=5))
    printable = st.characters(min_codepoint=33, max_codepoint=126)
    return one, draw(st.text(printable, min_size=1).filter(lambda text: text != "none"))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=option_values())
def test_a_value_is_the_same_in_the_file_and_on_the_command_line(tmp_path: Path, case: tuple[Option, Any]) -> None:
    one, value = case
    text = value if isinstance(value, str) else spell(value)
    plain = write_toml(tmp_path, {"output.root": "out"})

    flagged = load_config(plain, [(one.places[-1], text)])
    filed = load_config(write_toml(tmp_path, {"output.root": "out", one.name: value}))

    assert flagged == filed
    assert getattr(getattr(filed, one.section), one.key) == (tuple(value) if isinstance(value, list) else value)


def test_resolved_holds_every_option_once_and_is_json(tmp_path: Path) -> None:
    resolved = make_config(tmp_path).resolved()

    assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved
    names = {f"{section}.{key}" for section, keys in resolved.items() if isinstance(keys, dict) for key in keys}
    assert names == {one.name for one in OPTIONS}
    assert resolved["schema_version"] == 1
    assert resolved["miles"]["global_batch_size"] == 8
    assert resolved["miles"]["qkv_format"] == "thd"


def test_the_digest_follows_what_a_run_computes_and_nothing_else(tmp_path: Path) -> None:
    base = {"output.root": "out"}
    digest = load_config(write_toml(tmp_path, base)).digest
    free = {
        "output.root",
        "tracking.use_wandb",
        "tracking.progress",
        "run.resume",
        "run.checkpoint_every",
        "run.checkpoint_keep",
        "run.save_rollouts",
        "run.engine",
        "run.rollout_workers",
        "run.timeout_seconds",
        "miles.num_rollout",
    }

    for one in OPTIONS:
        changed = load_config(write_toml(tmp_path, base | {one.name: example_of(one)})).digest
        # The layout is derived, so writing it out changes nothing; a contradiction is refused elsewhere. How to search
        # for an order decides nothing where none is searched.
        idle = one.name in ("miles.qkv_format", *SEARCHING)
        assert (changed == digest) == (one.name in free or idle), one.name

    balanced = base | {"core.pack_order": "balanced"}
    digest = load_config(write_toml(tmp_path, balanced)).digest
    for one in (one for one in OPTIONS if one.name in SEARCHING):
        assert load_config(write_toml(tmp_path, balanced | {one.name: example_of(one)})).digest != digest, one.name


#: Options that say how to search for an order.
SEARCHING = (
    "core.expert_balance_layer_stride",
    "core.expert_balance_search_proposals",
    "core.expert_balance_search_seconds",
    "core.expert_balance_method",
    "core.expert_balance_guard",
    "core.expert_balance_max_slot_assignments",
)


def test_the_digest_of_a_run_in_arrival_order_is_that_of_the_release_before_orders(tmp_path: Path) -> None:
    assert make_config(tmp_path).digest == "a8f82b8eb0c9f9a8fb83cf220b844819"
    assert make_config(tmp_path, core__pack_order="arrival").digest == "a8f82b8eb0c9f9a8fb83cf220b844819"


def test_expert_balanced_packing_implies_balanced_order(tmp_path: Path) -> None:
    config = make_config(tmp_path, trainer__expert_balanced_packing=True)
    assert config.pack_order == config.resolved()["core"]["pack_order"] == "balanced"
    assert make_config(tmp_path, trainer__pack_order="balanced").pack_order == "balanced"
    assert make_config(tmp_path).pack_order == "arrival"


def test_the_digest_does_not_depend_on_how_the_file_is_written(tmp_path: Path) -> None:
    spread = {"output.root": "out", "trainer.lr": None, "optimizer.lr": 1, "inference.rollout_batch_size": 8}
    gathered = {"output.root": "out", "miles.lr": 1.0, "miles.global_batch_size": 64}

    assert load_config(write_toml(tmp_path, spread)).digest == load_config(write_toml(tmp_path, gathered)).digest


def test_the_digest_is_the_same_in_another_process(tmp_path: Path) -> None:
    path = write_toml(tmp_path, SMALL)
    program = f"from pack_miles.settings.config import load_config; print(load_config({str(path)!r}).digest)"

    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert other.stdout.strip() == load_config(path).digest


def test_where_an_option_was_written_is_kept_and_changes_nothing(tmp_path: Path) -> None:
    canonical = load_config(write_toml(tmp_path, {"output.root": "out", "miles.lr": 0.5, "core.max_policy_lag": 2}))
    path = write_toml(tmp_path, {"output.root": "out", "optimizer.lr": 0.5, "core.max_policy_lag": 1})
    config = load_config(path, [("async.max_policy_lag", "2")])

    assert config.written == {
        "output.root": "output.root (line 4)",
        "miles.lr": "optimizer.lr (line 6)",
        "core.max_policy_lag": "--async.max_policy_lag",
    }
    assert config == canonical
    assert (config.digest, config.resolved()) == (canonical.digest, canonical.resolved())


def test_a_configuration_can_be_made_in_code() -> None:
    config = Config(name="a", output=Output(root="out"), miles=Miles(rollout_batch_size=2))

    assert config.collection_samples == 16
