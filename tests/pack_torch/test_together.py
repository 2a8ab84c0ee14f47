"""Several packs laid out at once are what each would be alone, and share nothing that shows."""

import gc
import pickle
import weakref
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core import PackError
from pack_torch import Sft
from pack_torch.formats import together
from pack_torch.formats.columns import Field, Row
from pack_torch.formats.encoded import Encoded
from pack_torch.formats.together import encode_together
from support.format_cases import as_kind, lists, same
from support.iterable_cases import Stream, held, packed, rows_of_lengths

MADE = Sft(label_mode="tokens")


def encoded(format: Sft, packs: Sequence[Sequence[Row]]) -> list[Encoded]:
    """All packs, as many at once as the format likes."""
    found: list[Encoded] = []
    while len(found) < len(packs):
        found += format.encode_some(packs[len(found) :])
    return found


def test_labels_positions_and_boundaries_begin_anew_in_every_pack() -> None:
    packs = [[{"input_ids": [1, 2]}, {"input_ids": [3]}], [{"input_ids": [4, 5, 6]}]]
    first, second = encoded(MADE, packs)
    assert [one.columns["input_ids"].tolist() for one in (first, second)] == [[1, 2, 3], [4, 5, 6]]
    assert [one.columns["labels"].tolist() for one in (first, second)] == [[2, -100, -100], [5, 6, -100]]
    assert [one.position_ids.tolist() for one in (first, second)] == [[0, 1, 0], [0, 1, 2]]
    assert [one.cu_seqlens.tolist() for one in (first, second)] == [[0, 2, 3], [0, 3]]
    assert [MADE.decode(one) for one in (first, second)] == packs


def shown(encoded: Encoded) -> dict[str, Any]:
    """All there is to see of a pack."""
    names = ("segment_lens", "tokens", "doc_lens", "cu_seqlens", "document_ids", "position_ids", "reach", "names")
    seen = {name: getattr(encoded, name) for name in names}
    return seen | {"columns": dict(encoded.columns), "values": dict(encoded.values), "heads": dict(encoded.heads)}


@st.composite
def packs_of_rows(draw: st.DrawFn) -> tuple[Sft, list[list[Row]]]:
    """Packs of rows with masks, prompts, weights and tags, or without, of any kinds of sequences."""
    optional = draw(st.sets(st.sampled_from(["labels", "completion_mask", "weights", "prompt_length", "tag"])))
    declared = draw(st.booleans())
    kinds = st.sampled_from(["list", "int32", "int64", "tensor"])
    kind = draw(st.none() | kinds)

    def row() -> Row:
        tokens = draw(lists(1, 5))
        made = {
            "input_ids": tokens,
            "labels": [token + 1 for token in tokens],
            "completion_mask": [token % 2 for token in tokens],
            "weights": [token / 2 if draw(st.booleans()) else token for token in tokens],
            "prompt_length": draw(st.integers(0, len(tokens))),
            "tag": [len(tokens), "x"],
        }
        names = ["input_ids", *sorted(optional)]
        whole = {"input_ids", "labels", "completion_mask"}
        return {name: as_kind(made[name], kind or draw(kinds)) if name in whole else made[name] for name in names}

    packs = [[row() for _ in range(draw(st.integers(1, 4)))] for _ in range(draw(st.integers(1, 5)))]
    mode = draw(st.sampled_from(["tokens", *(["aligned"] if "labels" in optional else [])]))
    weights = Field(0.0, shift=True, dtype="float64" if declared else None)
    return Sft(label_mode=mode, token_fields={"weights": weights}), packs


@settings(deadline=None, max_examples=150)
@given(packs_of_rows(), st.integers(1, 20))
def test_packs_together_are_the_packs_alone(drawn: tuple[Sft, list[list[Row]]], tokens: int) -> None:
    format, packs = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "_TOKENS", tokens)
        found = encoded(format, packs)
    alone = [format.encode(pack) for pack in packs]
    for one, other, rows in zip(found, alone, packs, strict=True):
        assert same(shown(one), shown(other))
        assert one.cu_seqlens.dtype == np.int32
        assert same(format.decode(one), format.decode(other))
        assert len(format.decode(one)) == len(rows)


def test_the_type_of_a_column_does_not_hang_on_the_neighbours() -> None:
    format = Sft(label_mode="tokens", token_fields={"weights": 0.0})
    packs = [[{"input_ids": [1, 2], "weights": [0.5, 1]}], [{"input_ids": [3], "weights": [2]}]]
    assert [one.columns["weights"].dtype for one in encoded(format, packs)] == [np.float64, np.int64]


def test_names_keep_the_order_that_a_pack_has_them_in() -> None:
    packs = [[{"input_ids": [1, 2], "tag": 1}], [{"tag": 2, "input_ids": [3, 4]}]]
    assert [list(row) for one in encoded(MADE, packs) for row in MADE.decode(one)] == [list(one[0]) for one in packs]


def test_a_pack_that_is_refused_is_refused_in_its_turn_and_again() -> None:
    rows = [*rows_of_lengths([10, 10, 10]), {"input_ids": [[1, 2]] * 10}, *rows_of_lengths([10])]
    packs = iter(packed(rows, block=8))
    assert [held(pack) for pack in islice(packs, 3)] == [[0] * 10, [1] * 10, [2] * 10]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tokens are one row") as caught:
            next(packs)
        assert caught.value.__notes__ == ["in the pack of documents 3, counted from 0 as this reader reads them"]


