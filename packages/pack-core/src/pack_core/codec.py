"""A plan to bytes and back, and to a log record from which the same plan is made again."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import attrs
import msgspec

from pack_core.digest import digest
from pack_core.errors import PackError, RecordError
from pack_core.planner import Step, ending_after, plan_by, searched
from pack_core.types import Bounds, DispatchCounts, Plan, Sample, Search, SearchTrace, Topology, Work
from pack_core.verify import verify

__all__ = ["decode", "digest", "encode", "rebuild", "record", "samples_of"]

VERSION = 2


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
    pack_order: str
    samples: _Samples
    tail_samples: int
    work: tuple[Work, ...]
    arrival: tuple[Work, ...]
    bounds: tuple[Bounds, ...]
    search: Search | None
    traces: tuple[SearchTrace, ...]
    layers: tuple[int, ...]
    routed_layers: int
    digest: str


def encode(plan: Plan) -> bytes:
    """Return the plan as bytes: MessagePack of `[version, checksum, plan]`.

    Raises:
        RecordError: an integer of the plan does not fit 64 bits.

    >>> from pack_core import plan
    >>> made = plan([Sample("a", 3)], topology=Topology(ranks=1), capacity=8, step_samples=1)
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


def record(plan: Plan, samples: Sequence[Sample], counts: DispatchCounts | None = None) -> dict[str, Any]:
    """Return every input of the plan and what came of it, in plain JSON values, for one log line.

    `rebuild` makes the identical plan from it.

    Args:
        plan: the plan.
        samples: the samples it was made from.
        counts: the counts it was made with, if any: the figures of expert work are checked against them.

    Raises:
        RecordError: the plan does not hold for these samples; the first violation is named.

    >>> samples = [Sample("a", 3), Sample("b", 4)]
    >>> from pack_core import plan
    >>> made = plan(samples, topology=Topology(ranks=1), capacity=8, step_samples=2)
    >>> line = record(made, samples)
    >>> line["samples"], line["work"][0]["packs_per_rank"]
    ({'ids': ['a', 'b'], 'lengths': [3, 4], 'groups': [None, None]}, 1)
    """
    wrong = verify(plan, samples, counts)
    if wrong:
        raise RecordError(f"the plan does not hold for these samples, give its own: {wrong[0]} ({len(wrong)} in all)")
    return {
        "version": VERSION,
        "topology": attrs.asdict(plan.topology),
        "capacity": plan.capacity,
        "step_samples": plan.step_samples,
        "equalize": plan.equalize,
        "max_documents": plan.max_documents,
        "pack_order": plan.pack_order,
        "samples": {
            "ids": [sample.id for sample in samples],
            "lengths": [sample.length for sample in samples],
            "groups": [sample.group for sample in samples],
        },
        "tail_samples": len(plan.tail),
        "work": [attrs.asdict(one) for one in plan.work],
        "arrival": [attrs.asdict(one) for one in plan.arrival],
        "bounds": [attrs.asdict(one) for one in plan.bounds],
        "search": None if plan.search is None else attrs.asdict(plan.search),
        "traces": [{**attrs.asdict(one), "order": list(one.order)} for one in plan.traces],
        "layers": list(plan.layers),
        "routed_layers": plan.routed_layers,
        "digest": plan.digest,
    }


def samples_of(record: Mapping[str, Any]) -> list[Sample]:
    """Return the samples that a record was made with.

    Raises:
        RecordError: the record is not one of `record`.

    >>> samples = [Sample("a", 3), Sample("b", 4, group=0)]
    >>> from pack_core import plan
    >>> made = plan(samples, topology=Topology(ranks=1), capacity=8, step_samples=2)
    >>> samples_of(record(made, samples)) == samples
    True
    """
    return _samples(_read(record))


