from pathlib import Path
from typing import Any

import pytest
from pack_miles.errors import InputError
from pack_miles.settings.config import load_config
from pack_miles.settings.sections import Core, Run
from support.miles_config import SMALL, toml, write_toml


def refusal(path: Path, *overrides: tuple[str, str]) -> str:
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_two_places_that_disagree_are_named_with_their_values_and_lines(tmp_path: Path) -> None:
    path = write_toml(tmp_path, {"output.root": "out", "trainer.max_policy_lag": 2, "async.max_policy_lag": 3})

    assert refusal(path) == (
        f"{path}: trainer.max_policy_lag (line 6) = 2 and async.max_policy_lag (line 8) = 3 set the same option "
        "(core.max_policy_lag) and disagree; keep one of them"
    )


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("trainer.sequence_packing", 1, "must be true or false; got 1 (int)"),
        ("trainer.packing_max_tokens", True, "must be an integer of at least 1 (or leave it out); got true (bool)"),
        ("trainer.packing_max_tokens", 2.0, "got 2.0 (float)"),
        ("trainer.packing_max_tokens", 0, "must be an integer of at least 1 (or leave it out); got 0"),
        ("trainer.max_sequence_length", "8192", 'must be an integer of at least 2; got "8192" (str)'),
        ("trainer.attention_backend", "flash", "must be torch | segment | flash_2 | flash_3 | flash_4 | te; got"),
        ("trainer.kl_coef", -0.5, "must be a number of at least 0; got -0.5"),
        ("optimizer.adam_beta1", 1.0, "must be a number of at least 0 and below 1; got 1.0"),
        ("optimizer.adam_eps", 0.0, "must be a number above 0; got 0.0"),
        ("optimizer.lr", True, "must be a number of at least 0; got true (bool)"),
        ("inference.rollout_temperature", 0, "must be a number above 0; got 0"),
        ("trainer.scoring_check_tolerance", True, "got true (bool)"),
        ("model.dense_layers_indices", [0, 0], "must be a list of distinct integers, none negative; got [0, 0]"),
        ("model.dense_layers_indices", [-1], "got [-1]"),
        ("model.dense_layers_indices", 0, "got 0 (int)"),
        ("data.task", "", 'must be a non-empty text (or leave it out); got ""'),
        ("output.root", "", 'must be a non-empty text; got ""'),
        ("optimizer.lr", 10**400, "must be finite, a number of at least 0; got 1000"),
        ("run.seed", 2**63, "must be an integer of at least 0 and at most 4,611,686,018,427,387,904"),
        ("run.ranks", [4], "must be an integer of at least 1; got [4] (list)"),
    ],
)
def test_a_wrong_value_says_what_is_allowed_and_where_it_stands(
    tmp_path: Path, place: str, value: Any, words: str
) -> None:
    path = write_toml(tmp_path, {place: value} if place == "output.root" else {"output.root": "out", place: value})

    message = refusal(path)

    assert message.startswith(f"{path}: {place} (line {4 if place == 'output.root' else 6}) ")
    assert words in message


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_refused_in_the_file_and_in_flags(tmp_path: Path, text: str) -> None:
    path = write_toml(tmp_path, {"output.root": "out"})
    with_number = tmp_path / "number.toml"
    with_number.write_text(path.read_text() + f"[optimizer]\nlr = {text}\n")

    assert "optimizer.lr (line 6) must be finite" in refusal(with_number)
    assert "--miles.lr must be finite" in refusal(path, ("miles.lr", text))


