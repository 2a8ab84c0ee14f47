"""Lengths from real NumPy arrays and torch tensors."""

from typing import Any

import numpy as np
import pytest
import torch
from pack_core import LengthError, Sample, Topology, as_lengths, equalize, pack, plan

NUMPY_WIDTHS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
TORCH_WIDTHS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", NUMPY_WIDTHS)
def test_numpy_integers_of_every_width_are_read_without_overflow(dtype: type) -> None:
    lengths: Any = np.array([120, 120, 120], dtype=dtype)
    packing = pack(lengths, capacity=300)
    assert list(packing) == [[0, 1], [2]]
    assert list(equalize(packing, lengths, count=3)) == [[0], [1], [2]]
    assert list(as_lengths(list(lengths))) == [120, 120, 120]


@pytest.mark.parametrize("dtype", TORCH_WIDTHS)
def test_torch_integers_of_every_width_are_read_without_overflow(dtype: torch.dtype) -> None:
    lengths = torch.tensor([120, 120, 120], dtype=dtype)
    packing = pack(lengths, capacity=300)
    assert list(packing) == [[0, 1], [2]]
    assert list(equalize(packing, lengths, count=3)) == [[0], [1], [2]]
    assert list(as_lengths(list(lengths))) == [120, 120, 120]


@pytest.mark.parametrize(
    "lengths",
    [
        np.array([1, 300])[::-1],
        np.array([300, 1], dtype=">i4"),
        np.array([300, 1], dtype=object),
        [np.array(300), torch.tensor(1)],
        torch.tensor([[300, 0], [1, 0]])[:, 0],
    ],
)
def test_strided_swapped_and_0d_integers_are_read(lengths: object) -> None:
    assert list(as_lengths(lengths)) == [300, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "lengths",
    [
        np.array([1.0, 2.0]),
        np.array([1, 2], dtype=np.float16),
        np.array([True, True]),
        np.array([[1, 2]]),
        np.array(["1"]),
        np.ma.masked_array([1, 2], mask=[True, False]),
        [np.float64(2)],
        [np.bool_(True)],
        [np.array([1])],
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([[1]]),
        [torch.tensor(True)],
        [torch.tensor(2.0)],
        [torch.tensor([1])],
    ],
)
def test_floats_booleans_and_nested_rows_are_refused_by_position(lengths: object) -> None:
    with pytest.raises(LengthError, match="the sample at position 0 has length"):
        as_lengths(lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [np.array(5), torch.tensor(5), np.int64(5)])
def test_one_number_is_no_row(lengths: object) -> None:
    with pytest.raises(LengthError, match="lengths are one"):
        as_lengths(lengths)  # type: ignore[arg-type]


def test_samples_made_of_scalars_are_plain_values() -> None:
    sample = Sample(np.str_("q"), np.uint8(200), torch.tensor(3))  # type: ignore[arg-type]
    assert [type(value) for value in (sample.id, sample.length, sample.group)] == [str, int, int]
    made = plan([sample], topology=Topology(np.int64(1)), capacity=np.int32(256), step_samples=torch.tensor(1))  # type: ignore[arg-type]
    assert (type(made.capacity), type(made.step_samples), type(made.topology.ranks)) == (int, int, int)


@pytest.mark.parametrize("dtype", TORCH_WIDTHS)
def test_a_long_tensor_is_read_where_it_lies(dtype: torch.dtype) -> None:
    lengths = torch.tensor([120, 7], dtype=dtype).repeat(2_000)
    assert list(as_lengths(lengths)) == [120, 7] * 2_000
    found = pack(lengths, capacity=300, strategy="best_fit_decreasing")
    assert found == pack([120, 7] * 2_000, capacity=300, strategy="best_fit_decreasing", kernels="python")
    lengths[3_001] = 0
    with pytest.raises(LengthError, match="position 3001 has length 0"):
        as_lengths(lengths)
    with pytest.raises(LengthError, match="position 0 has length True"):
        as_lengths(lengths.bool())
