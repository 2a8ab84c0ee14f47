import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from pack_miles.miles.options import read_settings
from pack_miles.miles.refusals import refuse_settings
from pack_miles.miles.rewards import grouped_rewards
from pack_miles.scoring_pass import ScoringPass, decide
from pack_miles.settings.arguments import core_options, miles_arguments, miles_options
from pack_miles.settings.config import Config, load_config
from pack_miles.settings.refusals import refuse
from pack_miles.settings.sections import OPTIONS
from support.miles_config import NODE, SMALL, make_config, write_toml
from support.refusal_cases import EXPERTS as HOSTED_EXPERTS
from support.refusal_cases import write_checkpoints


def parsed(arguments: list[str]) -> dict[str, str | None]:
    """Return flags and values of an argument vector, read without the code that wrote it."""
    read: dict[str, str | None] = {}
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument
            assert flag not in read
            read[flag] = None
        else:
            assert read[flag] is None
            read[flag] = argument
    return read


def test_the_arguments_of_a_node(tmp_path: Path) -> None:
    replay = {"miles__use_rollout_routing_replay": True, "miles__use_miles_router": True}

    flags = parsed(miles_arguments(make_config(tmp_path, NODE, **replay)))

    core = json.loads(flags.pop("--olmo-core-config") or "")
    assert core["sequence_packing"] is True
    assert core["packing_max_tokens"] == 6144
    assert core["attention_backend"] == "flash_4"
    assert flags == {
        "--train-backend": "olmo_core",
        "--actor-num-nodes": "1",
        "--actor-num-gpus-per-node": "8",
        "--no-offload-train": None,
        "--data-pad-size-multiplier": "1",
        "--seed": "17",
        "--rollout-seed": "17",
        "--save": str(tmp_path / "out"),
        "--hf-checkpoint": "org/model",
        "--prompt-data": str(tmp_path / "prompts.jsonl"),
        "--micro-batch-size": "1",
        "--global-batch-size": "64",
        "--rollout-batch-size": "8",
        "--n-samples-per-prompt": "8",
        "--num-rollout": "100",
        "--rollout-max-prompt-len": "2048",
        "--rollout-max-response-len": "4096",
        "--rollout-max-context-len": "6144",
        "--rollout-temperature": "1.0",
        "--use-rollout-routing-replay": None,
        "--use-miles-router": None,
        "--kl-coef": "0.0",
        "--calculate-per-token-loss": None,
        "--disable-grpo-std-normalization": None,
        "--qkv-format": "thd",
        "--eps-clip": "0.2",
        "--eps-clip-high": "0.28",
        "--optimizer": "adam",
        "--lr": "1e-06",
        "--adam-beta1": "0.9",
        "--adam-beta2": "0.95",
        "--adam-eps": "1e-08",
        "--weight-decay": "0.0",
        "--clip-grad": "1.0",
    }


def test_switches_that_are_off_emit_nothing_but_the_one_spelt_by_what_it_turns_off(tmp_path: Path) -> None:
    off = parsed(miles_arguments(make_config(tmp_path, miles__calculate_per_token_loss=False)))
    on = parsed(miles_arguments(make_config(tmp_path, miles__grpo_std_normalization=True)))

    assert "--calculate-per-token-loss" not in off
    assert "--disable-grpo-std-normalization" in off
    assert "--disable-grpo-std-normalization" not in on
    assert "--grpo-std-normalization" not in on


def test_turning_packing_off_changes_the_layout(tmp_path: Path) -> None:
    config = make_config(tmp_path, core__sequence_packing=False, core__packing_max_tokens=None)

    assert parsed(miles_arguments(config))["--qkv-format"] == "bshd"
    assert core_options(config)["packing_max_tokens"] is None


@pytest.mark.parametrize("base", [SMALL, NODE], ids=["small", "node"])
def test_raising_the_packing_limit_leaves_every_rollout_option_as_it_was(tmp_path: Path, base: dict[str, Any]) -> None:
    limit = base["core.max_sequence_length"]
    tight = parsed(miles_arguments(make_config(tmp_path, base, core__packing_max_tokens=limit)))
    wide = parsed(miles_arguments(make_config(tmp_path, base, core__packing_max_tokens=4 * limit)))

    before, after = (json.loads(flags.pop("--olmo-core-config") or "") for flags in (tight, wide))

    assert tight == wide
    assert (before.pop("packing_max_tokens"), after.pop("packing_max_tokens")) == (limit, 4 * limit)
    assert before == after


