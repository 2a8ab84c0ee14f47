"""Documents packed as they arrive, worked out by hand; policies, limits and errors."""

import json
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from pack_core import LengthError, PackError, RecordError
from pack_core.stream import (
    BestFit,
    Document,
    Documents,
    StreamOptions,
    StreamState,
    Tally,
    finish,
    open_stream,
    packs_of,
    push,
    push_many,
)


def packed(lengths, groups=None, costs=None, kinds=None, **options):
    """All packs and the last state, pushed one by one."""
    chosen = StreamOptions(**options)
    state, packs = open_stream(chosen), []
    for document in Documents(range(len(lengths)), lengths, groups, costs, kinds).rows():
        state, closed = push(chosen, state, document)
        packs += closed
    state, closed = finish(chosen, state)
    return [*packs, *closed], state


def keys(packs):
    return [(*pack.keys, pack.reason) for pack in packs]


STREAM = [6, 5, 3, 4, 2, 7, 1]


@pytest.mark.parametrize(
    ("strategy", "lengths", "expected"),
    [
        # Nothing is looked back at: 6 | 5 3 | 4 2 | 7 1.
        ("next_fit", STREAM, [(0, "closed"), (1, 2, "closed"), (3, 4, "closed"), (5, 6, "last")]),
        # 6 leaves 4: of 5 3 4 the 3 is the first; nothing of 5 4 2 fits 1. 5 and 4 leave 1: of 2 7 1 only the 1.
        ("first_fit", STREAM, [(0, 2, "closed"), (1, 3, 6, "full"), (4, 5, "last")]),
        # 6 leaves 4: of 5 3 4 the 4 is the longest. 5 3 2 are in order, and full.
        ("best_fit", STREAM, [(0, 3, "full"), (1, 2, 4, "full"), (5, 6, "last")]),
        # The oldest first, where it fits: 3 6 leave 1, which none of 5 4 2 fits; 5 4, and the 1 of 2 7 1.
        ("best_fit", [3, 6, 5, 4, 2, 7, 1], [(0, 1, "closed"), (2, 3, 6, "full"), (4, 5, "last")]),
        # The longest of 3 6 5, of 3 5 4 that fits 4, of 3 5 2, of 3 2 7 that fits 5, of 2 7 1 that fits 2.
        ("longest_first", [3, 6, 5, 4, 2, 7, 1], [(1, 3, "full"), (2, 0, 4, "full"), (5, 6, "last")]),
        # 6 5 | 3 4 would be split, so 4 of the 5 go into the first pack.
        ("concat_split", STREAM, [(0, 1, "full"), (1, 2, 3, 4, "full"), (5, 6, "last")]),
    ],
)
def test_a_window_of_three_by_hand(strategy, lengths, expected) -> None:
    packs, state = packed(lengths, strategy=strategy, capacity=10, window=3)
    assert keys(packs) == expected
    assert state.counts.packed.tokens == 28 == state.counts.seen.tokens


def test_like_lengths_by_hand() -> None:
    # 6 opens; of 2 5 3 the 5 is nearest. 2 opens; of 3 6 2 the 2, then the 3 of 3 6; the 6 is last.
    packs, _ = packed([6, 2, 5, 3, 6, 2], strategy="length_grouped", capacity=12, window=3)
    assert keys(packs) == [(0, 2, "closed"), (1, 5, 3, "closed"), (4, "last")]


def test_classes_by_hand() -> None:
    # All weight is on the short: of 9 1 the 1; of 9 9 there are none, so the older 9; of 9 1 the 1, at last the 9.
    how = {"strategy": "binned", "capacity": 10, "window": 2}
    packs, _ = packed([9, 1, 9, 1], **how, strategy_options={"weights": (1, 0), "edges": (5,)})
    assert keys(packs) == [(1, 0, "full"), (3, 2, "full")]
    # All weight is on the long, strictly: no 1 is ever taken.
    only_long = {"weights": (0, 1), "edges": (5,), "surplus": "discard"}
    packs, state = packed([1, 9, 1, 9], **how, strategy_options=only_long)
    assert keys(packs) == [(1, "closed"), (3, "last")]
    assert state.counts.lost == {"surplus": Tally(2, 2)}


