"""What other frameworks embed: pack-core alone, by examples that are short enough to copy."""

import random
import sys
from typing import Any

import pytest
from support.embedding import FOLDER, Rows, example
from support.packing_oracles import fit

numpy = pytest.importorskip("numpy")


def test_every_example_is_under_sixty_lines_and_one_alone_needs_torch() -> None:
    found = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    assert set(found) == {"verl_micro_batches", "nemo_rl_packer", "trl_pack_dataset", "torch_loop"}
    assert {name for name, text in found.items() if len(text.splitlines()) >= 60} == set()
    before = set(sys.modules)
    for name in set(found) - {"torch_loop"}:
        example(name)
    assert "torch" not in set(sys.modules) - before


def batch_of(lengths: list[int]) -> Rows:
    mask = numpy.arange(max(lengths)) < numpy.array(lengths)[:, None]
    return Rows(input_ids=numpy.arange(mask.size).reshape(mask.shape), attention_mask=mask.astype(int))


def rearranged(lengths: list[int], limit: int, **options: Any) -> list[list[int]]:
    batch = batch_of(lengths)
    micro, places = example("verl_micro_batches").rearrange_micro_batches(batch, limit, **options)
    assert [one["input_ids"].tolist() for one in micro] == [batch["input_ids"][rows].tolist() for rows in places]
    return places  # type: ignore[no-any-return]


def test_verls_forty_tokens_in_micro_batches_of_eight() -> None:
    # Six tokens for each of five rows: a sum of 30 would fill four of eight, but no two fit together.
    assert sorted(rearranged([6] * 5, 8)) == [[0], [1], [2], [3], [4]]
    # Groups of two rows stay together: 8 | 8 of 10, not 5 5 | 3 3.
    assert sorted(rearranged([5, 3, 5, 3], 10, force_group_size=2)) == [[0, 1], [2, 3]]
    # Three are asked for, and a multiple of four: four.
    assert len(rearranged([2] * 6, 8, min_num_micro_batch=3, num_batches_divided_by=4)) == 4
    # The lightest at both ends: of 6, 5, 4, 3 come 4 6 5 3.
    assert rearranged([3, 4, 5, 6], 6) == [[1], [3], [2], [0]]


def test_micro_batches_hold_every_row_once_within_the_limit() -> None:
    draw = random.Random(4)
    for _ in range(40):
        size, step = draw.choice([1, 2]), draw.choice([None, 2])
        lengths = [draw.randint(1, 40) for _ in range(2 * draw.randint(4, 20))]
        places = rearranged(lengths, 90, force_group_size=size, num_batches_divided_by=step)
        assert sorted(row for rows in places for row in rows) == list(range(len(lengths)))
        assert all(sum(lengths[row] for row in rows) <= 90 and rows for rows in places)
        assert len(places) % (step or 1) == 0
        for rows in places:
            assert rows[::size] == [row // size * size for row in rows[::size]]
            assert all(row // size in {start // size for start in rows[::size]} for row in rows)


@pytest.mark.parametrize(
    ("lengths", "limit", "options"),
    [([9, 2], 8, {}), ([2, 2, 2], 8, {"force_group_size": 2}), ([2, 2], 8, {"num_batches_divided_by": 3})],
)
def test_what_no_micro_batches_can_hold_is_refused(lengths: list[int], limit: int, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"do not fit|holds the rows"):
        rearranged(lengths, limit, **options)


def test_micro_batches_are_as_few_as_first_fit_decreasing_needs() -> None:
    # 12 8 | 10 10 | 10 9 | 7 7 6 are four of at most 20; filled evenly, they would be five.
    lengths = [9, 10, 7, 8, 10, 10, 12, 7, 6]
    places = rearranged(lengths, 20)
    assert sorted(row for rows in places for row in rows) == list(range(9))
    assert all(sum(lengths[row] for row in rows) <= 20 for rows in places)
    assert len(places) == 4


def test_the_packer_of_nemo_rl_keeps_its_contract() -> None:
    packer_of = example("nemo_rl_packer").Packer
    lengths = [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert packer_of(100).pack(lengths) == fit(lengths, 100, best=True, decreasing=True)
    assert packer_of(100).pack([]) == []
    packer = packer_of(100, collect_metrics=True, min_bin_count=7, bin_count_multiple=4)
    packs = packer.pack(lengths)
    assert len(packs) == 8
    assert sorted(index for one in packs for index in one) == list(range(9))
    assert packer.metrics == {"packs": 8, "sequences": 9, "tokens": 450, "fill": 450 / 800}
    packer.pack([100] * 8)
    assert packer.metrics == {"packs": 16, "sequences": 17, "tokens": 1250, "fill": 1250 / 1600}
    packer.reset_metrics()
    assert packer.metrics["packs"] == 0
    for wrong in ({"min_bin_count": -1}, {"bin_count_multiple": 0}):
        with pytest.raises(ValueError, match="must be"):
            packer_of(100, **wrong)
    with pytest.raises(ValueError, match="capacity"):
        packer_of(100).pack([101])


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {"min_bin_count": 2}, "Cannot create 2 bins with only 0 sequences"),
        ([], {"min_bin_count": 2, "bin_count_multiple": 3}, "Cannot create 3 bins with only 0 sequences"),
        ([50, 50], {"min_bin_count": 3}, "Cannot create 3 bins with only 2 sequences"),
        ([50, 50], {"bin_count_multiple": 4}, "Cannot create 4 bins with only 2 sequences"),
    ],
)
def test_too_few_sequences_are_refused_in_the_words_of_nemo_rl(
    lengths: list[int], options: dict[str, int], message: str
) -> None:
    # Its own tests ask for these words, also where there is nothing to pack: every pack must hold a sequence.
    with pytest.raises(ValueError, match=message):
        example("nemo_rl_packer").Packer(100, **options).pack(lengths)
    assert example("nemo_rl_packer").Packer(100, True, min_bin_count=0, bin_count_multiple=4).pack([]) == []


