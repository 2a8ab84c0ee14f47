"""Values of files stay what they are: types of JSON lines, and of files that lie beside others in a folder."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_torch.cli import main
from pack_torch.offline import DatasetError, find_files, lines, pack_dataset, pack_source
from pack_torch.offline.kinds import can_hold
from pack_torch.offline.layout import Recipe
from pack_torch.offline.sources import ArrowSource


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def carried(path: Path, **chosen: Any) -> list[dict[str, Any]]:
    """Return the documents that files are read as."""
    return [row for table in find_files(path, **chosen).tables() for row in table.to_pylist()]


@pytest.mark.parametrize(
    ("before", "late", "told"),
    [
        (1, 2.7, "holds 2.7, while the lines before hold int64 and this one double"),
        (1, 2.0, "holds 2.0, while the lines before hold int64 and this one double"),
        (
            [1, 0],
            [0.5, 1.0],
            "holds [0.5,1.0], while the lines before hold list<item: int64> and this one list<item: d",
        ),
        ({"a": 1}, {"a": 1, "b": 7}, 'holds {"a":1,"b":7}, while the lines before hold struct<a: int64> and this one'),
        (
            [{"a": 1}],
            [{"b": 7}],
            'holds [{"b":7}], while the lines before hold list<item: struct<a: int64>> and this one list<',
        ),
        (0.5, True, "holds true, while the lines before hold double and this one bool"),
        ({"a": [0.5]}, {"a": [2.5, False]}, 'holds {"a":[2.5,false]}, which no column can hold'),
        (0.5, 2**53 + 1, "holds 9007199254740993, while the lines before hold double and this one int64"),
        (1, 2**64, "holds 18446744073709551616, which no column can hold"),
        (None, "x", 'holds "x", while the lines before hold null and this one string'),
        ("x", 1, "holds 1, while the lines before hold string and this one int64"),
    ],
)
def test_a_late_value_of_another_kind_is_refused_with_its_line_not_changed(
    before: Any,
    late: Any,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lines, "AT_A_TIME", 2)
    rows = [{"input_ids": [5, 6], "m": value} for value in (before, before, before, late, before)]
    given = write_lines(tmp_path / "in.jsonl", rows)
    for more in ([], ["--dry-run"]):
        arguments = ["pack", str(given), str(tmp_path / "out"), "--capacity", "8", "--per-document", "m", *more]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {given}:4: 'm' {told}")
        assert "leave 'm' out" in error


@pytest.mark.parametrize(
    ("values", "held"),
    [
        ([1, 2.5, 3, 4], [1.0, 2.5, 3.0, 4.0]),  # seen together at first
        ([0.5, 0.25, 3, None], [0.5, 0.25, 3.0, None]),  # whole numbers among those with a fraction, exactly
        ([{"b": 1, "a": 2}, {"b": 3}, {"a": 4, "b": 5}, {}], [{"b": 1, "a": 2}, {"b": 3, "a": None}] * 2),
        ([[1], [], [], [2]], [[1], [], [], [2]]),
    ],
)
def test_a_late_value_that_fits_is_held_exactly(
    values: list[Any], held: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "AT_A_TIME", 2)
    if isinstance(values[0], dict):
        held = [{"b": 1, "a": 2}, {"b": 3, "a": None}, {"b": 5, "a": 4}, {"b": None, "a": None}]
    given = write_lines(tmp_path / "in.jsonl", [{"input_ids": [5], "m": value} for value in values])
    assert [row["m"] for row in carried(given, per_document=["m"])] == held


def test_true_is_no_number_with_a_fraction(tmp_path: Path) -> None:
    rows = [{"input_ids": [5], "m": {"w": [0.5], "good": True}}, {"input_ids": [5], "m": {"w": [0.5, True]}}]
    with pytest.raises(DatasetError, match=r"in.jsonl:2: 'm' holds {\"w\":\[0.5,true\]}, which no column can hold"):
        find_files(write_lines(tmp_path / "in.jsonl", rows), per_document=["m"])
    assert carried(write_lines(tmp_path / "in.jsonl", rows[:1]), per_document=["m"]) == rows[:1]


def test_types_of_the_first_of_several_files_hold_for_all(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "w": {"a": 1}}])
    write_lines(tmp_path / "b.jsonl", [{"w": {"a": 1, "b": 7}, "input_ids": [1, 2]}])
    files = find_files(tmp_path, per_document=["w"])
    with pytest.raises(DatasetError, match=r"b.jsonl:1: 'w' holds .* while the lines before hold struct<a: int64>"):
        files.lengths()
    write_lines(tmp_path / "b.jsonl", [{"w": {"a": 1}, "input_ids": [1, 2], "x": 1}])
    with pytest.raises(DatasetError, match=r"b.jsonl:1: the line has column 'x'"):
        files.lengths()


def test_token_ids_with_a_fraction_are_refused_by_name(tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", [{"input_ids": [1, 2], "w": [0.5, 1]}, {"input_ids": [1.5], "w": [1]}])
    with pytest.raises(DatasetError, match=r"in.jsonl: column 'input_ids' holds list<item: double>, but token ids are"):
        find_files(given)
    for values in ([[1.0, 2.0]], [[True]]):
        with pytest.raises(DatasetError, match=r"'input_ids' holds .* but token ids are whole numbers"):
            pack_dataset(pa.table({"input_ids": values}), 4)
    assert pack_dataset(pa.table({"input_ids": [[1, 2]], "w": [[0.5, 1.0]]}), 4)[0]["w"] == [0.5, 1.0]


def test_columns_that_are_left_out_by_name_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2], "m": 1}, {"input_ids": [3], "m": "x"}]
    rows.append({"input_ids": [4], "extra": 2**80})
    given = write_lines(tmp_path / "in.jsonl", rows)
    files = find_files(given, ["input_ids"])
    assert files.lengths().tolist() == [2, 1, 1]
    assert files.left_out == ("m",)
    assert main(["pack", str(given), str(tmp_path / "out"), "--capacity", "8", "--columns", "input_ids"]) == 0
    assert pq.read_table(tmp_path / "out").column("input_ids").to_pylist() == [[1, 2, 3, 4]]
    capsys.readouterr()
    with pytest.raises(DatasetError, match=r"in.jsonl:2: the line has no 'labels'"):
        find_files(
            write_lines(tmp_path / "in.jsonl", [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}]),
            ["input_ids", "labels"],
        )
    with pytest.raises(DatasetError, match=r"there is no column 'x'; the columns are 'input_ids', 'labels'"):
        find_files(tmp_path / "in.jsonl", ["x"])


def write_table(path: Path, table: Any) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def one(kind: Any, values: list[Any], name: str = "input_ids") -> Any:
    return pa.table({name: pa.array(values, kind)})


@pytest.mark.parametrize("ending", [".arrow", ".parquet"])
@pytest.mark.parametrize(
    "second", [one(pa.list_(pa.int32()), [[4]]), one(pa.large_list(pa.int64()), [[4]]), one(pa.list_(pa.null()), [[]])]
)
def test_files_of_a_folder_in_other_types_are_packed_where_no_value_changes(
    ending: str, second: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "in").mkdir()
    write_table(folder / f"0{ending}", one(pa.list_(pa.null()), []))  # an empty one says nothing
    write_table(folder / f"a{ending}", one(pa.list_(pa.int64()), [[1, 2], [3]]))
    write_table(folder / f"b{ending}", second)
    tokens = [1, 2, 3, *second.column(0).to_pylist()[0]]
    assert find_files(folder).lengths().tolist() == [2, 1, len(tokens) - 3]
    for more in (["--dry-run"], []):
        assert main(["pack", str(folder), str(tmp_path / "out.arrow"), "--capacity", "8", *more]) == 0
        assert f"3 documents, {len(tokens)} tokens" in capsys.readouterr().out
    (part,) = (tmp_path / "out.arrow").glob("part-*")
    assert pa.ipc.open_stream(part.read_bytes()).read_all().column("input_ids").to_pylist() == [tokens]
    assert sorted(path.name for path in folder.iterdir()) == [f"0{ending}", f"a{ending}", f"b{ending}"]


@pytest.mark.parametrize("ending", [".arrow", ".parquet"])
@pytest.mark.parametrize(
    ("second", "told"),
    [
        (one(pa.list_(pa.int64()), [[1]], "ids"), "there is no column 'input_ids'; {first} has one"),
        (one(pa.list_(pa.string()), [["a"]]), "column 'input_ids' holds list<.*: string>, which cannot become list<"),
        (one(pa.struct({"a": pa.int64()}), [{"a": 1}]), "column 'input_ids' holds struct<a: int64>, which cannot"),
        (one(pa.list_(pa.float64()), [[1.0]]), "column 'input_ids' holds list<.*: double>, which cannot become list<"),
        (one(pa.list_(pa.uint64()), [[2**63]]), "column 'input_ids' does not fit the type that {first} has, list<"),
        (
            one(pa.list_(pa.int64()), [[1]]).append_column("more", [[1]]),
            "there is a column 'more', which {first} has not; name the columns",
        ),
    ],
)
def test_files_of_a_folder_that_cannot_lie_in_one_table_are_named(
    ending: str, second: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "in").mkdir()
    write_table(folder / f"a{ending}", one(pa.list_(pa.int64()), [[1, 2], [3]]))
    write_table(folder / f"b{ending}", second)
    for more in (["--dry-run"], []):
        assert main(["pack", str(folder), str(tmp_path / "out"), "--capacity", "8", *more]) == 2
        error = capsys.readouterr().err
        assert re.search(told.replace("{first}", f"{folder}/a{ending}"), error)
        assert error.startswith(f"error: {folder}/b{ending}: ")


def test_struct_fields_that_only_a_later_file_has_are_not_dropped(tmp_path: Path) -> None:
    for name, value in (("a", {"x": 1}), ("b", {"x": 1, "y": 2})):
        write_table(tmp_path / f"{name}.parquet", pa.table({"input_ids": [[1]], "m": [value]}))
    with pytest.raises(DatasetError, match=r"b.parquet: column 'm' holds struct<x: int64, y: int64>, which cannot"):
        find_files(tmp_path, per_document=["m"])
    assert find_files(tmp_path, ["input_ids"]).lengths().tolist() == [1, 1]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([[1]]), pa.array([[2]])], names=["a", "a"])
    write_table(tmp_path / "in.arrow", twice)
    with pytest.raises(DatasetError, match=r"in.arrow: there are 2 columns 'a'; rename them"):
        find_files(tmp_path / "in.arrow")
    both = twice.append_column("input_ids", [[[5]]])
    assert pack_dataset(both, 4, columns=["input_ids"])[0]["input_ids"] == [5]


def test_a_source_of_differing_files_names_both(tmp_path: Path) -> None:
    paths = (str(tmp_path / "a.arrow"), str(tmp_path / "b.arrow"))
    write_table(Path(paths[0]), one(pa.list_(pa.int64()), [[1]]))
    write_table(Path(paths[1]), one(pa.list_(pa.int32()), [[1]]))
    with pytest.raises(DatasetError, match=r"b.arrow: its columns are .*int32>, while those of .*a.arrow are .*int64>"):
        pack_source(ArrowSource(paths), Recipe(8))


def test_what_can_hold_what() -> None:
    kinds = [pa.int8(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.bool_(), pa.list_(pa.int8())]
    assert [[int(can_hold(kind, other)) for other in kinds] for kind in kinds] == [
        [1, 1, 0, 0, 0, 0, 0],  # integers: the cast itself refuses what is too large
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    # A cast of whole numbers to float16 is not looked after by Arrow.
    assert (can_hold(pa.float16(), pa.int64()), can_hold(pa.float64(), pa.float16())) == (False, True)
    assert all(can_hold(kind, pa.null()) and can_hold(kind, pa.dictionary(pa.int8(), kind)) for kind in kinds[:5])
