"""What a configuration is, as what JSON holds, to be compared when a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from pack_core.errors import PackError
from pack_core.stream import StreamOptions

from pack_torch.formats.format import Format
from pack_torch.iterable.order import Mixed, Shuffled

#: Policies for overlong documents that cut them.
CUTTING = ("truncate", "truncate_left", "split")


def check_format(format: Any, options: StreamOptions) -> None:
    """Raise unless it is a format, and one whose rows may be cut wherever these options may cut them."""
    if isinstance(format, type) or not callable(getattr(format, "encode", None)):
        raise PackError(f"format is {format!r}; give an object such as Sft(), which says what a row is")
    if Format not in type(format).__mro__:
        raise PackError(
            f"{type(format).__name__} does not inherit from pack_torch.Format, which brings what a format need not "
            "write itself; let it do so"
        )
    cuts = f"overlong={options.overlong!r}" if options.overlong in CUTTING else ""
    anywhere = f"strategy {options.strategy!r}" if options.cuts else ""
    if cuts and options.max_cost is not None:
        anywhere = anywhere or f"{cuts} with max_cost"
    whole = format.whole
    if whole is not None and (cuts or anywhere):
        raise PackError(
            f"{anywhere or cuts} cuts rows, and {type(format).__name__} rows cannot be cut: {whole}; choose "
            + ("another strategy" if options.cuts else "overlong='drop' or 'error'")
        )
    if anywhere and type(format).spans is not Format.spans:
        raise PackError(
            f"{anywhere} cuts rows at any token, and {type(format).__name__} rows have spans that stay whole; choose "
            + ("another strategy" if options.cuts else "overlong='drop' or 'error', or leave max_cost out")
        )


def described(value: Any) -> Any:
    """Return a value's type and fields; functions and other objects by name, for their addresses change.

    >>> from pack_torch import SharedPrompt
    >>> described(SharedPrompt())["shared"], described(len)
    (True, 'builtins.len')
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): described(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if attrs.has(type(value)):
        own = attrs.fields(type(value))
        return {"type": name} | {field.name: described(getattr(value, field.name)) for field in own}
    return name


def source_described(source: Any) -> Any:
    """Return what is known of a source without reading it.

    >>> source_described([{"n": 1}])
    ['builtins.list', 1]
    """
    if isinstance(source, Mixed):
        own = {"mix": [source_described(one) for one in source.sources], "names": list(source.names)}
        return own | {"weights": list(source.weights), "stop": source.stop, "seed": source.seed}
    if isinstance(source, Shuffled):
        return {"shuffle": source_described(source.source), "buffer": source.buffer, "seed": source.seed}
    size = len(source) if hasattr(source, "__len__") and hasattr(source, "__getitem__") else None
    return [f"{type(source).__module__}.{type(source).__qualname__}", size]