def test_groups_by_hand() -> None:
    # Pair a takes 7 of 10, and neither the 5 nor pair b fits the rest, but the 3 does; 5 and b fill the next.
    lengths, groups = [4, 3, 5, 3, 2, 3], ["a", "a", None, "b", "b", None]
    packs, _ = packed(lengths, groups, strategy="best_fit", capacity=10, window=4)
    assert keys(packs) == [(0, 1, 5, "full"), (2, 3, 4, "full")]


def test_the_example_of_torchtunes_rfc() -> None:
    (pack,), _ = packed([2, 2], strategy="first_fit", capacity=4)
    assert [[part.key] * part.tokens for part in pack.parts] == [[0, 0], [1, 1]]  # its document_ids
    assert [[*range(part.start, part.stop)] for part in pack.parts] == [[0, 1], [0, 1]]  # its input_pos


@pytest.mark.parametrize(
    ("overlong", "spans", "lost", "cut"),
    [
        ("drop", [[(1, 0, 2)]], {"overlong": Tally(1, 6)}, {}),
        ("truncate", [[(0, 0, 4)], [(1, 0, 2)]], {"truncated": Tally(1, 2)}, {}),
        ("truncate_left", [[(0, 2, 6)], [(1, 0, 2)]], {"truncated": Tally(1, 2)}, {}),
        ("split", [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)]], {}, {"overlong": Tally(1, 6)}),
    ],
)
def test_an_overlong_document_is_lost_only_by_policy_and_counted(overlong, spans, lost, cut) -> None:
    packs, state = packed([6, 2], capacity=4, overlong=overlong)
    assert [[(part.key, part.start, part.stop) for part in pack.parts] for pack in packs] == spans
    assert (dict(state.counts.lost), dict(state.counts.cut)) == (lost, cut)
    assert state.counts.seen == Tally(2, 8)


def test_a_document_is_split_however_long_it_is() -> None:
    packs, _ = packed([11], capacity=4, overlong="split")
    assert [pack.lengths for pack in packs] == [(4,), (4,), (3,)]


def test_exactly_full_and_last_documents_are_kept() -> None:
    assert [pack.keys for pack in packed([5, 2], capacity=5)[0]] == [(0,), (1,)]
    assert [pack.keys for pack in packed([4, 4, 4, 4, 3], capacity=10, window=1)[0]] == [(0, 1), (2, 3), (4,)]


def test_the_last_pack_is_padded_kept_or_dropped() -> None:
    padded, state = packed([6, 5], capacity=10, last="pad")
    assert (keys(padded), state.counts.padding) == ([(0, "closed"), (1, "last")], 5)
    kept, state = packed([6, 5], capacity=10, last="keep")
    assert (keys(kept), state.counts.padding) == ([(0, "closed"), (1, "last")], 0)
    rest, state = packed([6, 5], capacity=10, last="drop")
    assert (keys(rest), state.counts.lost) == ([(0, "closed")], {"last": Tally(1, 5)})
    whole, state = packed([6, 4], capacity=10, last="drop")  # a full pack is no incomplete one
    assert (keys(whole), state.counts.lost) == ([(0, 1, "full")], {})


def test_documents_without_tokens_are_refused_or_dropped_and_never_packed() -> None:
    with pytest.raises(LengthError, match="document 0 has no tokens"):
        packed([0, 1], capacity=4)
    packs, state = packed([0, 1, 0, 1], capacity=4, zero_length="drop")
    assert [pack.keys for pack in packs] == [(1, 3)]
    assert state.counts.lost == {"zero_length": Tally(2, 0)}
    assert packed([], capacity=4)[0] == []


