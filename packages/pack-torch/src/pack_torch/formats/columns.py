"""Fields of many documents end to end in one array each, and back to what they were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

#: One sample as the dataset gives it, by field name.
Row = Mapping[str, Any]

#: What a document's values were before they were joined: a list or tuple, an array's dtype or a tensor's.
Origin = type | np.dtype[Any] | torch.dtype

Array = NDArray[Any]


@attrs.frozen
class Field:
    """A field with one value, or one row of values, per token.

    Args:
        pad: what stands where there is no token.
        shift: values belong to tokens, and row t is to hold that of token t + 1 of the same document, as labels do;
            a document's last row then holds `pad`, and no value crosses a boundary.
        dtype: NumPy's name of what it is stored as; None keeps what comes, where that can hold `pad`.

    Raises:
        ValueError: no such dtype, or one that cannot hold `pad`.

    >>> Field(pad=-100, shift=True, dtype="int64").pad
    -100
    """

    pad: float = 0
    shift: bool = False
    dtype: str | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse a dtype that there is not, or that would change the pad value."""
        if self.dtype is None:
            return
        try:
            given: np.dtype[Any] = np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype is {self.dtype!r}; give a name that NumPy knows, such as 'int64'") from None
        if not _holds(given, self.pad):
            raise ValueError(f"pad is {self.pad!r}, which {self.dtype} cannot hold; choose another of the two")


def holding(dtype: Any, pad: float) -> np.dtype[Any]:
    """Return the dtype, or a wider one where it cannot hold the pad value as it is.

    Raises:
        ValueError: there is none that holds the pad and all values of the dtype.

    >>> holding("uint8", 0), holding("uint8", -100), holding("int64", 0.5), holding("bool", -100)
    (dtype('uint8'), dtype('int16'), dtype('float64'), dtype('int8'))
    """
    given: np.dtype[Any] = np.dtype(dtype)
    if _holds(given, pad):
        return given
    wider: np.dtype[Any] = np.result_type(given, np.min_scalar_type(pad))
    whole = math.isfinite(pad) and pad == int(pad)
    if given.kind in "iu" and wider.kind == "f" and whole:
        raise ValueError(f"no dtype holds {given} and the pad value {pad!r}; name another of the two")
    return wider


def _holds(dtype: np.dtype[Any], pad: float) -> bool:
    if dtype.kind == "b":
        return pad in (0, 1)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return math.isfinite(pad) and pad == int(pad) and bool(limits.min <= pad <= limits.max)
    if dtype.kind == "f":  # rounding is what such numbers are for, but not to infinity
        return not math.isfinite(pad) or abs(pad) <= float(np.finfo(dtype).max)
    return True


def as_fields(fields: Mapping[str, Field | float]) -> Mapping[str, Field]:
    """Return the fields with plain pad values turned into a `Field`."""
    return {name: given if isinstance(given, Field) else Field(given) for name, given in fields.items()}


