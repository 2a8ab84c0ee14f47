"""What one option is: its type, the places it may be written, its limits, how its text and values are read."""

import json
import math
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, get_args, get_origin

import attrs

from pack_miles.errors import InputError

#: Option types in words, as an error or the option table says them.
KINDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a non-empty text",
    tuple: "a list of distinct integers, none negative",
}


@attrs.frozen
class Limits:
    """The numbers an option accepts: `low` to `high`, without `low` when `above`, without `high` when `below`."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False

    def admit(self, value: float) -> bool:
        """Return whether the value is inside.

        >>> Limits(low=0, high=1, below=True).admit(1)
        False
        """
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        return self.high is None or not (value > self.high or (self.below and value == self.high))

    def __str__(self) -> str:
        """Return the limits in words: ` of at least 1`."""
        parts = []
        if self.low is not None:
            parts.append(f"{'above' if self.above else 'of at least'} {self.low:,}")
        if self.high is not None:
            parts.append(f"{'below' if self.below else 'at most'} {self.high:,}")
        return " " + " and ".join(parts) if parts else ""


@attrs.frozen
class Option:
    """One option: everything the option table, the flags, the loader and the error messages derive from."""

    section: str
    key: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    default: Any
    limits: Limits
    path: bool
    alike: bool
    help: str
    places: tuple[str, ...]

    @property
    def name(self) -> str:
        """The canonical dotted name, `core.packing_max_tokens`."""
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def required(self) -> bool:
        """Whether the run file or a flag must give it."""
        return self.default is attrs.NOTHING

    @property
    def allowed(self) -> str:
        """What the option accepts, in words."""
        words = " | ".join(self.choices) if self.choices else KINDS[self.kind]
        return words + str(self.limits) + (" (or leave it out)" if self.optional else "")

    def check(self, value: Any) -> Any:
        """Return the value as the option holds it (an int becomes a float, a list a tuple).

        Raises:
            ValueError: wrong type, outside the limits, or not finite; the text says what is allowed.
        """
        if value is None and self.optional:
            return None
        if not _fits(self.kind, value):
            raise ValueError(f"must be {self.allowed}; got {spell(value)} ({type(value).__name__})")
        if self.kind is float and not _finite(value):
            raise ValueError(f"must be finite, {self.allowed}; got {spell(value)[:40]}")
        if (self.choices and value not in self.choices) or (self.kind is str and not value):
            raise ValueError(f"must be {self.allowed}; got {spell(value)}")
        if self.kind in (int, float) and not self.limits.admit(value):
            raise ValueError(f"must be {self.allowed}; got {spell(value)}")
        return self.kind(value)

    def read(self, text: str) -> Any:
        """Return the checked value of a flag's text; `none` is absence where the option may be absent.

        Raises:
            ValueError: the text is not of the option's type, or its value is not allowed.
        """
        return self.check(_parse(self, text))


def _fits(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is tuple:
        return _distinct(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _distinct(value: Any) -> TypeGuard[list[int]]:
    whole = isinstance(value, (list, tuple)) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value
    )
    return whole and len(set(value)) == len(value)


def _parse(option: Option, text: str) -> Any:
    if option.optional and text == "none":
        return None
    if option.kind is bool:
        return {"true": True, "false": False}.get(text, text)
    if option.kind in (int, float):
        try:
            return int(text) if option.kind is int else float(text)
        except ValueError:
            return text
    if option.kind is tuple:
        try:
            return json.loads(text if text.startswith("[") else f"[{text}]")
        except json.JSONDecodeError:
            return text
    return text


def spell(value: Any) -> str:
    """Return a value as a run file spells it.

    >>> spell(True), spell("thd"), spell((0, 1)), spell(None)
    ('true', '"thd"', '[0, 1]', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,
    also: str = "",
    low: float | None = None,
    high: float | None = None,
    above: bool = False,
    below: bool = False,
    path: bool = False,
    alike: bool = False,
) -> Any:
    """Declare an option as a field of a section.

    `also` lists the other sections it may be written in; `path` marks a file name, which is taken relative to the run
    file; `alike` marks an option that does not change what a run computes, and so stays out of the digest.
    """
    metadata = {
        "help": help,
        "also": tuple(also.split()),
        "limits": Limits(low, high, above, below),
        "path": path,
        "alike": alike,
    }
    return attrs.field(default=default, metadata=metadata)


def options_of(section: str, values: type) -> Iterator[Option]:
    """Yield the options that the attrs class of a section declares, in order."""
    for field in attrs.fields(values):
        kind, choices, optional = _annotation(field.type)
        yield Option(
            section=section,
            key=field.name,
            kind=kind,
            choices=choices,
            optional=optional,
            default=field.default,
            limits=field.metadata["limits"],
            path=field.metadata["path"],
            alike=field.metadata["alike"],
            help=field.metadata["help"],
            places=tuple(f"{place}.{field.name}" for place in (section, *field.metadata["also"])),
        )


def _annotation(annotation: Any) -> tuple[type, tuple[str, ...], bool]:
    if get_origin(annotation) is Literal:
        return str, get_args(annotation), False
    if isinstance(annotation, UnionType) or NoneType in get_args(annotation):
        kind, choices, _ = _annotation(next(one for one in get_args(annotation) if one is not NoneType))
        return kind, choices, True
    return get_origin(annotation) or annotation, (), False


@attrs.frozen
class Section:
    """A section of the run file; its values are checked however it is made."""

    def __attrs_post_init__(self) -> None:
        """Check every value, and hold it as its option does.

        Raises:
            InputError: a value its option does not accept.
        """
        for declared in options_of(type(self).__name__.lower(), type(self)):
            try:
                value = declared.check(getattr(self, declared.key))
            except ValueError as error:
                raise InputError(f"{declared.name} {error}") from None
            object.__setattr__(self, declared.key, value)

    def as_dict(self) -> dict[str, Any]:
        """Return the values by key, lists for tuples: what JSON can hold."""
        values: Mapping[str, Any] = attrs.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
