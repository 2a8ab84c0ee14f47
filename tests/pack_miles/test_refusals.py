from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pack_core import Sample
from pack_miles.errors import InputError
from pack_miles.reporting.forecast import forecast
from pack_miles.settings.combinations import COMBINATIONS
from pack_miles.settings.config import Config, load_config
from pack_miles.settings.machine import Machine
from pack_miles.settings.overview import overview
from pack_miles.settings.refusals import refusals, refuse
from support.miles_config import NODE, SMALL, make_config, toml, without_lines, write_toml

#: A small run whose routes are replayed.
ROUTED = SMALL | {"miles.use_rollout_routing_replay": True}

#: Code -> base, the settings it refuses, words of its message, and the nearest settings that pass.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "packing-attention": (
        SMALL,
        {"core.attention_backend": "torch"},
        "'torch': that backend cannot keep the documents of one row apart, so each would attend to the ones before "
        "it; set core.attention_backend = segment",
        {"core.attention_backend": "torch", "core.sequence_packing": False, "core.packing_max_tokens": None},
    ),
    "packing-off-limit": (
        SMALL,
        {"core.sequence_packing": False},
        "core.packing_max_tokens = 128 requires core.sequence_packing = true",
        {"core.sequence_packing": False, "core.packing_max_tokens": None},
    ),
    "packing-cover": (
        SMALL,
        {"core.packing_max_tokens": 63},
        "core.packing_max_tokens = 63 must cover core.max_sequence_length = 64",
        {"core.packing_max_tokens": 64},
    ),
    "qkv-format": (
        SMALL,
        {"miles.qkv_format": "bshd"},
        "miles.qkv_format = 'bshd' contradicts core.sequence_packing = true, whose layout is 'thd'",
        {"miles.qkv_format": "thd"},
    ),
    "micro-batch": (SMALL, {"miles.micro_batch_size": 2}, "miles.micro_batch_size = 2", {"miles.micro_batch_size": 1}),
    "ranks-ep": (
        SMALL,
        {"run.ranks": 4, "core.expert_parallel_size": 8},
        "run.ranks = 4 is not a multiple of core.expert_parallel_size = 8",
        {"run.ranks": 4, "core.expert_parallel_size": 4},
    ),
    "step-ranks": (
        SMALL,
        {"run.ranks": 6},
        "miles.global_batch_size = 8 is not a multiple of run.ranks = 6",
        {"run.ranks": 8},
    ),
    "collection-step": (
        SMALL,
        {"miles.global_batch_size": 12},
        "a collection has 16 samples (rollout_batch_size 4 x n_samples_per_prompt 4), not a multiple of "
        "miles.global_batch_size = 12",
        {"miles.global_batch_size": 16},
    ),
    "policy-lag": (
        SMALL,
        {"miles.global_batch_size": 4},
        "core.max_policy_lag = 1, but with 4 optimizer steps per collection its last samples are 3 steps behind",
        {"miles.global_batch_size": 4, "core.max_policy_lag": 3},
    ),
    "group-of-one": (
        SMALL,
        {"miles.n_samples_per_prompt": 1, "miles.rollout_batch_size": 16},
        "miles.n_samples_per_prompt = 1: GRPO has no group",
        {"miles.n_samples_per_prompt": 2, "miles.rollout_batch_size": 8},
    ),
    "expert-world": (
        ROUTED,
        {"core.expert_balanced_packing": True, "core.expert_parallel_size": 4},
        "core.expert_balanced_packing = true needs world > expert_parallel_size > 1, but run.ranks = 4 and "
        "core.expert_parallel_size = 4",
        {"core.expert_balanced_packing": True, "core.expert_parallel_size": 2},
    ),
    "expert-packing": (
        ROUTED,
        {"core.expert_balanced_packing": True, "core.sequence_packing": False, "core.packing_max_tokens": None},
        "core.expert_balanced_packing = true requires core.sequence_packing = true",
        {"core.pack_order": "balanced", "core.sequence_packing": False, "core.packing_max_tokens": None},
    ),
    "expert-replay": (
        ROUTED,
        {"core.expert_balanced_packing": True, "miles.use_rollout_routing_replay": False},
        "core.expert_balanced_packing = true requires miles.use_rollout_routing_replay = true",
        {"core.pack_order": "balanced", "miles.use_rollout_routing_replay": False},
    ),
    "expert-balance-data": (
        ROUTED,
        {"core.expert_balanced_packing": True, "miles.balance_data": True},
        "core.expert_balanced_packing and miles.balance_data are both true and exclude each other: balance_data "
        "changes the stride partition",
        {"core.expert_balanced_packing": True},
    ),
    "expert-arrival": (
        ROUTED,
        {"core.expert_balanced_packing": True, "core.pack_order": "arrival"},
        "core.pack_order = 'arrival' contradicts core.expert_balanced_packing = true",
        {"core.expert_balanced_packing": True, "core.pack_order": "balanced"},
    ),
    "balanced-balance-data": (
        SMALL,
        {"core.pack_order": "balanced", "miles.balance_data": True},
        "core.pack_order = 'balanced' and miles.balance_data = true both share samples out over ranks",
        {"core.pack_order": "balanced"},
    ),
    "method-experts": (
        ROUTED,
        {"core.pack_order": "balanced", "core.expert_balance_method": "reference"},
        "core.expert_balance_method = 'reference' needs core.expert_balanced_packing = true",
        {"core.expert_balanced_packing": True, "core.expert_balance_method": "reference"},
    ),
    "slots-experts": (
        ROUTED,
        {"core.pack_order": "balanced", "core.expert_balance_max_slot_assignments": 99},
        "core.expert_balance_max_slot_assignments = 99 needs core.expert_balanced_packing = true",
        {"core.expert_balanced_packing": True, "core.expert_balance_max_slot_assignments": 99},
    ),
    "balance-data": (SMALL, {"miles.balance_data": True}, "miles.balance_data = true is not implemented", {}),
    "prompt-context": (
        NODE,
        {"miles.rollout_max_prompt_len": 6144},
        "miles.rollout_max_prompt_len = 6144 leaves no token of miles.rollout_max_context_len = 6144",
        {"miles.rollout_max_prompt_len": 6143},
    ),
    "sample-length": (
        NODE,
        {"miles.rollout_max_context_len": None, "miles.rollout_max_prompt_len": 2049},
        "a rollout may reach 6145 tokens, prompt and response together, more than core.max_sequence_length = 6144",
        {"miles.rollout_max_context_len": None, "miles.rollout_max_prompt_len": 2048},
    ),
    "task-prompt": (
        SMALL,
        {"miles.rollout_max_prompt_len": 5},
        "miles.rollout_max_prompt_len = 5, but prompts of task 'sort' have up to",
        {"miles.rollout_max_prompt_len": 40},
    ),
    "task-context": (
        SMALL,
        {"miles.rollout_max_context_len": 21},
        "miles.rollout_max_context_len = 21, but a prompt of task 'sort'",
        {"miles.rollout_max_context_len": 64},
    ),
    "small-attention": (
        SMALL,
        {"core.attention_backend": "flash_4"},
        "core.attention_backend = 'flash_4' with model.format = 'small'",
        {"core.attention_backend": "segment"},
    ),
    "segment-attention": (
        NODE,
        {"core.attention_backend": "segment"},
        "core.attention_backend = 'segment' with model.format = 'hf'",
        {"core.attention_backend": "flash_2"},
    ),
    "model-source": (NODE, {"model.source": None}, "model.format = 'hf' needs model.source", {"model.source": "x"}),
    "foreign-geometry": (
        NODE,
        {"model.hidden_size": 128, "model.dropout": 0.1},
        "model.hidden_size, model.dropout set with model.format = 'hf'",
        {"model.hidden_size": 64},
    ),
    "head-size": (
        SMALL,
        {"model.hidden_size": 66},
        "model.hidden_size = 66 is not a multiple of model.num_attention_heads = 4",
        {"model.hidden_size": 72},
    ),
    "odd-head": (SMALL, {"model.hidden_size": 68}, "heads of 17 numbers are odd", {"model.hidden_size": 72}),
    "dense-index": (
        SMALL,
        {"model.dense_layers_indices": [0, 3]},
        "model.dense_layers_indices names layer 3, but the model has layers 0 to 2",
        {"model.dense_layers_indices": [0, 2]},
    ),
    "top-k": (
        SMALL,
        {"model.num_experts_per_tok": 9},
        "model.num_experts_per_tok = 9 is more than model.n_routed_experts = 8",
        {"model.num_experts_per_tok": 8},
    ),
    "experts-ep": (
        SMALL,
        {"model.n_routed_experts": 5},
        "model.n_routed_experts = 5 is not a multiple of core.expert_parallel_size = 2",
        {"model.n_routed_experts": 6},
    ),
    "replay-dense": (
        SMALL,
        {"model.dense_layers_indices": [0, 1, 2], "miles.use_rollout_routing_replay": True},
        "every layer is dense: there is no router to replay",
        {"model.dense_layers_indices": [0, 1, 2]},
    ),
    "replay-router": (
        NODE,
        {"miles.use_rollout_routing_replay": True},
        "miles.use_rollout_routing_replay = true needs miles.use_miles_router = true",
        {"miles.use_rollout_routing_replay": True, "miles.use_miles_router": True},
    ),
    "data-source": (
        NODE,
        {"data.prompt_data": None},
        "neither data.task nor data.prompt_data is given",
        {"data.prompt_data": "other.jsonl"},
    ),
    "unknown-task": (
        SMALL,
        {"data.task": "sorts"},
        "data.task = 'sorts' is unknown; did you mean sort?; tasks: sort",
        {"data.task": "sort"},
    ),
    "task-format": (
        NODE,
        {"data.prompt_data": None, "data.task": "sort"},
        "data.task = 'sort' speaks its own few tokens",
        {},
    ),
    "prompts-format": (
        SMALL,
        {"data.task": None, "data.prompt_data": "p.jsonl"},
        "data.prompt_data is given with model.format = 'small', which has no tokenizer",
        {},
    ),
    "optimizer": (NODE, {"miles.optimizer": "sgd"}, "miles.optimizer = 'sgd': only adam", {"miles.optimizer": "adam"}),
}