def test_limits_beside_the_capacity() -> None:
    packs, _ = packed([1, 1, 1, 1, 1], capacity=10, max_documents=2)
    assert keys(packs) == [(0, 1, "full"), (2, 3, "full"), (4, "last")]
    packs, _ = packed([3, 3, 1, 2], capacity=10, max_cost=18)  # 9 + 9; 1 + 4
    assert keys(packs) == [(0, 1, "closed"), (2, 3, "last")]
    packs, _ = packed([5], capacity=10, max_cost=10, overlong="split")  # 3² is the most within 10
    assert [pack.lengths for pack in packs] == [(3,), (2,)]
    packs, _ = packed([4, 4], costs=[1, 1], capacity=10, max_cost=2)
    assert [pack.keys for pack in packs] == [(0, 1)]
    packs, _ = packed([8], costs=[100], capacity=8, max_cost=25, overlong="truncate")  # half of it costs a quarter
    assert packs[0].lengths == (4,)
    # One token of three has a ninth of the cost of 10, which counts as 2: two of them are within 4.
    packs, _ = packed([3], costs=[10], capacity=8, max_cost=4, overlong="split")
    assert [pack.lengths for pack in packs] == [(1, 1), (1,)]


def test_short_documents_wait_for_ever_only_without_a_limit() -> None:
    lengths = [1, *[9] * 30]
    late, _ = packed(lengths, strategy="longest_first", capacity=9, window=4)
    assert late[-1].keys == (0,)
    # Window 4 is full at the third 9; when the sixth has come, six were admitted after the 1, and it is next.
    early, _ = packed(lengths, strategy="longest_first", capacity=9, window=4, max_wait=6)
    assert [pack.keys for pack in early].index((0,)) == 3
    # The pack that is open when the 9 is due closes for its sake, although the 1 would fit.
    due, _ = packed([1, 1, 9, 1, 1, 1], strategy="first_fit", capacity=9, window=2, max_wait=2)
    assert keys(due)[0] == (0, 1, 3, "due")


@pytest.mark.parametrize("block", [1, 20])  # one by one, and in one go
def test_a_stream_of_which_nothing_is_packed_is_stopped(block) -> None:
    options = StreamOptions(capacity=4, window=1, overlong="drop", max_idle=20)

    def pushed(state, lengths):
        for start in range(0, len(lengths), block):
            part = lengths[start : start + block]
            state, _ = push_many(options, state, Documents(range(len(part)), part))
        return state

    state = pushed(open_stream(options), [4, *[9] * 19])
    assert state.idle == 19
    state = pushed(state, [1, *[9] * 18, 1])
    assert state.idle == 0
    state = pushed(state, [9] * 19)
    assert state.idle == 19
    with pytest.raises(PackError, match=r"20 documents were lost since one was last put into a pack \(by overlong\)"):
        pushed(state, [9] * 20)


def test_groups_that_cannot_be_kept_together_are_refused() -> None:
    with pytest.raises(LengthError, match=r"group 'a' from document 0 on has 6 tokens, 2 documents.*never cut"):
        packed([3, 3], ["a", "a"], capacity=4, overlong="split")
    with pytest.raises(LengthError, match="max_documents 1"):
        packed([1, 1], ["a", "a"], capacity=4, max_documents=1)
    with pytest.raises(PackError, match="window is 2"):
        packed([1, 1, 1], ["a", "a", "a"], capacity=4, window=2)
    with pytest.raises(PackError, match="group 'a' was complete and comes back with document 2"):
        packed([1, 1, 1], ["a", None, "a"], capacity=4)
    with pytest.raises(PackError, match="strategy cuts"):
        packed([1, 1], ["a", "a"], capacity=4, strategy="concat_split")
    packs, state = packed([3, 3, 1], ["a", "a", None], capacity=4, overlong="drop")
    assert [pack.keys for pack in packs] == [(2,)]
    assert state.counts.lost == {"overlong": Tally(2, 6)}


