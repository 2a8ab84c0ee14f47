"""What is wrong with a line that is no row, in words: the sample, the field, its value, and what it must be."""

import json
import math
import re
from collections.abc import Collection
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

#: Field of a row -> what it must be.
RULES = {
    "tokens": "token ids, whole numbers from 0 that fit 64 bits, prompt and response together",
    "response_length": "a whole number, how many of the last tokens are the response",
    "loss_mask": "0 or 1 for each response token",
    "rollout_log_probs": "a number for each response token",
    "rollout_routed_experts": "expert ids, [tokens - 1][layers][top_k]",
    "reward": "a number, or null",
    "index": "a whole number or a text, or null",
    "group_index": "a whole number or a text, or null",
    "weight_versions": "a list of texts, or null",
}
#: How msgspec ends a message about a value inside an object.
PLACE = re.compile(r" - at `\$\.(\w+)(\S*)`$")
MISSING = re.compile(r"missing required field `(\w+)`")
KINDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}
NOT_FINITE = "numbers must be finite, the run that wrote it was not; leave the sample out"


def called(index: int | str | None, number: int) -> str:
    """Return what a sample is called in a message: by its index, or else by its line.

    >>> called("q17/3", 6), called(None, 6)
    ("sample 'q17/3'", 'the sample of line 6')
    """
    return f"the sample of line {number}" if index is None else f"sample {index!r}"


def type_fault(line: bytes, number: int, reason: str) -> str:
    """Return what is wrong with a line that is JSON but no row; `reason` is the decoder's.

    >>> type_fault(b'{"tokens": [1, 2], "index": 5}', 6, "Object missing required field `response_length`")
    'sample 5 has no response_length; it must be a whole number, how many of the last tokens are the response'
    """
    given = _read(line)
    if not isinstance(given, dict):
        return f"the line holds {KINDS.get(type(given), 'no object')}; a rollouts file has one JSON object a line"
    name = _name(given, number)
    if missing := MISSING.search(reason):
        return f"{name} has no {missing[1]}; it must be {RULES.get(missing[1], 'given')}"
    if (place := PLACE.search(reason)) is None or place[1] not in RULES:
        return f"{name}: {reason}; see the field names and types of MILES' samples"
    field, path = place.groups()
    try:
        value = given[field]
        for step in re.findall(r"\[(\d+)\]", path):
            value = value[int(step)]
    except (LookupError, TypeError):
        return f"{name} has a wrong {field} ({reason}); {field} must be {RULES[field]}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} has {field}{path} = {_spell(value)}; {NOT_FINITE}"
    return f"{name} has {field}{path} = {_spell(value)}; {field} must be {RULES[field]}"


def json_fault(line: bytes, number: int, reason: str, zipped: bool) -> str:
    """Return what is wrong with a line that is not JSON; `reason` is the decoder's.

    >>> json_fault(b'{"tokens": [1, 2], "index": 5, "reward": NaN}', 1, "", False)[:27]
    'sample 5 has reward = NaN; '
    """
    given = _read(line)
    if isinstance(given, dict) and (found := _not_finite(given)):
        place, value = found
        return f"{_name(given, number)} has {place} = {_spell(value)}; {NOT_FINITE}"
    hint = "write one JSON object a line"
    if not line.endswith(b"\n"):
        hint = "the file ends inside it and may be truncated; copy it again"
    elif zipped:
        hint += ", or the file is damaged; copy it again"
    return f"not valid JSON: {reason.removeprefix('JSON is malformed: ')}; {hint}"


def key_fault(line: bytes, number: int, keys: Collection[str]) -> str | None:
    """Return what is wrong with the keys of a line: one that is almost a field the line lacks; None when nothing is.

    >>> key_fault(b'{"index": 5}', 1, ["tokens", "loss_maks"])
    "sample 5 has an unknown field 'loss_maks'; did you mean 'loss_mask'? rename it, or leave it out"
    """
    for key in keys:
        if key not in RULES and (near := _nearest(key)) and near not in keys:
            name = _name(_read(line), number)
            return f"{name} has an unknown field {key!r}; did you mean {near!r}? rename it, or leave it out"
    return None


@lru_cache(maxsize=256)
def _nearest(key: str) -> str | None:
    # Close enough for a slip of the fingers, not for another field of MILES: teacher_log_probs is none of ours.
    return next(iter(get_close_matches(key, RULES, n=1, cutoff=0.82)), None)


def _read(line: bytes) -> Any:
    """Return what a lenient reader makes of a line, NaN and Infinity included; None when it cannot be read."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _name(given: Any, number: int) -> str:
    index = given.get("index") if isinstance(given, dict) else None
    return called(index if isinstance(index, (int, str)) and not isinstance(index, bool) else None, number)


def _not_finite(given: dict[str, Any]) -> tuple[str, float] | None:
    """Return the place and value of the first number that is not finite; without recursion, as lines may be deep."""
    left: list[tuple[str, Any]] = [("", given)]
    while left:
        place, value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return place, value
        if isinstance(value, dict):
            left += [(f"{place}.{key}" if place else key, inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            left += [(f"{place}[{number}]", value[number]) for number in reversed(range(len(value)))]
    return None


def _spell(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