def changed(folder: Path, base: dict[str, Any], options: dict[str, Any]) -> Config:
    return make_config(folder, base | options)


def told(config: Config) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        refuse(config)
    return tuple(map(without_lines, caught.value.problems))


def test_every_row_of_scope_config_has_a_case() -> None:
    assert set(CASES) == {row.code for row in COMBINATIONS}
    assert {row.scope for row in COMBINATIONS} == {"config"}


def test_the_codes_are_unique() -> None:
    codes = [row.code for row in refusals(Machine())]

    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("base", [SMALL, NODE], ids=["small", "node"])
def test_the_bases_of_the_cases_are_not_refused(tmp_path: Path, base: dict[str, Any]) -> None:
    refuse(changed(tmp_path, base, {}))


@pytest.mark.parametrize("code", CASES)
def test_a_row_is_triggered_by_configuration_alone_and_says_what_was_given(tmp_path: Path, code: str) -> None:
    base, bad, words, _ = CASES[code]
    config = changed(tmp_path, base, bad)

    applying = [row.code for row in COMBINATIONS if row.applies(config)]

    assert code in applying
    assert any(words in problem for problem in told(config)), told(config)


@pytest.mark.parametrize("code", CASES)
def test_the_good_neighbour_of_a_row_passes_the_whole_table(tmp_path: Path, code: str) -> None:
    base, _, _, good = CASES[code]

    refuse(changed(tmp_path, base, good))