def test_a_document_over_a_limit_is_named_with_what_to_do() -> None:
    expected = r"document 1 has 9 tokens, 1 documents and cost 81, but capacity is 4; .*set overlong to"
    with pytest.raises(LengthError, match=expected):
        packed([1, 9], capacity=4)
    with pytest.raises(LengthError, match="not one token"):
        packed([2], costs=[1000], capacity=4, max_cost=1, overlong="truncate")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fit"}, "'next_fit', 'first_fit', 'best_fit'"),
        ({"strategy": 3}, "has no method choose"),
        ({"strategy": BestFit(), "strategy_options": {"seed": 1}}, "strategies given by name"),
        ({"strategy": "binned"}, "lacks weights"),
        ({"strategy": "best_fit", "strategy_options": {"weights": 1}}, "has weights; best_fit has no options"),
        ({"strategy": "binned", "strategy_options": {"weights": (0, 0)}}, "not 0 together"),
        ({"strategy": "binned", "strategy_options": {"weights": (1, 1), "edges": (4, 5)}}, "one rising edge less"),
        ({"capacity": 0}, "at least 1"),
        ({"capacity": 2.5}, "whole number"),
        ({"window": True}, "whole number"),
        ({"overlong": "cut"}, "'error', 'drop', 'truncate', 'truncate_left', 'split'"),
        ({"last": None}, "'pad', 'keep', 'drop'"),
        ({"zero_length": "pack"}, "'error', 'drop'"),
        ({"window": 8, "max_wait": 7}, "max_wait is 7 but window is 8"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message) -> None:
    with pytest.raises(PackError, match=message):
        StreamOptions(**{"capacity": 10} | options)


def test_columns_that_are_no_documents_are_refused() -> None:
    with pytest.raises(LengthError, match="document 1 has length -1"):
        Documents([0, 1], [1, -1])
    with pytest.raises(LengthError, match="whole number"):
        Documents([0], [1.5])
    with pytest.raises(PackError, match="2 keys but 1 lengths"):
        Documents([0, 1], [1])
    with pytest.raises(PackError, match="2 keys but 1 groups"):
        Documents([0, 1], [1, 1], groups=["a"])


def test_lengths_may_be_of_any_kind_of_integer() -> None:
    wanted = [(3, 2), (4,)]
    for lengths in ([3, 2, 4], np.array([3, 2, 4], np.uint8), array("b", [3, 2, 4]), [np.int64(3), 2, 4]):
        assert [pack.lengths for pack in packed(lengths, capacity=6)[0]] == wanted
    assert [pack.lengths for pack in packs_of(iter([3, 2, 4]), capacity=6)] == wanted


def test_the_state_is_small_json_and_a_finished_stream_takes_no_more() -> None:
    options = StreamOptions(capacity=2048, window=256)
    state, _ = push_many(options, open_stream(options), Documents(range(10_000), [200, 300] * 5_000))
    text = json.dumps(state.to_json())
    assert len(text) < 20_000
    assert StreamState.from_json(json.loads(text)) == state
    assert json.loads(state.to_text()) == json.loads(text)
    assert StreamState.from_text(state.to_text()) == state
    last, packs = finish(options, state)
    assert packs
    assert finish(options, last) == (last, [])
    with pytest.raises(PackError, match="finished"):
        push(options, last, Document(0, 1))
    with pytest.raises(PackError, match="finished"):
        push_many(options, last, Documents(range(10), [1] * 10))


def test_states_that_were_changed_are_refused() -> None:
    options = StreamOptions(capacity=10, window=4)
    state, _ = push_many(options, open_stream(options), Documents(range(3), [1, 2, 3]))
    for change in ({"waiting": []}, {"waiting": state.to_json()["waiting"][::-1]}, {"tickets": 1}, {"row": 3}):
        with pytest.raises(RecordError):
            StreamState.from_json(state.to_json() | change)
        with pytest.raises(RecordError):
            StreamState.from_text(json.dumps(state.to_json() | change))
    for text in ("", "[]", '{"waiting"', None, state.to_json()):
        with pytest.raises(RecordError, match="to_text"):
            StreamState.from_text(text)  # type: ignore[arg-type]


def test_numpy_is_not_needed() -> None:
    """No module of the stream names it: arrays are asked for their lists."""
    folder = Path(sys.modules["pack_core.stream"].__file__).parent
    assert [path.name for path in sorted(folder.glob("*.py")) if "import numpy" in path.read_text()] == []
