"""Packing on the fly: what comes out, from which source, and that a run goes on exactly."""

import gc
import itertools
import json
import pickle
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core import PackError, RecordError
from pack_core.stream import Tally
from pack_torch import PackCollator, PackedIterable, add_metrics, mix, shuffle, summarize
from support.format_cases import rows_of, same
from support.iterable_cases import (
    TOKENS,
    Stateful,
    Stream,
    held,
    numbers,
    packed,
    resumed_at_every_pack,
    rows_of_lengths,
    some_rows,
)
from support.stream_oracles import one_by_one

SOURCES = {"list": list, "tuple": tuple, "stateful": Stateful, "stream": Stream}
QUIET = pytest.mark.filterwarnings("ignore:the source has neither")


def test_documents_are_packed_as_they_come() -> None:
    rows = rows_of_lengths([6, 5, 4, 3])
    packs = list(packed(rows, window=2))
    # 6 opens a pack and leaves 4: of 5 and 4, which wait then, the 4 fits. The rest is the last pack.
    assert [held(pack) for pack in packs] == [[0] * 6 + [2] * 4, [1] * 5 + [3] * 3]
    assert [pack.capacity for pack in packs] == [10, 10]
    assert packs[0].documents() == [rows[0], rows[2]]


def test_a_run_saved_after_the_first_pack_does_not_lose_what_waited() -> None:
    rows = rows_of_lengths([4, 4, 4, 4])
    dataset = packed(rows, capacity=6, window=1)
    first = next(iter(dataset))
    other = packed(rows, capacity=6, window=1)
    other.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert (numbers([first]), numbers(other)) == ([0], [1, 2, 3])