@pytest.mark.parametrize(
    ("base", "options", "code"),
    [
        (SMALL, {"core.attention_backend": "te"}, "packing-attention"),
        (NODE, {"core.attention_backend": "torch"}, "packing-attention"),
        (NODE, {"core.attention_backend": "te"}, "packing-attention"),
        (
            SMALL,
            {"core.sequence_packing": False, "core.packing_max_tokens": None, "miles.qkv_format": "thd"},
            "qkv-format",
        ),
        (ROUTED, {"core.expert_balanced_packing": True, "core.expert_parallel_size": 1}, "expert-world"),
        (SMALL, {"core.expert_balance_method": "reference"}, "method-experts"),
        (SMALL, {"model.source": "x"}, "model-source"),
        (SMALL, {"data.prompt_data": "p.jsonl"}, "data-source"),
        (SMALL, {"miles.rollout_max_response_len": 64}, "sample-length"),
        (NODE | {"model.format": "olmo_core"}, {"core.attention_backend": "segment"}, "segment-attention"),
    ],
)
def test_the_other_ways_into_a_row_are_refused_too(
    tmp_path: Path, base: dict[str, Any], options: dict[str, Any], code: str
) -> None:
    config = changed(tmp_path, base, options)

    assert code in [row.code for row in COMBINATIONS if row.applies(config)]


