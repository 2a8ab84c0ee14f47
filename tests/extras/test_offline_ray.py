"""Packing on a real Ray Data of this machine: the single-machine plan, also when a worker dies in the middle."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from pack_torch.offline import DatasetError, pack_dataset, pack_source
from pack_torch.offline.layout import Recipe
from pack_torch.offline.ray_data import _PackFile, _PackTable, pack_blocks, pack_files
from pack_torch.offline.sources import ArrowSource
from support.offline_cases import documents, lognormal

#: Ray sets options of its own that it calls deprecated.
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CAPACITY = 256
BLOCKS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def tables() -> list[Any]:
    return [pa.table(documents(lognormal(150, seed))) for seed in range(BLOCKS)]


@pytest.fixture(scope="module")
def files(tables: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return written(tables, tmp_path_factory.mktemp("blocks"))


def written(tables: Sequence[Any], folder: Path) -> list[str]:
    """Arrow files of some tables, one of each."""
    paths = [str(folder / f"block{b}.arrow") for b in range(len(tables))]
    for path, table in zip(paths, tables, strict=True):
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return paths


def lists(rows: Any) -> list[dict[str, list[int]]]:
    return [{name: list(values) for name, values in row.items()} for row in rows]


def by_block(tables: list[Any], numbered: bool) -> list[dict[str, list[int]]]:
    """The rows of one machine that packs block after block."""
    rows = []
    first = 0
    for table in tables:
        for row in lists(pack_dataset(table, CAPACITY)):
            rows.append(row | {"documents": [d + first for d in row["documents"]]})
        first += table.num_rows if numbered else 0
    return rows


def test_a_plan_of_all_files_is_that_of_one_machine(files: list[str]) -> None:
    alone = lists(pack_source(ArrowSource(tuple(files)), Recipe(CAPACITY)))
    assert lists(pack_files(files, CAPACITY, plan="global", part_tokens=2048).iter_rows()) == alone


def test_plans_of_blocks_are_those_of_one_machine_for_the_same_blocks(tables: list[Any], files: list[str]) -> None:
    assert lists(pack_files(files, CAPACITY).iter_rows()) == by_block(tables, numbered=True)
    assert lists(pack_blocks(ray.data.from_arrow(tables), CAPACITY).iter_rows()) == by_block(tables, numbered=False)


def test_a_mistake_is_told_by_the_task_that_meets_it(files: list[str]) -> None:
    with pytest.raises(DatasetError, match="over the capacity of 32, the first being document"):
        pack_files(files, 32, plan="global")
    with pytest.raises(Exception, match=r"block\d.arrow: .* over the capacity of 32, the first being document"):
        pack_files(files, 32).materialize()
    with pytest.raises(DatasetError, match="plan is 'best'; it must be 'block' or 'global'"):
        pack_files(files, 32, plan="best")


@pytest.mark.parametrize("argument", ["columns", "per_document", "add"])
def test_one_name_for_a_list_of_names_is_refused_at_once(argument: str, files: list[str]) -> None:
    message = f"{argument} is the text 'labels'; it must be a list of names"
    for plan in ("block", "global"):
        with pytest.raises(DatasetError, match=message):
            pack_files(files, 32, plan=plan, **{argument: "labels"})
    with pytest.raises(DatasetError, match=message):
        pack_blocks(ray.data.range(1), 32, **{argument: "labels"})


def tokenized(make: Callable[[int], dict[str, Any]], count: int = 6, blocks: int = 2) -> Any:
    """A pipeline that makes the columns of each document from its number."""

    def columns(batch: dict[str, Any]) -> dict[str, list[Any]]:
        made = [make(int(number)) for number in batch["id"]]
        return {name: [document[name] for document in made] for name in made[0]}

    return ray.data.range(count, override_num_blocks=blocks).map_batches(columns, batch_size=None)


def table_of(dataset: Any) -> Any:
    return pa.concat_tables([table for table in ray.get(dataset.to_arrow_refs()) if table.num_rows])


def test_three_arrays_are_packed_as_three_lists() -> None:
    rows = pack_blocks(tokenized(lambda d: {"input_ids": np.arange(d + 1)}, 3, 1), 4).take_all()
    assert [list(row["input_ids"]) for row in rows] == [[0, 1, 2, 0], [0, 1]]
    assert [list(row["documents"]) for row in rows] == [[2, 0], [1]]


@pytest.mark.parametrize("length", [lambda d: 4, lambda d: d, lambda d: 3 * (d > 2)], ids=["equal", "from 0", "mixed"])
def test_one_dimensional_tensors_of_numbers_are_packed_as_lists(length: Callable[[int], int]) -> None:
    def arrays(d: int) -> dict[str, Any]:
        tokens = 10 * d + np.arange(length(d))
        return {"input_ids": tokens, "seen": tokens % 3 > 0, "weights": tokens / 7, "beside": np.array([d, d])}

    def plain(d: int) -> dict[str, Any]:
        return {name: column.tolist() for name, column in arrays(d).items()}

    for blocks in (2, 3):
        expected = table_of(pack_blocks(tokenized(plain, blocks=blocks), 6, per_document=["beside"]))
        # The second time blocks are slices of one, which begin in the middle of its memory.
        given = tokenized(arrays, blocks=2) if blocks == 2 else tokenized(arrays, blocks=1).materialize().repartition(3)
        packed = table_of(pack_blocks(given, 6, per_document=["beside"]))
        assert packed.drop_columns("beside").equals(expected.drop_columns("beside"))
        assert packed.to_pylist() == expected.to_pylist()


def test_narrow_numbers_stay_narrow_and_arrows_own_tensors_are_taken() -> None:
    narrow = table_of(pack_blocks(tokenized(lambda d: {"input_ids": np.arange(d + 1, dtype=np.int16)}), 6))
    assert narrow.schema.field("input_ids").type == pa.list_(pa.int16())
    storage = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), storage)
    work = _PackTable(Recipe(4), None, (), ("documents",))
    (packed,) = work(pa.table({"input_ids": tensors}).slice(1))
    assert packed.to_pydict() == {"input_ids": [[3, 4, 5, 6]], "documents": [[0, 1]]}


@pytest.mark.parametrize("value", [np.ones((2, 2)), np.array(["a", "bc"])], ids=["two dimensions", "text"])
def test_other_tensors_are_refused_where_they_are_to_be_packed(value: Any) -> None:
    def make(d: int) -> dict[str, Any]:
        return {"input_ids": np.arange(d + 1), "image": value}

    with pytest.raises(Exception, match=r"column 'image' holds ArrowTensorTypeV2.*one number a token.*per_document"):
        pack_blocks(tokenized(make), 6).materialize()
    with pytest.raises(Exception, match=r"column 'image' holds .*flatten"):
        pack_blocks(tokenized(make), 6, columns=["input_ids", "image"]).materialize()
    assert len(pack_blocks(tokenized(make), 6, columns=["input_ids"]).take_all()) == 4
    beside = pack_blocks(tokenized(make), 6, columns=["input_ids"], per_document=["image"]).take_all()
    assert len(beside) == 4
    if value.dtype == float:
        assert np.array_equal(beside[0]["image"][0], value)


EMPTY = pa.table({"input_ids": pa.array([[], []], pa.list_(pa.int64()))})
SHORT = pa.table({"input_ids": [[1, 2, 3], [4]]})


def test_a_block_with_nothing_to_pack_gives_no_rows(tmp_path: Path) -> None:
    blocks = [EMPTY, SHORT, EMPTY.slice(0, 0), EMPTY]
    (row,) = lists(pack_blocks(ray.data.from_arrow(blocks), 4).take_all())
    assert row == {"input_ids": [1, 2, 3, 4], "seq_lengths": [3, 1], "documents": [0, 1], "starts": [0, 0]}
    untyped = tokenized(lambda d: {"input_ids": [7] * (d // 2)}, 4)  # the first block's empty lists have no type
    assert [list(row["input_ids"]) for row in pack_blocks(untyped, 4).take_all()] == [[7, 7]]
    paths = written(blocks, tmp_path)
    expected = [row | {"documents": [2, 3]}]
    assert lists(pack_files(paths, 4).take_all()) == expected
    assert lists(pack_files(paths, 4, plan="global").take_all()) == expected


def test_what_a_block_lost_is_told_also_where_it_gives_no_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pack_torch.offline")
    work = _PackTable(Recipe(2, overlong="drop"), None, (), ("documents",))
    for block in (EMPTY, pa.concat_tables([EMPTY, SHORT.slice(0, 1)])):
        assert sum(made.num_rows for made in work(block)) == 0
    (path,) = written([EMPTY], tmp_path)
    files = _PackFile(Recipe(2), None, (), ())
    assert list(files(pa.table({"path": [path], "first": [0]}))) == []
    assert caplog.messages == [
        "a block: 2 documents without tokens are in no row",
        "a block: 2 documents without tokens are in no row",
        "a block: 1 document over the capacity dropped: 3 tokens lost",
        f"{path}: 2 documents without tokens are in no row",
    ]


@pytest.mark.parametrize("plan", ["block", "global"])
def test_files_with_nothing_at_all_to_pack_are_an_error_as_on_one_machine(plan: str, tmp_path: Path) -> None:
    paths = written([EMPTY, EMPTY.slice(0, 0), EMPTY], tmp_path)
    with pytest.raises(DatasetError, match=r"there is nothing to pack: 4 documents(?: in 3 files)?, none with a token"):
        pack_files(paths, 4, plan=plan)
    with pytest.raises(DatasetError, match="paths is empty; give one Arrow file or more"):
        pack_files([], 4, plan=plan)
    # Documents that were all dropped are no error on one machine, and are none here.
    paths = written([SHORT.slice(0, 1)], tmp_path)
    assert len(pack_dataset(SHORT.slice(0, 1), 2, overlong="drop")) == 0
    assert pack_files(paths, 2, plan=plan, overlong="drop").take_all() == []


@pytest.mark.parametrize("plan", ["block", "global"])
def test_one_path_is_one_file(plan: str, tmp_path: Path) -> None:
    (path,) = written([SHORT], tmp_path)
    for one in (path, Path(path)):
        assert lists(pack_files(one, 4, plan=plan).take_all()) == lists(pack_files([path], 4, plan=plan).take_all())


@pytest.mark.parametrize("plan", ["block", "global"])
def test_a_worker_killed_in_the_middle_changes_nothing(
    plan: str, tables: list[Any], files: list[str], tmp_path: Path
) -> None:
    expected = (
        by_block(tables, numbered=True)
        if plan == "block"
        else lists(pack_source(ArrowSource(tuple(files)), Recipe(CAPACITY)))
    )
    killed: list[int] = []

    def slow(table: Any) -> Any:
        """Leave the process id when a block begins, and take some time."""
        begun = tmp_path / f"{os.getpid()}-{time.monotonic_ns()}.begun"
        begun.touch()
        time.sleep(1.0)
        begun.rename(begun.with_suffix(".done"))
        return table

    def kill() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            begun = {path.name.split("-")[0] for path in tmp_path.glob("*.begun")}
            if len(begun) >= 2:  # several workers are at it
                killed.append(int(min(begun)))
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.02)

    killer = Thread(target=kill)
    killer.start()
    packed = pack_files(files, CAPACITY, plan=plan, part_tokens=5000)
    rows = lists(packed.map_batches(slow, batch_size=None, batch_format="pyarrow").iter_rows())
    killer.join()
    assert rows == expected
    (torn,) = tmp_path.glob("*.begun")
    assert torn.name.startswith(f"{killed[0]}-"), "the block it was at was not finished by it"
    assert len({path.name.split("-")[0] for path in tmp_path.glob("*.done")} - {str(killed[0])}) >= 1