@pytest.mark.parametrize("strategy", ["next_fit", "first_fit", "best_fit", "longest_first"])
@given(lengths=st.lists(st.integers(1, 14), max_size=25), window=st.integers(1, 6), block=st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_packs_are_those_of_a_plain_loop(strategy: str, lengths: list[int], window: int, block: int) -> None:
    dataset = packed(rows_of_lengths(lengths), strategy=strategy, window=window, block=block, overlong="split")
    expected = one_by_one(lengths, strategy, 10, window, overlong="split")
    assert [held(pack) for pack in dataset] == [
        [key for key, start, stop in pack for _ in range(start, stop)] for pack in expected
    ]


@QUIET
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("order", ["plain", "shuffled", "mixed", "twice"])
def test_every_source_in_every_order_goes_on_exactly_at_every_pack(kind: str, order: str) -> None:
    def make() -> PackedIterable:
        one, two = (SOURCES[kind](some_rows(count, seed=count)) for count in (17, 9))
        source = {
            "plain": lambda: one,
            "shuffled": lambda: shuffle(one, 5, seed=3),
            "mixed": lambda: mix({"a": shuffle(one, 3), "b": two}, [2, 1], stop="all_exhausted"),
            "twice": lambda: shuffle(one, 7),
        }[order]()
        return packed(source, epochs=2 if order == "twice" else 1)

    resumed_at_every_pack(make)


@pytest.mark.parametrize("strategy", ["next_fit", "best_fit", "longest_first", "length_grouped", "concat_split"])
@pytest.mark.parametrize("overlong", ["drop", "truncate", "truncate_left", "split"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_strategy_and_policy_goes_on_exactly_at_every_pack(strategy: str, overlong: str, prefetch: int) -> None:
    rows = [{"input_ids": []}, *some_rows(25, seed=5, most=13), {"input_ids": []}]
    for last in ("pad", "keep", "drop"):
        resumed_at_every_pack(
            lambda last=last: packed(
                rows, strategy=strategy, overlong=overlong, last=last, zero_length="drop", prefetch=prefetch
            )
        )


@pytest.mark.parametrize("name", ["sft", "preference", "shared", "multimodal"])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_rows_of_every_format_come_out_as_they_went_in_and_once(name: str, data: st.DataObject) -> None:
    format, rows = data.draw(rows_of(name))
    rows = [row for row in rows if format.length(row)]
    capacity = max([format.length(row) for row in rows], default=1)
    options = {"format": format, "capacity": capacity, "window": data.draw(st.integers(1, 3)), "block": 2}
    dataset = packed(rows, **options)
    packs = list(dataset)
    out = [row for pack in packs for row in pack.documents()]
    assert len(out) == len(rows)
    assert all(any(same(dict(row), dict(one)) for one in out) for row in rows)
    stop = data.draw(st.integers(0, len(packs)))
    for _ in itertools.islice(iter(dataset), stop):
        pass
    state = json.loads(json.dumps(dataset.state_dict()))
    other = packed(rows, **options)
    other.load_state_dict(state)
    rest = [row for pack in other for row in pack.documents()]
    done = sum(len(pack.documents()) for pack in packs[:stop])
    assert all(same(dict(one), dict(two)) for one, two in zip(rest, out[done:], strict=True))


@given(
    lengths=st.lists(st.integers(0, 15), max_size=30),
    strategy=st.sampled_from(["next_fit", "best_fit", "concat_split"]),
    overlong=st.sampled_from(["drop", "truncate", "split"]),
    last=st.sampled_from(["pad", "keep", "drop"]),
)
@settings(max_examples=60, deadline=None)
def test_no_token_is_lost_uncounted(lengths: list[int], strategy: str, overlong: str, last: str) -> None:
    dataset = packed(rows_of_lengths(lengths), strategy=strategy, overlong=overlong, last=last, zero_length="drop")
    given_out = sum(pack.tokens for pack in dataset)
    counts = dataset.counts
    assert counts.seen == Tally(len(lengths), sum(lengths))
    assert given_out + counts.lost_tokens == sum(lengths)
    assert counts.packed.tokens == given_out


@QUIET
@given(
    count=st.integers(0, 40),
    world=st.integers(1, 4),
    kind=st.sampled_from(sorted(SOURCES)),
    order=st.sampled_from(["plain", "shuffled", "mixed"]),
)
@settings(max_examples=40, deadline=None)
def test_ranks_together_read_every_document_once(count: int, world: int, kind: str, order: str) -> None:
    rows, more = some_rows(count), rows_of_lengths([3] * 7, first=count)
    found, sizes = [], []
    for rank in range(world):
        source = SOURCES[kind](rows)
        if order == "mixed":
            source = mix([source, SOURCES[kind](more)], stop="drain")
        elif order == "shuffled":
            source = shuffle(source, 4)
        own = numbers(packed(source, rank=rank, world=world))
        sizes.append(len(own))
        found += own
    assert sorted(found) == list(range(count + (7 if order == "mixed" else 0)))
    assert max(sizes) - min(sizes) <= (2 if order == "mixed" else 1)


def test_a_source_that_knows_where_it_is_is_not_read_from_the_start() -> None:
    dataset = packed(Stateful(some_rows(400)))
    list(itertools.islice(iter(dataset), 80))
    source = Stateful(some_rows(400))
    other = packed(source)
    other.load_state_dict(dataset.state_dict())
    assert len(list(itertools.islice(iter(other), 1))) == 1
    assert source.asked <= 16


def test_a_source_without_state_is_read_again_aloud_or_refused() -> None:
    dataset = packed(Stream(some_rows(20)))
    next(iter(dataset))
    state = dataset.state_dict()
    other = packed(Stream(some_rows(20)))
    other.load_state_dict(state | {"block": [state["block"][0]]})
    list(other)
    late = packed(Stream(some_rows(20)))
    list(itertools.islice(iter(late), 8))
    other.load_state_dict(late.state_dict())
    with pytest.warns(UserWarning, match=r"neither an index nor a state, so its first \d+ rows are read again"):
        next(iter(other))
    strict = packed(Stream(some_rows(20)), resume="cursor")
    strict.load_state_dict(state)
    with pytest.raises(RecordError, match="resume='cursor', but a source has neither"):
        iter(strict)


def test_an_iterator_can_be_gone_through_once_and_says_so() -> None:
    dataset = packed(iter(some_rows(6)))
    assert numbers(dataset) == list(range(6))
    with pytest.raises(PackError, match="an iterator, which can be gone through once"):
        iter(dataset)


def test_a_changed_source_is_noticed() -> None:
    rows = some_rows(20)
    dataset = packed(rows)
    list(itertools.islice(iter(dataset), 4))
    other = packed([{"input_ids": [1]}] * 20)
    other.load_state_dict(dataset.state_dict())
    with pytest.raises(RecordError, match=r"had at least \d tokens and now has 1; the source is not what it was"):
        iter(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 11}, "capacity was 10 and is 11"),
        ({"strategy": "first_fit"}, "strategy was .*best_fit.* and is .*first_fit"),
        ({"window": 4}, "window was 3 and is 4"),
        ({"block": 5}, "block was 4 and is 5"),
        ({"epochs": 2}, "epochs was 1 and is 2"),
        ({"world": 2}, "saved by rank 0 of 1, worker 0 of 1, and this is rank 0 of 2, worker 0 of 1; documents are"),
        ({"rank": 1, "world": 2}, "this is rank 1 of 2"),
    ],
)
def test_a_state_of_another_configuration_is_refused_with_what_differs(change: dict[str, int], message: str) -> None:
    state = packed(some_rows(9)).state_dict()
    with pytest.raises(RecordError, match=message):
        packed(some_rows(9), **change).load_state_dict(state)
    with pytest.raises(RecordError, match=r"source was .* 9.* and is .* 8"):
        packed(some_rows(8)).load_state_dict(state)
    with pytest.raises(RecordError, match="version None"):
        packed(some_rows(9)).load_state_dict({})