#: A run of an OLMo-core model that this trainer samples and trains by itself.
CORE: dict[str, Any] = SMALL | {
    "model.format": "olmo_core",
    "model.source": "model.json",
    "model.dtype": "float64",
    "miles.use_rollout_routing_replay": True,
}


def test_a_core_model_trained_here_takes_the_task_the_precision_and_the_attention_of_the_small_one(
    tmp_path: Path,
) -> None:
    refuse(changed(tmp_path, CORE, {}))
    (problem,) = told(changed(tmp_path, CORE, {"core.attention_backend": "torch"}))
    assert "set core.attention_backend = segment" in problem
    (problem,) = told(changed(tmp_path, CORE, {"model.dropout": 0.1}))
    assert "model.dropout set with model.format = 'olmo_core', whose checkpoint brings its own geometry" in problem


def test_a_core_checkpoint_for_miles_still_needs_its_router_and_its_own_precision(tmp_path: Path) -> None:
    node = NODE | {"model.format": "olmo_core"}
    refuse(changed(tmp_path, node, {}))
    (problem,) = told(changed(tmp_path, node, {"miles.use_rollout_routing_replay": True}))
    assert "needs miles.use_miles_router = true" in problem
    (problem,) = told(changed(tmp_path, node, {"model.dtype": "float64"}))
    assert "model.dtype set with model.format = 'olmo_core'" in problem


def test_the_remedy_of_leaking_attention_fits_the_model(tmp_path: Path) -> None:
    (problem,) = told(changed(tmp_path, NODE, {"core.attention_backend": "torch"}))

    assert "set core.attention_backend = flash_4" in problem


def refused(path: Path, *flags: tuple[str, str]) -> str:
    with pytest.raises(InputError) as caught:
        refuse(load_config(path, flags))
    return str(caught.value)


def test_an_option_is_called_by_the_flag_that_gave_it(tmp_path: Path) -> None:
    path = write_toml(tmp_path, SMALL)

    assert refused(path, ("trainer.global_batch_size", "6"), ("core.max_policy_lag", "9")) == (
        f"{path}: 2 problems\n"
        "  - --trainer.global_batch_size = 6 is not a multiple of run.ranks (line 20) = 4: every rank takes as many "
        "samples of a step; take a multiple of 4\n"
        "  - a collection has 16 samples (rollout_batch_size 4 x n_samples_per_prompt 4), not a multiple of "
        "--trainer.global_batch_size = 6; take a global_batch_size that divides it, or leave it out for one optimizer "
        "step a collection"
    )


def test_an_option_is_called_by_its_place_in_the_file_and_the_remedy_does_so_too(tmp_path: Path) -> None:
    settings = SMALL | {"core.packing_max_tokens": None, "core.sequence_packing": None}
    path = write_toml(tmp_path, settings | {"trainer.packing_max_tokens": 96, "trainer.sequence_packing": False})

    assert refused(path) == (
        f"{path}: trainer.packing_max_tokens (line 20) = 96 requires trainer.sequence_packing (line 21) = true; turn "
        "packing on, or leave packing_max_tokens out (the flag --trainer.packing_max_tokens none unsets what a file "
        "sets)"
    )
    refuse(load_config(path, [("trainer.packing_max_tokens", "none")]))


def test_an_option_that_was_not_written_keeps_its_canonical_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml(SMALL | {"core.max_policy_lag": None}))

    assert "core.max_policy_lag = 0, but with 2 optimizer steps per collection its last samples are 1 step" in (
        refused(path)
    )


