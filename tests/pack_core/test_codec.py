"""A plan to bytes, to a log record, and back."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_core import (
    PackError,
    Plan,
    RecordError,
    Sample,
    Schedule,
    Topology,
    decode,
    digest,
    encode,
    plan,
    rebuild,
    record,
    samples_of,
)

SAMPLES = [
    Sample(f"q{i}" if i % 2 else i, length, group=[None, "g", i][i % 3])
    for i, length in enumerate([17, 87, 19, 13, 23, 89, 29, 11, *[60] * 8, 5, 6])
]


def made(**options: Any) -> Plan:
    return plan(SAMPLES, topology=Topology(4, 2), capacity=128, step_samples=8, **options)


def through_json(line: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(line, sort_keys=True, allow_nan=False))
    return read


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, list[Sample]]:
    name = st.text(max_size=4) | st.integers(-(2**63), 2**64 - 1)
    ids = draw(st.lists(name, min_size=1, max_size=24, unique=True))
    samples = [Sample(one, draw(st.integers(1, 30)), draw(st.none() | name)) for one in ids]
    ranks = draw(st.integers(1, 3))
    return (
        plan(
            samples,
            topology=Topology(ranks),
            capacity=draw(st.integers(30, 90)),
            step_samples=ranks * draw(st.integers(1, 4)),
            equalize=draw(st.sampled_from(["tokens", "samples", "balanced"])),
            max_documents=draw(st.none() | st.integers(1, 3)),
        ),
        samples,
    )


def test_a_plan_comes_back_from_its_bytes() -> None:
    assert decode(encode(made())) == made()


@given(plans())
def test_bytes_and_records_give_the_identical_plan(case: tuple[Plan, list[Sample]]) -> None:
    one, samples = case
    assert decode(encode(one)) == one
    line = through_json(record(one, samples))
    assert samples_of(line) == samples
    assert rebuild(line, samples) == one


@pytest.mark.parametrize("data", [b"", b"\x00", b"nonsense", b"\xc1", b"\x93\x02\xc4\x00\xc0", b"{}", b"\xff" * 40])
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(PackError, match=f"these {len(data)} bytes are"):
        decode(data)


def test_bytes_cut_short_or_with_more_behind_are_refused() -> None:
    data = encode(made())
    for wrong in (*(data[:end] for end in range(0, len(data), 7)), data + b"\x00", data + data):
        with pytest.raises(RecordError):
            decode(wrong)


def test_any_flipped_bit_is_refused() -> None:
    data = encode(made())
    for position in range(len(data)):
        for bit in (1, 16, 128):
            wrong = bytearray(data)
            wrong[position] ^= bit
            with pytest.raises(RecordError):
                decode(bytes(wrong))


def test_bytes_of_another_version_are_refused_by_its_number() -> None:
    version, *rest = msgspec.msgpack.decode(encode(made()))
    with pytest.raises(RecordError, match="the plan is of version 3 but this pack-core reads version 2"):
        decode(msgspec.msgpack.encode([version + 1, *rest]))


def test_a_sealed_topology_that_cannot_be_is_refused() -> None:
    version, _, body = msgspec.msgpack.decode(encode(made()))
    body["topology"]["ranks"] = 3
    packed = msgspec.msgpack.encode(body)
    sealed = [version, blake2b(packed, digest_size=16).digest(), body]
    with pytest.raises(RecordError, match="3 ranks cannot hold whole replicas"):
        decode(msgspec.msgpack.encode(sealed))


def test_work_that_64_bits_do_not_hold_is_refused() -> None:
    huge = plan([Sample("a", 2**40)], topology=Topology(1), capacity=2**41, step_samples=1)
    with pytest.raises(RecordError, match="does not fit 64 bits"):
        encode(huge)


def test_the_digest_is_of_the_order_and_packs_as_json() -> None:
    # The text is written out here, so that any other program can compute the same.
    text = b"[[0,1,2],[[[[0],[2]],[[1],[3]]]]]"
    step = Schedule((((0,), (2,)), ((1,), (3,))))
    assert digest((0, 1, 2), (step,)) == blake2b(text, digest_size=16).hexdigest()


def test_the_digest_tells_orders_and_cuts_apart() -> None:
    one = digest((0, 1), (Schedule((((0, 1),),)),))
    assert digest((0, 1), (Schedule((((0, 1),),)),)) == one
    others = [
        digest((1, 0), (Schedule((((0, 1),),)),)),
        digest((0, 1), (Schedule((((1, 0),),)),)),
        digest((0, 1), (Schedule((((0,), (1,)),)),)),
        digest((0, 1), (Schedule((((0,),), ((1,),))),)),
        digest((0, 1), (Schedule((((0,),),)), Schedule((((1,),),)))),
    ]
    assert len({one, *others}) == 6


def test_bounds_and_options_are_not_in_the_digest() -> None:
    assert made().digest == made(equalize="balanced", max_documents=9).digest


def test_two_processes_give_the_same_digest_bytes_and_record() -> None:
    program = (
        "import json, pack_core as c\n"
        "s = [c.Sample(f'q{i}', 1 + i * 37 % 101, group=f'g{i // 4}') for i in range(70)]\n"
        "p = c.plan(s, topology=c.Topology(4, 2), capacity=160, step_samples=32)\n"
        "print(p.digest, c.encode(p).hex(), json.dumps(c.record(p, s)))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "4242")
    }
    assert len(said) == 1
    samples = [Sample(f"q{i}", 1 + i * 37 % 101, group=f"g{i // 4}") for i in range(70)]
    here = plan(samples, topology=Topology(4, 2), capacity=160, step_samples=32)
    assert said.pop().split()[0] == here.digest


def test_a_record_holds_every_input_and_the_counts() -> None:
    line = record(made(max_documents=3), SAMPLES)
    assert through_json(line) == line
    assert line["topology"] == {"ranks": 4, "expert_parallel": 2}
    assert (line["capacity"], line["step_samples"], line["equalize"], line["max_documents"]) == (128, 8, "tokens", 3)
    assert line["samples"]["ids"][:3] == [0, "q1", 2]
    assert line["samples"]["lengths"][:3] == [17, 87, 19]
    assert line["samples"]["groups"][:3] == [None, "g", 2]
    assert line["tail_samples"] == 2
    # Ranks hold 17+23, 87+89, 19+29 and 13+11: the second needs two packs.
    assert line["work"][0]["packs_per_rank"] == 2
    assert line["work"][0]["attention_token_work"] == 87 + 89
    assert line["bounds"][0]["packs_per_rank"] == 1
    assert line["search"] is None
    assert line["digest"] == made().digest


def test_a_plan_of_other_samples_is_not_recorded() -> None:
    with pytest.raises(RecordError, match=r"does not hold for these samples.*the plan orders 18 samples but 17"):
        record(made(), SAMPLES[:-1])
    with pytest.raises(RecordError, match="claims"):
        record(made(), [Sample("x", 1), *SAMPLES[1:]])


@pytest.mark.parametrize(
    ("samples", "difference"),
    [
        ([*SAMPLES[:3], attrs.evolve(SAMPLES[3], length=14), *SAMPLES[4:]], r"samples\[3\] has length 14 but 13 was"),
        ([*SAMPLES[:3], attrs.evolve(SAMPLES[3], id="q9x"), *SAMPLES[4:]], r"samples\[3\] has id 'q9x' but 'q3' was"),
        ([*SAMPLES[:3], attrs.evolve(SAMPLES[3], group=7), *SAMPLES[4:]], r"samples\[3\] has group 7 but None was"),
        ([SAMPLES[1], SAMPLES[0], *SAMPLES[2:]], r"samples\[0\] has id 'q1' but 0 was"),
        (SAMPLES[:-1], "17 samples were given but 18 recorded"),
        ([*SAMPLES, Sample("new", 1)], "19 samples were given but 18 recorded"),
    ],
)
def test_the_first_difference_of_the_samples_is_named(samples: list[Sample], difference: str) -> None:
    line = through_json(record(made(), SAMPLES))
    with pytest.raises(RecordError, match=difference):
        rebuild(line, samples)


def test_a_changed_record_does_not_pass() -> None:
    changes: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
        ("has digest", lambda line: line.update(digest="0" * 32)),
        ("has digest", lambda line: line.update(capacity=500)),
        ("has digest", lambda line: line.update(step_samples=4)),
        ("other work", lambda line: line["work"][0].update(model_tokens=1)),
        ("other work", lambda line: line["bounds"].pop()),
        ("other work", lambda line: line.update(tail_samples=3)),
        ("version 9", lambda line: line.update(version=9)),
        ("no plan record", lambda line: line.pop("digest")),
        ("no plan record", lambda line: line.update(capacity="128")),
        ("no plan record", lambda line: line.update(capacity=128.5)),
        ("no plan record", lambda line: line.update(search=3)),
        ("no whole search", lambda line: line.update(search={"proposals": 1})),
        ("cannot hold whole replicas", lambda line: line["topology"].update(ranks=3)),
        ("18 ids, 17 lengths", lambda line: line["samples"]["lengths"].pop()),
    ]
    for said, change in changes:
        line = through_json(record(made(), SAMPLES))
        change(line)
        with pytest.raises(RecordError, match=said):
            rebuild(line, SAMPLES)


@pytest.mark.parametrize("line", [None, [], "record", 3, {}, {"version": 2}, {"version": None}])
def test_what_is_no_record_is_refused(line: Any) -> None:
    with pytest.raises(RecordError, match="no plan record"):
        samples_of(line)
