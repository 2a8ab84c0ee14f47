"""What a dataset must refuse, keep together and account for, whoever reads it and however it is gone through again."""

import copy
import json
import pickle
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pack_core import PackError, RecordError
from pack_core.stream import Choice
from pack_torch import (
    Multimodal,
    Pack,
    PackCollator,
    Preference,
    Sft,
    SharedPrompt,
    add_metrics,
    mix,
    progress_line,
    shuffle,
    summarize,
)
from pack_torch.iterable.ahead import Ahead
from support.format_cases import no_payloads
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
from torch.utils.data import DataLoader


def order(packs: Iterable[Pack]) -> list[list[int]]:
    """The numbers of the rows of each pack."""
    return [[row["input_ids"][0] for row in pack.documents()] for pack in packs]


def in_groups(sizes: list[int]) -> list[dict[str, Any]]:
    """Rows of one token, the group of each, and a row of no group after every second group."""
    rows = []
    for group, size in enumerate(sizes):
        rows += [{"input_ids": [len(rows) + at], "group": group} for at in range(size)]
        if group % 2:
            rows.append({"input_ids": [len(rows)], "group": None})
    return rows


def test_groups_are_dealt_out_whole() -> None:
    rows = in_groups([2, 2, 2])  # 0 1 | 2 3 | 4 alone | 5 6
    one, two = (packed(rows, group="group", rank=rank, world=2) for rank in (0, 1))
    assert (sorted(numbers(one)), sorted(numbers(two))) == ([0, 1, 4], [2, 3, 5, 6])


def test_groups_may_be_numbers_of_numpy_and_states_are_json_all_the_same() -> None:
    rows = [row | {"group": None if row["group"] is None else np.int64(row["group"])} for row in in_groups([2, 2, 3])]
    resumed_at_every_pack(lambda: packed(rows, group="group", rank=1, world=2, block=2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1], "group": 0.5}], r"group, in field 'group', is 0\.5"),
        ([[1]], "the source gives one list, but rows have fields"),
    ],
)
def test_groups_that_are_none_are_named(rows: object, message: str) -> None:
    with pytest.raises(PackError, match=message):
        list(packed(rows, group="group", rank=0, world=2))


class InFiles(Stream):
    """What deals its files out by itself, as a stream of Hugging Face does."""

    num_shards = 2

    def shard(self, num_shards: int, index: int) -> Stream:
        half = len(self.rows) // 2
        return Stream(self.rows[half * index : half * (index + 1)])


@pytest.mark.filterwarnings("ignore:the source has neither")
def test_groups_in_files_that_are_dealt_out_are_refused_unless_somebody_knows_better() -> None:
    rows = in_groups([3, 3])
    with pytest.raises(PackError, match="the source deals out its 2 files, and a group='group' over two files"):
        list(packed(InFiles(rows), group="group", world=2))
    known = [packed(InFiles(rows), group="group", rank=rank, world=2, source_shards="workers") for rank in (0, 1)]
    assert sorted(number for one in known for number in numbers(one)) == list(range(7))


@pytest.mark.parametrize("kind", [list, Stateful, Stream])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:the source has neither")
def test_every_reader_has_whole_groups_and_all_have_everything_once(kind: type, world: int) -> None:
    rows = in_groups([3, 1, 2, 4, 1, 3, 2])
    of = {row["input_ids"][0]: row["group"] for row in rows}
    found: list[int] = []
    for rank in range(world):
        packs = [numbers([pack]) for pack in packed(kind(rows), group="group", window=4, rank=rank, world=world)]
        for group in {of[one] for pack in packs for one in pack} - {None}:
            whole = {number for number, its in of.items() if its == group}
            assert sum(whole <= set(pack) for pack in packs) == 1
        found += [one for pack in packs for one in pack]
        resumed_at_every_pack(lambda rank=rank: packed(kind(rows), group="group", window=4, rank=rank, world=world))
    assert sorted(found) == sorted(of)


def test_workers_have_whole_groups_too() -> None:
    rows = in_groups([2] * 8)
    of = {row["input_ids"][0]: row["group"] for row in rows}
    loader = DataLoader(packed(rows, group="group"), batch_size=None, num_workers=2)
    packs = [set(numbers([pack])) for pack in loader]
    for group in set(of.values()) - {None}:
        assert sum({number for number, its in of.items() if its == group} <= pack for pack in packs) == 1