def test_the_checkpoint_goes_where_its_format_says(tmp_path: Path) -> None:
    core = parsed(miles_arguments(make_config(tmp_path, NODE, model__format="olmo_core")))

    assert core["--load"] == "org/model"
    assert "--hf-checkpoint" not in core
    assert miles_options(make_config(tmp_path))["hf_checkpoint"] is None
    described = make_config(tmp_path, model__format="olmo_core", model__source="model.json")
    assert "--load" not in parsed(miles_arguments(described)), "a file that describes a model holds no weights"


def test_core_options_hold_the_names_of_the_trainer_and_ours_only_when_set(tmp_path: Path) -> None:
    own = make_config(tmp_path, core__scoring_check_max_tolerance=0.01)

    assert "scoring_check_max_tolerance" not in core_options(make_config(tmp_path))
    assert core_options(own)["scoring_check_max_tolerance"] == 0.01


def test_order_options_appear_in_the_arguments_only_where_they_mean_something(tmp_path: Path) -> None:
    def told(**changes: Any) -> tuple[dict[str, Any], str | None]:
        flags = parsed(miles_arguments(make_config(tmp_path, **changes)))
        core = json.loads(flags["--olmo-core-config"] or "")
        kept = {key: value for key, value in core.items() if key == "pack_order" or key.startswith("expert_balanc")}
        return kept, flags.get("--rollout-sample-filter-path")

    search = {"expert_balance_search_proposals": 7, "expert_balance_search_seconds": 0.25}
    asked = {"core__expert_balance_search_proposals": 7, "miles__use_rollout_routing_replay": True}
    assert told(**asked) == ({}, None)
    assert told(**asked, core__pack_order="balanced") == ({"pack_order": "balanced", **search}, None)
    assert told(**asked, core__expert_balanced_packing=True) == (
        {"expert_balanced_packing": True, "expert_balance_layer_stride": 1, **search},
        "pack_miles.producer.reorder_samples",
    )


#: What a run that balances experts needs beside the option under test.
EXPERTS = {"trainer.expert_balanced_packing": True, "trainer.use_rollout_routing_replay": True}

#: Off, or at the defaults of the trainer these options come from.
DEFAULTS = {
    "sequence_packing": False,
    "packing_max_tokens": None,
    "expert_balanced_packing": False,
    "expert_balance_search_proposals": 1024,
    "expert_balance_search_seconds": 0.25,
    "expert_balance_layer_stride": 1,
}

#: A field -> options beside it, the texts of its flag, what Core gets for each, and what changes in MILES' arguments.
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, str | None]]]] = {
    "sequence_packing": (
        {"trainer.packing_max_tokens": None},
        {"true": True, "false": False},
        {"true": {"--qkv-format": "thd"}, "false": {"--qkv-format": "bshd"}},
    ),
    "packing_max_tokens": ({}, {"64": 64, "9000": 9000}, {}),
    "expert_balanced_packing": (
        {"trainer.use_rollout_routing_replay": True},
        {"true": True, "false": "left out"},
        {"true": {"--rollout-sample-filter-path": "pack_miles.producer.reorder_samples"}},
    ),
    "expert_balance_search_proposals": (EXPERTS, {"0": 0, "7": 7}, {}),
    "expert_balance_search_seconds": (EXPERTS, {"0": 0.0, "1.5": 1.5}, {}),
    "expert_balance_layer_stride": (EXPERTS, {"1": 1, "3": 3}, {}),
}


@pytest.mark.parametrize("section", ["trainer", "core"])
@pytest.mark.parametrize("way", ["file", "flag"])
@pytest.mark.parametrize(("field", "text"), [(name, text) for name, row in FIELDS.items() for text in row[1]])
def test_packing_and_expert_fields_reach_core_and_miles(
    tmp_path: Path, field: str, text: str, way: str, section: str
) -> None:
    beside, values, changes = FIELDS[field]
    bare = {place: value for place, value in SMALL.items() if not place.startswith("core.")}
    fixed = {"trainer.sequence_packing": True, "trainer.packing_max_tokens": 128, "trainer.max_sequence_length": 64}
    fixed |= {"trainer.expert_parallel_size": 2, "trainer.attention_backend": "segment", "async.max_policy_lag": 1}
    without = {place: value for place, value in (bare | fixed | beside).items() if place != f"trainer.{field}"}

    if way == "file":
        written = without | {f"{section}.{field}": json.loads(text)}
        config = load_config(write_toml(tmp_path, written))
    else:
        config = load_config(write_toml(tmp_path, without), [(f"{section}.{field}", text)])
    refuse(config)
    flags = parsed(miles_arguments(config))
    core = json.loads(flags.pop("--olmo-core-config") or "")

    assert core.get(field, "left out") == values[text]
    plain = parsed(miles_arguments(load_config(write_toml(tmp_path, without))))
    del plain["--olmo-core-config"]
    assert flags == plain | changes.get(text, {})
    if text == "false" and field == "expert_balanced_packing":
        assert not [key for key in core if key.startswith("expert_balanc")], "as before there was such a feature"


