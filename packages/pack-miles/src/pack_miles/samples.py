"""Rollouts files: one sample a line under MILES' own field names, read strictly and one line at a time."""

import gzip
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated

import attrs
import msgspec
from pack_core import Sample

from pack_miles.errors import InputError, counted
from pack_miles.faults import called, json_fault, key_fault, type_fault

GZIP_MAGIC = b"\x1f\x8b"

#: Token ids are below it: they become 64-bit integers.
TOKENS = 2**63

#: A log-probability is at most 0, up to the rounding of the arithmetic that made it.
ROUNDING = 1e-6


class RolloutRow(msgspec.Struct, omit_defaults=True):
    """One rollout, a line of a rollouts file.

    `tokens` holds prompt and response together, the response being its last `response_length`; `loss_mask` and
    `rollout_log_probs` are per response token; `rollout_routed_experts` is `[tokens - 1][layers][top_k]` (the last
    token was sampled but never run). Fields of MILES that are not listed here are ignored, but a field that is almost
    one of these and stands in its place is refused as misspelt.

    >>> RolloutRow(tokens=[5, 6, 7], response_length=2).reward is None
    True
    """

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]
    response_length: int
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: list[list[list[int]]] | None = None
    reward: float | None = None
    index: int | str | None = None
    group_index: int | str | None = None
    weight_versions: list[str] | None = None


DECODER = msgspec.json.Decoder(RolloutRow)
KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@attrs.frozen
class RowLimits:
    """What a configuration says about its rows; None where it says nothing.

    `experts` bounds the ids of the layers in `moe_layers`; the columns of dense layers may hold anything.
    `vocabulary` bounds the token ids.
    """

    max_length: int | None = None
    vocabulary: int | None = None
    layers: int | None = None
    top_k: int | None = None
    experts: int | None = None
    moe_layers: tuple[int, ...] = ()


NO_LIMITS = RowLimits()


def read_rows(path: str | Path, limits: RowLimits = NO_LIMITS) -> Iterator[RolloutRow]:
    """Yield the rows of a rollouts file in order; gzip is recognized by its first bytes.

    Raises:
        InputError: naming file, line, sample, value, limit and remedy, for the first thing wrong.
    """
    first: RolloutRow | None = None
    shape: tuple[int, int] | None = None
    lines: dict[int | str, int] = {}
    for number, line, zipped in _lines(path):
        try:
            row = _decode(line, number, zipped)
            first = first or row
            check_row(row, number, limits)
            _check_identity(row, number, first, lines)
            shape = _check_same_shape(row, number, shape)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        yield row
    if first is None:
        raise InputError(f"{path}: the file is empty; a rollouts file has one JSON object a line")


def to_samples(rows: Iterable[RolloutRow]) -> list[Sample]:
    """Return what a plan needs of each row: its index (or line number when rows have none), length and group.

    >>> to_samples([RolloutRow(tokens=[5, 6, 7], response_length=2, group_index=4)])
    [Sample(id=1, length=3, group=4)]
    """
    return [
        Sample(id=number if row.index is None else row.index, length=len(row.tokens), group=row.group_index)
        for number, row in enumerate(rows, start=1)
    ]