def rebuild(record: Mapping[str, Any], samples: Sequence[Sample], counts: DispatchCounts | None = None) -> Plan:
    """Return the identical plan, made again from its record and the samples.

    A balanced order is searched again, a search that its clock cut short for as many attempts as were made then. Where
    the search followed routes it needs their counts for that; without them the recorded order is laid out again, which
    proves the packs but not the search, and the figures of expert work are the record's.

    Args:
        record: what `record` returned, also after a round trip through JSON.
        samples: the samples; compared with the recorded ones.
        counts: the counts that the plan was made with, if any.

    Raises:
        RecordError: the record is not one of `record`; the samples differ from the recorded (the first difference is
            named); or the plan made now is not the recorded one.

    >>> samples = [Sample("a", 3), Sample("b", 4)]
    >>> from pack_core import plan
    >>> made = plan(samples, topology=Topology(ranks=1), capacity=8, step_samples=2)
    >>> rebuild(record(made, samples), samples) == made
    True
    """
    read = _read(record)
    _check_same(samples, _samples(read))
    _check_traces(read, len(samples))
    if counts is not None and (counts.layers, counts.routed_layers) != (read.layers, read.routed_layers):
        raise RecordError(
            f"the counts are of layers {list(counts.layers)} of {counts.routed_layers} but the record of "
            f"{list(read.layers)} of {read.routed_layers}; give those of that plan"
        )
    try:
        made = _again(read, samples, counts)
    except PackError as error:
        raise RecordError(f"the recorded plan cannot be made again: {error}") from error
    if made.digest != read.digest:
        raise RecordError(
            f"the record has digest {read.digest} but its samples and options give {made.digest}; "
            "it was changed, written by another version, or its counts are others"
        )
    if (made.work, made.arrival, made.bounds, len(made.tail)) != (
        read.work,
        read.arrival,
        read.bounds,
        read.tail_samples,
    ):
        raise RecordError("the record has other work, bounds or tail than its packs give; it was changed")
    if made.traces != read.traces:
        raise RecordError("the record tells of another search than its samples and options give; it was changed")
    return made


def _again(read: _Record, samples: Sequence[Sample], counts: DispatchCounts | None) -> Plan:
    """The plan, searched again; without the counts its search followed, laid out in the recorded order."""
    trusted = bool(read.layers) and counts is None

    def choose(number: int, step: Step, ids: Sequence[str | int]) -> SearchTrace | None:
        if read.search is None or trusted:
            return read.traces[number] if read.search else None
        was = read.traces[number]
        again = attrs.evolve(read.search, kernels=None)
        return searched(step, ids, again, ending_after(was.attempts if was.stop == "deadline" else None))

    made = plan_by(
        samples,
        choose,
        topology=read.topology,
        capacity=read.capacity,
        step_samples=read.step_samples,
        equalize=read.equalize,
        max_documents=read.max_documents,
        pack_order=read.pack_order,
        counts=counts,
        search=read.search,
    )
    return _with_expert_figures(made, read) if trusted else made


def _check_traces(read: _Record, samples: int) -> None:
    if read.step_samples < 1 or (read.search is None) != (read.pack_order == "arrival"):
        raise RecordError("the record has no whole search or no samples of a step; it was changed")
    blocks = samples // read.step_samples if read.search else 0
    places = list(range(read.step_samples))
    if len(read.traces) != blocks or any(sorted(trace.order) != places for trace in read.traces):
        raise RecordError(
            "the record does not hold one order of a step's samples for each complete block; it was changed"
        )


def _with_expert_figures(made: Plan, read: _Record) -> Plan:
    """The plan with the recorded figures that only counts can give."""

    def filled(own: Sequence[Any], recorded: Sequence[Any], names: Sequence[str]) -> tuple[Any, ...]:
        if len(own) != len(recorded):
            raise RecordError(f"the record has figures of {len(recorded)} steps but its samples make {len(own)}")
        return tuple(
            attrs.evolve(one, **{name: getattr(other, name) for name in names})
            for one, other in zip(own, recorded, strict=True)
        )

    of_work = ("critical_work_proxy", "dispatches", "skew_mean", "skew_max", "max_slot_assignments")
    of_bounds = ("critical_work_proxy", "even_critical_work", "placed_critical_work")
    return attrs.evolve(
        made,
        work=filled(made.work, read.work, of_work),
        arrival=filled(made.arrival, read.arrival, of_work),
        bounds=filled(made.bounds, read.bounds, of_bounds),
        layers=read.layers,
        routed_layers=read.routed_layers,
    )


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
