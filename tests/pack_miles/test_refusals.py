import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pack_core import Sample
from pack_miles.errors import InputError
from pack_miles.miles.refusals import RUN
from pack_miles.reporting.forecast import forecast
from pack_miles.settings.combinations import COMBINATIONS
from pack_miles.settings.config import Config, load_config
from pack_miles.settings.machine import Machine
from pack_miles.settings.overview import overview
from pack_miles.settings.refusals import refuse, refused, table
from support.machine_cases import MACHINE_CASES
from support.miles_config import NODE, SMALL, make_config, toml, without_lines, write_toml
from support.refusal_cases import ARGUMENT_CASES, ROUTED, RUN_FILE_CASES, write_checkpoints
from support.sample_faults import DATA_CASES


def changed(folder: Path, base: dict[str, Any], options: dict[str, Any]) -> Config:
    return make_config(folder, base | options)


def told(config: Config) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        refuse(config)
    return tuple(map(without_lines, caught.value.problems))


def codes(config: Config) -> list[str]:
    return [code for code, _ in refused(config)]


def test_every_row_that_a_run_file_can_run_into_has_a_case() -> None:
    assert set(RUN_FILE_CASES) == {row.code for row in (*COMBINATIONS, *RUN)} | {"model-kind", "checkpoint"}
    assert {row.scope for row in COMBINATIONS} == {"config"}


def test_every_row_of_the_whole_table_has_a_case() -> None:
    rows = {(row.scope, row.code) for row in table(Machine())}
    cases = {("config", code) for code in RUN_FILE_CASES} | {("arguments", code) for code in ARGUMENT_CASES}
    cases |= {("machine", code) for code in MACHINE_CASES} | {("data", code) for code in DATA_CASES}
    assert rows <= cases
    assert {code for _, code in cases} == {code for _, code in rows}


def test_the_codes_are_unique() -> None:
    codes = [row.code for row in table(Machine())]

    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("base", [SMALL, NODE], ids=["small", "node"])
def test_the_bases_of_the_cases_are_not_refused(tmp_path: Path, base: dict[str, Any]) -> None:
    refuse(changed(tmp_path, base, {}))


@pytest.mark.parametrize("code", RUN_FILE_CASES)
def test_a_row_is_triggered_by_configuration_alone_and_says_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    base, bad, words, _ = RUN_FILE_CASES[code]
    write_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = changed(tmp_path, base, bad)

    assert code in codes(config)
    assert any(words in problem for problem in told(config)), told(config)


@pytest.mark.parametrize("code", RUN_FILE_CASES)
def test_the_good_neighbour_of_a_row_passes_the_whole_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    write_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    base, _, _, good = RUN_FILE_CASES[code]

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
            "row-layout",
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

    assert code in codes(config)


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


@pytest.mark.parametrize(
    ("router", "code"),
    [({"emo": {"pool": 2}}, "emo-routing"), ({"lb_loss_weight": 0.01}, "auxiliary-loss"), ({"z_loss_weight": 0.1}, "")],
)
def test_the_file_of_a_core_model_is_looked_into(tmp_path: Path, router: dict[str, Any], code: str) -> None:
    model = {"model": {"block": {"a": {"routed_experts_router": {"emo": None, "lb_loss_weight": None} | router}}}}
    (tmp_path / "model.json").write_text(json.dumps(model))
    experts = CORE | {"core.expert_balanced_packing": True}
    assert codes(changed(tmp_path, experts, {})) == ([code] if code else [])
    assert codes(changed(tmp_path, experts, {"core.router_aux_loss_weight": 0.0})) == (
        [code] if code == "emo-routing" else []
    )


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


def refusal(path: Path, *flags: tuple[str, str]) -> str:
    with pytest.raises(InputError) as caught:
        refuse(load_config(path, flags))
    return str(caught.value)


def test_an_option_is_called_by_the_flag_that_gave_it(tmp_path: Path) -> None:
    path = write_toml(tmp_path, SMALL)

    assert refusal(path, ("trainer.global_batch_size", "6"), ("core.max_policy_lag", "9")) == (
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

    assert refusal(path) == (
        f"{path}: trainer.packing_max_tokens (line 20) = 96 requires trainer.sequence_packing (line 21) = true; turn "
        "packing on, or leave packing_max_tokens out (the flag --trainer.packing_max_tokens none unsets what a file "
        "sets)"
    )
    refuse(load_config(path, [("trainer.packing_max_tokens", "none")]))


def test_an_option_that_was_not_written_keeps_its_canonical_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml(SMALL | {"core.max_policy_lag": None}))

    assert "core.max_policy_lag = 0, but with 2 optimizer steps per collection its last samples are 1 step" in (
        refusal(path)
    )


def test_the_name_of_an_option_inside_a_value_is_left_alone(tmp_path: Path) -> None:
    path = write_toml(tmp_path, SMALL | {"data.task": "run.ranks = 3"})

    assert "data.task (line 6) = 'run.ranks = 3' is unknown" in refusal(path)


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
        problems, ("world >", "sequence_packing", "routing_replay", "pack_order", "balance_data"), strict=True
    ):
        assert words in problem


def test_balance_data_alone_is_refused_as_before(tmp_path: Path) -> None:
    (problem,) = told(changed(tmp_path, SMALL, {"miles.balance_data": True}))
    assert problem.endswith("leave miles.balance_data out")


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
    found = codes(config)
    event("refused" if found else "planned")
    if found:
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
