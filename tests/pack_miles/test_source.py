"""The file that describes an OLMo-core model: where it is looked for, what is read of it, and what is refused."""

import json
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest
from pack_miles.core.source import read_source, source_error
from pack_miles.errors import InputError
from pack_miles.settings.config import load_config
from support.miles_config import NODE, SMALL, write_toml


def test_json_and_toml_say_the_same_and_the_digest_is_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"d_model": 32, "block": {"n": 1}}')
    (tmp_path / "a.toml").write_text("d_model = 32\n[block]\nn = 1\n")
    first, second = (read_source(str(tmp_path / name)) for name in ("a.json", "a.toml"))
    assert first.configuration == second.configuration == {"d_model": 32, "block": {"n": 1}}
    assert first.digest == blake2b(b'{"d_model": 32, "block": {"n": 1}}', digest_size=16).hexdigest() != second.digest


def test_of_a_checkpoint_s_own_file_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": {"d_model": 32}, "optim": {}}))
    assert read_source(str(tmp_path / "config.json")).configuration == {"d_model": 32}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "org/model",
            None,
            "model.source = 'org/model' is no .json or .toml file and no folder; save one with json.dump(",
        ),
        ("gone.json", None, "gone.json' cannot be read: No such file or directory; save one"),
        ("a.json", "{", "a.json' is not valid: Expecting property name"),
        ("a.toml", "d_model", "a.toml' is not valid: "),
        ("a.json", "[1]", "a.json' holds no configuration but list; save one"),
    ],
)
def test_what_is_no_description_is_refused_with_the_way_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(InputError) as caught:
        read_source(name)
    assert words in str(caught.value)
    assert source_error(name) == str(caught.value)


def test_a_file_is_looked_for_beside_the_run_file_and_a_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    core = {"model.format": "olmo_core", "model.source": "model.json"}
    file = write_toml(tmp_path / "runs", SMALL | core)
    assert load_config(file).model.source == str(tmp_path / "runs" / "model.json")
    assert load_config(file, [("model.source", "other.toml")]).model.source == str(tmp_path / "other.toml")
    assert load_config(write_toml(tmp_path / "runs", NODE)).model.source == "org/model"


def test_validate_needs_neither_torch_nor_olmo_core_for_such_a_run(tmp_path: Path) -> None:
    file = write_toml(tmp_path, SMALL | {"model.format": "olmo_core", "model.source": "model.json"})
    words = (
        "import sys; sys.modules.update(torch=None, olmo_core=None); from pack_miles.cli import main; "
        f"sys.exit(main(['validate', {str(file)!r}]))"
    )
    told = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr


def test_a_checkpoint_is_its_configuration_and_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step30"
    folder.mkdir()
    assert "step30' holds no config.json; save one" in source_error(str(folder))
    (folder / "config.json").write_text(json.dumps({"model": {"d_model": 32}}))
    assert "holds config.json but no model_and_optim; give a checkpoint" in source_error(str(folder))
    (folder / "model_and_optim").mkdir()
    (folder / "model_and_optim" / "__0_0.distcp").write_bytes(b"1234")
    found = read_source(str(folder))
    assert found.configuration == {"d_model": 32}
    assert found.weights == folder / "model_and_optim"
    (folder / "model_and_optim" / "__0_0.distcp").write_bytes(b"12345")
    assert read_source(str(folder)).digest != found.digest != read_source(str(folder / "config.json")).digest
    monkeypatch.chdir(tmp_path.parent)
    file = write_toml(tmp_path, SMALL | {"model.format": "olmo_core", "model.source": "step30"})
    assert load_config(file).model.source == str(folder), "a folder is looked for beside the run file"