def test_discarding_says_how_much_is_lost_and_counts_it() -> None:
    rows = rows_of_lengths([6, 5, 4, 3, 7, 7, 2, 2, 9, 9])
    dataset = packed(rows, resume="discard")
    given_out = numbers(itertools.islice(iter(dataset), 1))
    # One block of four was read: 6 and 4 are given, 5 and 3 wait.
    assert given_out == [0, 2]
    other = packed(rows, resume="discard")
    with pytest.warns(UserWarning, match="2 documents of 8 tokens that waited"):
        other.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert numbers(other) == [4, 5, 6, 7, 8, 9]
    assert other.counts.lost == {"discarded": Tally(2, 8)}


def test_a_finished_state_has_no_packs_and_the_next_iteration_starts_over() -> None:
    dataset = packed(some_rows(9))
    whole = [held(pack) for pack in dataset]
    other = packed(some_rows(9))
    other.load_state_dict(dataset.state_dict())
    assert list(other) == []
    assert [held(pack) for pack in other] == whole


def test_a_dataset_travels_to_another_process_with_what_it_was_told_to_load() -> None:
    dataset = packed(some_rows(12))
    packs = iter(dataset)
    next(packs)
    rest = packed(some_rows(12))
    rest.load_state_dict(dataset.state_dict())
    there = pickle.loads(pickle.dumps(rest))
    assert [held(pack) for pack in there] == [held(pack) for pack in packs]


def test_shuffling_gives_every_row_once_in_another_order_each_epoch() -> None:
    source = rows_of_lengths([1] * 50)
    orders = []
    for epoch in (0, 1):
        dataset = packed(shuffle(source, 20), strategy="next_fit")
        dataset.set_epoch(epoch)
        orders.append([token for pack in dataset for token in held(pack)])
        assert sorted(orders[-1]) == list(range(50))
        assert all(abs(place - token) < 20 for place, token in enumerate(orders[-1]))
    assert orders[0] != orders[1] != list(range(50))
    both = packed(shuffle(source, 20), strategy="next_fit", epochs=2)
    assert [token for pack in both for token in held(pack)] == orders[0] + orders[1]


@pytest.mark.parametrize(
    ("stop", "lengths"),
    [("first_exhausted", None), ("drain", 350), ("all_exhausted", None), ("never", None)],
)
def test_mixing_stops_as_asked_and_follows_the_weights(stop: str, lengths: int | None) -> None:
    one, two = rows_of_lengths([1] * 300), rows_of_lengths([1] * 50, first=1000)
    dataset = packed(mix({"one": one, "two": two}, [3, 1], stop=stop), strategy="next_fit", block=32)
    tokens = [t for pack in itertools.islice(dataset, 200) for t in held(pack)]
    ones, twos = ([t for t in tokens if (t < 1000) is small] for small in (True, False))
    assert ones[:300] == list(range(len(ones[:300])))
    assert twos[:50] == list(range(1000, 1000 + len(twos[:50])))
    if stop == "first_exhausted":
        # Two comes to its end first: about 150 of one by then; it ends with the draw that finds it empty.
        assert len(twos) == 50
        assert 90 < len(ones) < 220
    elif stop == "drain":
        assert sorted(tokens) == [*range(300), *range(1000, 1050)]
    elif stop == "all_exhausted":
        assert len(ones) == 300
        assert 60 < len(twos) < 140
        assert twos[50:100] == twos[: len(twos[50:100])]
    else:
        assert len(tokens) == 2000
        assert 1400 < len(ones) < 1600


