"""Attention inside documents: against an explicit mask, and against a softmax written row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import PackedBatch, document_causal_mask, get_attention
from support.torch_naive import naive_attention


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, 2, 4, generator=draw, dtype=dtype, requires_grad=True) for _ in range(3)]


def row(*lengths: int) -> PackedBatch:
    return PackedBatch(torch.zeros(sum(lengths), dtype=torch.int64), lengths)


def test_the_mask_of_two_documents_by_hand() -> None:
    assert document_causal_mask(torch.tensor([0, 0, 0, 1, 1])).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("name", ["segment", "dense"])
@pytest.mark.parametrize("lengths", [(1,), (5,), (3, 3, 3), (2, 3, 4), (4, 1, 4, 2, 1, 4)])
def test_a_packed_row_is_a_softmax_over_each_documents_past(name: str, lengths: tuple[int, ...]) -> None:
    query, key, value = inputs(sum(lengths))
    apart = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    expected = torch.cat([naive_attention(*parts) for parts in apart])
    wanted = torch.autograd.grad(expected.square().sum(), (query, key, value))

    found = get_attention(name)(query, key, value, row(*lengths))
    gradients = torch.autograd.grad(found.square().sum(), (query, key, value))

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_segment_equals_dense_on_any_row(lengths: list[int]) -> None:
    batch = row(*lengths)
    parts = inputs(batch.tokens, seed=len(lengths))

    found, expected = (get_attention(name)(*parts, batch) for name in ("segment", "dense"))

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_other_documents_do_not_change_a_single_bit(dtype: torch.dtype) -> None:
    lengths = (4, 9, 4, 2, 9, 70)
    batch = row(*lengths)
    parts = [part.detach() for part in inputs(batch.tokens, dtype=dtype)]
    before = get_attention("segment")(*parts, batch)

    for document in range(len(lengths)):
        own = batch.document_ids == document
        changed = [torch.where(own[:, None, None], part, part * 3 - 1) for part in parts]
        assert torch.equal(get_attention("segment")(*changed, batch)[own], before[own])


def test_one_document_may_use_any_backend() -> None:
    parts = inputs(6)

    torch.testing.assert_close(
        get_attention("torch")(*parts, row(6)), get_attention("segment")(*parts, row(6)), rtol=0, atol=1e-12
    )


def test_a_backend_that_mixes_documents_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'torch' cannot keep documents apart but the row has 2; use one of segment"):
        get_attention("torch")(*inputs(6), row(4, 2))


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'flash_9' is not one of segment, dense, torch"):
        get_attention("flash_9")


def test_the_registry_says_who_keeps_documents_apart() -> None:
    apart = {name: get_attention(name).keeps_documents_apart for name in ("segment", "dense", "torch")}

    assert apart == {"segment": True, "dense": True, "torch": False}
