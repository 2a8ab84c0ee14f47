"""`pack_dataset` beside TRL's own, in its spellings: the same tokens, and as many rows when it sees all documents."""

from typing import Any

import pyarrow as pa
import pytest
import trl
from datasets import Dataset
from pack_torch.offline import pack_dataset
from support.offline_cases import documents, lognormal

LENGTHS = [*lognormal(900), 300, 700, 1]


def rows(dataset: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(row["input_ids"]), tuple(row["labels"])) for row in dataset]


@pytest.mark.parametrize("spelling", ["bfd", "bfd_split"])
def test_rows_hold_the_same_documents_and_are_as_many(spelling: str) -> None:
    dataset = Dataset.from_dict(documents(LENGTHS))
    theirs = trl.pack_dataset(dataset, 256, spelling, map_kwargs={"batch_size": len(dataset)})
    ours = pack_dataset(dataset, 256, spelling, add=("seq_lengths",))
    assert len(ours) == len(theirs)
    assert ours.column_names == theirs.column_names

    def documents_in(packed: Any) -> list[list[int]]:
        found = []
        for row in packed:
            assert [-value for value in row["labels"]] == row["input_ids"]
            begins = [sum(row["seq_lengths"][:place]) for place in range(len(row["seq_lengths"]))]
            found += [row["input_ids"][b : b + n] for b, n in zip(begins, row["seq_lengths"], strict=True)]
        return sorted(found)

    assert documents_in(ours) == documents_in(theirs)


def test_wrapped_rows_are_theirs() -> None:
    dataset = Dataset.from_dict(documents(LENGTHS))
    theirs = trl.pack_dataset(dataset, 256, "wrapped", map_kwargs={"batch_size": len(dataset)})
    assert rows(pack_dataset(dataset, 256, "wrapped")) == rows(theirs)


def test_planned_over_all_documents_there_are_fewer_rows_than_theirs_by_default() -> None:
    dataset = Dataset.from_dict(documents(lognormal(4000)))
    assert len(pack_dataset(dataset, 256, "bfd")) < len(trl.pack_dataset(dataset, 256, "bfd"))


def test_types_of_columns_are_theirs() -> None:
    table = pa.table({name: pa.array(v, pa.list_(pa.int32())) for name, v in documents([3, 2]).items()})
    theirs = trl.pack_dataset(Dataset(table), 8, "bfd").data.table.schema.remove_metadata()
    assert pack_dataset(table, 8, "bfd", add=("seq_lengths",)).table(0, 1).schema.equals(theirs)
