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
    for lengths, options in (([101], {}), ([50, 50], {"min_bin_count": 3}), ([], {"min_bin_count": 1})):
        with pytest.raises(ValueError, match=r"capacity|one would be empty|no lengths"):
            packer_of(100, **options).pack(lengths)


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


def test_columns_that_do_not_belong_together_are_refused() -> None:
    pack_dataset = example("trl_pack_dataset").pack_dataset
    with pytest.raises(ValueError, match="column 'labels' has other lengths than 'input_ids'"):
        pack_dataset({"input_ids": [[1, 2]], "labels": [[1]]}, 4)
    with pytest.raises(ValueError, match="strategy is 'ffd'"):
        pack_dataset(ROWS, 4, "ffd")
