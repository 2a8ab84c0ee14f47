"""Sliding windows and block masks: a token sees the last few tokens of its own document, and never over its start."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import (
    PackedBatch,
    SmallModel,
    block_mask,
    build_batch,
    document_causal_mask,
    full_state,
    get_attention,
    mask_function,
    response_log_probs,
)
from pack_torch.layers import rotation
from support.torch_cases import CONFIG, make_rollouts
from support.torch_naive import naive_attention, naive_log_probs
from torch.nn.attention.flex_attention import create_block_mask

LENGTHS = [(1,), (6,), (3, 3, 3), (2, 3, 4), (4, 1, 4, 2, 1, 4)]
WINDOWS = [None, 1, 2, 3, 4, 100]


def inputs(tokens: int, heads: int = 2, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, count, 4, generator=draw, dtype=dtype, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    ]


def row(*lengths: int) -> PackedBatch:
    return PackedBatch(torch.zeros(sum(lengths), dtype=torch.int64), lengths)


def naive(parts: list[torch.Tensor], lengths: tuple[int, ...], window: int | None) -> torch.Tensor:
    apart = zip(*(part.split(lengths) for part in parts), strict=True)
    return torch.cat([naive_attention(*document, window) for document in apart])


def test_the_window_of_two_by_hand() -> None:
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]

    assert document_causal_mask(torch.tensor([0, 0, 0, 1, 1]), window=2).int().tolist() == expected


def test_a_window_of_one_gives_each_token_its_own_value() -> None:
    query, key, value = inputs(9)

    for name in ("segment", "dense"):
        torch.testing.assert_close(get_attention(name)(query, key, value, row(4, 5), window=1), value)


@pytest.mark.parametrize("name", ["segment", "dense"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_windowed_attention_is_a_softmax_over_the_last_tokens_of_each_document(
    name: str, window: int | None, lengths: tuple[int, ...]
) -> None:
    parts = inputs(sum(lengths))
    expected = naive(parts, lengths, window)
    wanted = torch.autograd.grad(expected.square().sum(), parts)

    found = get_attention(name)(*parts, row(*lengths), window=window)
    gradients = torch.autograd.grad(found.square().sum(), parts)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.none() | st.integers(1, 8))
def test_segment_dense_and_flex_agree_on_any_row_and_window(lengths: list[int], window: int | None) -> None:
    batch = row(*lengths)
    parts = inputs(batch.tokens)

    with torch.no_grad():
        found, expected, flexed = (
            get_attention(name)(*parts, batch, window=window) for name in ("segment", "dense", "flex")
        )

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(flexed, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 5, 255, 256, 257, 300, 599, 600])
def test_a_document_longer_than_one_strip_is_cut_without_a_seam(window: int) -> None:
    lengths = (7, 600, 257, 600)
    batch, parts = row(*lengths), inputs(sum(lengths))

    found, expected = (get_attention(name)(*parts, batch, window=window) for name in ("segment", "dense"))

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["segment", "dense", "flex"])
def test_query_heads_may_share_fewer_key_heads(name: str, window: int | None) -> None:
    lengths = (5, 2, 5)
    query, key, value = (part.detach() for part in inputs(12, heads=4, key_heads=2))
    expected = naive([query, *(part.repeat_interleave(2, dim=1) for part in (key, value))], lengths, window)

    with torch.no_grad():
        found = get_attention(name)(query, key, value, row(*lengths), window=window)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_whole_row_is_a_softmax_when_it_is_one_document() -> None:
    parts = inputs(7)

    torch.testing.assert_close(get_attention("torch")(*parts, row(7)), naive(parts, (7,), None), rtol=0, atol=1e-12)


def test_a_nan_stays_in_its_document_under_a_window_too() -> None:
    lengths = (4, 300, 4)
    batch, parts = row(*lengths), [part.detach() for part in inputs(308)]
    for part in parts:
        part[4:304] = torch.nan

    found = get_attention("segment")(*parts, batch, window=3)

    assert torch.isfinite(found[batch.document_ids != 1]).all()
    assert torch.isnan(found[batch.document_ids == 1]).all()


def test_dropped_weights_are_zero_and_the_others_make_up_for_them() -> None:
    for name in ("segment", "dense"):
        torch.manual_seed(0)
        value = torch.ones(200, 2, 4)
        found = get_attention(name)(value, value, value, row(*[1] * 200), dropout=0.5)
        assert set(found.unique().tolist()) == {0.0, 2.0}, name


@pytest.mark.parametrize("name", ["segment", "dense", "flex"])
def test_a_window_under_one_is_refused(name: str) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="window is 0 but counts the token itself"):
        get_attention(name)(*inputs(3), row(3), window=0)


def test_a_backend_without_window_or_dropout_refuses_it_by_name() -> None:
    with pytest.raises(ValueError, match="'torch' has no sliding window"):
        get_attention("torch")(*inputs(3), row(3), window=2)
    with torch.no_grad(), pytest.raises(ValueError, match="'flex' has no dropout"):
        get_attention("flex")(*inputs(3), row(3), dropout=0.1)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 40])
@pytest.mark.parametrize("lengths", [(1,), (8,), (3, 5), (4, 4, 4, 4), (1, 9, 2, 17, 4), (33,), (16, 1, 16)])
def test_the_block_mask_is_the_one_torch_makes_from_the_whole_mask(
    lengths: tuple[int, ...], window: int | None
) -> None:
    batch = row(*lengths)
    for size in (1, 4, 8):
        expected = create_block_mask(
            mask_function(batch.document_ids, window),
            None,
            None,
            batch.tokens,
            batch.tokens,
            device="cpu",
            BLOCK_SIZE=size,
        )
        found = block_mask(lengths, batch.document_ids, window, size)

        assert found.seq_lengths == expected.seq_lengths
        for side in ("kv", "full_kv", "q", "full_q"):
            counts, others = getattr(found, f"{side}_num_blocks"), getattr(expected, f"{side}_num_blocks")
            assert counts.dtype == others.dtype == torch.int32
            assert torch.equal(counts, others)
            columns, wanted = getattr(found, f"{side}_indices"), getattr(expected, f"{side}_indices")
            for place, count in enumerate(counts[0, 0].tolist()):
                assert columns[0, 0, place, :count].tolist() == wanted[0, 0, place, :count].tolist()


def test_the_mask_function_allows_what_the_mask_allows() -> None:
    batch = row(3, 1, 4)
    rows = torch.arange(batch.tokens)
    for window in (None, 1, 2, 9):
        allowed = batch.mask_function(window)(rows[:1], rows[:1], rows[:, None], rows[None, :])
        assert torch.equal(allowed, document_causal_mask(batch.document_ids, window))


def test_a_row_gives_each_kernel_its_metadata_once() -> None:
    batch = row(3, 1, 4)

    assert batch.seq_idx.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert batch.jagged_offsets.tolist() == batch.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert (batch.seq_idx.dtype, batch.jagged_offsets.dtype, batch.cu_seqlens.dtype) == (
        torch.int32,
        torch.int64,
        torch.int32,
    )
    assert batch.block_mask() is batch.block_mask()
    assert batch.block_mask(2) is batch.block_mask(2)
    assert batch.block_mask() is not batch.block_mask(2)


def test_flex_runs_forward_on_a_cpu_and_says_so_before_it_would_fail() -> None:
    parts = inputs(8)

    with pytest.raises(ValueError, match=r"'flex' runs forward only on cpu; run it under torch.no_grad\(\)"):
        get_attention("flex")(*parts, row(5, 3))
    with pytest.raises(ValueError, match="'flex' runs forward only on cpu"):
        SmallModel(CONFIG, seed=0, attention="flex")(row(5, 3))
    with torch.no_grad():
        expected = naive(parts, (5, 3), None)
        torch.testing.assert_close(get_attention("flex")(*parts, row(5, 3)), expected, rtol=0, atol=1e-12)


def test_the_small_model_scores_alike_under_flex_and_segment() -> None:
    batch = build_batch(make_rollouts(), [3, 0, 7])

    with torch.no_grad():
        found, expected = (
            SmallModel(CONFIG, seed=1, dtype=torch.float64, attention=name)(batch).hidden
            for name in ("flex", "segment")
        )

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["segment", "dense"])
def test_the_small_model_with_a_window_equals_the_formulas(attention: str) -> None:
    config = attrs.evolve(CONFIG, sliding_window=3)
    model = SmallModel(config, seed=3, dtype=torch.float64, attention=attention)
    rollouts, pack = make_rollouts(), [5, 1, 3]
    batch = build_batch(rollouts, pack)

    found = batch.split(response_log_probs(model, batch).detach())
    full = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    unlimited = batch.split(response_log_probs(full, batch).detach())

    for index, scores, other in zip(pack, found, unlimited, strict=True):
        expected = naive_log_probs(full_state(model), config, rollouts[index], False)
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-10)
        assert not torch.allclose(scores, other)


def test_rotations_restart_with_every_document() -> None:
    batch = row(4, 1, 6)
    whole = rotation(batch.position_ids, 8, 10000.0, torch.float64)
    alone = rotation(torch.arange(6), 8, 10000.0, torch.float64)

    for turned, expected in zip(whole, alone, strict=True):
        for document, length in zip(turned.split([4, 1, 6]), (4, 1, 6), strict=True):
            assert torch.equal(document, expected[:length])
