"""How a stream is packed: every option, checked."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from pack_core.errors import PackError
from pack_core.lengths import as_integer
from pack_core.stream.strategies import STRATEGIES
from pack_core.types.stream import Strategy

_ALLOWED = {
    "overlong": ("error", "drop", "truncate", "truncate_left", "split"),
    "last": ("pad", "keep", "drop"),
    "zero_length": ("error", "drop"),
}


def _integer(least: int, optional: bool = False) -> Any:
    def check(instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if value is not None or not optional:
            object.__setattr__(instance, attribute.name, as_integer(value, attribute.name, least=least))

    return check


def _one_of(instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    allowed = _ALLOWED[attribute.name]
    if value not in allowed:
        raise PackError(f"{attribute.name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


@attrs.frozen(kw_only=True)
class StreamOptions:
    """How documents that arrive are packed.

    Attributes:
        strategy: the name of one (`STRATEGIES`), or an object with a method `choose`, see `Strategy`.
        capacity: most tokens of a pack.
        window: most documents that wait. The strategy chooses once so many do; documents in the open pack do not wait.
        max_documents: most documents of a pack; None for no limit.
        max_cost: most cost of a pack, which is Σ length² of its documents unless they say otherwise; None for no limit.
            A part of a document costs its share of the tokens, squared, times what the document costs.
        overlong: what becomes of a document that no pack can hold: `"error"`, or `"drop"` it, `"truncate"` its end or
            `"truncate_left"` its beginning, or `"split"` it into full parts and a rest. A group is never cut.
        last: what becomes of the pack that is open when the stream ends: it is there as `"pad"`, to be filled up by
            whoever lays it out, and its padding is counted; or as `"keep"`, to stay short; or `"drop"` it.
        zero_length: what becomes of a document without tokens: `"error"`, or `"drop"` it. It is never in a pack.
        max_wait: most documents that may be admitted while one waits; then it is put into the next pack that has room,
            which is the open one or the one after. At least the window; None for no limit.
        max_idle: how many documents lost since one was last put into a pack are an error.
        seed: for strategies that draw.
        strategy_options: of a strategy given by its name.

    Raises:
        PackError: an option is not among what is allowed, which the message lists.

    >>> StreamOptions(capacity=2048, window=64).strategy
    'best_fit'
    """

    strategy: str | Strategy = "best_fit"
    capacity: int = attrs.field(validator=_integer(1))
    window: int = attrs.field(default=256, validator=_integer(1))
    max_documents: int | None = attrs.field(default=None, validator=_integer(1, optional=True))
    max_cost: int | None = attrs.field(default=None, validator=_integer(1, optional=True))
    overlong: Literal["error", "drop", "truncate", "truncate_left", "split"] = attrs.field(
        default="error", validator=_one_of
    )
    last: Literal["pad", "keep", "drop"] = attrs.field(default="pad", validator=_one_of)
    zero_length: Literal["error", "drop"] = attrs.field(default="error", validator=_one_of)
    max_wait: int | None = attrs.field(default=None, validator=_integer(1, optional=True))
    max_idle: int = attrs.field(default=10_000, validator=_integer(1))
    seed: int = attrs.field(default=0, validator=_integer(-(2**63)))
    strategy_options: Mapping[str, Any] = attrs.field(factory=dict)
    chooser: Strategy = attrs.field(init=False, repr=False, eq=False)
    cuts: bool = attrs.field(init=False, repr=False, eq=False)
    choices: Mapping[str, Any] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Refuse what contradicts, and make the strategy."""
        if self.max_wait is not None and self.max_wait < self.window:
            raise PackError(
                f"max_wait is {self.max_wait:,} but window is {self.window:,}; documents wait until the window is "
                "full, so make max_wait at least the window, or the window smaller"
            )
        chooser = _named(self.strategy, self.strategy_options, self.seed)
        object.__setattr__(self, "chooser", chooser)
        object.__setattr__(self, "cuts", bool(getattr(chooser, "cuts", False)))
        object.__setattr__(self, "choices", _choices(chooser))  # now, for it may change what it holds as it chooses

    def to_json(self) -> dict[str, Any]:
        """Return all options as what JSON holds, a strategy by its name and its own options: what a resume compares.

        >>> StreamOptions(capacity=2048).to_json()["strategy"]
        {'name': 'best_fit', 'options': {}}
        """
        own = {name: _plain(value) for name, value in attrs.asdict(self, filter=_is_own, recurse=False).items()}
        given = type(self.chooser)
        names = {kind: name for name, kind in STRATEGIES.items()}
        name = names.get(given, f"{given.__module__}.{given.__qualname__}")
        return own | {"strategy": {"name": name, "options": dict(self.choices)}}


def _is_own(attribute: "attrs.Attribute[Any]", value: object) -> bool:
    return attribute.name not in ("strategy", "strategy_options", "chooser", "cuts", "choices")


def _choices(chooser: Strategy) -> dict[str, object]:
    """Return how a strategy was made: the fields of one that attrs made, else what it holds that JSON has."""
    kind = type(chooser)
    if attrs.has(kind):
        return {field.name: _plain(getattr(chooser, field.name)) for field in attrs.fields(kind)}
    return {name: _plain(one) for name, one in getattr(chooser, "__dict__", {}).items() if _is_plain(one)}


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: object) -> object:
    if value != value:  # not a number is not even itself, and a state would not be its own
        return repr(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)


def _named(strategy: object, options: Mapping[str, Any], seed: int) -> Strategy:
    if not isinstance(strategy, str):
        if options or isinstance(strategy, type) or not callable(getattr(strategy, "choose", None)):
            what = "strategy_options are for strategies given by name" if options else "it has no method choose"
            what = "it is a class" if isinstance(strategy, type) else what
            raise PackError(f"strategy is {strategy!r}, and {what}; give a name, or an object with choose")
        return strategy  # type: ignore[return-value]  # it has the one method of the protocol
    if strategy not in STRATEGIES:
        raise PackError(f"strategy is {strategy!r}; it must be one of {', '.join(map(repr, STRATEGIES))}, or an object")
    kind = STRATEGIES[strategy]
    fields = attrs.fields_dict(kind)  # type: ignore[arg-type]  # every strategy here is made by attrs
    unknown, missing = (
        options.keys() - fields.keys(),
        [name for name, field in fields.items() if field.default is attrs.NOTHING and name not in options],
    )
    if unknown or missing:
        fault = f"has {', '.join(sorted(unknown))}" if unknown else f"lacks {', '.join(missing)}"
        raise PackError(f"strategy_options {fault}; {strategy} has {', '.join(fields) or 'no options'}")
    return kind(**({"seed": seed} if "seed" in fields else {}), **options) if "seed" not in options else kind(**options)
