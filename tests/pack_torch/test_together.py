"""Several packs laid out at once are what each would be alone, and share nothing that shows."""

import pickle
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
from support.format_cases import as_kind, lists, same
from support.iterable_cases import held, packed, rows_of_lengths

MADE = Sft(label_mode="tokens")


def test_labels_positions_and_boundaries_begin_anew_in_every_pack() -> None:
    packs = [[{"input_ids": [1, 2]}, {"input_ids": [3]}], [{"input_ids": [4, 5, 6]}]]
    first, second = MADE.encode_packs(packs)
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
        found = list(format.encode_packs(packs))
    alone = [format.encode(pack) for pack in packs]
    for one, other, rows in zip(found, alone, packs, strict=True):
        assert same(shown(one), shown(other))
        assert one.cu_seqlens.dtype == np.int32
        assert same(format.decode(one), format.decode(other))
        assert len(format.decode(one)) == len(rows)


def test_the_type_of_a_column_does_not_hang_on_the_neighbours() -> None:
    format = Sft(label_mode="tokens", token_fields={"weights": 0.0})
    packs = [[{"input_ids": [1, 2], "weights": [0.5, 1]}], [{"input_ids": [3], "weights": [2]}]]
    assert [one.columns["weights"].dtype for one in format.encode_packs(packs)] == [np.float64, np.int64]


def test_a_pack_that_is_refused_is_refused_in_its_turn_and_again() -> None:
    rows = [*rows_of_lengths([10, 10, 10]), {"input_ids": [[1, 2]] * 10}, *rows_of_lengths([10])]
    packs = iter(packed(rows, block=8))
    assert [held(pack) for pack in islice(packs, 3)] == [[0] * 10, [1] * 10, [2] * 10]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tokens are one row") as caught:
            next(packs)
        assert caught.value.__notes__ == ["in the pack of documents 3, counted from 0 as this reader reads them"]


def test_a_subclass_that_lays_out_its_own_way_sees_one_pack_at_a_time() -> None:
    @attrs.frozen
    class Numbered(Sft):
        def encode(self, rows: Sequence[Row]) -> Encoded:
            laid = super().encode(rows)
            return attrs.evolve(laid, values={"of": [len(rows)] * len(rows)})

    packs = list(packed(rows_of_lengths([5, 5, 3, 3]), format=Numbered(label_mode="tokens")))
    assert [pack.values for pack in packs] == [{"of": [2, 2]}, {"of": [2, 2]}]


def test_a_format_that_leaves_packs_out_is_told_so() -> None:
    @attrs.frozen
    class Short(Sft):
        def encode_packs(self, packs: Sequence[Sequence[Row]]) -> Iterator[Encoded]:
            return super().encode_packs(packs[:-1])

    packs = iter(packed(rows_of_lengths([10, 10, 10]), format=Short(label_mode="tokens")))
    assert [held(pack) for pack in islice(packs, 2)] == [[0] * 10, [1] * 10]
    with pytest.raises(PackError, match=r"Short\.encode_packs gave 2 packs where there are 3; it must give one for"):
        next(packs)


def test_few_tokens_are_held_by_a_pack_that_is_kept() -> None:
    rows = [{"input_ids": np.full(1_000, number)} for number in range(200)]
    for pack in packed(rows, capacity=1_000, block=200):
        held_by = pack.encoded.columns["input_ids"].base
        assert held_by is None or held_by.nbytes <= 16 * 8_000
    wide = [[{"input_ids": np.full(length, 1)}] for length in (10_000, 20_000, 30_000, 2, 2_000, 768)]
    found = [one.columns["labels"] for one in MADE.encode_packs(wide)]
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