@pytest.mark.parametrize("source", [shuffle(in_groups([2, 2]), 4), mix([in_groups([2]), in_groups([2])])])
def test_what_moves_rows_one_by_one_is_refused_beside_groups(source: object) -> None:
    with pytest.raises(PackError, match=r"group='group' keeps neighbours together, and (shuffle|mix) moves rows"):
        iter(packed(source, group="group"))


class Slow(Stateful):
    """A source that a thread is still reading when it is begun again, unless it is waited for."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in super().__iter__():
            if len(threading.enumerate()) > 1:
                threading.Event().wait(0.001)
            yield row


def test_what_is_read_ahead_is_not_read_on_while_the_source_is_begun_anew() -> None:
    rows = some_rows(120)
    expected = order(packed(Slow(rows)))
    dataset = packed(Slow(rows), prefetch=2)
    for _ in range(3):
        packs = iter(dataset)
        next(packs)
        state = json.loads(json.dumps(dataset.state_dict()))
        next(packs)
        assert order(dataset) == expected
        next(iter(dataset))
        dataset.load_state_dict(state)
        assert order(dataset) == expected[1:]


def test_an_iteration_that_is_not_read_ahead_any_more_goes_on_by_itself() -> None:
    rows = some_rows(60)
    expected = order(packed(rows))
    dataset = packed(rows, prefetch=3)
    first = iter(dataset)
    begun = order([next(first)])
    assert order(dataset) == expected
    assert begun + order(first) == expected


class Interrupted(list):  # type: ignore[type-arg]
    def __getitem__(self, place: Any) -> Any:
        if place == 6:
            raise KeyboardInterrupt
        return super().__getitem__(place)


class Short(list):  # type: ignore[type-arg]
    def __getitem__(self, place: Any) -> Any:
        if place == 6:
            raise StopIteration
        return super().__getitem__(place)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupt_is_raised_again_and_not_waited_for(prefetch: int) -> None:
    packs = iter(packed(Interrupted(some_rows(9)), prefetch=prefetch))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            list(packs)


def test_a_source_that_gives_fewer_rows_than_it_says_is_noticed() -> None:
    with pytest.raises(PackError, match="the source has 9 rows by its length and gave 2 for 4 places from 4 on"):
        list(packed(Short(some_rows(9))))


@pytest.mark.parametrize("make", [lambda it: it, copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_an_epoch_is_told_to_workers_that_live_on(make: Any, start: str) -> None:
    dataset = make(packed(shuffle(some_rows(20), 20), window=1))
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context=start)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append(order(loader))
    assert orders[0] == orders[2] != orders[1]
    with pytest.raises(PackError, match="epoch is 'a' "):
        dataset.set_epoch("a")  # type: ignore[arg-type]


IMAGES = [
    {"input_ids": [0] * 12, "images": ["a"], "spans": [(8, 11)]},
    {"input_ids": [1] * 3, "images": [], "spans": []},
]
TEXTS = [{"input_ids": row["input_ids"]} for row in IMAGES]


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_rows_that_the_format_cuts_are_counted_as_those_that_the_stream_cuts(overlong: str) -> None:
    text = packed(TEXTS, overlong=overlong)
    # The image goes as a whole: four tokens are lost, not two.
    images = packed(IMAGES, overlong=overlong, format=Multimodal(no_payloads, TOKENS))
    for dataset, lost in ((text, 2), (images, 4)):
        packs = list(dataset)
        metrics = add_metrics([pack.info for pack in packs])
        counts = dataset.counts
        assert (counts.seen.documents, counts.seen.tokens) == (2, 15)
        assert (metrics["consumed_documents/0"], metrics["consumed_tokens/0"]) == (2, 15)
        kept = sum(pack.tokens for pack in packs)
        assert counts.seen.tokens == kept + counts.lost_tokens
        if overlong == "truncate":
            assert counts.lost["truncated"].tokens == metrics["lost_tokens/truncated"] == lost
            assert metrics["lost_documents/truncated"] == 1
        else:
            assert kept == 15
            assert (metrics["cut_documents/overlong"], metrics["cut_tokens/overlong"]) == (1, 12)


def test_documents_cut_where_a_pack_is_full_are_told_with_the_batch() -> None:
    dataset = packed(rows_of_lengths([6, 7, 7]), strategy="concat_split")
    metrics = add_metrics([batch.metrics for batch in map(PackCollator(), ([pack] for pack in dataset))])
    assert metrics["cut_documents/full"] == 1
    assert metrics["cut_tokens/full"] == dataset.counts.cut["full"].tokens


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_is_lost_behind_the_last_pack_is_told_with_it(prefetch: int) -> None:
    rows = rows_of_lengths([6, 6, 6, 3, 11, 11, 11, 11, 11])  # blocks of four: the last pack is of the first one
    dataset = packed(rows, window=1, overlong="drop", prefetch=prefetch)
    metrics = add_metrics([pack.info for pack in dataset])
    assert (metrics["lost_documents/overlong"], metrics["lost_tokens/overlong"]) == (5, 55)
    assert metrics["consumed_documents/0"] == dataset.counts.seen.documents == 9
    resumed_at_every_pack(lambda: packed(rows, window=1, overlong="drop", prefetch=prefetch))


def test_a_source_that_waits_for_its_packs_to_be_used_is_not_read_on() -> None:
    given: list[int] = []

    class Live:
        """Rows that are there only once the one before was used."""

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number in range(5):
                assert given == list(range(number))
                yield {"input_ids": [number] * 10}

    for pack in packed(Live(), window=1, block=1):
        given += numbers([pack])
    assert given == [0, 1, 2, 3, 4]


def test_an_error_behind_the_last_pack_does_not_take_it_away() -> None:
    packs = iter(packed([*rows_of_lengths([6, 6, 6, 6]), {"wrong": 1}], window=1))
    assert [held(next(packs)) for _ in range(3)] == [[0] * 6, [1] * 6, [2] * 6]
    for _ in range(2):
        with pytest.raises(PackError, match="document 4"):
            next(packs)


def test_how_full_packs_are_does_not_depend_on_how_they_are_laid() -> None:
    packs = list(packed(rows_of_lengths([6, 6])))
    for mask, padding in (("varlen", 0.0), ("dense", 0.4)):
        metrics = PackCollator(mask)(packs).metrics
        assert (summarize(metrics)["fill"], summarize(metrics)["padding_share"]) == (0.6, padding)
        assert "60.0 % full" in progress_line(metrics, 1.0)


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        (
            Preference(),
            {"overlong": "truncate"},
            "overlong='truncate' cuts rows, and Preference rows cannot be cut",
        ),
        (Preference(), {"strategy": "concat_split"}, "strategy 'concat_split' cuts rows, and Preference rows cannot"),
        (SharedPrompt(), {"overlong": "split"}, "SharedPrompt rows cannot be cut: completions are compared .*='drop'"),
        (Multimodal(no_payloads), {"strategy": "concat_split"}, "at any token, and Multimodal rows have spans that"),
        (Multimodal(no_payloads), {"overlong": "split", "max_cost": 81}, "overlong='split' with max_cost cuts rows at"),
        (Sft, {}, "format is .*Sft.*; give an object such as Sft"),
        (None, {}, "format is None; give an object"),
        (SimpleNamespace(encode=list, length=len), {}, "SimpleNamespace does not inherit from pack_torch.Format"),
    ],
)
def test_formats_whose_rows_would_be_cut_wrongly_are_refused_before_anything_is_read(
    format: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PackError, match=message):
        packed([], format=format, **options)


class Every:
    """A strategy by hand: whatever fits, from some place on."""

    def __init__(self, place: int) -> None:
        self.place = place

    def choose(self, waiting: Any, room: Any, memory: Any) -> Choice:
        fitting = [at for at, one in enumerate(waiting) if room.fits(one)]
        return Choice(take=(fitting[self.place % len(fitting)],)) if fitting else Choice(close=True)


def test_a_strategy_made_by_hand_is_compared_by_its_own_values() -> None:
    state = packed(some_rows(9), strategy=Every(0)).state_dict()
    packed(some_rows(9), strategy=Every(0)).load_state_dict(state)
    with pytest.raises(RecordError, match=r"strategy was .*'place': 0.* and is .*'place': 1"):
        packed(some_rows(9), strategy=Every(1)).load_state_dict(state)
    with pytest.raises(PackError, match="it is a class"):
        packed(some_rows(9), strategy=Every)


class Counting(Every):
    def choose(self, waiting: Any, room: Any, memory: Any) -> Choice:
        self.place += 1
        return super().choose(waiting, room, memory)


def test_what_a_strategy_changes_while_it_chooses_is_not_how_it_was_made() -> None:
    dataset = packed(some_rows(9), strategy=Counting(0))
    next(iter(dataset))
    packed(some_rows(9), strategy=Counting(0)).load_state_dict(dataset.state_dict())


@pytest.mark.parametrize("state", [None, "", {"version": 1}, {"version": 1, "setup": [], "epoch": 0}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(RecordError, match=r"the state is of version None|the state has no .*; give what state_dict"):
        packed(some_rows(9)).load_state_dict(state)


def test_a_state_that_says_more_packs_were_given_than_there_are_is_refused() -> None:
    dataset = packed(some_rows(9))
    next(iter(dataset))
    other = packed(some_rows(9))
    other.load_state_dict({**dataset.state_dict(), "given": 50})
    with pytest.raises(RecordError, match="saved after 50 packs of a block that has"):
        list(other)


def test_an_error_in_a_pack_says_which_documents_it_has() -> None:
    rows: list[dict[str, object]] = [{"input_ids": [1]}, {"input_ids": [2], "extra": 1}]
    with pytest.raises(ValueError, match="do not have the same fields") as caught:
        list(packed(rows, format=Sft(label_mode="tokens")))
    assert caught.value.__notes__ == ["in the pack of documents 0, 1, counted from 0 as this reader reads them"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"train": [], "test": []}, "the source is one dict of train, test; give one of them, or mix them"),
        ([[1, 2]], "document 0, .* is one list, and Sft cannot say its length"),
        ([{"input_ids": None}], "document 0, .* has fields input_ids, and Sft cannot say its length: object of type"),
    ],
)
def test_sources_that_are_none_are_named(source: object, message: str) -> None:
    with pytest.raises(PackError, match=message):
        list(packed(source))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_have_epochs_of_their_own(make: Any) -> None:
    one = packed(shuffle(some_rows(9), 9))
    first = order(one)
    other = make(one)
    other.set_epoch(3)
    assert order(one) == first != order(other)
    assert (one.state_dict()["epoch"], other.state_dict()["epoch"]) == (0, 3)


def test_what_is_made_ahead_ends_and_is_asked_again() -> None:
    ends: list[Any] = [None, None]
    ahead = Ahead(ends.pop, 1)
    assert [ahead(), ahead()] == [None, None]
    failing = iter(())
    ahead = Ahead(lambda: next(failing), 1)
    for _ in range(2):
        with pytest.raises(StopIteration):
            ahead()
    ahead = Ahead(lambda: None, 1)
    ahead.close()
    assert ahead() is None


def test_a_group_of_one_epoch_is_not_that_of_the_next() -> None:
    rows = [{"input_ids": [number] * 4, "group": number // 2} for number in range(4)]
    assert order(packed(rows, group="group", epochs=2, window=4, capacity=8)) == [[0, 1], [2, 3]] * 2
    one = [{"input_ids": [number] * 4, "group": 0} for number in range(2)]
    assert order(packed(one, group="group", epochs=3, window=2, capacity=8)) == [[0, 1]] * 3
    resumed_at_every_pack(lambda: packed(rows, group="group", epochs=2, window=4, capacity=8, rank=1, world=2))


def test_an_iteration_takes_no_rows_from_the_one_begun_after_it() -> None:
    rows = some_rows(60)
    expected = order(packed(Stateful(rows)))
    for prefetch in (0, 2):
        dataset = packed(Stateful(rows), prefetch=prefetch)
        old = iter(dataset)
        next(old)
        new = iter(dataset)
        begun = order([next(new)])
        with pytest.raises(PackError, match="the dataset was begun anew, and its source keeps its own place"):
            list(old)
        assert begun + order(new) == expected


class Wrapping(Stateful):
    """A source that is back at its first row by itself once it has ended."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from super().__iter__()
        self.at = 0


def test_a_source_that_begins_anew_by_itself_is_not_read_twice() -> None:
    resumed_at_every_pack(lambda: packed(shuffle(Wrapping(some_rows(13)), 8), epochs=2))
    resumed_at_every_pack(lambda: packed(Wrapping(some_rows(13)), epochs=2, rank=1, world=2))


def test_what_a_strategy_holds_that_has_no_value_of_its_own_is_not_compared() -> None:
    one, two = (Every(0) for _ in range(2))
    one.keys, two.keys = (object(), 1), (object(), 1)  # type: ignore[attr-defined]
    packed(some_rows(9), strategy=one).load_state_dict(packed(some_rows(9), strategy=two).state_dict())
    one.weight = two.weight = float("nan")  # type: ignore[attr-defined]
    packed(some_rows(9), strategy=one).load_state_dict(packed(some_rows(9), strategy=two).state_dict())
