import importlib
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from pack_miles.errors import InputError
from pack_miles.settings.config import Config
from pack_miles.settings.machine import Machine, holds_run, probe, writable
from pack_miles.settings.refusals import machine_refusals, refuse_machine
from pack_miles.standing import Standing, latest, write
from support.machine_cases import MACHINE_CASES, leave_runs
from support.miles_config import NODE, SMALL, make_config, without_lines


def changed(folder: Path, base: dict[str, Any], options: dict[str, Any]) -> Config:
    return make_config(folder, base | options)


def told_here(config: Config, machine: Machine) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        refuse_machine(config, machine)
    return caught.value.problems


def test_a_machine_that_has_everything_passes(tmp_path: Path) -> None:
    refuse_machine(changed(tmp_path, SMALL, {}), Machine())


def test_every_row_of_scope_machine_has_a_case() -> None:
    rows = machine_refusals(Machine())

    assert set(MACHINE_CASES) == {row.code for row in rows}
    assert {row.scope for row in rows} == {"machine"}


@pytest.mark.parametrize("code", MACHINE_CASES)
def test_a_machine_row_applies_and_its_good_neighbour_passes(tmp_path: Path, code: str) -> None:
    base, bad, bad_machine, words, good, good_machine = MACHINE_CASES[code]
    leave_runs(tmp_path)
    (tmp_path / "model.json").write_text("{}")

    problems = told_here(changed(tmp_path, base, bad), bad_machine)
    neighbour = changed(tmp_path, SMALL if code == "train-format" else base, good)
    left = [row.code for row in machine_refusals(good_machine) if row.applies(neighbour)]

    assert any(words in without_lines(problem) for problem in problems), problems
    # A checkpoint of Hugging Face is not trained, so what it needs of a machine never comes alone.
    assert left == (["train-format"] if neighbour.model.format == "hf" else [])


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


def test_where_a_ray_cluster_puts_its_ranks_is_not_judged_here(tmp_path: Path) -> None:
    config = changed(tmp_path, SMALL, {"run.backend": "nccl", "run.engine": "ray"})
    alone = Machine(extras=frozenset(["ray"]))

    refuse_machine(config, attrs.evolve(alone, cluster="10.0.0.1:6379"))
    assert "needs a CUDA device for each of 4 ranks" in told_here(config, alone)[0]


def test_wandb_is_the_first_ranks_alone(tmp_path: Path) -> None:
    config = changed(tmp_path, SMALL, {"tracking.use_wandb": True})

    refuse_machine(config, Machine(rank=1, world=4))
    assert "wandb" in told_here(config, Machine(rank=0, world=4))[0]


def test_a_folder_called_like_an_optional_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B leaves a folder of its own name where a run is started."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    config = changed(tmp_path, SMALL, {"tracking.use_wandb": True})

    assert probe(config, {}).extras == frozenset()

    (tmp_path / "wandb" / "__init__.py").write_text("def init(): ...\n")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    assert probe(config, {}).extras == {"wandb"}
    assert probe(changed(tmp_path, SMALL, {}), {}).extras == frozenset(), "what is not wanted is not looked for"
    monkeypatch.delitem(sys.modules, "wandb")


@pytest.mark.parametrize(
    ("file", "root", "found"),
    [
        ("dump/events/trainer_cell0_rank3.jsonl", "dump/events", "dump/events"),
        ("dump/events/trainer_cell0_rank3.jsonl", "dump/events/runs/mine", "dump/events"),
        ("dump/events/trainer_cell0_rank3.jsonl", "dump/mine", ""),
        ("dump/training_contract_rank3.jsonl", "dump", ""),
    ],
)
def test_the_folder_of_miles_own_events_is_known_by_its_files(tmp_path: Path, file: str, root: str, found: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("{}\n")

    machine = probe(changed(tmp_path, SMALL, {"output.root": root}), {})

    assert machine.foreign == (str(tmp_path / found) if found else "")


def test_only_the_first_rank_judges_the_output_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "training_contract_rank0.jsonl").write_text("{}\n")
    config = changed(tmp_path, SMALL, {})

    refuse_machine(config, Machine(rank=1, world=4))
    assert "already holds a run" in told_here(config, Machine(rank=0, world=4))[0]


def test_the_probe_reads_what_a_launcher_announces(tmp_path: Path) -> None:
    machine = probe(changed(tmp_path, SMALL, {}), {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})

    assert (machine.rank, machine.world, machine.local_ranks) == (1, 4, 2)
    assert machine.torch_error == ""


def test_the_probe_says_why_torch_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

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
    monkeypatch.delitem(sys.modules, "flash_attn")
    importlib.invalidate_caches()
    assert probe(config, {}).attention == {"flash_2"}
    monkeypatch.delitem(sys.modules, "flash_attn")


def test_a_start_that_wrote_no_event_does_not_use_up_its_folder(tmp_path: Path) -> None:
    (tmp_path / "training_contract_rank0.jsonl").write_text("")

    assert not holds_run(str(tmp_path))


def test_looking_at_the_output_folder_writes_nothing(tmp_path: Path) -> None:
    assert writable(str(tmp_path / "a" / "b" / "c"))
    assert not holds_run(str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    leave_runs(tmp_path)
    config = changed(tmp_path, SMALL, {"output.root": "used", "run.resume": True})
    assert [row.code for row in machine_refusals(Machine()) if row.applies(config)] == ["resume-nothing"]


def test_a_checkpoint_whose_description_is_torn_is_named(tmp_path: Path) -> None:
    leave_runs(tmp_path)
    torn = tmp_path / "saved" / "checkpoints" / "collection_000002" / "standing.json"
    torn.write_text(torn.read_text()[:20])
    with pytest.raises(InputError, match=r"standing\.json cannot be read"):
        refuse_machine(changed(tmp_path, SMALL, {"output.root": "saved", "run.resume": True}), Machine())


def test_the_newest_checkpoint_is_the_one_of_most_collections(tmp_path: Path) -> None:
    for name in ("collection_999999", "collection_1000000", "collection_1000001.partial"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        write(folder, Standing(rollouts=1, completed_steps=1, world_size=1, configuration="x"))
    assert latest(tmp_path) == tmp_path / "checkpoints" / "collection_1000000"
    assert latest(tmp_path / "elsewhere") is None
