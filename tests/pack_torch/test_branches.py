"""Prompts that branches share: masks, positions and targets by hand, and against one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import PackCollator, PackedBatch, Preference, SharedPrompt, build_pack
from pack_torch.formats import Encoded
from pack_torch.intervals import reach_block_mask, reach_function
from support.format_cases import branched, sees, tokens_of

ROW = {"prompt_ids": [1, 2], "completion_ids": [[3, 4, 5], [6, 7]]}


def test_a_shared_prompt_by_hand() -> None:
    pack = build_pack([ROW], format=SharedPrompt())
    assert pack["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert pack.document_ids.tolist() == [0] * 7
    assert pack.dense_mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]


def test_the_last_prompt_token_predicts_the_first_of_every_branch() -> None:
    batch = PackCollator(mask="dense")([build_pack([ROW], format=SharedPrompt(), capacity=9)])
    rows, targets = batch.score_map()
    assert targets.tolist() == [3, 4, 5, 6, 7]
    assert rows.tolist() == [1, 2, 3, 1, 5]
    assert [(one.id, one.group, one.length, one.response_length) for one in batch.rollouts] == [
        ("0/0", 0, 5, 3),
        ("0/1", 0, 4, 2),
    ]


def test_a_pair_by_hand_apart_and_as_a_tree() -> None:
    row = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6, 7], "id": "q"}
    apart = build_pack([row], format=Preference())
    assert apart["input_ids"].tolist() == [1, 2, 3, 4, 5, 1, 2, 6, 7]
    assert apart.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert apart.cu_seqlens.tolist() == [0, 5, 9]
    tree = build_pack([row], format=Preference(shared=True))
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3]
    for pack, rows in ((apart, [1, 2, 3, 6, 7]), (tree, [1, 2, 3, 1, 5])):
        batch = PackCollator(mask="dense")([pack])
        assert batch.score_map()[0].tolist() == rows
        assert batch.score_map()[1].tolist() == [3, 4, 5, 6, 7]
        assert [one.id for one in batch.rollouts] == ["q/chosen", "q/rejected"]
        assert batch.chosen == {"q/chosen"}


@settings(deadline=None, max_examples=80)
@given(st.lists(branched(), min_size=1, max_size=4), st.booleans(), st.integers(1, 5), st.integers(0, 3))
def test_masks_positions_and_targets_are_what_they_are_token_by_token(
    drawn: list, shared: bool, block: int, padding: int
) -> None:
    rows = [{"prompt_ids": prompt, "completion_ids": branches} for prompt, branches in drawn]
    tokens = tokens_of(drawn, shared)
    expected = [[sees(query, key) and k <= q for k, key in enumerate(tokens)] for q, query in enumerate(tokens)]

    format = SharedPrompt(shared=shared)
    pack = build_pack(rows, format=format, capacity=len(tokens) + padding)
    batch = PackCollator(mask="dense")([pack])

    assert pack.position_ids.tolist() == [token.position for token in tokens]
    assert pack.document_ids.tolist() == [token.document for token in tokens]
    assert pack.dense_mask().tolist() == expected
    mask = batch.dense_mask()[0]
    assert mask[: len(tokens), : len(tokens)].tolist() == expected
    assert torch.equal(mask[len(tokens) :, len(tokens) :], torch.eye(padding, dtype=torch.bool))
    assert not mask[: len(tokens), len(tokens) :].any()
    assert not mask[len(tokens) :, : len(tokens)].any()
    places = [
        (start, start + block) for start in range(0, len(tokens) + padding, block)
    ]  # a block is there where any of its pairs is, and taken whole only where all are
    blocks = reach_block_mask(batch.reach, batch.mask_function, block_size=block)
    assert blocks.to_dense()[0, 0].tolist() == [
        [int(mask[slice(*query), slice(*key)].any()) for key in places] for query in places
    ]
    full = [int(n) for n in blocks.full_kv_num_blocks[0, 0]]
    for number, query in enumerate(places):
        whole = [
            column
            for column, key in enumerate(places)
            if mask[slice(*query), slice(*key)].numel() == block * block and mask[slice(*query), slice(*key)].all()
        ]
        assert blocks.full_kv_indices[0, 0, number, : full[number]].tolist() == whole

    # A branch's token is predicted by the token that stands one position before it and that it sees.
    wanted = []
    for place, token in enumerate(tokens):
        if token.branch is not None:
            seen = [k for k in range(place) if expected[place][k] and tokens[k].position == token.position - 1]
            assert len(seen) == 1
            wanted.append((seen[0], int(pack["input_ids"][place])))
    got_rows, got_targets = batch.score_map()
    assert list(zip(got_rows.tolist(), got_targets.tolist(), strict=True)) == wanted
    assert [one.response_length for one in batch.rollouts] == [len(b) for _, branches in drawn for b in branches]


def test_deeper_trees_are_masked_alike() -> None:
    # 0 and its children 1 and 4; 1 has the children 2 and 3.
    tree = Encoded({}, [2, 1, 1, 2, 1], [5], [-1, 0, 1, 1, 0])
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 2]
    reach = torch.from_numpy(tree.reach)[None]
    row = torch.arange(7)
    seen = reach_function(reach)(torch.tensor(0), torch.tensor(0), row[:, None], row[None, :])
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]
    batch = PackedBatch(torch.arange(7), (7,), reach=reach[0])
    assert batch.position_ids.tolist() == tree.position_ids.tolist()
    assert torch.equal(batch.dense_mask(), seen)


def test_a_window_is_counted_along_the_branch() -> None:
    encoded = build_pack([ROW], format=SharedPrompt()).encoded
    batch = PackedBatch(torch.arange(7), (7,), reach=torch.from_numpy(encoded.reach))
    assert batch.dense_mask(window=2)[5].int().tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert batch.block_mask(window=2).to_dense()[0, 0].tolist() == [[1]]
    with pytest.raises(ValueError, match="a window is counted in positions"):
        reach_function(batch.reach[None], window=2)


def test_lengths_and_costs_count_a_shared_prompt_once() -> None:
    assert (SharedPrompt().length(ROW), SharedPrompt(shared=False).length(ROW)) == (7, 9)
    # Squares of 2 + 3 and 2 + 2 tokens; the prompt's own 4 are done once.
    assert (SharedPrompt(shared=False).cost(ROW), SharedPrompt().cost(ROW)) == (41, 37)
    pair = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6, 7]}
    assert (Preference().length(pair), Preference(shared=True).length(pair)) == (9, 7)
    assert (Preference().cost(pair), Preference(shared=True).cost(pair)) == (41, 37)


def test_a_tree_draws_its_branches() -> None:
    drawn = build_pack([ROW], format=SharedPrompt(), capacity=8).describe(width=8)
    assert drawn.splitlines()[1:] == ["|0000000.|", "|==aaabb.|"]


def test_fields_per_token_and_per_completion_reach_the_losses() -> None:
    row = ROW | {
        "advantages": [1.0, -2.0],
        "old_log_probs": [[-1, -2, -3], [-4, -5]],
        "completion_mask": [[1, 0, 1], [0, 1]],
    }
    batch = PackCollator(mask="dense")([build_pack([row, row], format=SharedPrompt())])
    assert batch.concat("advantages").tolist() == [1.0, 1.0, 1.0, -2.0, -2.0] * 2
    assert batch.concat("old_log_probs").tolist() == [-1, -2, -3, -4, -5] * 2
    assert batch.concat("loss_mask").tolist() == [True, False, True, False, True] * 2
    assert [one.active_tokens for one in batch.rollouts] == [2, 1] * 2
    whole = PackCollator(mask="dense")([build_pack([ROW | {"completion_mask": [0, 1]}], format=SharedPrompt())])
    assert whole.concat("loss_mask").tolist() == [False, False, False, True, True]
    with pytest.raises(ValueError, match="no ref_log_probs per scored token, only loss_mask, "):
        batch.concat("ref_log_probs")


def test_mistakes_are_named() -> None:
    def build(**row: object) -> None:
        build_pack([{**ROW, **row}], format=SharedPrompt())

    with pytest.raises(ValueError, match="document 0 of the pack has an empty prompt"):
        build(prompt_ids=[])
    with pytest.raises(ValueError, match="has a prompt and nothing after it"):
        build(completion_ids=[])
    with pytest.raises(ValueError, match=r"has \[3, 1\] values of 'old_log_probs' for branches of \[3, 2\] tokens"):
        build(old_log_probs=[[0.0] * 3, [0.0]])
    with pytest.raises(ValueError, match="has 3 advantages for 2 completions"):
        build(advantages=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="a prompt with 2 completions cannot be cut: completions are compared"):
        SharedPrompt().cut(ROW, 0, 3)
    pair = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
    with pytest.raises(ValueError, match="a pair of answers cannot be cut: a margin needs both"):
        Preference().cut(pair, 0, 1)
    with pytest.raises(ValueError, match="pairs have no 'rejected_mask' but its counterpart; give both or neither"):
        build_pack([pair | {"chosen_mask": [1]}], format=Preference())
    with pytest.raises(ValueError, match="takes \\[3\\] and no rollouts"):
        PackedBatch(torch.arange(3), (3,), reach=torch.tensor([3, 3]))
