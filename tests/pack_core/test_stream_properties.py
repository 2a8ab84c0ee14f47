"""What holds for every strategy, policy and limit: nothing vanishes, no limit is broken, and any pause is harmless."""

import json
import random
from collections import defaultdict

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pack_core.stream import Documents, StreamOptions, StreamState, Tally, finish, open_stream, push, push_many
from pack_core.stream.many import has_stroke, push_stroke
from support.packing_oracles import fewest_packs
from support.stream_oracles import one_by_one, one_long_row

NAMES = ["next_fit", "first_fit", "best_fit", "longest_first", "binned", "length_grouped", "concat_split"]
FAST = ["next_fit", "first_fit", "best_fit", "longest_first", "concat_split"]
POLICIES = ["drop", "truncate", "truncate_left", "split"]


@st.composite
def choices(draw, names=tuple(NAMES)):
    """Options, none of which makes a length an error."""
    name = draw(st.sampled_from(names))
    window = draw(st.integers(1, 8))
    own = {}
    if name == "binned":
        weights = draw(st.tuples(st.integers(0, 3), st.integers(1, 3)))
        own = {"weights": weights, "edges": (5,), "surplus": draw(st.sampled_from(["keep", "discard"]))}
    return StreamOptions(
        strategy=name,
        capacity=draw(st.integers(6, 14)),
        window=window,
        max_documents=draw(st.none() | st.integers(2, 5)),
        max_cost=draw(st.none() | st.integers(4, 120)),
        max_wait=draw(st.none() | st.integers(window, 20)),
        overlong=draw(st.sampled_from(POLICIES)),
        last=draw(st.sampled_from(["pad", "keep", "drop"])),
        zero_length="drop",
        seed=draw(st.integers(0, 5)),
        strategy_options=own,
    )


LENGTHS = st.lists(st.integers(0, 18), max_size=60)


def run(options, documents, sizes=()):
    """All packs and the last state, pushed in blocks of the sizes given, the rest one by one."""
    state, packs, start = open_stream(options), [], 0
    rows = list(documents.rows())
    for size in [*sizes, *[1] * len(rows)]:
        state, closed = push_many(options, state, rows[start : start + size])
        packs += closed
        start += size
    state, closed = finish(options, state)
    return [*packs, *closed], state


@given(choices(), LENGTHS)
def test_every_token_is_in_one_pack_or_counted_as_lost(options, lengths) -> None:
    packs, state = run(options, Documents(range(len(lengths)), lengths))
    seen = [(part.key, place) for pack in packs for part in pack.parts for place in range(part.start, part.stop)]
    assert len(seen) == len(set(seen))
    assert set(seen) <= {(key, place) for key, length in enumerate(lengths) for place in range(length)}
    counts = state.counts
    assert counts.seen == Tally(len(lengths), sum(lengths))
    assert counts.packed.tokens == len(seen) == sum(lengths) - sum(tally.tokens for tally in counts.lost.values())
    assert (counts.packs, counts.packed.documents) == (len(packs), sum(map(len, packs)))
    assert (state.waiting, state.row) == ((), ())


@given(choices(), LENGTHS)
def test_no_pack_is_over_a_limit_and_none_is_empty(options, lengths) -> None:
    for pack in run(options, Documents(range(len(lengths)), lengths))[0]:
        assert 0 < pack.tokens <= options.capacity
        assert min(pack.lengths) > 0
        assert len(pack) <= (options.max_documents or len(pack))
        assert options.max_cost is None or sum(length**2 for length in pack.lengths) <= options.max_cost
        if pack.reason == "full" and options.max_documents is None and options.max_cost is None:
            assert pack.tokens == options.capacity


@given(choices(), LENGTHS, st.lists(st.integers(1, 30), max_size=4))
def test_blocks_of_any_size_give_what_one_by_one_gives(options, lengths, sizes) -> None:
    documents = Documents(range(len(lengths)), lengths)
    assert run(options, documents, sizes) == run(options, documents)


