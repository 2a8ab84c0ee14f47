"""A plan to bytes and back, and to a log record from which the same plan is made again."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import attrs
import msgspec

from pack_core.digest import digest
from pack_core.errors import RecordError
from pack_core.planner import plan as plan_samples
from pack_core.types import Bounds, Plan, Sample, Topology, Work
from pack_core.verify import verify

__all__ = ["decode", "digest", "encode", "rebuild", "record", "samples_of"]

VERSION = 1


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    version: int
    checksum: bytes
    body: msgspec.Raw


class _Samples(msgspec.Struct, frozen=True):
    ids: tuple[str | int, ...]
    lengths: tuple[int, ...]
    groups: tuple[str | int | None, ...]


class _Record(msgspec.Struct, frozen=True):
    version: int
    topology: Topology
    capacity: int
    step_samples: int
    equalize: str
    max_documents: int | None
    samples: _Samples
    tail_samples: int
    work: tuple[Work, ...]
    bounds: tuple[Bounds, ...]
    search: None
    digest: str


def encode(plan: Plan) -> bytes:
    """Return the plan as bytes: MessagePack of `[version, checksum, plan]`.

    Raises:
        RecordError: an integer of the plan does not fit 64 bits.

    >>> made = plan_samples([Sample("a", 3)], topology=Topology(ranks=1), capacity=8, step_samples=1)
    >>> decode(encode(made)) == made
    True
    """
    try:
        body = msgspec.msgpack.encode(plan)
    except OverflowError as error:
        raise RecordError(f"the plan holds an integer that does not fit 64 bits ({error}); check the lengths") from None
    return msgspec.msgpack.encode(_Sealed(VERSION, _checksum(body), msgspec.Raw(body)))


def decode(data: bytes) -> Plan:
    """Return the plan that `encode` made the bytes from.

    Raises:
        RecordError: the bytes are not of `encode`, are of another version, or were changed or cut short.

    >>> decode(b"nonsense")
    Traceback (most recent call last):
    pack_core.errors.RecordError: these 8 bytes are no plan ...
    """
    try:
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
        if sealed.version != VERSION:
            raise RecordError(f"the plan is of version {sealed.version} but this pack-core reads version {VERSION}")
        if _checksum(sealed.body) != sealed.checksum:
            raise RecordError(f"these {len(data):,} bytes are a damaged plan: the checksum differs; encode it again")
        return msgspec.msgpack.decode(sealed.body, type=Plan)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordError(f"these {len(data):,} bytes are no plan or are damaged: {error}") from None


def record(plan: Plan, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return every input of the plan and what came of it, in plain JSON values, for one log line.

    `rebuild` makes the identical plan from it.

    Args:
        plan: the plan.
        samples: the samples it was made from.

    Raises:
        RecordError: the plan does not hold for these samples; the first violation is named.

    >>> samples = [Sample("a", 3), Sample("b", 4)]
    >>> made = plan_samples(samples, topology=Topology(ranks=1), capacity=8, step_samples=2)
    >>> line = record(made, samples)
    >>> line["samples"], line["work"][0]["packs_per_rank"]
    ({'ids': ['a', 'b'], 'lengths': [3, 4], 'groups': [None, None]}, 1)
    """
    wrong = verify(plan, samples)
    if wrong:
        raise RecordError(f"the plan does not hold for these samples, give its own: {wrong[0]} ({len(wrong)} in all)")
    return {
        "version": VERSION,
        "topology": attrs.asdict(plan.topology),
        "capacity": plan.capacity,
        "step_samples": plan.step_samples,
        "equalize": plan.equalize,
        "max_documents": plan.max_documents,
        "samples": {
            "ids": [sample.id for sample in samples],
            "lengths": [sample.length for sample in samples],
            "groups": [sample.group for sample in samples],
        },
        "tail_samples": len(plan.tail),
        "work": [attrs.asdict(one) for one in plan.work],
        "bounds": [attrs.asdict(one) for one in plan.bounds],
        "search": None,
        "digest": plan.digest,
    }


def samples_of(record: Mapping[str, Any]) -> list[Sample]:
    """Return the samples that a record was made with.

    Raises:
        RecordError: the record is not one of `record`.

    >>> samples = [Sample("a", 3), Sample("b", 4, group=0)]
    >>> made = plan_samples(samples, topology=Topology(ranks=1), capacity=8, step_samples=2)
    >>> samples_of(record(made, samples)) == samples
    True
    """
    return _samples(_read(record))


def rebuild(record: Mapping[str, Any], samples: Sequence[Sample]) -> Plan:
    """Return the identical plan, made again from its record and the samples.

    Args:
        record: what `record` returned, also after a round trip through JSON.
        samples: the samples; compared with the recorded ones.

    Raises:
        RecordError: the record is not one of `record`; the samples differ from the recorded (the first difference is
            named); or the plan made now is not the recorded one.

    >>> samples = [Sample("a", 3), Sample("b", 4)]
    >>> made = plan_samples(samples, topology=Topology(ranks=1), capacity=8, step_samples=2)
    >>> rebuild(record(made, samples), samples) == made
    True
    """
    read = _read(record)
    _check_same(samples, _samples(read))
    made = plan_samples(
        samples,
        topology=read.topology,
        capacity=read.capacity,
        step_samples=read.step_samples,
        equalize=read.equalize,
        max_documents=read.max_documents,
    )
    if made.digest != read.digest:
        raise RecordError(
            f"the record has digest {read.digest} but its samples and options give {made.digest}; "
            "it was changed, or written by another version"
        )
    if (made.work, made.bounds, len(made.tail)) != (read.work, read.bounds, read.tail_samples):
        raise RecordError("the record has other work, bounds or tail than its packs give; it was changed")
    return made


def _read(record: Mapping[str, Any]) -> _Record:
    version = record.get("version") if isinstance(record, Mapping) else None
    if version is not None and version != VERSION:
        raise RecordError(f"the record is of version {version!r} but this pack-core reads version {VERSION}")
    try:
        return msgspec.convert(record, _Record)
    except msgspec.ValidationError as error:
        raise RecordError(f"this is no plan record: {error}") from None


def _samples(read: _Record) -> list[Sample]:
    ids, lengths, groups = read.samples.ids, read.samples.lengths, read.samples.groups
    if not len(ids) == len(lengths) == len(groups):
        raise RecordError(f"the record has {len(ids)} ids, {len(lengths)} lengths and {len(groups)} groups")
    return [Sample(*fields) for fields in zip(ids, lengths, groups, strict=True)]


def _check_same(given: Sequence[Sample], recorded: Sequence[Sample]) -> None:
    for position, (one, other) in enumerate(zip(given, recorded, strict=False)):
        for field in ("id", "length", "group"):
            now, then = getattr(one, field), getattr(other, field)
            if now != then:
                raise RecordError(
                    f"samples[{position}] has {field} {now!r} but {then!r} was recorded; give the samples of that plan"
                )
    if len(given) != len(recorded):
        raise RecordError(
            f"{len(given)} samples were given but {len(recorded)} recorded; give the samples of that plan"
        )


def _checksum(body: bytes | msgspec.Raw) -> bytes:
    return blake2b(body, digest_size=16).digest()
