from pathlib import Path
from typing import Any

import attrs
import pytest
from pack_miles.combinations import COMBINATIONS
from pack_miles.config import Config
from pack_miles.errors import InputError
from pack_miles.machine import Machine, holds_run, probe, writable
from pack_miles.refusals import machine_refusals, refusals, refuse, refuse_machine
from support.miles_config import NODE, SMALL, make_config

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
    "wandb": (SMALL, {"tracking.use_wandb": True}, "tracking.use_wandb = true is not in this release", {}),
}

#: A machine on which the run of `NODE` lacks nothing.
BLACKWELL = Machine(cuda_devices=8, capability=(10, 0), attention=frozenset(["flash_4"]))


def changed(folder: Path, base: dict[str, Any], settings: dict[str, Any]) -> Config:
    return make_config(folder, base | settings)


def told(config: Config) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        refuse(config)
    return caught.value.problems


def told_here(config: Config, machine: Machine) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        refuse_machine(config, machine)
    return caught.value.problems


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
    ("base", "settings", "code"),
    [
        (SMALL, {"core.attention_backend": "te"}, "packing-attention"),
        (NODE, {"core.attention_backend": "torch"}, "packing-attention"),
        (NODE, {"core.attention_backend": "te"}, "packing-attention"),
        (
            SMALL,
            {"core.sequence_packing": False, "core.packing_max_tokens": None, "miles.qkv_format": "thd"},
            "qkv-format",
        ),
        (SMALL, {"model.source": "x"}, "model-source"),
        (SMALL, {"data.prompt_data": "p.jsonl"}, "data-source"),
        (SMALL, {"miles.rollout_max_response_len": 64}, "sample-length"),
        (NODE | {"model.format": "olmo_core"}, {"core.attention_backend": "segment"}, "segment-attention"),
    ],
)
def test_the_other_ways_into_a_row_are_refused_too(
    tmp_path: Path, base: dict[str, Any], settings: dict[str, Any], code: str
) -> None:
    config = changed(tmp_path, base, settings)

    assert code in [row.code for row in COMBINATIONS if row.applies(config)]


def test_the_remedy_of_leaking_attention_fits_the_model(tmp_path: Path) -> None:
    (problem,) = told(changed(tmp_path, NODE, {"core.attention_backend": "torch"}))

    assert "set core.attention_backend = flash_4" in problem


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    config = changed(tmp_path, SMALL, {"run.ranks": 6, "tracking.use_wandb": True, "miles.balance_data": True})

    assert len(told(config)) == 3


@pytest.mark.parametrize("example", ["dev", "node", "demo"])
def test_the_examples_are_not_refused(example: str) -> None:
    from pack_miles.config import load_config

    refuse(load_config(Path(__file__).parents[2] / "examples" / f"{example}.toml"))


# --- what only the machine shows -------------------------------------------------------------------------------------


def test_a_machine_that_has_everything_passes(tmp_path: Path) -> None:
    refuse_machine(changed(tmp_path, SMALL, {}), Machine())


MACHINE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Machine, str, dict[str, Any], Machine]] = {
    "torch": (SMALL, {}, Machine(torch_error="ImportError: no"), "cannot be imported (ImportError: no)", {}, Machine()),
    "nccl-devices": (
        SMALL,
        {"run.backend": "nccl"},
        Machine(cuda_devices=3),
        "needs a CUDA device for each of 4 ranks; here are 3",
        {"run.backend": "nccl"},
        Machine(cuda_devices=4),
    ),
    "flash-device": (
        NODE,
        {},
        attrs.evolve(BLACKWELL, capability=(9, 0)),
        "core.attention_backend = 'flash_4' needs compute capability 10.0 to 12.0; here is compute capability 9.0",
        {},
        BLACKWELL,
    ),
    "attention-function": (
        NODE,
        {},
        attrs.evolve(BLACKWELL, attention=frozenset()),
        "needs flash_attn.cute.flash_attn_varlen_func, which cannot be imported",
        {},
        BLACKWELL,
    ),
    "train-format": (NODE, {}, BLACKWELL, "model.format = 'hf' cannot be trained by this release", {}, BLACKWELL),
    "world-size": (SMALL, {}, Machine(rank=0, world=2), "the launcher started 2 processes", {}, Machine(rank=0, world=4)),
    "output-writable": (SMALL, {"output.root": "run.toml/x"}, Machine(), "cannot be written", {}, Machine()),
    "output-used": (
        SMALL,
        {"output.root": "used"},
        Machine(),
        "already holds a run",
        {"output.root": "used", "run.resume": True},
        Machine(),
    ),
    "resume-nothing": (
        SMALL,
        {"run.resume": True},
        Machine(),
        "run.resume = true, but output.root",
        {"output.root": "used", "run.resume": True},
        Machine(),
    ),
}