@pytest.mark.parametrize("name", FAST)
def test_a_stroke_gives_the_state_and_packs_of_the_loop(name) -> None:
    """Also from the midst of a stream: what waits and the open pack come along."""
    draw = random.Random(name)
    for _ in range(300):
        window = draw.randint(1, 9)
        options = StreamOptions(
            strategy=name,
            capacity=draw.randint(6, 30),
            window=window,
            max_documents=draw.choice([None, None, 2, 4]),
            max_wait=draw.choice([None, window, window + 3]),
            overlong=draw.choice(POLICIES),
            zero_length="drop",
        )
        longest = draw.randint(1, 2 * options.capacity)
        count = draw.randint(1, 60)
        documents = Documents(
            range(count),
            [draw.choice((1, longest, draw.randint(0, longest))) for _ in range(count)],
            kinds=[key % 3 for key in range(count)],
        )
        rows, first = list(documents.rows()), draw.randint(0, count - 1)
        state, slow, packs = open_stream(options), open_stream(options), []
        for place, row in enumerate(rows):
            slow, closed = push(options, slow, row)
            if place < first:
                state = slow
            else:
                packs += closed
        rest = Documents.of(rows[first:])
        assert has_stroke(options, state, rest)
        assert push_stroke(options, state, rest) == (slow, packs)


def test_strokes_are_taken_where_the_fast_strategies_have_no_groups_or_costs() -> None:
    for name in NAMES:
        options = StreamOptions(strategy=name, capacity=9, overlong="split", **own_options(name))
        state, documents = open_stream(options), Documents(range(3), [1, 20, 3])
        assert has_stroke(options, state, documents) == (name in FAST)
        assert not has_stroke(options, state, Documents(range(2), [1, 2], groups=["a", "a"]))
        assert not has_stroke(options, state, Documents(range(2), [1, 2], costs=[1, 2]))


def own_options(name):
    return {"strategy_options": {"weights": (1, 1), "edges": (5,)}} if name == "binned" else {}


