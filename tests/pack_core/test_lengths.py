"""Lengths from whatever holds integers."""

import decimal
from array import array
from typing import Any

import pytest
from pack_core import LengthError, Sample, as_lengths, pack
from support.core_ducks import Index, Row, Scalar

INTEGER_CODES = "bBhHiIlLqQ"


@pytest.mark.parametrize("code", INTEGER_CODES)
def test_every_integer_width_of_array_is_read(code: str) -> None:
    assert as_lengths(array(code, [1, 2, 120])) == array("q", [1, 2, 120])
    assert as_lengths(memoryview(array(code, [1, 2, 120]))) == array("q", [1, 2, 120])


@pytest.mark.parametrize("code", INTEGER_CODES)
def test_sums_of_narrow_integers_do_not_overflow(code: str) -> None:
    # 3 * 120 is over what a signed or unsigned byte holds, so packs of 360 tokens must not wrap around.
    assert list(pack(array(code, [120, 120, 120]), capacity=300)) == [[0, 1], [2]]


@pytest.mark.parametrize(
    "values",
    [
        [200, 200],
        (200, 200),
        range(200, 202),
        iter([200, 200]),
        (value for value in [200, 200]),
        memoryview(bytes([200, 200])),
        Row([200, 200]),
        [Scalar(200), Scalar(200)],
        [Index(200), 200],
    ],
    ids=lambda values: type(values).__name__,
)
def test_ordered_rows_of_integers_are_read(values: object) -> None:
    assert list(as_lengths(values)) in ([200, 200], [200, 201])  # type: ignore[arg-type]


def test_the_row_given_is_not_shared() -> None:
    given = array("q", [1, 2])
    read = as_lengths(given)
    given[0] = 9
    assert read[0] == 1


def test_no_lengths_are_an_empty_row() -> None:
    assert as_lengths([]) == array("q")


@pytest.mark.parametrize("wrong", [2.0, 2.5, float("nan"), True, None, "2", [2], decimal.Decimal(2), Scalar(True),
                                   Scalar(2.0), Scalar([2])], ids=repr)  # fmt: skip
def test_what_is_no_whole_number_is_named_by_its_position(wrong: object) -> None:
    with pytest.raises(LengthError, match=r"the sample at position 1 has length .* one whole number of tokens"):
        as_lengths([1, wrong, 3])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [0, -1, Scalar(0), Index(-5)])
