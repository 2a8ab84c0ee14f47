"""Router losses: by hand, against plain loops, under every cut, and what packing does to the one that counts packs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_torch import load_balancing_loss, router_z_loss
from torch import Tensor

DOCUMENTS = (2, 6, 3)
DENOMINATORS = {"token": 27, "response": 7}


def draw(
    lengths: tuple[int, ...], layers: int = 2, experts: int = 5, top_k: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits and routes of a row; routes are not those the logits would choose."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(sum(lengths), layers, experts, generator=generator, dtype=torch.float64)
    routes = torch.rand(sum(lengths), layers, experts, generator=generator).argsort(dim=2)[:, :, :top_k]
    return logits, routes


def plain_losses(
    logits: list[Any],
    routes: list[Any],
    lengths: tuple[int, ...],
    grouping: str,
    reduction: str,
    z_reduction: str,
    source: str,
) -> tuple[float, float]:
    """Both numerators in Python floats, one token, layer and expert at a time."""
    tokens, layers, experts, top_k = len(logits), len(logits[0]), len(logits[0][0]), len(routes[0][0])
    starts = [sum(lengths[:document]) for document in range(len(lengths))]
    balance = size = 0.0
    for layer in range(layers):
        probabilities, ids, squares = [], [], []
        for token in range(tokens):
            scores = [math.exp(x) for x in logits[token][layer]]
            probabilities.append([score / sum(scores) for score in scores])
            squares.append(math.log(sum(scores)) ** 2)
            best = sorted(range(experts), key=lambda expert, scores=scores: -scores[expert])[:top_k]
            ids.append(routes[token][layer] if source == "replayed" else best)
        for start, length in zip(starts, lengths, strict=True):
            own = range(start, start + length)
            counted = own if grouping == "sequence" else range(tokens)
            penalty = 0.0
            for expert in range(experts):
                share = sum(ids[token].count(expert) for token in counted) / (top_k * len(counted))
                penalty += experts * share * sum(probabilities[token][expert] for token in own) / length
            balance += penalty * (length if reduction == "token" else 1)
            size += sum(squares[token] for token in own) / (1 if z_reduction == "token" else length)
    return balance, size


COMBINATIONS = list(
    itertools.product(("local_batch", "sequence"), ("token", "response"), ("token", "response"), ("replayed", "live"))
)


def objective(
    logits: Tensor,
    routes: Tensor,
    lengths: tuple[int, ...],
    grouping: Any,
    reduction: Any,
    z_reduction: Any,
    source: Any,
) -> Tensor:
    balance = load_balancing_loss(
        logits, routes, lengths, grouping=grouping, reduction=reduction, count_source=source
    ).numerator
    size = router_z_loss(logits, lengths, reduction=z_reduction).numerator
    return 0.3 * balance / DENOMINATORS[reduction] + 0.07 * size / DENOMINATORS[z_reduction]


def test_penalties_of_1_and_3_mean_two_and_a_half_over_tokens_and_2_over_responses() -> None:
    even, skewed = [0.25] * 4, [0.75, 0.125, 0.0625, 0.0625]
    logits = torch.tensor([even] * 2 + [skewed] * 6, dtype=torch.float64).log().unsqueeze(1)
    routes = torch.zeros(8, 1, 1, dtype=torch.int64)

    token = load_balancing_loss(logits, routes, (2, 6), grouping="sequence", reduction="token")
    response = load_balancing_loss(logits, routes, (2, 6), grouping="sequence", reduction="response")

    assert (token.tokens, token.documents) == (response.tokens, response.documents) == (8, 2)
    assert float(token.numerator) / token.tokens == pytest.approx(2.5, abs=1e-14)
    assert float(response.numerator) / response.documents == pytest.approx(2.0, abs=1e-14)


def test_normalizers_of_1_and_3_mean_two_and_a_half_over_tokens_and_2_over_responses() -> None:
    # One expert: the logarithm of its normalizer is its logit.
    logits = torch.tensor([1.0, -1.0] + [3**0.5] * 6, dtype=torch.float64).view(8, 1, 1)

    token, response = (router_z_loss(logits, (2, 6), reduction=reduction) for reduction in ("token", "response"))

    assert float(token.numerator) / token.tokens == pytest.approx(2.5, abs=1e-14)
    assert float(response.numerator) / response.documents == pytest.approx(2.0, abs=1e-14)


def test_two_documents_that_balance_each_other_cost_less_as_one_histogram_than_as_two() -> None:
    # Each prefers and takes another expert of two: alone 2 * 1 * 0.75, together 2 * (0.5 * 0.5 + 0.5 * 0.5).
    logits = torch.tensor([[[0.75, 0.25]], [[0.25, 0.75]]], dtype=torch.float64).log()
    routes = torch.tensor([[[0]], [[1]]])

    def numerator(rows: slice, lengths: tuple[int, ...], grouping: Any) -> float:
        return float(load_balancing_loss(logits[rows], routes[rows], lengths, grouping=grouping).numerator)

    assert numerator(slice(0, 2), (1, 1), "sequence") == pytest.approx(1.5 + 1.5, abs=1e-14)
    assert numerator(slice(0, 2), (1, 1), "local_batch") == pytest.approx(1.0 + 1.0, abs=1e-14)
    alone = [numerator(slice(row, row + 1), (1,), "local_batch") for row in (0, 1)]
    assert alone == pytest.approx([1.5, 1.5], abs=1e-14)


def test_one_histogram_is_the_dot_product_of_counts_and_mean_scores() -> None:
    logits, routes = draw(DOCUMENTS)

    found = load_balancing_loss(logits, routes, DOCUMENTS).numerator / 11

    scores = torch.softmax(logits, dim=2).mean(dim=0)
    expected = sum(
        5 / 2 * (torch.bincount(routes[:, i].flatten(), minlength=5).double() / 11) @ scores[i] for i in range(2)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("grouping", "reduction", "z_reduction", "source"), COMBINATIONS)
def test_every_combination_equals_plain_loops_in_value_and_gradient(
    grouping: str, reduction: str, z_reduction: str, source: str
) -> None:
    choices = (grouping, reduction, z_reduction, source)
    logits, routes = draw(DOCUMENTS)
    logits.requires_grad_()

    found = objective(logits, routes, DOCUMENTS, *choices)
    found.backward()

    def plain(values: list[Any]) -> float:
        balance, size = plain_losses(values, routes.tolist(), DOCUMENTS, *choices)
        return 0.3 * balance / DENOMINATORS[reduction] + 0.07 * size / DENOMINATORS[z_reduction]

    values = logits.tolist()
    assert float(found.detach()) == pytest.approx(plain(values), rel=1e-12, abs=1e-12)
    for token, layer, expert in itertools.product((0, 1, 4, 10), (0, 1), range(5)):
        kept = values[token][layer][expert]
        slopes = []
        for step in (1e-3, 5e-4):
            values[token][layer][expert] = kept + step
            above = plain(values)
            values[token][layer][expert] = kept - step
            slopes.append((above - plain(values)) / (2 * step))
            values[token][layer][expert] = kept
        # Richardson: the error of the two central differences cancels to fourth order.
        slope = (4 * slopes[1] - slopes[0]) / 3
        assert float(logits.grad[token, layer, expert]) == pytest.approx(slope, rel=1e-8, abs=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6).map(tuple),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_losses_of_documents_add_up_to_the_same_in_any_cut_and_order(
    lengths: tuple[int, ...], seed: int, data: Any
) -> None:
    logits, routes = draw(lengths, seed=seed)
    logits.requires_grad_()
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {len(lengths)})
    packs = [order[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
    parts = [torch.split(side, list(lengths)) for side in (logits, routes)]

    for choices in itertools.product(("sequence",), ("token", "response"), ("token", "response"), ("replayed", "live")):
        whole = objective(logits, routes, lengths, *choices)
        cut = sum(
            objective(
                *(torch.cat([side[d] for d in pack]) for side in parts), tuple(lengths[d] for d in pack), *choices
            )
            for pack in packs
        )
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (cut, whole)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_the_source_of_counts_changes_the_histogram_and_nothing_else() -> None:
    logits, _ = draw(DOCUMENTS)
    chosen = logits.topk(2, dim=2).indices

    for grouping, reduction in itertools.product(("local_batch", "sequence"), ("token", "response")):
        live = load_balancing_loss(
            logits, draw(DOCUMENTS)[1], DOCUMENTS, grouping=grouping, reduction=reduction, count_source="live"
        )
        replayed = load_balancing_loss(logits, chosen, DOCUMENTS, grouping=grouping, reduction=reduction)
        assert torch.equal(live.numerator, replayed.numerator)


def test_even_probabilities_cost_one_per_token_and_layer_whatever_the_loads() -> None:
    _, routes = draw(DOCUMENTS)

    loss = load_balancing_loss(torch.zeros(11, 2, 5, dtype=torch.bfloat16), routes.to(torch.uint8), DOCUMENTS)

    assert loss.numerator.dtype == torch.float32
    assert float(loss.numerator) == pytest.approx(22, rel=1e-6)


def test_a_model_without_routers_has_no_router_loss() -> None:
    logits, routes = torch.zeros(3, 0, 4), torch.zeros(3, 0, 2, dtype=torch.int64)

    assert float(load_balancing_loss(logits, routes, (3,)).numerator) == 0.0
    assert float(router_z_loss(logits, (1, 2)).numerator) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grouping": "rows"}, "grouping 'rows' is not one of local_batch, sequence"),
        ({"reduction": "group"}, "reduction 'group' is not one of token, response"),
        ({"count_source": "old"}, "count_source 'old' is not one of replayed, live"),
        ({"doc_lens": (2, 6)}, r"doc_lens \[2, 6\] do not partition the 11 rows of router_logits"),
        ({"doc_lens": (2, 0, 9)}, "do not partition"),
        ({"router_logits": torch.zeros(11, 5)}, r"router_logits have shape \[11, 5\] but must be"),
        ({"routes": torch.zeros(11, 3, 2, dtype=torch.int64)}, "without the columns of dense layers"),
        (
            {"routes": torch.full((11, 2, 2), -1)},
            "routes name expert -1 at row 0, routed layer 0, but experts are 0 to 4",
        ),
        ({"routes": torch.zeros(11, 2, 2)}, "routes are torch.float32 but expert ids are integers"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    logits, routes = draw(DOCUMENTS)

    with pytest.raises(ValueError, match=message):
        load_balancing_loss(**{"router_logits": logits, "routes": routes, "doc_lens": DOCUMENTS} | change)
