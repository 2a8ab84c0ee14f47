"""Packing Hugging Face datasets on the fly: read by index, or streamed and gone on with from their own state."""

import json
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
from pack_torch import PackedIterable, shuffle
from support.iterable_cases import TOKENS, numbers, resumed_at_every_pack, some_rows
from torch.utils.data import DataLoader

ROWS = some_rows(40, seed=2)


def rows_of_files(files: list[int]) -> Iterator[dict[str, Any]]:
    for number in files:
        yield from ROWS[number * 10 : number * 10 + 10]


def streamed(files: int = 4) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(rows_of_files, gen_kwargs={"files": list(range(files))})


def packed(source: Any, **options: Any) -> PackedIterable:
    return PackedIterable(source, format=TOKENS, capacity=12, window=3, block=8, **options)


@pytest.mark.parametrize(
    "make", [lambda: datasets.Dataset.from_list(ROWS), streamed, lambda: streamed().shuffle(seed=3, buffer_size=1)]
)
def test_it_goes_on_exactly_at_every_pack(make: Any) -> None:
    resumed_at_every_pack(lambda: packed(make()))


def test_a_stream_shuffled_here_goes_on_exactly() -> None:
    resumed_at_every_pack(lambda: packed(shuffle(streamed(), 6), epochs=2))


@pytest.mark.parametrize(("files", "world"), [(4, 1), (4, 2), (4, 3), (2, 4)])
def test_ranks_read_every_row_once(files: int, world: int) -> None:
    found = [number for rank in range(world) for number in numbers(packed(streamed(files), rank=rank, world=world))]
    assert sorted(found) == list(range(10 * files))


@pytest.mark.parametrize(("files", "world", "workers"), [(4, 1, 2), (4, 2, 2), (1, 1, 2)])
def test_workers_read_every_row_once(files: int, world: int, workers: int) -> None:
    found = []
    for rank in range(world):
        dataset = packed(streamed(files), rank=rank, world=world)
        found += numbers(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert sorted(found) == list(range(10 * files))


def test_too_few_files_for_ranks_and_workers_are_refused() -> None:
    dataset = packed(streamed(1), world=2)
    with pytest.raises(ValueError, match="in 1 files, which it deals out to workers by itself"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=2)))


def test_the_state_is_small_and_json() -> None:
    dataset = packed(streamed())
    for _ in dataset:
        assert len(json.dumps(dataset.state_dict())) < 4_000