def test_a_length_below_one_is_named_by_position_and_id(wrong: object) -> None:
    with pytest.raises(
        LengthError, match=r"the sample at position 1 has length (0|-\d); a sample has at least 1 token"
    ):
        as_lengths([1, wrong, 3])  # type: ignore[list-item]
    with pytest.raises(LengthError, match=r"sample 'b' \(position 1\) has length"):
        as_lengths([1, wrong, 3], ids=["a", "b", "c"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "values",
    [array("d", [1.0]), array("f", [1.0]), Row(["a"]), Row([1.0]), Row([True]), Row([[1], [2]]),
     memoryview(array("d", [1.0])), memoryview(b"abcd").cast("B", (2, 2)), memoryview(b"ab").cast("?")],
)  # fmt: skip
def test_rows_of_anything_else_are_refused(values: object) -> None:
    with pytest.raises(LengthError, match="position 0 has length"):
        as_lengths(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", ["12", b"12", bytearray(b"12"), {1: 2}, {1, 2}, frozenset([1])], ids=repr)
def test_text_and_unordered_collections_are_refused(values: object) -> None:
    with pytest.raises(LengthError, match=r"lengths are a \w+; give a list or array of integers"):
        as_lengths(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [5, None, Scalar(5), 2.5])
def test_one_number_is_no_row(value: object) -> None:
    with pytest.raises(LengthError, match="lengths are one"):
        as_lengths(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [[2**63], [1, 2**62, 2**62], array("Q", [2**64 - 1])])
def test_lengths_that_64_bits_cannot_sum_are_refused(values: object) -> None:
    with pytest.raises(LengthError, match="sum to more than 9,223,372,036,854,775,807 tokens"):
        as_lengths(values)  # type: ignore[arg-type]


def test_a_long_wrong_value_is_shortened_in_the_message() -> None:
    with pytest.raises(LengthError) as caught:
        as_lengths([list(range(10_000))])  # type: ignore[list-item]
    assert len(str(caught.value)) < 200


def test_a_sample_takes_the_integers_of_other_libraries() -> None:
    sample = Sample(Scalar(3), Scalar(7), Index(2))  # type: ignore[arg-type]
    assert (sample.id, sample.length, sample.group) == (3, 7, 2)
    assert [type(value) for value in (sample.id, sample.length, sample.group)] == [int, int, int]


class Column:
    """What columns of other libraries offer: their values by `to_pylist`, and what was asked of them."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.asked: list[str] = []

    def __len__(self) -> int:
        return len(self._values)

    def to_pylist(self) -> list[int]:
        self.asked.append("values")
        return list(self._values.tolist())


class ByArray(Column):
    """One that gives its memory by `__array__`."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.asked.append("memory")
        return self._values


class ByDlpack(Column):
    """One that gives its memory by DLPack."""

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append("memory")
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._values.__dlpack_device__()


@pytest.mark.parametrize("kind", [ByArray, ByDlpack, Column])
@pytest.mark.parametrize("count", [3, 5_000])
def test_a_column_is_read_by_its_memory_where_it_is_long_and_by_its_values_otherwise(
    kind: type[Column], count: int
) -> None:
    numpy = pytest.importorskip("numpy")
    column = kind(numpy.arange(1, count + 1, dtype=numpy.int32))
    assert as_lengths(column) == array("q", range(1, count + 1))  # type: ignore[arg-type]
    assert column.asked == (["memory"] if count > 3 and kind is not Column else ["values"])
    assert list(pack(column, capacity=count)) == list(pack(range(1, count + 1), capacity=count))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4"])
def test_long_rows_of_any_width_are_read_and_refused_as_short_ones(width: str) -> None:
    numpy = pytest.importorskip("numpy")
    row = numpy.resize(numpy.array([100, 7], dtype=width), 6_000)
    assert as_lengths(row) == array("q", [100, 7] * 3_000)
    assert as_lengths(row[::2]) == array("q", [100] * 3_000)
    row[4_999] = 0
    with pytest.raises(LengthError, match="the sample at position 4999 has length 0; a sample has at least 1 token"):
        as_lengths(row)
    with pytest.raises(LengthError, match="6,000 lengths but 1 ids"):
        as_lengths(row, ids=["a"])


@pytest.mark.parametrize("kernels", ["python", "numpy"])
@pytest.mark.parametrize("count", [3, 6_000])
def test_a_length_that_is_masked_is_missing(count: int, kernels: str) -> None:
    numpy = pytest.importorskip("numpy")
    row = numpy.ma.masked_array(numpy.ones(count, "int64"), mask=[place == 1 for place in range(count)])
    for read in (as_lengths, lambda values: pack(values, capacity=10, kernels=kernels)):
        with pytest.raises(LengthError, match="position 1 has length None"):
            read(row)
    row.mask = False
    assert as_lengths(row) == array("q", [1]) * count


@pytest.mark.parametrize("wrong", ["float64", "bool", "object", "matrix", "sum"])
def test_long_rows_that_are_no_lengths_are_refused(wrong: str) -> None:
    numpy = pytest.importorskip("numpy")
    row = numpy.ones(6_000, dtype="int64")
    rows = {
        "float64": (row.astype("float64"), "position 0 has length 1.0"),
        "bool": (row.astype("bool"), "position 0 has length True"),
        "object": (numpy.array([1] * 5_999 + [None], dtype=object), "position 5999 has length None"),
        "matrix": (row.reshape(3_000, 2), "position 0 has length"),
        "sum": (row * 2**62, "the lengths sum to more than"),
    }
    values, message = rows[wrong]
    with pytest.raises(LengthError, match=message):
        as_lengths(values)
    with pytest.raises(LengthError, match=message):
        pack(values, capacity=2**62, kernels="numpy")


def test_lengths_do_not_share_memory_with_what_they_were_read_from() -> None:
    given = array("q", [3]) * 5_000
    read = as_lengths(given)
    given[0] = 9
    assert read[0] == 3
