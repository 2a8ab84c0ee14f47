"""Recorded routes along a packed row: whose row is whose, and every record that is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pack_torch import Rollout, build_batch, check_routes, pack_routes


def recorded(name: str, length: int, layers: int = 3, top_k: int = 2, start: int = 100) -> Rollout:
    """A rollout whose routes count up, so that every one of them is known by its value."""
    routes = start + torch.arange((length - 1) * layers * top_k).view(length - 1, layers, top_k)
    return Rollout(name, [1] * length, 1, routes=routes)


def test_five_and_eight_tokens_keep_a_final_row_each() -> None:
    first, second = recorded("a", 5), recorded("b", 8, start=900)

    routes = pack_routes([first, second])

    assert routes.shape == (13, 3, 2)
    assert routes[4].tolist() == [[0, 1]] * 3
    assert routes[12].tolist() == [[0, 1]] * 3
    assert routes[5].tolist() == [[900, 901], [902, 903], [904, 905]]
    assert torch.equal(routes[:4], first.routes)
    assert torch.equal(routes[5:12], second.routes)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4))
def test_row_by_row_every_token_has_its_own_route(lengths: list[int], layers: int, top_k: int) -> None:
    rollouts = [
        Rollout(
            place,
            [1] * length,
            0,
            routes=torch.arange((length - 1) * layers * top_k).view(length - 1, layers, top_k) + 1000 * place,
        )
        for place, length in enumerate(lengths)
    ]

    expected = []
    for place, length in enumerate(lengths):
        for token in range(length - 1):
            flat = range(token * layers * top_k, (token + 1) * layers * top_k)
            expected.append([1000 * place + value for value in flat])
        expected.append(list(range(top_k)) * layers)

    assert pack_routes(rollouts).flatten(1).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_integer_width_is_taken(dtype: torch.dtype) -> None:
    rollout = Rollout("a", [1, 2, 3], 1, routes=torch.tensor([[[3, 1]], [[0, 2]]], dtype=dtype))

    assert pack_routes([rollout]).tolist() == [[[3, 1]], [[0, 2]], [[0, 1]]]


def test_a_document_of_one_token_has_only_the_final_row() -> None:
    alone = Rollout("a", [1], 0, routes=torch.zeros(0, 2, 3, dtype=torch.int32))

    assert pack_routes([alone]).tolist() == [[[0, 1, 2], [0, 1, 2]]]


def test_a_batch_lays_routes_only_when_asked() -> None:
    rollouts = [recorded("a", 3), recorded("b", 2)]

    assert build_batch(rollouts, [1, 0]).routes is None
    assert torch.equal(build_batch(rollouts, [1, 0], replay=True).routes, pack_routes([rollouts[1], rollouts[0]]))


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (
            torch.zeros(4, 3, 2, dtype=torch.int32),
            r"'q1': routes have shape \[4, 3, 2\].*per sample, with 3 rows for its 4",
        ),
        (torch.zeros(2, 3, 2, dtype=torch.int32), "'q1': .*per sample"),
        (torch.zeros(3, 6, dtype=torch.int32), r"'q1': routes have shape \[3, 6\]"),
        (torch.zeros(3, 3, 2), r"'q1': routes are torch\.float32"),
        (torch.zeros(3, 3, 2, dtype=torch.bool), r"'q1': routes are torch\.bool"),
    ],
)
def test_routes_of_the_wrong_rows_rank_or_type_name_their_sample(routes: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rollout("q1", [1, 2, 3, 4], 1, routes=routes)


def test_a_sample_without_routes_or_of_another_model_is_named() -> None:
    good = recorded("a", 3)

    with pytest.raises(ValueError, match="sample 'b' has no routes but replay is on"):
        pack_routes([good, Rollout("b", [1, 2], 1)])
    with pytest.raises(ValueError, match="sample 'b': routes have 2 layers and top_k 2 but 3 layers"):
        pack_routes([good, recorded("b", 3, layers=2)])
    with pytest.raises(ValueError, match="sample 'b': routes have 3 layers and top_k 4"):
        pack_routes([good, recorded("b", 3, top_k=4)])
    with pytest.raises(ValueError, match="at least one"):
        pack_routes([])


def test_dense_columns_may_hold_garbage_and_routed_ones_may_not() -> None:
    routes = torch.zeros(5, 3, 2, dtype=torch.int32)
    routes[:, 0] = -1
    routes[:, 2] = 77

    check_routes(routes, 4, [1])
    with pytest.raises(ValueError, match="document 0: row 0 of layer 2 is routed to expert 77 but experts are 0 to 3"):
        check_routes(routes, 4, [1, 2])


def test_an_expert_that_is_not_there_is_found_by_sample_row_and_layer() -> None:
    routes = torch.zeros(9, 3, 2, dtype=torch.int16)
    routes[6, 2, 1] = -1

    with pytest.raises(ValueError, match="sample 'b': row 1 of layer 2 is routed to expert -1 but experts are 0 to 3"):
        check_routes(routes, 4, [1, 2], doc_lens=[5, 4], names=["a", "b"])
    routes[6, 2, 1] = 4
    with pytest.raises(ValueError, match="document 1: row 1 of layer 2 is routed to expert 4"):
        check_routes(routes, 4, [1, 2], doc_lens=[5, 4])
    check_routes(routes, 5, [1, 2], doc_lens=[5, 4])