@examples(max_examples=200)
@given(choices(("next_fit", "first_fit", "best_fit", "longest_first", "length_grouped")), LENGTHS)
def test_packs_are_those_of_a_plain_program(options, lengths) -> None:
    unlimited = float("inf")
    expected = one_by_one(
        lengths,
        options.strategy,
        options.capacity,
        options.window,
        max_documents=options.max_documents or unlimited,
        max_cost=options.max_cost or unlimited,
        max_wait=options.max_wait or unlimited,
        overlong=options.overlong,
        last=options.last,
    )
    packs, _ = run(options, Documents(range(len(lengths)), lengths), [len(lengths) // 2])
    assert [[(part.key, part.start, part.stop) for part in pack.parts] for pack in packs] == expected


@given(LENGTHS, st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_one_long_row_is_cut_at_every_capacity(lengths, capacity, window, at_once) -> None:
    options = StreamOptions(
        strategy="concat_split", capacity=capacity, window=window, overlong="split", zero_length="drop"
    )
    packs, state = run(options, Documents(range(len(lengths)), lengths), [len(lengths)] * at_once)
    tokens = [[(part.key, at) for part in pack.parts for at in range(part.start, part.stop)] for pack in packs]
    assert tokens == one_long_row(lengths, capacity)
    assert state.counts.cut.get("full", Tally()).documents == sum(map(len, packs)) - sum(map(bool, lengths))


@examples(max_examples=60)
@given(choices(), LENGTHS)
def test_a_stream_resumed_at_every_document_goes_on_exactly(options, lengths) -> None:
    rows = list(Documents(range(len(lengths)), lengths).rows())
    whole = run(options, Documents.of(rows))
    state, packs = open_stream(options), []
    for row in rows:
        state = StreamState.from_json(json.loads(json.dumps(state.to_json())))
        state, closed = push(options, state, row)
        packs += closed
    state, closed = finish(options, StreamState.from_json(json.loads(json.dumps(state.to_json()))))
    assert ([*packs, *closed], state) == whole


@given(choices(), LENGTHS)
def test_no_more_wait_than_the_window_and_none_for_longer_than_allowed(options, lengths) -> None:
    state, admitted, taken = open_stream(options), {}, set()
    for row in Documents(range(len(lengths)), lengths).rows():
        before = state.tickets
        state, packs = push(options, state, row)
        assert sum(unit.documents for unit in state.waiting) <= options.window
        for ticket in range(before, state.tickets):
            admitted[ticket] = row.key
        for unit in state.waiting:
            assert admitted[unit.ticket] == unit.key
            assert options.max_wait is None or state.tickets - 1 - unit.ticket < options.max_wait
        taken |= {part.key for pack in packs for part in pack.parts} | {part.key for part in state.row}
    if options.overlong == "split" and options.strategy in ("next_fit", "concat_split"):
        assert sorted(taken) == [key for key in range(len(lengths)) if lengths[key]][: len(taken)]


@given(choices(("next_fit", "concat_split")), LENGTHS)
def test_next_fit_and_the_long_row_keep_the_order_of_arrival(options, lengths) -> None:
    packs, _ = run(options, Documents(range(len(lengths)), lengths), [20])
    parts = [(part.key, part.start) for pack in packs for part in pack.parts]
    assert parts == sorted(parts)


@examples(max_examples=150)
@given(choices([name for name in NAMES if name != "concat_split"]), st.data())
def test_groups_are_in_one_pack_in_their_order_or_wholly_lost(options, data) -> None:
    sizes = data.draw(st.lists(st.integers(1, min(3, options.window)), max_size=20))
    groups = [number if size > 1 or number % 2 else None for number, size in enumerate(sizes) for _ in range(size)]
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=len(groups), max_size=len(groups)))
    documents = Documents(range(len(groups)), lengths, groups)
    options = attrs.evolve(options, overlong="drop")  # all else is an error for a group
    packs, state = run(options, documents)
    assert (packs, state) == run(options, documents, [len(groups)])
    between = open_stream(options)
    for row in documents.rows():
        between, _ = push(options, between, row)
        units = [*between.waiting, *([between.gathering] if between.gathering else [])]
        assert sum(unit.documents for unit in units) <= options.window
    places = defaultdict(list)
    for number, pack in enumerate(packs):
        for place, key in enumerate(pack.keys):
            if groups[key] is not None:
                places[groups[key]].append((number, place, key))
    for group, found in places.items():
        members = [key for key, name in enumerate(groups) if name == group and lengths[key]]
        assert [key for _, _, key in found] == members
        assert len({number for number, _, _ in found}) == 1
        assert found[-1][1] - found[0][1] == len(found) - 1
    assert state.counts.packed.tokens + state.counts.lost_tokens == sum(lengths)


@examples(max_examples=60)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=9))
def test_over_a_window_of_everything_the_longest_first_are_near_the_fewest_packs(lengths) -> None:
    """First fit decreasing needs at most 11/9 of the fewest and 6/9 of a pack more (Dósa, 2007)."""
    least = fewest_packs(lengths, 10)
    for name in ("next_fit", "first_fit", "best_fit", "longest_first", "length_grouped"):
        packs, _ = run(StreamOptions(strategy=name, capacity=10, window=20), Documents(range(len(lengths)), lengths))
        assert len(packs) >= least
        if name == "longest_first":
            assert 9 * len(packs) <= 11 * least + 6
        if name != "next_fit":  # what closes has no room for anything that waited
            assert all(
                one.tokens + min(other.lengths) > 10 for at, one in enumerate(packs) for other in packs[at + 1 :]
            )


@pytest.mark.parametrize("name", NAMES)
def test_the_same_stream_gives_the_same_packs(name) -> None:
    documents = Documents(range(300), [key * 37 % 16 + 1 for key in range(300)])
    own = own_options(name)
    packs = [run(StreamOptions(strategy=name, capacity=20, window=9, **own), documents)[0] for _ in range(2)]
    assert packs[0] == packs[1]
