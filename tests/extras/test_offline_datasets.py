"""Hugging Face datasets into packed rows, and pictures of them."""

import sys
import tracemalloc
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_dataset
from pack_torch.cli import main
from pack_torch.offline import DatasetError, pack_dataset, to_dataset, write_rows
from support.offline_cases import documents, joined, lognormal, unpacked

LENGTHS = lognormal(400)


def lists(rows: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in rows]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return a dataset that lies on disk in two files."""
    folder = tmp_path_factory.mktemp("stored")
    Dataset.from_dict(documents(LENGTHS)).save_to_disk(folder, num_shards=2)
    return Dataset.load_from_disk(folder)


def test_a_stored_dataset_is_packed_whole_and_in_place(stored: Dataset) -> None:
    packed = pack_dataset(stored, 256)
    for name, whole in documents(LENGTHS).items():
        found = unpacked(packed, name)
        assert [joined(found[d]) for d in range(len(LENGTHS))] == whole


def test_shuffled_and_filtered_datasets_number_what_is_left(stored: Dataset) -> None:
    chosen = stored.shuffle(seed=3).select(range(100)).filter(lambda row: len(row["input_ids"]) > 9)
    assert 10 < len(chosen) < 100
    found = unpacked(pack_dataset(chosen, 256), "labels")
    assert [joined(found[d]) for d in range(len(chosen))] == [list(row) for row in chosen["labels"]]


def test_a_bad_document_that_was_filtered_out_is_no_obstacle() -> None:
    bad = Dataset.from_dict({"input_ids": [[1], [1, 2], [3]], "labels": [[1], [1], [3]]})
    with pytest.raises(DatasetError, match="document 1 has 2 values of 'input_ids' but 1 of 'labels'"):
        pack_dataset(bad, 4)
    good = bad.filter(lambda row: len(row["input_ids"]) == len(row["labels"]))
    assert pack_dataset(good, 4)[0]["input_ids"] == [1, 3]


def test_a_bad_document_is_named_by_its_place_in_the_shuffled_dataset() -> None:
    bad = Dataset.from_dict({"input_ids": [[1], [1, 2], [3]], "labels": [[1], [1], [3]]}).select([2, 0, 1])
    with pytest.raises(DatasetError, match="document 2 has 2 values"):
        pack_dataset(bad, 4)


def test_every_split_is_packed_by_itself_and_a_stream_is_refused(stored: Dataset) -> None:
    packed = pack_dataset(DatasetDict(train=stored, test=stored.select(range(5))), 256)
    assert {name: rows.losses.tokens for name, rows in packed.items()} == {"train": 0, "test": 0}
    assert sum(len(row["input_ids"]) for row in packed["test"]) == sum(LENGTHS[:5])
    with pytest.raises(DatasetError, match=r"IterableDataset; give a datasets\.Dataset"):
        pack_dataset(stored.to_iterable_dataset(), 256)


def test_rows_become_a_dataset_again_and_written_files_load(stored: Dataset, tmp_path: Path) -> None:
    packed = pack_dataset(stored.shuffle(seed=3), 256)
    again = to_dataset(packed, tmp_path / "rows.arrow", processes=2)
    assert lists(again) == lists(packed)
    write_rows(packed, tmp_path / "rows", part_tokens=2048)
    loaded = load_dataset("parquet", data_dir=str(tmp_path / "rows"), cache_dir=str(tmp_path / "cache"), split="train")
    assert lists(loaded) == lists(packed)
    with pytest.raises(DatasetError, match=r"does not end in '\.arrow'"):
        to_dataset(packed, tmp_path / "rows")
    with pytest.raises(DatasetError, match="documents was"):
        to_dataset(pack_dataset(stored.shuffle(seed=4), 256), tmp_path / "rows.arrow")


def test_where_all_is_dropped_the_dataset_is_empty_but_has_its_columns(tmp_path: Path) -> None:
    packed = pack_dataset(Dataset.from_dict({"input_ids": [[1] * 9]}), 5, overlong="drop")
    for _ in range(2):
        again = to_dataset(packed, tmp_path / "rows.arrow")
        assert (len(again), again.column_names) == (0, packed.column_names)


def test_the_format_of_the_dataset_does_not_matter(stored: Dataset) -> None:
    assert lists(pack_dataset(stored.with_format("torch"), 256)) == lists(pack_dataset(stored, 256))


def test_pictures_show_as_many_blocks_as_there_are_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "in.jsonl"
    Dataset.from_dict({"input_ids": [[1] * size for size in (60, 60, 40, 30)]}).to_json(given)
    for arguments in (["pack", str(given), str(tmp_path / "out"), "--capacity", "100"], ["advise", str(given)]):
        picture = tmp_path / f"{arguments[0]}.svg"
        assert main([*arguments, "--picture", str(picture)]) == 0
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")
        png = picture.with_suffix(".png")
        assert main([*arguments, "--picture", str(png)]) == 0
        assert png.read_bytes().startswith(b"\x89PNG")
    assert "Take a capacity of" in capsys.readouterr().out


def test_a_bar_is_shown_on_a_terminal(
    stored: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.to_parquet(tmp_path / "in.parquet")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["pack", str(tmp_path / "in.parquet"), str(tmp_path / "out"), "--capacity", "256"]) == 0
    assert "writing rows" in capsys.readouterr().err


def test_lengths_are_read_where_they_lie() -> None:
    """Planning takes what offsets and plan take, whatever the documents hold."""
    wide = Dataset.from_dict({"input_ids": np.zeros((2000, 3000), np.int32)})
    assert wide.data.nbytes > 20_000_000
    tracemalloc.start()
    try:
        packed = pack_dataset(wide, 9000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(packed) == 667
    assert peak < 2_000_000