def test_the_fields_are_off_or_at_the_defaults_of_the_trainer_they_come_from() -> None:
    declared = {one.key: one.default for one in OPTIONS if one.section == "core"}
    assert {name: declared[name] for name in FIELDS} == DEFAULTS


@pytest.mark.parametrize("name", ["demo", "dev", "node"])
def test_no_maintained_example_balances_experts_and_each_takes_the_flag(name: str) -> None:
    path = Path(__file__).parents[2] / "examples" / f"{name}.toml"
    config = load_config(path)
    refuse(config)
    assert not config.core.expert_balanced_packing
    assert "--rollout-sample-filter-path" not in parsed(miles_arguments(config))
    if name != "dev":  # which has one rank, and no packing
        assert flagged(path).core.expert_balanced_packing


def flagged(path: Path) -> Config:
    router = [("inference.use_miles_router", "true"), ("trainer.router_aux_loss_weight", "0")]
    config = load_config(path, [("trainer.expert_balanced_packing", "true"), *router])
    refuse(config)
    return config


def test_the_hook_lets_the_arguments_pass_that_a_run_file_makes_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pack_miles.miles.hosted.installed_rule", lambda: grouped_rewards)
    for changes, seam in (
        ({}, "groups"),
        ({"miles.custom_reward_post_process_path": "pack_miles.producer.reorder_and_normalize"}, "rewards"),
        ({"core.expert_balanced_packing": False, "core.pack_order": "balanced"}, "rewards"),
    ):
        config = make_config(tmp_path, HOSTED_EXPERTS | {"model.source": "olmo3moe"} | changes)
        refuse(config)
        given = miles_options(config) | {"olmo_core_config": json.dumps(core_options(config))}
        settings = read_settings(Namespace(**given), seam)
        assert settings.enabled
        refuse_settings(settings)
        other = {"groups": "custom_reward_post_process_path", "rewards": "rollout_sample_filter_path"}[seam]
        assert given[other] is None, "one hook, in one place"


def test_router_weights_reach_core_under_the_names_of_its_trainer_and_only_when_set(tmp_path: Path) -> None:
    def told(**changes: Any) -> dict[str, float]:
        core = core_options(make_config(tmp_path, **changes))
        return {name: value for name, value in core.items() if name.startswith("router_")}

    assert told() == {}
    assert told(trainer__router_aux_loss_weight=0.0, core__router_z_loss_weight=1e-5) == {
        "router_aux_loss_weight": 0.0,
        "router_z_loss_weight": 1e-5,
    }


def test_use_wandb_reaches_miles_only_when_it_is_on(tmp_path: Path) -> None:
    assert "--use-wandb" not in parsed(miles_arguments(make_config(tmp_path)))
    assert parsed(miles_arguments(make_config(tmp_path, tracking__use_wandb=True)))["--use-wandb"] is None


ONE_STEP = {"miles.rollout_batch_size": 4, "miles.n_samples_per_prompt": 4, "miles.global_batch_size": 16}


@pytest.mark.parametrize(
    ("settings", "standalone", "reason", "steps"),
    [
        ({}, False, "the training forward at unchanged weights", 1),
        ({"miles.global_batch_size": 8}, True, "2 optimizer steps", 2),
        ({"miles.rollout_batch_size": 16}, True, "4 optimizer steps", 4),
        ({"miles.kl_coef": 0.01}, True, "kl_coef", 1),
        ({"model.dropout": 0.1}, True, "stochastic model configuration: dropout", 1),
        ({"miles.use_rollout_logprobs": True}, False, "rollout log-probabilities", 1),
        ({"core.scoring_pass_required": True}, True, "core.scoring_pass_required", 1),
        # The first that holds gives the reason.
        ({"core.scoring_pass_required": True, "miles.kl_coef": 0.01}, True, "core.scoring_pass_required", 1),
        ({"miles.global_batch_size": 8, "miles.kl_coef": 0.01}, True, "2 optimizer steps", 2),
        ({"miles.kl_coef": 0.01, "model.dropout": 0.1}, True, "kl_coef", 1),
        ({"model.dropout": 0.1, "miles.use_rollout_logprobs": True}, True, "dropout", 1),
    ],
)
def test_the_scoring_pass_is_decided_by_the_first_condition_that_holds(
    tmp_path: Path, settings: dict[str, Any], standalone: bool, reason: str, steps: int
) -> None:
    decision = decide(make_config(tmp_path, SMALL | ONE_STEP | settings))

    assert isinstance(decision, ScoringPass)
    assert decision.standalone is standalone
    assert reason in decision.reason
    assert decision.optimizer_steps_per_collection == steps