def test_every_row_of_scope_machine_has_a_case() -> None:
    rows = machine_refusals(Machine())

    assert set(MACHINE_CASES) == {row.code for row in rows}
    assert {row.scope for row in rows} == {"machine"}


@pytest.mark.parametrize("code", MACHINE_CASES)
def test_a_machine_row_applies_and_its_good_neighbour_passes(tmp_path: Path, code: str) -> None:
    base, bad, bad_machine, words, good, good_machine = MACHINE_CASES[code]
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "training_contract_rank0.jsonl").write_text("")

    problems = told_here(changed(tmp_path, base, bad), bad_machine)
    neighbour = changed(tmp_path, SMALL if code == "train-format" else base, good)
    left = [row.code for row in machine_refusals(good_machine) if row.applies(neighbour)]

    assert any(words in problem for problem in problems), problems
    # Nothing but the small model trains, so what a checkpoint needs of a machine never comes alone.
    assert left == ([] if neighbour.model.format == "small" else ["train-format"])


@pytest.mark.parametrize(
    ("backend", "capability", "fits"),
    [
        ("flash_2", (7, 5), True),
        ("flash_2", None, False),
        ("flash_3", (9, 0), True),
        ("flash_3", (10, 0), False),
        ("flash_3", (8, 9), False),
        ("flash_4", (9, 0), False),
        ("flash_4", (10, 0), True),
        ("flash_4", (12, 0), True),
        ("flash_4", (12, 1), False),
    ],
)
def test_flash_backends_need_their_compute_capability(
    tmp_path: Path, backend: str, capability: tuple[int, int] | None, fits: bool
) -> None:
    machine = Machine(cuda_devices=8 if capability else 0, capability=capability, attention=frozenset([backend]))
    config = changed(tmp_path, NODE, {"core.attention_backend": backend})

    applying = [row.code for row in machine_refusals(machine) if row.applies(config)]

    assert ("flash-device" not in applying) == fits


def test_a_launcher_of_several_nodes_needs_devices_for_its_own_ranks_only(tmp_path: Path) -> None:
    config = changed(tmp_path, SMALL, {"run.backend": "nccl"})

    refuse_machine(config, Machine(cuda_devices=2, rank=0, world=4, local_ranks=2))


def test_only_the_first_rank_judges_the_output_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "training_contract_rank0.jsonl").write_text("")
    config = changed(tmp_path, SMALL, {})

    refuse_machine(config, Machine(rank=1, world=4))
    assert "already holds a run" in told_here(config, Machine(rank=0, world=4))[0]


def test_the_probe_reads_what_a_launcher_announces(tmp_path: Path) -> None:
    machine = probe(changed(tmp_path, SMALL, {}), {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})

    assert (machine.rank, machine.world, machine.local_ranks) == (1, 4, 2)
    assert machine.torch_error == ""


def test_the_probe_says_why_torch_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)

    machine = probe(changed(tmp_path, SMALL, {}), {})

    assert "torch" in machine.torch_error
    assert [row.code for row in machine_refusals(machine) if row.applies(changed(tmp_path, SMALL, {}))] == ["torch"]


def test_a_package_without_its_function_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder called like the package imports, as a namespace; the function decides."""
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    config = changed(tmp_path, NODE, {"core.attention_backend": "flash_2"})

    assert probe(config, {}).attention == frozenset()

    (tmp_path / "flash_attn" / "__init__.py").write_text("def flash_attn_varlen_func(): ...\n")
    monkeypatch.delitem(__import__("sys").modules, "flash_attn")
    __import__("importlib").invalidate_caches()
    assert probe(config, {}).attention == {"flash_2"}
    monkeypatch.delitem(__import__("sys").modules, "flash_attn")


def test_looking_at_the_output_folder_writes_nothing(tmp_path: Path) -> None:
    assert writable(str(tmp_path / "a" / "b" / "c"))
    assert not holds_run(str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []
