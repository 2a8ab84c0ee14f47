import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pack_miles.cli import main
from pack_miles.settings.sections import OPTIONS, PLACES
from support.miles_config import NODE, SMALL, write_toml
from support.miles_rows import row, write_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Five thousand real rollouts that may lie beside the checkout; nothing depends on them.
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_rollouts.jsonl.gz"


def rollouts(folder: Path, count: int = 20) -> Path:
    rows = [row(20 + n % 30, 8, index=n, group_index=n // 4) for n in range(count)]
    return write_jsonl(folder / "rollouts.jsonl.gz", rows)


def test_validate_prints_a_line_for_each_area_and_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["validate", str(write_toml(tmp_path, SMALL))])

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines] == [
        *("file", "model", "data", "packing", "ranks", "steps", "loss", "scoring", "output", "machine"),
        "valid",
    ]


@pytest.mark.parametrize("example", ["dev", "node", "demo", "core"])
def test_the_examples_validate_and_plan_without_hardware(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(EXAMPLES / f"{example}.toml")

    assert main(["validate", path]) == 0
    assert main(["plan", path]) == 0
    assert "MILES arguments" in capsys.readouterr().out


def test_plan_prints_options_shape_scoring_and_forecast_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = write_toml(tmp_path, SMALL), rollouts(tmp_path)

    assert main(["plan", str(path), "--rollouts", str(file), "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["shape"] == {
        "samples_per_collection": 16,
        "samples_per_optimizer_step": 8,
        "optimizer_steps_per_collection": 2,
        "collections": 100,
        "ranks": 4,
        "expert_parallel_size": 2,
        "replicas": 2,
        "samples_per_rank_and_step": 2,
        "max_policy_lag_optimizer_steps": 1,
    }
    assert told["scoring_pass"] == {
        "standalone": True,
        "reason": "2 optimizer steps per collection",
        "optimizer_steps_per_collection": 2,
        "check_interval": 50,
        "check_tolerance": 0.001,
        "check_max_tolerance": None,
    }
    assert told["core"]["packing_max_tokens"] == 128
    assert told["miles"]["qkv_format"] == "thd"
    assert told["runtime_validated"] is False
    # 20 samples are two steps of eight; each rank holds two samples a step, at most 49 tokens each: one pack.
    assert (told["rollouts"]["complete_steps"], told["rollouts"]["tail_samples"]) == (2, 4)
    assert told["rollouts"]["forwards_per_rank"] == 2
    assert told["rollouts"]["one_sample_a_row_forwards_per_rank"] == 4


def test_plan_shows_packs_fill_work_and_bounds_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = write_toml(tmp_path, SMALL), rollouts(tmp_path)

    assert main(["plan", str(path), "--rollouts", str(file)]) == 0

    out = capsys.readouterr().out
    assert "20 samples, 2 complete optimizer steps of 8, 4 samples left over" in out
    assert "Forwards of a rank: 2, against 4 with one sample a row (50.0% fewer)" in out
    assert "not wall times" in out
    assert all(len(line) <= 80 for line in out.splitlines() if "x bound" in line)


def test_one_sample_and_one_step_are_told_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = write_toml(tmp_path, SMALL), rollouts(tmp_path, count=9)

    assert main(["plan", str(path), "--rollouts", str(file)]) == 0

    out = capsys.readouterr().out
    assert "9 samples, 1 complete optimizer step of 8, 1 sample left over" in out
    assert "Note: the last sample does not fill an optimizer step and stays untouched" in out


def test_a_forecast_of_many_steps_stays_on_a_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = write_toml(tmp_path, SMALL), rollouts(tmp_path, count=8 * 50)

    main(["plan", str(path), "--rollouts", str(file)])

    table = capsys.readouterr().out.split("Rollouts:")[1]
    assert len(table.splitlines()) < 30


def test_flags_override_the_file_in_order_and_under_every_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_toml(tmp_path, SMALL))
    flags = ["--trainer.packing_max_tokens", "256", "--core.packing_max_tokens=512", "--name", "other"]

    assert main(["plan", *flags, path, "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert (told["core"]["packing_max_tokens"], told["name"]) == (512, "other")


@pytest.mark.parametrize("command", ["validate", "plan"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--core.attention_backend", "torch"], "cannot keep the documents of one row apart"),
        (["--core.packing_max_tokens", "63"], "must cover core.max_sequence_length (line 10) = 64"),
        (
            ["--run.ranks", "3", "--miles.global_batch_size", "12"],
            "not a multiple of core.expert_parallel_size (line 11) = 2",
        ),
        (["--core.packing_max_tokens", "2.5"], "--core.packing_max_tokens must be an integer"),
        (
            ["--core.packing_max_token", "256"],
            "--core.packing_max_token: unknown option; did you mean core",
        ),
        (["--core.packing_max_tokens"], "expected one argument; see pack-miles"),
        (["--core.packing", "256"], "--core.packing: unknown option"),
        (["extra"], "'extra' is one argument too many"),
    ],
)
def test_a_mistake_ends_with_status_2_and_one_screen_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], words: str
) -> None:
    status = main([command, str(write_toml(tmp_path, SMALL)), *arguments])

    told = capsys.readouterr()
    assert status == 2
    assert words in told.err
    assert told.err.startswith("error: ")
    assert "Traceback" not in told.err
    assert told.out == ""
    assert len(told.err.splitlines()) < 24


@pytest.mark.parametrize("before", [True, False])
def test_debug_adds_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str], before: bool) -> None:
    command = ["validate", str(tmp_path / "none.toml")]

    status = main(["--debug", *command] if before else [*command, "--debug"])

    told = capsys.readouterr().err
    assert status == 2
    assert "Traceback" in told
    assert "no such file; give the path of a TOML run file" in told


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "the file is empty"),
        (
            [row(5, 2), row(5, 2, loss_mask=[1])],
            ":2: the sample of line 2 has 1 value of loss_mask but response_length 2",
        ),
        ([row(65, 2)], ":1: the sample of line 1 has 65 tokens but max_sequence_length is 64"),
        (['{"tokens": [1,'], ":1: not valid JSON"),
    ],
)
def test_a_bad_rollouts_file_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], words: str
) -> None:
    file = write_jsonl(tmp_path / "bad.jsonl", rows)

    status = main(["plan", str(write_toml(tmp_path, SMALL)), "--rollouts", str(file)])

    told = capsys.readouterr()
    assert status == 2
    assert words in told.err
    assert str(file) in told.err
    assert told.out == ""


def test_validate_here_looks_at_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = str(write_toml(tmp_path, NODE))

    assert main(["validate", node]) == 0
    assert main(["validate", node, "--here"]) == 2
    assert "cannot be trained by this release" in capsys.readouterr().err
    assert main(["validate", str(write_toml(tmp_path, SMALL)), "--here"]) == 0


def test_train_refuses_before_anything_is_started_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_toml(tmp_path, NODE)

    assert main(["train", str(path)]) == 2

    assert "cannot be trained by this release" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_validate_and_plan_write_nothing(tmp_path: Path) -> None:
    path, file = write_toml(tmp_path, SMALL), rollouts(tmp_path)

    main(["validate", str(path), "--here"])
    main(["plan", str(path), "--rollouts", str(file)])

    assert sorted(tmp_path.iterdir()) == [file, path]


NO_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "pack_torch", "numpy"}:
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Blocker())
sys.modules["torch"] = sys.modules["numpy"] = None
from pack_miles.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NO_TORCH, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_gpu_configuration_is_planned_on_a_machine_without_torch(tmp_path: Path) -> None:
    file = rollouts(tmp_path, count=300)

    planned = without_torch("plan", str(EXAMPLES / "node.toml"), "--rollouts", str(file), "--json")
    checked = without_torch("validate", str(EXAMPLES / "node.toml"), "--here")

    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["rollouts"]["complete_steps"] == 2
    assert checked.returncode == 2
    assert "torch cannot be imported" in checked.stderr
    assert "Traceback" not in checked.stderr


def test_an_audit_needs_no_torch(tmp_path: Path) -> None:
    audited = without_torch("audit", str(tmp_path))

    assert audited.returncode == 2
    assert str(tmp_path) in audited.stderr
    assert "Traceback" not in audited.stderr


@pytest.mark.skipif(not GSM8K.exists(), reason="the shared rollouts are not beside this checkout")
def test_real_rollouts_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "node.toml"), "--rollouts", str(GSM8K), "--json"]) == 0

    told = json.loads(capsys.readouterr().out)["rollouts"]
    with gzip.open(GSM8K) as lines:
        lengths = [len(json.loads(line)["tokens"]) for line in lines]
    complete = len(lengths) // 128
    assert (told["samples"], told["complete_steps"], told["tail_samples"]) == (5276, complete, 5276 - complete * 128)
    assert told["total"]["model_tokens"] == sum(lengths[: complete * 128])


def test_help_is_one_screen_and_points_at_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["validate"], ["plan"], ["train"]):
        assert main([*command, "--help"]) == 0
        out = capsys.readouterr().out
        assert len(out.splitlines()) <= 30
        assert "--help-options" in out
        assert "the value none unsets an option that may be left out" in out


def test_the_option_table_lists_every_option_with_its_places(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-options"]) == 0

    out = capsys.readouterr().out
    for place in PLACES:
        assert place in out
    for one in OPTIONS:
        assert one.help in out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pack-miles ")


def test_no_command_and_an_unknown_one_are_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["valdate"]) == 2
    assert "invalid choice: 'valdate'" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pack_miles", "plan", str(write_toml(tmp_path, SMALL))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()

    assert told == b""


def test_the_module_runs_as_the_command_does(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pack_miles", "validate", str(write_toml(tmp_path, SMALL))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith("valid\n")