def write_rows(path: str | Path, rows: Iterable[RolloutRow]) -> None:
    """Write rows as a rollouts file, gzip when the name ends in `.gz`; the file appears whole or not at all.

    Raises:
        InputError: a row that `read_rows` would refuse, named.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            if path.suffix == ".gz":
                # No name and no time in the header: the same rows give the same bytes.
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    _write(packed, path, rows)
            else:
                _write(raw, path, rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write(stream: IO[bytes] | gzip.GzipFile, path: Path, rows: Iterable[RolloutRow]) -> None:
    for number, row in enumerate(rows, start=1):
        try:
            check_row(row, number)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        stream.write(msgspec.json.encode(row) + b"\n")


def check_row(row: RolloutRow, number: int, limits: RowLimits = NO_LIMITS) -> None:
    """Raise what is wrong with one row; `number` names it when it has no index.

    Raises:
        ValueError: naming the sample, the value, the limit and the remedy.
    """
    name = _name(row, number)
    total, response = len(row.tokens), row.response_length
    if not 0 <= response < total:
        raise ValueError(
            f"{name} has response_length {response}, but it must be at least 0 and below its {total} tokens, for a "
            "prompt of one token at least; correct response_length or tokens"
        )
    if limits.max_length is not None and total > limits.max_length:
        raise ValueError(
            f"{name} has {counted(total, 'token')} but max_sequence_length is {limits.max_length:,}; raise it (and "
            "packing_max_tokens with it) or leave the sample out"
        )
    _check_tokens(name, row.tokens, limits.vocabulary)
    if row.loss_mask is not None:
        _check_length(name, "loss_mask", len(row.loss_mask), response)
        for place, value in enumerate(row.loss_mask):
            if value not in (0, 1):
                raise ValueError(f"{name} has loss_mask[{place}] = {value}; a mask holds only 0 and 1")
    if row.rollout_log_probs is not None:
        _check_length(name, "rollout_log_probs", len(row.rollout_log_probs), response)
        for place, chance in enumerate(row.rollout_log_probs):
            if not math.isfinite(chance):
                raise ValueError(f"{name} has rollout_log_probs[{place}] = {chance}; log-probabilities must be finite")
            if chance > ROUNDING:
                raise ValueError(
                    f"{name} has rollout_log_probs[{place}] = {chance}; the logarithm of a probability is at most 0, "
                    "write log-probabilities"
                )
    if row.reward is not None and not math.isfinite(row.reward):
        raise ValueError(f"{name} has reward {row.reward}; rewards must be finite, or null")
    if row.rollout_routed_experts is not None:
        _check_routes(name, row.rollout_routed_experts, total - 1, limits)


def _name(row: RolloutRow, number: int) -> str:
    return called(row.index, number)


def _check_tokens(name: str, tokens: list[int], vocabulary: int | None) -> None:
    limit = TOKENS if vocabulary is None else vocabulary
    if min(tokens) >= 0 and max(tokens) < limit:
        return
    place, token = next((place, token) for place, token in enumerate(tokens) if not 0 <= token < limit)
    why = "token ids are whole numbers from 0 that fit 64 bits; correct it or leave the sample out"
    if vocabulary is not None:
        why = f"the model of the run has token ids 0 to {vocabulary - 1}; the rollouts are of another model"
    raise ValueError(f"{name} has tokens[{place}] = {token}; {why}")


def _check_length(name: str, field: str, length: int, response: int) -> None:
    if length != response:
        raise ValueError(
            f"{name} has {counted(length, 'value')} of {field} but response_length {response}; give one for each "
            "response token"
        )


def _check_routes(name: str, routes: list[list[list[int]]], rows: int, limits: RowLimits) -> None:
    rule = "rollout_routed_experts is [tokens - 1][layers][top_k]"
    if len(routes) != rows:
        raise ValueError(
            f"{name} has routes of {counted(len(routes), 'token')} but needs {rows}: {rule}, the last token was "
            "never run; record the routes of every other token"
        )
    if not routes:
        return
    layers = limits.layers or len(routes[0])
    top_k = limits.top_k or (len(routes[0][0]) if routes[0] else 0)
    if not layers or not top_k:
        raise ValueError(
            f"{name} has routes of {counted(layers, 'layer')} and {counted(top_k, 'expert')} a token; {rule}, neither "
            "may be 0"
        )
    for place, token in enumerate(routes):
        if len(token) != layers:
            raise ValueError(
                f"{name} has routes of {counted(len(token), 'layer')} at row {place}, expected {layers}; {rule}"
            )
        for layer, experts in enumerate(token):
            if len(experts) != top_k:
                raise ValueError(
                    f"{name} has {counted(len(experts), 'expert')} at row {place}, layer {layer}, expected {top_k}; "
                    f"{rule}"
                )
    if limits.experts is not None:
        _check_experts(name, routes, limits.experts, limits.moe_layers)


def _check_experts(name: str, routes: list[list[list[int]]], experts: int, layers: tuple[int, ...]) -> None:
    for place, token in enumerate(routes):
        for layer in layers:
            if len(set(token[layer])) != len(token[layer]):
                raise ValueError(
                    f"{name} is routed to {token[layer]} at row {place}, layer {layer}, an expert twice; a token goes "
                    "to different experts: record the routes anew, or leave the sample out"
                )
            for expert in token[layer]:
                if not 0 <= expert < experts:
                    raise ValueError(
                        f"{name} is routed to expert {expert} at row {place}, layer {layer}, but the model has experts "
                        f"0 to {experts - 1}; the rollouts are of another model"
                    )


def _check_identity(row: RolloutRow, number: int, first: RolloutRow, lines: dict[int | str, int]) -> None:
    for field in ("index", "group_index"):
        if (getattr(row, field) is None) != (getattr(first, field) is None):
            has = "has no" if getattr(row, field) is None else "has an"
            other = "has one" if getattr(row, field) is None else "has none"
            raise ValueError(f"{_name(row, number)} {has} {field} but line 1 {other}; give all lines one or none")
    if row.index is not None and (earlier := lines.setdefault(row.index, number)) != number:
        raise ValueError(f"index {row.index!r} is also that of line {earlier}; every sample needs an index of its own")


def _check_same_shape(row: RolloutRow, number: int, shape: tuple[int, int] | None) -> tuple[int, int] | None:
    if not row.rollout_routed_experts:
        return shape
    own = (len(row.rollout_routed_experts[0]), len(row.rollout_routed_experts[0][0]))
    if shape is not None and own != shape:
        raise ValueError(
            f"{_name(row, number)} has routes of {counted(own[0], 'layer')} and top-{own[1]}, the lines before have "
            f"{shape[0]} and top-{shape[1]}; a file holds rollouts of one model"
        )
    return own


def _decode(line: bytes, number: int, zipped: bool) -> RolloutRow:
    if not line.strip():
        raise ValueError("the line is blank; a rollouts file has one JSON object a line")
    try:
        if fault := key_fault(line, number, KEYS.decode(line).keys()):
            raise ValueError(fault)
        return DECODER.decode(line)
    except msgspec.ValidationError as error:
        raise ValueError(type_fault(line, number, str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(json_fault(line, number, str(error), zipped)) from None


def _lines(path: str | Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield number and text of each line, and whether the file is gzip."""
    number = 0
    try:
        with Path(path).open("rb") as raw:
            zipped = raw.peek(2)[:2] == GZIP_MAGIC
            stream = gzip.GzipFile(fileobj=raw) if zipped else raw
            for number, line in enumerate(stream, start=1):
                yield number, line, zipped
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a rollouts file (JSON lines, gzip too)") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: the gzip file is truncated or damaged after line {number}: {error}; copy it again"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
