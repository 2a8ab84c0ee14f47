"""Examples, shares and steps against verl's own module (its PyPI wheel, without dependencies), MILES' and TRL's."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import trl
from pack_core import balance, schedule
from support.embedding import Rows, example


@pytest.fixture(scope="module")
def verl() -> Any:
    """verl's module of balancing, run without the package, whose imports need a cluster."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "utils" / "seqlen_balancing.py"
    stand_ins = {name: ModuleType(name) for name in ("verl", "verl.protocol", "verl.utils", "verl.utils.device")}
    stand_ins["verl.protocol"].__dict__.update(DataProto=object)
    stand_ins["verl.utils.device"].__dict__.update(get_device_name=lambda: "cpu")
    select = SimpleNamespace(index_select_tensor_dict=lambda batch, rows: batch[rows])
    stand_ins["verl.utils"].__dict__.update(tensordict_utils=select)
    kept = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        found = importlib.util.spec_from_file_location("verl_seqlen_balancing", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(kept)
    return module


def cost(length: int) -> int:
    return 24_576 * length + length**2


def rows_of(lengths: list[int]) -> Rows:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return Rows(input_ids=torch.arange(mask.numel()).view_as(mask), attention_mask=mask)


@pytest.mark.parametrize("seed", range(12))
def test_micro_batches_have_verls_shape_and_are_no_more(verl: Any, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [min(4_000, int(draw.lognormvariate(6.5, 1))) + 1 for _ in range(48)]
    options = {
        "num_batches_divided_by": draw.choice([None, 2]),
        "min_num_micro_batch": draw.choice([None, 9]),
        "force_group_size": draw.choice([1, 2]),
        "use_dynamic_bsz_balance": draw.random() < 0.7,
    }
    limit = 8_002
    ours, places = example("verl_micro_batches").rearrange_micro_batches(rows_of(lengths), limit, **options)
    theirs, expected = verl.rearrange_micro_batches(rows_of(lengths), limit, **options)
    assert type(places) is type(expected)
    assert all(type(row) is int for rows in places for row in rows)
    assert [set(one) for one in ours] == [set(theirs[0])] * len(ours)
    assert sorted(row for rows in places for row in rows) == sorted(row for rows in expected for row in rows)
    assert max(sum(lengths[row] for row in rows) for rows in places) <= limit
    assert len(places) <= len(expected)
    for one, rows in zip(ours, places, strict=True):
        assert torch.equal(one["input_ids"], rows_of(lengths)["input_ids"][rows])
    # verl puts results back where they came from by what we return.
    every = torch.cat([one["attention_mask"].sum(1) for one in ours])
    assert verl.restore_dynamic_batch(every, places).tolist() == lengths


def test_shares_are_as_even_as_verls_and_miles(verl: Any) -> None:
    from miles.utils import seqlen_balancing as miles

    draw = random.Random(5)
    for samples, ranks in ((64, 8), (256, 8), (512, 16), (40, 4)):
        lengths = [min(32_768, int(draw.lognormvariate(8, 1)) + 1) for _ in range(samples)]
        for equal in (True, False):
            for objective, costs in (("tokens", lengths), ("work", list(map(cost, lengths)))):
                largest = max(sum(costs[i] for i in share) for share in balance(lengths, ranks, objective, equal))
                for peer in (verl, miles):
                    shares = peer.get_seqlen_balanced_partitions(costs, ranks, equal)
                    assert largest <= max(sum(costs[i] for i in share) for share in shares)


def test_a_step_loses_less_than_verls_shares_and_is_never_over_the_capacity(verl: Any) -> None:
    # As verl does it: shares of equal count by Karmarkar-Karp over work, then each rank's own micro-batches, level.
    draw, capacity, ranks = random.Random(6), 32_768, 8
    lengths = [max(64, min(capacity, int(draw.lognormvariate(9.01, 0.8)))) for _ in range(512)]
    shares = verl.get_seqlen_balanced_partitions(list(map(cost, lengths)), ranks, True)
    held = []
    for share in shares:
        _, places = verl.rearrange_micro_batches(
            rows_of([lengths[i] for i in share]), capacity, use_dynamic_bsz_balance=True
        )
        held.append(sorted((sum(cost(lengths[share[row]]) for row in rows) for rows in places), reverse=True))
    count = max(map(len, held))
    theirs = sum(max(row[p] if p < len(row) else 0 for row in held) for p in range(count))
    step = schedule(lengths, ranks, capacity)
    assert all(sum(lengths[i] for i in one) <= capacity for packs in step.packs for one in packs)
    ours = sum(max(sum(cost(lengths[i]) for i in one) for one in packs) for packs in zip(*step.packs, strict=True))
    assert step.packs_per_rank <= count
    assert ours / (sum(map(cost, lengths)) / ranks) < 1.012
    assert ours < theirs


def pieces(packed: dict[str, list[list[int]]]) -> list[tuple[tuple[int, ...], ...]]:
    """The documents of packed rows, every column of each, in no order."""
    found = []
    for row, lengths in enumerate(packed["seq_lengths"]):
        starts = [sum(lengths[:place]) for place in range(len(lengths))]
        for start, length in zip(starts, lengths, strict=True):
            found.append(tuple(tuple(packed[name][row][start : start + length]) for name in ("input_ids", "labels")))
    return sorted(found)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_a_data_set_is_packed_as_trls_own_function_packs_it(strategy: str) -> None:
    draw = random.Random(7)
    rows = [[draw.randint(1, 99) for _ in range(min(70, int(draw.lognormvariate(2.5, 1)) + 1))] for _ in range(300)]
    columns = {"input_ids": rows, "labels": [[-token for token in row] for row in rows]}
    data = datasets.Dataset.from_dict(columns)
    theirs = {name: list(map(list, column)) for name, column in trl.pack_dataset(data, 48, strategy)[:].items()}
    ours = example("trl_pack_dataset").pack_dataset(columns, 48, strategy)
    if strategy == "wrapped":
        assert ours == theirs
    else:  # which of two equally long documents, and which of two packs with equal room, is another matter
        assert sorted(map(len, ours["labels"])) == sorted(map(len, theirs["labels"]))
        assert pieces(ours) == pieces(theirs)
    assert example("trl_pack_dataset").pack_dataset(data.data.table, 48, strategy).to_pydict() == ours
    assert example("trl_pack_dataset").pack_dataset(data, 48, strategy).to_dict() == ours


def test_a_data_set_is_given_back_as_what_it_came_in() -> None:
    pack_dataset = example("trl_pack_dataset").pack_dataset
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5]]})
    chosen = data.select([2, 1]).with_format("torch")  # rows by index, given out as tensors
    ours, theirs = pack_dataset(chosen, 4), trl.pack_dataset(chosen, 4)
    assert isinstance(ours, datasets.Dataset)
    assert ours.format["type"] == theirs.format["type"] == "torch"
    assert torch.equal(ours[0]["input_ids"], theirs[0]["input_ids"])
    splits = datasets.DatasetDict(train=data, test=data.select([0]))
    packed = pack_dataset(splits, 4)
    assert isinstance(packed, datasets.DatasetDict)
    assert {name: one.to_dict() for name, one in packed.items()} == {
        name: one.to_dict() for name, one in trl.pack_dataset(splits, 4).items()
    }
    assert pack_dataset(data.select([]), 4).to_dict() == {"input_ids": [], "seq_lengths": []}
