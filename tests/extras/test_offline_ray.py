"""Packing on a real Ray Data of this machine: the single-machine plan, also when a worker dies in the middle."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
import ray
from pack_torch.offline import DatasetError, pack_dataset, pack_source
from pack_torch.offline.layout import Recipe
from pack_torch.offline.ray_data import pack_blocks, pack_files
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
    folder = tmp_path_factory.mktemp("blocks")
    paths = [str(folder / f"block{b}.arrow") for b in range(BLOCKS)]
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
