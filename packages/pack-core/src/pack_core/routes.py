"""Recorded expert ids, read from whatever holds them, and what is said when they do not fit."""

import struct
from array import array
from collections.abc import Sequence

from pack_core.errors import PackError, RoutingError
from pack_core.lengths import as_integer
from pack_core.recording import Recording

_INTEGER_FORMATS = frozenset("bBhHiIlLqQnN")


def read_routes(routes: object, rows: int, how: Recording, name: str) -> tuple[memoryview, int, tuple[int, ...]]:
    """Return the ids in a native integer format, how many layers they are of, and which of those are to be counted.

    Raises:
        RoutingError: the routes are missing, have the wrong shape, or hold what is no integer.

    >>> from pack_core.recording import recording
    >>> view, layers, selected = read_routes(bytes([3, 2]), 1, recording(layers=1, experts=4, top_k=2), "sample 'a'")
    >>> view.tolist(), layers, selected
    ([3, 2], 1, (0,))
    """
    if routes is None:
        raise RoutingError(f"{name} has no routes; record them during rollout, or plan without routes")
    if isinstance(routes, str):
        raise RoutingError(f"{name} has routes that are text; give the expert ids as integers")
    try:
        view = memoryview(routes)  # type: ignore[arg-type]  # whether it has a buffer is what is asked
    except (TypeError, ValueError, BufferError):
        listed = _listed(routes, rows, how, name)
        return memoryview(listed), len(how.selected), tuple(range(len(how.selected)))
    form = (view.format or "B").lstrip("@")
    if form.lstrip("<>=!") not in _INTEGER_FORMATS:
        kind = {"?": "booleans", "e": "floats", "f": "floats", "d": "floats", "g": "floats"}.get(form[-1], repr(form))
        raise RoutingError(f"{name} has routes that are {kind}; expert ids are integers, convert them where recorded")
    check_shape(view.shape or (), rows, how, name, itemsize=view.itemsize)
    if form not in _INTEGER_FORMATS:
        count = view.nbytes // view.itemsize
        wide = "Q" if form[-1].isupper() else "q"
        view = memoryview(array(wide, struct.unpack(f"{form[0]}{count}{form[1:]}", view.tobytes())))
    return view, how.layers, how.selected


def _listed(routes: object, rows: int, how: Recording, name: str) -> "array[int]":
    """Return the ids of the selected layers of nested lists, end to end."""
    tolist = getattr(routes, "tolist", None)
    nested = tolist() if callable(tolist) else routes
    if not isinstance(nested, Sequence):
        raise RoutingError(
            f"{name} has routes that are a {type(routes).__name__}; give an array or nested lists of ids"
        )
    if len(nested) != rows:
        raise _wrong_rows(len(nested), rows, name)
    ids: list[object] = []
    for row, of_row in enumerate(nested):
        have = len(of_row) if isinstance(of_row, Sequence) else 0
        if have != how.layers:
            raise RoutingError(
                f"{name} has {have} layers at row {row:,} but needs {how.layers}; record every decoder layer of every "
                "token, dense ones too"
            )
        for layer in how.selected:
            of_layer = of_row[layer]
            have = len(of_layer) if isinstance(of_layer, Sequence) else 0
            if have != how.top_k:
                raise RoutingError(
                    f"{name} has {have} ids at row {row:,} of layer {layer} but needs {how.top_k} (top_k); the row is "
                    "partly missing: record it anew or leave the sample out"
                )
            ids += of_layer
    try:
        if set(map(type, ids)) <= {int}:
            return array("q", ids)  # type: ignore[arg-type]  # every type was just looked at
        return array("q", [as_integer(value, "an id", least=-(2**63)) for value in ids])
    except (PackError, OverflowError):
        raise _not_whole(ids, how, name) from None


def _not_whole(ids: list[object], how: Recording, name: str) -> RoutingError:
    def fits(value: object) -> bool:
        try:
            return as_integer(value, "an id", least=-(2**63)) < 2**63
        except PackError:
            return False

    place = next(place for place, value in enumerate(ids) if not fits(value))
    row, within = divmod(place, len(how.selected) * how.top_k)
    return RoutingError(
        f"{name} has {ids[place]!r} ({type(ids[place]).__name__}) at row {row:,} of layer "
        f"{how.selected[within // how.top_k]}; an expert id is a whole number, 0 to {how.experts - 1}"
    )


