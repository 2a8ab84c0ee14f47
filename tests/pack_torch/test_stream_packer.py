"""The packer that keeps its state, saved and loaded at every document."""

import json

import pytest
from pack_core import PackError, RecordError
from pack_core.stream import Documents, Tally
from pack_torch.stream import StreamPacker

HOW = {"strategy": "first_fit", "capacity": 6, "window": 2}


def test_nothing_is_lost_when_a_packer_is_saved_after_a_pack_and_loaded() -> None:
    packer = StreamPacker(capacity=6, window=1)
    closed = [pack.keys for key in range(2) for pack in packer.push(key, 4)]
    assert (closed, packer.waiting) == ([(0,)], (1,))
    other = StreamPacker(capacity=6, window=1)
    other.load_state_dict(json.loads(json.dumps(packer.state_dict())))
    assert [pack.keys for pack in [*other.push(2, 4), *other.finish()]] == [(1,), (2,)]
    assert other.counts.packed == Tally(3, 12)


def test_a_packer_loaded_before_every_document_packs_as_if_never_stopped() -> None:
    lengths = [6, 4, 5, 1, 2, 3, 3, 6, 1, 1, 4]
    straight = StreamPacker(**HOW)
    expected = [*straight.push_many(Documents(range(len(lengths)), lengths)), *straight.finish()]
    packs, state = [], StreamPacker(**HOW).state_dict()
    for key, length in enumerate(lengths):
        packer = StreamPacker(**HOW)
        packer.load_state_dict(json.loads(json.dumps(state)))
        packs += packer.push(key, length)
        state = packer.state_dict()
    assert [*packs, *packer.finish()] == expected
    assert packer.counts == straight.counts


def test_a_state_of_other_options_is_refused_with_what_differs() -> None:
    state = StreamPacker(**HOW).state_dict()
    with pytest.raises(RecordError, match=r"capacity was 6 and is 7; open the packer with those"):
        StreamPacker(**HOW | {"capacity": 7}).load_state_dict(state)
    with pytest.raises(RecordError, match=r"strategy was .*first_fit.* and is .*best_fit"):
        StreamPacker(**HOW | {"strategy": "best_fit"}).load_state_dict(state)
    with pytest.raises(RecordError, match="version None"):
        StreamPacker(**HOW).load_state_dict({})


def test_an_error_leaves_the_packer_as_it_was() -> None:
    packer = StreamPacker(**HOW)
    packer.push(0, 3)
    before = packer.state_dict()
    with pytest.raises(PackError, match="document 2 has 9 tokens"):
        packer.push_many(Documents([1, 2], [6, 9]))
    assert packer.state_dict() == before
    assert [pack.keys for pack in packer.finish()] == [(0,)]
    assert packer.finish() == []
    with pytest.raises(PackError, match="finished"):
        packer.push(3, 1)


def test_pairs_stay_together() -> None:
    packer = StreamPacker(strategy="best_fit", capacity=8, window=4)
    packs = [
        pack.keys
        for key, (length, pair) in enumerate([(3, "a"), (2, "a"), (2, "b"), (4, "b"), (1, None)])
        for pack in packer.push(key, length, group=pair)
    ]
    # a and half of b wait: the window is full, so a opens a pack, in which only the 1 fits.
    assert packs + [pack.keys for pack in packer.finish()] == [(0, 1, 4), (2, 3)]