def test_the_name_of_an_option_inside_a_value_is_left_alone(tmp_path: Path) -> None:
    path = write_toml(tmp_path, SMALL | {"data.task": "run.ranks = 3"})

    assert "data.task (line 6) = 'run.ranks = 3' is unknown" in refused(path)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    config = changed(tmp_path, SMALL, {"run.ranks": 6, "miles.micro_batch_size": 2, "miles.balance_data": True})

    assert len(told(config)) == 3


def test_everything_expert_balanced_packing_lacks_is_told_in_order(tmp_path: Path) -> None:
    lacking = {
        "core.expert_balanced_packing": True,
        "core.pack_order": "arrival",
        "core.expert_parallel_size": 1,
        "core.sequence_packing": False,
        "core.packing_max_tokens": None,
        "miles.balance_data": True,
    }
    problems = told(changed(tmp_path, SMALL, lacking))
    for problem, words in zip(
        problems, ("world >", "sequence_packing", "routing_replay", "balance_data", "pack_order"), strict=True
    ):
        assert words in problem


def test_balance_data_alone_is_refused_as_before(tmp_path: Path) -> None:
    (problem,) = told(changed(tmp_path, SMALL, {"miles.balance_data": True}))
    assert problem.endswith("leave it false; position p of a step goes to rank p % ranks")


#: Values that a few options of a small run may take; not all of them fit the others.
VALUES: dict[str, list[Any]] = {
    "model.hidden_size": [8, 12, 5],
    "model.num_attention_heads": [2, 3],
    "model.num_hidden_layers": [1, 2],
    "model.n_routed_experts": [2, 4, 5],
    "model.num_experts_per_tok": [1, 3],
    "model.dense_layers_indices": [[], [0, 1, 2], [2]],
    "core.sequence_packing": [False],
    "core.packing_max_tokens": [None, 63, 64, 90],
    "core.max_sequence_length": [37, 60],
    "core.expert_parallel_size": [1, 3, 4],
    "core.attention_backend": ["torch", "te", "flash_4"],
    "core.max_policy_lag": [0, 3],
    "core.pack_order": ["balanced"],
    "core.expert_balanced_packing": [True],
    "miles.rollout_batch_size": [2, 3, 8],
    "miles.n_samples_per_prompt": [1, 2, 8],
    "miles.global_batch_size": [None, 4, 12, 16],
    "miles.use_rollout_routing_replay": [True],
    "run.ranks": [1, 2, 3, 8],
}


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw changes of a few options."""
    places = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4))
    return {place: draw(st.sampled_from(VALUES[place])) for place in places}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=shapes())
def test_what_the_table_lets_pass_can_be_planned_and_what_it_refuses_is_told(
    tmp_path: Path, drawn: dict[str, Any]
) -> None:
    config = changed(tmp_path, SMALL, drawn)
    refused = any(row.applies(config) for row in COMBINATIONS)
    event("refused" if refused else "planned")
    if refused:
        assert all("; " in problem for problem in told(config))
        return

    refuse(config)
    planned = overview(config, forecast(config, [Sample(id=n, length=1 + n % 30) for n in range(40)]))

    shape = planned["shape"]
    assert shape["samples_per_rank_and_step"] * shape["ranks"] == shape["samples_per_optimizer_step"]
    steps = shape["optimizer_steps_per_collection"]
    assert steps * shape["samples_per_optimizer_step"] == shape["samples_per_collection"]
    assert shape["replicas"] * shape["expert_parallel_size"] == shape["ranks"]
    assert 1 <= steps <= shape["max_policy_lag_optimizer_steps"] + 1
    assert planned["core"]["attention_backend"] == "segment" or not planned["core"]["sequence_packing"]
    assert len(planned["rollouts"]["steps"]) == 40 // shape["samples_per_optimizer_step"]


@pytest.mark.parametrize("example", ["dev", "node", "demo"])
def test_the_examples_are_not_refused(example: str) -> None:
    refuse(load_config(Path(__file__).parents[2] / "examples" / f"{example}.toml"))
