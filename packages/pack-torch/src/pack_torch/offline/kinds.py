"""Kinds of Arrow values: which are lists, text or numbers, and which can take the place of others unchanged."""

from typing import Any

import pyarrow as pa


def is_list(kind: Any) -> bool:
    """Return whether a value of a kind is a list.

    >>> is_list(pa.large_list(pa.int8())), is_list(pa.int8())
    (True, False)
    """
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    """Return whether a value of a kind is text.

    >>> is_text(pa.large_string()), is_text(pa.binary())
    (True, False)
    """
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_number(kind: Any) -> bool:
    """Return whether a value of a kind is a number or true or false, or a list of such at any depth.

    >>> is_number(pa.list_(pa.bool_())), is_number(pa.timestamp("s"))
    (True, False)
    """
    if is_list(kind):
        return is_number(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def can_hold(kind: Any, other: Any) -> bool:
    """Return whether a safe cast to a kind keeps every value of another one as it is, or refuses the value.

    Not every safe cast does: fields that a struct lacks are dropped, decimals are rounded to fewer places.

    >>> can_hold(pa.int32(), pa.int64()), can_hold(pa.float64(), pa.int64()), can_hold(pa.int64(), pa.float64())
    (True, True, False)
    >>> can_hold(pa.struct({"a": pa.int8()}), pa.struct({"a": pa.int8(), "b": pa.int8()}))
    False
    """
    if pa.types.is_null(other) or kind == other or (is_text(kind) and is_text(other)):
        return True
    if is_list(kind) and is_list(other):
        return can_hold(kind.value_type, other.value_type)
    if pa.types.is_struct(kind) and pa.types.is_struct(other):
        places = [kind.get_field_index(field.name) for field in other]  # -1 for none, or more than one
        return all(
            place >= 0 and can_hold(kind.field(place).type, field.type)
            for place, field in zip(places, other, strict=True)
        )
    if pa.types.is_dictionary(other):
        return can_hold(kind, other.value_type)
    if pa.types.is_integer(other):
        # That a cast to 16 bits with a fraction changes nothing, Arrow does not look.
        return bool(pa.types.is_integer(kind) or (pa.types.is_floating(kind) and kind.bit_width > 16))
    floating = pa.types.is_floating(kind) and pa.types.is_floating(other)
    return bool(floating and kind.bit_width >= other.bit_width)