def keys_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the field names of the rows, which all have the same.

    Raises:
        ValueError: no rows, or one that has other fields than the first; names both.
    """
    if not rows:
        raise ValueError("there are no documents; a pack holds at least one")
    first = tuple(rows[0])
    if len({*map(tuple, rows)}) == 1:  # names in the same order compare much sooner
        return first
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            odd = sorted({*row} ^ {*first})
            raise ValueError(
                f"document {number} of the pack and document 0 do not have the same fields: {', '.join(odd)} in one of "
                "them only; give every document of a dataset the same"
            )
    return first


def joined(parts: Sequence[Any], field: Field, name: str) -> Array:
    """Return the parts end to end, `[T, ...]`, in the field's dtype.

    Raises:
        ValueError: they cannot be stored as that, or differ in shape; names the field.
    """
    if field.dtype is not None:
        try:
            return np.concatenate(parts, dtype=np.dtype(field.dtype), casting="safe")
        except (TypeError, ValueError, RuntimeError):
            pass  # an empty list looks like floats, and a tensor may lie elsewhere: look at each part
    try:
        arrays = [_as_array(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise ValueError(f"field {name!r} does not hold numbers that NumPy takes: {error}") from None
    kinds = [one.dtype for one in arrays if one.size] or [np.dtype("int64")]
    try:
        dtype = np.dtype(field.dtype) if field.dtype else holding(np.result_type(*kinds), field.pad)
        for one in arrays:
            _check_range(one, dtype)
        return np.concatenate(
            [one if one.size else np.zeros(one.shape, dtype) for one in arrays], dtype=dtype, casting="same_kind"
        )
    except (TypeError, ValueError) as error:
        where = f"field {name!r} cannot be stored" + (f" as {field.dtype}" if field.dtype else "")
        raise ValueError(f"{where}: {error}") from None


def joined_tokens(parts: Sequence[Any], field: Field, name: str) -> Array:
    """Return the tokens of all parts end to end, `[T]`.

    Raises:
        ValueError: as `joined`, or a part is not one row of tokens.
    """
    column = joined(parts, field, name)
    if column.ndim != 1:
        shape = list(np.shape(parts[0]))
        raise ValueError(
            f"field {name!r} has shape {shape}, and tokens are one row, [tokens]; take the row out of what a tokenizer "
            "returned as a batch"
        )
    return column


def _check_range(values: Array, dtype: np.dtype[Any]) -> None:
    """Raise where a whole number would come out as another one."""
    if dtype.kind not in "iu" or values.dtype.kind not in "iu" or not values.size or np.can_cast(values.dtype, dtype):
        return
    limits, least, largest = np.iinfo(dtype), int(values.min()), int(values.max())
    if least < limits.min or largest > limits.max:
        raise ValueError(f"{least if least < limits.min else largest} is not from {limits.min} to {limits.max}")


def _as_array(part: Any) -> Array:
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        # NumPy has no bfloat16; float32 holds all its values.
        return np.asarray(part.float() if part.dtype == torch.bfloat16 else part)
    return np.asarray(part)


def origins_of(parts: Sequence[Any]) -> Origin | tuple[Origin, ...]:
    """Return what the parts were: one answer where all were alike, else one each."""
    kinds = set(map(type, parts))
    if kinds == {np.ndarray}:
        alike = {part.dtype for part in parts}
        if len(alike) == 1:
            (dtype,) = alike
            return cast("np.dtype[Any]", dtype)
    elif len(kinds) == 1 and kinds <= {list, tuple}:
        return kinds.pop()
    return tuple(_origin(part) for part in parts)


def _origin(part: Any) -> Origin:
    return part.dtype if isinstance(part, (np.ndarray, torch.Tensor)) else type(part)


def restored(values: Array, origin: Origin) -> Any:
    """Return one document's values as they were given: other sequences than arrays, tensors and tuples as lists.

    >>> restored(np.array([1, 2]), list), restored(np.array([1, 2]), torch.int32)
    ([1, 2], tensor([1, 2], dtype=torch.int32))
    """
    if isinstance(origin, np.dtype):
        return values.astype(origin)
    if isinstance(origin, torch.dtype):
        return torch.from_numpy(np.ascontiguousarray(values)).to(origin, copy=True)
    plain = values.tolist()
    return tuple(plain) if origin is tuple else plain


def split_parts(column: Array, lengths: Sequence[int], origins: Origin | tuple[Origin, ...]) -> list[Any]:
    """Return the parts of a column as they were given."""
    parts = np.split(column, np.cumsum(lengths)[:-1])
    each = origins if isinstance(origins, tuple) else (origins,) * len(parts)
    return [restored(part, origin) for part, origin in zip(parts, each, strict=True)]


def check_lengths(parts: Iterable[Any], lengths: Sequence[int], name: str, tokens: str) -> None:
    """Raise unless every part has one value per token."""
    found = list(map(len, parts))
    if found != lengths:
        number = next(i for i, (one, two) in enumerate(zip(found, lengths, strict=True)) if one != two)
        raise ValueError(
            f"document {number} of the pack has {found[number]:,} values of {name!r} for {lengths[number]:,} of "
            f"{tokens!r}; a field per token has one value for each"
        )


def shifted(column: Array, ends: Array, pad: float) -> Array:
    """Return the column one row up inside each document.

    >>> shifted(np.array([1, 2, 3, 4, 5]), np.array([3, 5]), -100).tolist()
    [2, 3, -100, 5, -100]
    """
    moved = np.empty_like(column)
    moved[:-1] = column[1:]
    moved[ends - 1] = pad
    return moved


def unshifted(column: Array, starts: Array, heads: Array) -> Array:
    """Return what `shifted` was made from; `heads` are the first values of the documents."""
    back = np.empty_like(column)
    back[1:] = column[:-1]
    back[starts] = heads
    return back


@cache
def _counting(size: int) -> Array:
    numbers = np.arange(size)
    numbers.flags.writeable = False
    return numbers


def counting(size: int) -> Array:
    """Return 0, 1, ... `size - 1`, a view that cannot be written."""
    return _counting(1 << max(size - 1, 1).bit_length())[:size]