@pytest.mark.parametrize(
    ("place", "text", "words"),
    [
        ("trainer.sequence_packing", "yes", '--trainer.sequence_packing must be true or false; got "yes" (str)'),
        ("core.packing_max_tokens", "6k", "--core.packing_max_tokens must be an integer of at least 1"),
        ("run.ranks", "none", "--run.ranks must be an integer of at least 1"),
        ("model.dense_layers_indices", "a", "--model.dense_layers_indices must be a list of distinct integers"),
        ("core.packing_max_token", "5", "unknown option; did you mean core.packing_max_tokens?"),
        ("output.root", "", '--output.root must be a non-empty text; got ""'),
        ("name", "a b", "name must start with a letter or digit"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path: Path, place: str, text: str, words: str) -> None:
    assert words in refusal(write_toml(tmp_path, SMALL), (place, text))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("trainer.sequence_pakking", "unknown option; did you mean trainer.sequence_packing?"),
        ("inference.sequence_packing", "unknown option; did you mean"),
        ("trainer.no_such_thing_at_all", "unknown option; see pack-miles --help-options"),
        ("trainr.sequence_packing", "[trainr] (line 5): unknown section; did you mean trainer?"),
    ],
)
def test_an_unknown_option_or_section_suggests_the_nearest(tmp_path: Path, place: str, words: str) -> None:
    assert words in refusal(write_toml(tmp_path, {"output.root": "out", place: 1}))


def test_a_section_that_is_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('schema_version = 1\nname = "a"\ntrainer = 3\noutput = { root = "out" }\n')

    assert "trainer (line 3) must be a section, [trainer]; got 3" in refusal(path)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("lr", "did you mean optimizer.lr?"),
        ("packing_max_token", "did you mean trainer.packing_max_tokens?"),
        ("seed", "did you mean data.seed or run.seed?"),
        ("nane", "did you mean name?"),
        ("nothing_like_it", "see pack-miles --help-options"),
    ],
)
def test_a_key_outside_every_section_is_told_as_a_key(tmp_path: Path, key: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'schema_version = 1\nname = "a"\n{key} = 3\n[output]\nroot = "out"\n')

    assert refusal(path) == f"{path}: {key} (line 3): no option outside a section; {words}"


def test_a_missing_file_a_folder_and_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")

    assert "no such file" in refusal(tmp_path / "none.toml")
    assert "cannot be read" in refusal(tmp_path)
    assert "not a text file in UTF-8" in refusal(tmp_path / "bytes.toml")


def test_broken_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('schema_version = 1\nname = "a"\n[output\n')

    assert refusal(path).startswith(f"{path}:3: not valid TOML")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "schema_version is missing"),
        ("schema_version = 2", "schema_version is 2"),
        ("schema_version = true", "schema_version is true"),
        ('schema_version = "1"', 'schema_version is "1"'),
    ],
)
def test_another_schema_version_is_refused(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'{line}\nname = "a"\n')

    message = refusal(path)

    assert words in message
    assert "reads schema_version = 1" in message


@pytest.mark.parametrize("name", ["-a", ".a", "a b", "", "a/b", "ä"])
def test_a_name_that_could_not_be_a_file_name_is_refused(tmp_path: Path, name: str) -> None:
    assert "name must start with" in refusal(write_toml(tmp_path, SMALL, name=name))


def test_all_mistakes_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("schema_version = 1\n[trainer]\nmax_policy_lag = -1\nwhat = 1\n")

    with pytest.raises(InputError) as caught:
        load_config(path, [("run.ranks", "x")])

    assert len(caught.value.problems) == 5
    message = str(caught.value)
    assert message.startswith(f"{path}: 5 problems\n")
    for words in (
        "max_policy_lag (line 3)",
        "trainer.what",
        "--run.ranks",
        "name is missing",
        "output.root is missing",
    ):
        assert words in message


def test_a_flood_of_mistakes_stays_on_one_screen(tmp_path: Path) -> None:
    path = write_toml(tmp_path, {"output.root": "out"} | {f"run.option_{n}": 1 for n in range(100)})

    message = refusal(path)

    assert len(message.splitlines()) <= 20
    assert "... and 88 more" in message


def test_a_section_made_in_code_is_checked_too() -> None:
    with pytest.raises(InputError, match=r"core\.packing_max_tokens must be an integer of at least 1"):
        Core(packing_max_tokens=0)
    with pytest.raises(InputError, match=r"run\.ranks must be an integer"):
        Run(ranks=2.0)  # type: ignore[arg-type]


def test_the_line_of_an_option_is_left_out_where_it_cannot_be_told(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml({"output.root": "out"}).replace("[output]", 'trainer = { kl_coef = "x" }\n[output]'))

    assert f"{path}: trainer.kl_coef must be a number" in refusal(path)