def unknown_id(
    view: memoryview, shape: tuple[int, int, int], selected: Sequence[int], how: Recording, name: str
) -> RoutingError:
    """Return the error for the first id of a selected layer that is no expert, found the slow way.

    `view` and `selected` are as `read_routes` returned them, `shape` is `[rows, layers, top_k]` of the view.
    """
    rows, layers, top_k = shape
    form = (view.format or "B").lstrip("@")
    flat = memoryview(view.tobytes()).cast(form)  # type: ignore[call-overload]  # one of the integer formats
    size = layers * top_k
    for row in range(rows):
        ids = flat[row * size : (row + 1) * size].tolist()
        kept = [ids[layer * top_k : (layer + 1) * top_k] for layer in selected]
        for layer, of_layer in zip(how.selected, kept, strict=True):
            wrong = [value for value in of_layer if not 0 <= value < how.experts]
            if wrong:
                unset = -1 if form.islower() else 2 ** (8 * view.itemsize) - 1
                return _wrong_id(wrong[0], unset, kept, row, layer, how, name)
    raise AssertionError("every id is an expert")


def _wrong_id(
    value: int, unset: int, kept: list[list[int]], row: int, layer: int, how: Recording, name: str
) -> RoutingError:
    gone = sum(of_layer.count(unset) for of_layer in kept)
    total = len(kept) * how.top_k
    if value != unset:
        return RoutingError(
            f"{name}: row {row:,} of layer {layer} is routed to expert {value} but experts are 0 to {how.experts - 1}; "
            "were these routes recorded with another model? A layer that does not route belongs into dense_layers"
        )
    much = f"missing: all {total} ids" if gone == total else f"partly missing: {gone} of {total} ids"
    return RoutingError(
        f"{name}: row {row:,} is {much} of the counted layers are {value}, never set, the first in layer {layer}; "
        "record it anew or leave the sample out. A layer that does not route belongs into dense_layers"
    )


def check_shape(shape: Sequence[int], rows: int, how: Recording, name: str, *, itemsize: int = 8) -> None:
    """Raise unless routes have the shape `[rows, layers, top_k]`, or are as many ids in one flat row.

    >>> from pack_core.recording import recording
    >>> check_shape([4, 3, 2], 3, recording(layers=3, experts=4, top_k=2), "sample 'a'")
    Traceback (most recent call last):
    pack_core.errors.RoutingError: sample 'a' has routes of 4 rows but needs 3: its 4 tokens but the last, which ...
    """
    row = how.layers * how.top_k
    more = _bytes_of_wider(shape[0], rows * row) if len(shape) == 1 and itemsize == 1 else ""
    if len(shape) == 1:
        if shape[0] % row:
            raise RoutingError(
                f"{name} has {shape[0]:,} ids but needs {rows * row:,}: {rows:,} rows of {how.layers} layers and "
                f"top-{how.top_k}; check layers and top_k{more}"
            )
        shape = (shape[0] // row, how.layers, how.top_k)
    if len(shape) != 3 or tuple(shape[1:]) != (how.layers, how.top_k):
        raise RoutingError(
            f"{name} has routes of shape {list(shape)} but needs [{rows}, {how.layers}, {how.top_k}], which is "
            "[length - 1, layers, top_k]; record every decoder layer, dense ones too"
        )
    if shape[0] != rows:
        raise _wrong_rows(shape[0], rows, name, more)


def _wrong_rows(have: int, rows: int, name: str, more: str = "") -> RoutingError:
    return RoutingError(
        f"{name} has routes of {have:,} rows but needs {rows:,}: its {rows + 1:,} tokens but the last, which was "
        f"sampled and never run; record one row for every token that was run{more}"
    )


def _bytes_of_wider(have: int, need: int) -> str:
    if need and have in (2 * need, 4 * need, 8 * need):
        bits = 8 * have // need
        return f". Bytes hold one id each: view {bits}-bit ids as such, for example with memoryview(...).cast"
    return ""