@pytest.mark.parametrize("bad", [[], [{"tokens": [1]}], [{"input_ids": []}]])
def test_whatever_ails_a_pack_the_one_before_it_is_laid_out(bad: list[Row]) -> None:
    packs = [[{"input_ids": [1, 2]}], bad]
    (first,) = MADE.encode_some(packs)
    assert first.columns["labels"].tolist() == [2, -100]
    with pytest.raises(ValueError, match=r"no documents|have no 'input_ids'|has no tokens"):
        MADE.encode_some(packs[1:])


@attrs.frozen
class Failing(Sft):
    """Raises at its first call, and tells how many packs it was given at each."""

    fault: BaseException = attrs.field(factory=KeyboardInterrupt)
    calls: list[int] = attrs.field(factory=list)

    def encode_some(self, packs: Sequence[Sequence[Row]]) -> Sequence[Encoded]:
        self.calls.append(len(packs))
        if len(self.calls) == 1:
            raise self.fault
        return encode_together(self, packs)


def test_packs_that_must_be_laid_out_one_by_one_are_looked_at_once() -> None:
    packs = [[{"input_ids": [1, 2], "completion_mask": [0, 1]}]] * 9
    (first, *rest) = MADE.encode_some([*packs, [{"input_ids": []}], *packs])
    assert len(rest) == 8
    assert first.columns["labels"].tolist() == [2, -100]


def test_an_interrupted_iteration_goes_on_with_the_pack_it_was_at() -> None:
    format = Failing(label_mode="tokens")
    packs = iter(packed(rows_of_lengths([10] * 40), format=format, block=40))
    with pytest.raises(KeyboardInterrupt):
        next(packs)
    assert [held(pack)[0] for pack in packs] == list(range(40))
    assert format.calls[:4] == [16, 16, 16, 6]  # two wait until the source has ended


def test_an_iterator_that_ends_in_a_format_does_not_end_the_data() -> None:
    packs = iter(packed(rows_of_lengths([10] * 3), format=Failing(label_mode="tokens", fault=StopIteration()), block=8))
    with pytest.raises(RuntimeError, match="Failing or a row raised StopIteration"):
        next(packs)
    assert [held(pack)[0] for pack in packs] == [0, 1, 2]


def test_a_subclass_that_lays_out_its_own_way_sees_one_pack_at_a_time() -> None:
    @attrs.frozen
    class Numbered(Sft):
        def encode(self, rows: Sequence[Row]) -> Encoded:
            laid = super().encode(rows)
            return attrs.evolve(laid, values={"of": [len(rows)] * len(rows)})

    packs = list(packed(rows_of_lengths([5, 5, 3, 3]), format=Numbered(label_mode="tokens"), block=8))
    assert [pack.values for pack in packs] == [{"of": [2, 2]}, {"of": [2, 2]}]


@pytest.mark.parametrize(("number", "message"), [(0, "gave 0 packs of 3"), (4, "gave 4 packs of 3")])
def test_a_format_that_leaves_packs_out_or_adds_some_is_told_so(number: int, message: str) -> None:
    @attrs.frozen
    class Wrong(Sft):
        def encode_some(self, packs: Sequence[Sequence[Row]]) -> Sequence[Encoded]:
            return [self.encode(packs[0])] * number

    packs = iter(packed(rows_of_lengths([10, 10, 10]), format=Wrong(label_mode="tokens"), block=8))
    with pytest.raises(PackError, match=rf"Wrong\.encode_some {message}; it must give the first of them"):
        next(packs)


@pytest.mark.filterwarnings("ignore:the source has neither")
def test_nothing_of_a_block_is_held_once_its_packs_are_given() -> None:
    class Weak(dict[str, Any]):
        """A row that can be looked after."""

    watched: list[weakref.ref[Weak]] = []

    def source() -> Iterator[Row]:
        for length in [10] * 8 + [3]:
            row = Weak(input_ids=[1] * length)
            watched.append(weakref.ref(row))
            yield row

    dataset = packed(Stream(source()), strategy="next_fit", last="drop", window=1, block=1)
    given = sum(1 for _ in dataset)
    gc.collect()
    assert (given, [one() for one in watched]) == (8, [None] * 9)


def test_few_tokens_are_held_by_a_pack_that_is_kept() -> None:
    rows = [{"input_ids": np.full(1_000, number)} for number in range(200)]
    for pack in packed(rows, capacity=1_000, block=200):
        held_by = pack.encoded.columns["input_ids"].base
        assert held_by is None or held_by.nbytes <= 16 * 8_000
    wide = [[{"input_ids": np.full(length, 1)}] for length in (10_000, 20_000, 30_000, 2, 2_000, 768)]
    found = [one.columns["labels"] for one in encoded(MADE, wide)]
    assert list(map(len, found)) == [10_000, 20_000, 30_000, 2, 2_000, 768]
    shared = [None if one.base is None else len(one.base) for one in found]
    assert shared == [30_000, 30_000, 32_002, 32_002, 32_002, None]  # 2^15 are 32,768


def test_a_pack_travels_without_its_neighbours_and_is_written_without_harm_to_them() -> None:
    rows = [{"input_ids": np.full(1_000, number)} for number in range(8)]
    packs = list(packed(rows, capacity=1_000, block=8))
    assert len(pickle.dumps(packs[3])) < 4 * 8_000
    packs[3]["labels"][:] = -100
    packs[3].position_ids[:] = 7
    assert packs[3]["labels"].untyped_storage().nbytes() == 8_000
    for number in (2, 4):
        assert packs[number]["labels"].tolist() == [number] * 999 + [-100]
        assert torch.equal(packs[number].position_ids, torch.arange(1_000))