def test_the_packer_of_nemo_rl_takes_arrays_of_lengths() -> None:
    packer = example("nemo_rl_packer").Packer(10, collect_metrics=True)
    assert packer.pack(numpy.array([5, 5, 3])) == [[0, 1], [2]]
    assert packer.metrics == {"packs": 2, "sequences": 3, "tokens": 13, "fill": 13 / 20}
    assert {type(value) for value in packer.metrics.values()} == {int, float}
    assert packer.pack(numpy.array([], int)) == []
    assert packer.pack([numpy.int64(5), numpy.int32(5)]) == [[0, 1]]
    assert packer.compute_metrics(numpy.array([5, 5]), [[0, 1]])["fill"] == 1.0


#: The example of TRL's own documentation: rows of 5, 2, 3 and 1 tokens in rows of 4.
ROWS = {
    "input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]],
    "attention_mask": [[1, 1, 1, 0, 0], [1, 0], [1, 1, 0], [1]],
}


@pytest.mark.parametrize(
    ("strategy", "packed"),
    [
        ("bfd", {
            "input_ids": [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]],
            "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 1], [1, 0]],
            "seq_lengths": [[4], [3, 1], [2]],
        }),
        ("bfd_split", {
            "input_ids": [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]],
            "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1]],
            "seq_lengths": [[4], [3, 1], [2, 1]],
        }),
        ("wrapped", {
            "input_ids": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]],
            "attention_mask": [[1, 1, 1, 0], [0, 1, 0, 1], [1, 0, 1]],
        }),
    ],
)  # fmt: skip
def test_rows_are_packed_as_trl_documents_it(strategy: str, packed: dict[str, list[list[int]]]) -> None:
    assert example("trl_pack_dataset").pack_dataset(ROWS, 4, strategy) == packed


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_a_data_set_without_a_token_has_its_columns_and_no_rows(strategy: str) -> None:
    added = {} if strategy == "wrapped" else {"seq_lengths": []}
    for columns in ({"input_ids": [], "labels": []}, {"input_ids": [[], []], "labels": [[], []]}):
        packed = example("trl_pack_dataset").pack_dataset(columns, 4, strategy)
        assert packed == {"input_ids": [], "labels": []} | added


def test_columns_that_hold_no_lists_are_refused() -> None:
    pack_dataset = example("trl_pack_dataset").pack_dataset
    for columns, held in (({"input_ids": [[1]], "id": [3]}, "'id' holds int"), ({"t": ["ab"]}, "'t' holds str")):
        with pytest.raises(ValueError, match=f"column {held}, not a list of values a row; remove it"):
            pack_dataset(columns, 4)
    with pytest.raises(ValueError, match="column 'labels' holds NoneType"):
        pack_dataset({"input_ids": [[1], [2]], "labels": [[1], None]}, 4)
    with pytest.raises(ValueError, match="the data set has no columns"):
        pack_dataset({}, 4)
    with pytest.raises(ValueError, match="dataset is a list"):
        pack_dataset([[1]], 4)


def test_columns_that_do_not_belong_together_are_refused() -> None:
    pack_dataset = example("trl_pack_dataset").pack_dataset
    with pytest.raises(ValueError, match="column 'labels' has other lengths than 'input_ids'"):
        pack_dataset({"input_ids": [[1, 2]], "labels": [[1]]}, 4)
    with pytest.raises(ValueError, match="strategy is 'ffd'"):
        pack_dataset(ROWS, 4, "ffd")