def test_counts_travel_with_the_batches_and_add_up_to_all_that_was_read() -> None:
    one, two = rows_of_lengths([4] * 9 + [30]), rows_of_lengths([2] * 5)
    dataset = packed(mix({"web": one, "code": two}, stop="drain"), overlong="drop", epochs=2)
    collate = PackCollator(mask="dense")
    metrics = add_metrics([collate([pack]).metrics for pack in dataset])
    read = {name: metrics[name] for name in metrics if name.split("_")[0] in ("consumed", "lost")}
    assert read == {
        "consumed_documents/web": 20,
        "consumed_tokens/web": 132,
        "consumed_documents/code": 10,
        "consumed_tokens/code": 20,
        "lost_documents/overlong": 2,
        "lost_tokens/overlong": 60,
    }
    assert (metrics["tokens"], metrics["rows"], metrics["epochs"]) == (92, 28, 2)
    assert metrics["tokens"] + metrics["padding"] == metrics["packs"] * 10
    assert summarize(metrics)["length_p50"] == 4
    assert 30 <= summarize(metrics)["length_p99"] < 30 * 1.19


def test_images_are_cut_off_whole_and_counted() -> None:
    from pack_torch import Multimodal
    from support.format_cases import no_payloads

    rows = [{"input_ids": [0] * 12, "images": ["a"], "spans": [(8, 11)]}]
    dataset = packed(rows, format=Multimodal(no_payloads, TOKENS), overlong="truncate")
    (pack,) = dataset
    assert pack.tokens == 8
    assert pack.info["lost_tokens/truncated"] == 4
    split = list(packed(rows, format=Multimodal(no_payloads, TOKENS), overlong="split"))
    assert sorted(pack.tokens for pack in split) == [4, 8]
    assert sorted(len(row["images"]) for pack in split for row in pack.documents()) == [0, 1]


def test_groups_come_into_one_pack() -> None:
    rows = [row | {"pair": number // 2} for number, row in enumerate(rows_of_lengths([3, 2, 4, 5, 1, 1]))]
    found = [{row["input_ids"][0] for row in pack.documents()} for pack in packed(rows, group="pair", window=4)]
    assert all(sum(pair <= one for one in found) == 1 for pair in ({0, 1}, {2, 3}, {4, 5}))


def test_prefetching_raises_where_the_pack_is_asked_for_and_ends_with_its_reader() -> None:
    for prefetch in (0, 2):
        packs = iter(packed([*some_rows(8), {"wrong": 1}, *some_rows(8)], prefetch=prefetch))
        for _ in range(2):
            with pytest.raises(PackError, match=r"document 8, counted from 0 .* has fields wrong, .* no 'input_ids'"):
                list(packs)
    before = threading.active_count()
    packs = iter(packed(some_rows(500), prefetch=2))
    next(packs)
    assert threading.active_count() == before + 1
    del packs
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block is 0; it must be at least 1"),
        ({"resume": "maybe"}, "resume is 'maybe'"),
        ({"rank": 2, "world": 2}, "rank is 2 of world 2; it must be from 0 to 1"),
        ({"overlong": "cut"}, "overlong is 'cut'"),
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PackError, match=message):
        packed([], **options)


def test_the_rank_is_asked_for_only_where_there_is_one() -> None:
    with pytest.raises(PackError, match="this process has no process group"):
        iter(packed([], distributed=True))
    with pytest.raises(PackError, match="the source is one int"):
        iter(packed(3))
    with pytest.raises(PackError, match="weights are"):
        mix([[], []], [1, 0])
    with pytest.raises(PackError, match="buffer is 0"):
        shuffle([], 0)


def test_an_empty_source_gives_no_packs_and_does_not_run_for_ever() -> None:
    assert list(packed([])) == []
    with pytest.raises(PackError, match="no rows for this shard"):
        list(packed([], epochs=None))
