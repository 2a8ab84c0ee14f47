"""Ten deliberate faults and their kin: each is caught, and the explanation names it.

The list: label shifted over a boundary; positions not reset; replay row borrowed (from the next document); denominator
local (to a pack); mean of means; mask off by one; convolution not reset; attention window over a boundary; padding
counted as a document; final row of the routes missing. And: mask ignored, state leaked, dropout left on, a backward
that crosses documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from pack_torch import (
    AttentionBackend,
    PackedBatch,
    Rollout,
    SmallModel,
    build_batch,
    normalization,
    policy_loss,
    response_log_probs,
    scored_rows,
    target_log_probs,
)
from pack_torch.testing import assert_documents_isolated, assert_packing_equivalent, explain
from support.mixer_model import MixerModel
from support.torch_cases import CONFIG, PACKS, make_rollouts, record_routes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: fault -> (the mixer it is in, what the explanation must call it)
MIXER_FAULTS = {
    "positions": ("positions", "positions not reset"),
    "convolution": ("convolution", "convolution not reset"),
    "mask": ("attention", "mask ignored"),
    "look ahead": ("attention", "mask ignored"),
    "mask starts late": ("attention", "mask off by one"),
    "mask starts early": ("attention", "mask off by one"),
    "window": ("attention", "attention window not cut"),
    "state": ("gated", "state leaked"),
}


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return record_routes(SmallModel(CONFIG, seed=3, dtype=torch.float64), make_rollouts())


def plain(rollouts: list[Rollout]) -> list[Rollout]:
    return [attrs.evolve(rollout, routes=None) for rollout in rollouts]


def complaint(check: Callable[[], Any]) -> str:
    with pytest.raises(AssertionError) as caught:
        check()
    return str(caught.value)


@pytest.mark.parametrize("fault", list(MIXER_FAULTS))
def test_a_faulty_layer_among_sound_ones_is_found_and_named(rollouts: list[Rollout], fault: str) -> None:
    mixer, name = MIXER_FAULTS[fault]
    model = MixerModel(fault)

    text = complaint(lambda: assert_packing_equivalent(model, plain(rollouts), packs=PACKS))

    assert f"Likely cause: {name}" in text or f", or {name}" in text
    assert f"The first output to differ is that of mixers.{mixer} (" in text


@pytest.mark.parametrize("fault", list(MIXER_FAULTS))
def test_a_faulty_layer_is_named_by_its_log_probabilities_alone(rollouts: list[Rollout], fault: str) -> None:
    mixer, name = MIXER_FAULTS[fault]
    model = MixerModel(fault, mixers=mixer)

    def black_box(batch: PackedBatch) -> Tensor:
        return response_log_probs(model, batch)

    text = complaint(
        lambda: assert_packing_equivalent(black_box, plain(rollouts), packs=PACKS, parameters=list(model.parameters()))
    )

    assert f"Likely cause: {name}" in text or f", or {name}" in text
    assert "first output" not in text


@pytest.mark.parametrize("fault", [*MIXER_FAULTS, "labels"])
def test_what_leaks_is_not_isolated_and_positions_are(rollouts: list[Rollout], fault: str) -> None:
    model = MixerModel(None if fault == "labels" else fault)
    function: Any = shifted_labels(model) if fault == "labels" else model
    batch = build_batch(plain(rollouts), (0, 1, 3, 5))

    if fault == "positions":  # other tokens in a document do not move its neighbours' positions
        assert_documents_isolated(function, batch)
        return
    text = complaint(lambda: assert_documents_isolated(function, batch))

    name = "label shifted" if fault == "labels" else MIXER_FAULTS[fault][1]
    assert f"Likely cause: {name}" in text or f", or {name}" in text


@pytest.mark.parametrize("mixers", ["kimi", "attention gated", "kimi attention convolution"])
def test_a_leaking_state_is_found_wherever_it_stands(rollouts: list[Rollout], mixers: str) -> None:
    text = complaint(lambda: assert_packing_equivalent(MixerModel("state", mixers), plain(rollouts), packs=PACKS))

    layer = "kimi" if "kimi" in mixers else "gated"
    assert "Likely cause: state leaked" in text
    assert f"The first output to differ is that of mixers.{layer} (Delta)" in text


def shifted_labels(model: Any) -> Callable[[PackedBatch], Tensor]:
    """Each response is scored one row late, so that its last label is the next document's first token."""

    def score(batch: PackedBatch) -> Tensor:
        rows = scored_rows(batch.doc_lens, batch.response_lens) + 1
        labels = torch.roll(batch.input_ids, -1)
        return target_log_probs(model.logits(model(batch).hidden[rows]), labels[rows])

    return score


def test_a_label_shifted_over_a_boundary(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    text = complaint(lambda: assert_packing_equivalent(shifted_labels(model), rollouts, packs=PACKS, parameters=model))

    # Of the first sample, 3 response tokens: 0 and 1 have labels of their own.
    assert "sample 'sample-0' (document 0 of its row): log-probability of response token 2 is" in text
    assert "Likely cause: label shifted" in text


def test_attention_over_the_row(rollouts: list[Rollout]) -> None:
    def over_the_row(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
        q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
        return scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)

    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    leaking = AttentionBackend("leaking", True, "says it keeps documents apart, and does not", over_the_row)
    model.backend = leaking
    for block in model.blocks:
        block.attention.backend = leaking

    text = complaint(lambda: assert_packing_equivalent(model, rollouts, packs=PACKS))
    apart = complaint(lambda: assert_documents_isolated(model, build_batch(rollouts, PACKS[0], replay=True)))

    for one in (text, apart):
        assert "Likely cause: mask ignored" in one
        assert "The first output to differ is that of blocks.0.attention (Attention)" in one
    assert "sample 'sample-1' (document 1 of its row): log-probability of response token 0 is" in text


def borrowed_rows(model: Any) -> Callable[[PackedBatch], Tensor]:
    """Every token replays the row two further on, so that a document's last scored row is the next one's first."""

    def score(batch: PackedBatch) -> Tensor:
        return response_log_probs(model, attrs.evolve(batch, routes=torch.roll(batch.routes, -2, 0)))

    return score


def no_final_rows(model: Any) -> Callable[[PackedBatch], Tensor]:
    """Recorded rows end to end and the filling behind all of them: each document shifts those after it by a row."""

    def score(batch: PackedBatch) -> Tensor:
        recorded = torch.cat([rollout.routes for rollout in batch.rollouts])
        filling = torch.arange(2, dtype=recorded.dtype).expand(batch.documents, *recorded.shape[1:])
        return response_log_probs(model, attrs.evolve(batch, routes=torch.cat((recorded, filling))))

    return score


def test_a_replay_row_borrowed_from_the_next_document(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    text = complaint(lambda: assert_packing_equivalent(borrowed_rows(model), rollouts, packs=PACKS, parameters=model))

    # Of 3 response tokens the last is scored by the row that borrows.
    assert "sample 'sample-0' (document 0 of its row): log-probability of response token 2 is" in text
    assert "Likely cause: replay row misaligned" in text


def test_final_rows_of_routes_that_the_model_leaves_out(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    text = complaint(lambda: assert_packing_equivalent(no_final_rows(model), rollouts, packs=PACKS, parameters=model))

    assert "sample 'sample-1' (document 1 of its row)" in text
    assert "Likely cause: replay row misaligned" in text
    assert "every document needs a final row of its own" in text


def test_a_final_row_of_routes_that_is_missing(rollouts: list[Rollout]) -> None:
    batch = build_batch(rollouts, (0, 1), replay=True)

    with pytest.raises(ValueError, match=r"routes have shape \[11, 3, 2\] but must be \[13, layers, top_k\]"):
        attrs.evolve(batch, routes=torch.cat([rollout.routes for rollout in batch.rollouts]))


def test_padding_that_passes_for_a_document(rollouts: list[Rollout]) -> None:
    padded = torch.cat((rollouts[0].tokens, torch.zeros(3, dtype=torch.int64)))

    with pytest.raises(ValueError, match="padding is not allowed"):
        PackedBatch(padded, (5,))
    with pytest.raises(ValueError, match="one rollout per document"):
        PackedBatch(padded, (5, 3), (rollouts[0],))


def padded_mean(log_probs: Tensor, batch: PackedBatch) -> Tensor:
    """A mean over documents to which each row's padding was added."""
    return policy_loss(log_probs, batch, reduction="response").numerator / (batch.documents + 1)


def padded_sum(log_probs: Tensor, batch: PackedBatch) -> Tensor:
    """A sum to which each row's padding adds a loss of its own."""
    return policy_loss(log_probs, batch).numerator / 24 + 0.25


@pytest.mark.parametrize("joining", ["sum", "mean"])
def test_padding_that_the_denominator_counts(rollouts: list[Rollout], joining: Any) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    text = complaint(lambda: assert_packing_equivalent(model, rollouts, packs=PACKS, loss=padded_mean, joining=joining))

    assert "all log-probabilities agree" in text
    assert "Likely cause: padding counted as a document: every pack's loss is divided by one document more" in text


def test_padding_that_the_numerator_counts(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    text = complaint(lambda: assert_packing_equivalent(model, rollouts, packs=PACKS, loss=padded_sum))

    assert "all log-probabilities agree" in text
    assert "Likely cause: padding counted as a document: every pack adds 0.25 beside" in text


def mean_of(by: str) -> Callable[[Tensor, PackedBatch], Tensor]:
    """The loss divided by what the pack counts."""

    def loss(log_probs: Tensor, batch: PackedBatch) -> Tensor:
        if by == "samples":
            return policy_loss(log_probs, batch, reduction="response").numerator / batch.documents
        part = policy_loss(log_probs, batch)
        return part.numerator / max(part.active_tokens, 1)

    return loss


#: The list: deliberate fault -> (model, loss, how packs are joined), and what the explanation must call it.
LIST: dict[str, tuple[Callable[[], Any], Any, str, str]] = {
    "label shifted over a boundary": (lambda: shifted_labels(small()), None, "sum", "label shifted"),
    "positions not reset": (lambda: MixerModel("positions"), None, "sum", "positions not reset"),
    "replay row borrowed": (lambda: borrowed_rows(small()), None, "sum", "replay row misaligned"),
    "denominator local": (lambda: small(), mean_of("active tokens"), "sum", "denominator local to the pack"),
    "mean of means": (lambda: small(), mean_of("active tokens"), "mean", "mean of means"),
    "mask off by one": (lambda: MixerModel("mask starts late"), None, "sum", "mask off by one"),
    "convolution not reset": (lambda: MixerModel("convolution"), None, "sum", "convolution not reset"),
    "attention window over a boundary": (lambda: MixerModel("window"), None, "sum", "attention window not cut"),
    "padding counted as a document": (lambda: small(), padded_mean, "sum", "padding counted as a document"),
    "final row of the routes missing": (lambda: no_final_rows(small()), None, "sum", "replay row misaligned"),
}


def small() -> SmallModel:
    return SmallModel(CONFIG, seed=3, dtype=torch.float64)


@pytest.mark.parametrize("fault", list(LIST))
def test_the_list(rollouts: list[Rollout], fault: str) -> None:
    build, loss, joining, name = LIST[fault]
    model = build()
    used = plain(rollouts) if isinstance(model, MixerModel) else rollouts
    parameters = model if isinstance(model, torch.nn.Module) else []

    text = complaint(
        lambda: assert_packing_equivalent(
            model,
            used,
            packs=PACKS,
            loss=loss,
            joining=joining,
            parameters=parameters,  # type: ignore[arg-type]
        )
    )

    assert f"Likely cause: {name}" in text or f", or {name}" in text


def test_the_list_is_whole() -> None:
    assert len(LIST) == 10
    assert all(fault in str(__doc__).replace("\n", " ") for fault in LIST)


@pytest.mark.parametrize("by", ["active tokens", "samples"])
@pytest.mark.parametrize(("joining", "name"), [("sum", "denominator local to the pack"), ("mean", "mean of means")])
def test_a_denominator_that_the_pack_counts(rollouts: list[Rollout], by: str, joining: Any, name: str) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    text = complaint(lambda: assert_packing_equivalent(model, rollouts, packs=PACKS, loss=mean_of(by), joining=joining))

    assert text.startswith("the loss in update 1 is ")
    assert "all log-probabilities agree" in text
    assert f"Likely cause: {name}" in text
    assert f"its own {by}" in text


def test_a_right_loss_averaged_over_packs(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    tokens = normalization(rollouts).active_tokens

    text = complaint(
        lambda: assert_packing_equivalent(
            model, rollouts, packs=PACKS, joining="mean", loss=lambda lp, b: policy_loss(lp, b).numerator / tokens
        )
    )

    assert "Likely cause: mean of means" in text
    assert "divided by the number of packs" in text


def test_dropout_left_on(rollouts: list[Rollout]) -> None:
    model = SmallModel(attrs.evolve(CONFIG, dropout=0.5), seed=3, dtype=torch.float64)

    assert "Likely cause: not deterministic" in complaint(lambda: assert_packing_equivalent(model, rollouts))
    model.eval()
    assert explain(model, build_batch(rollouts, (0, 1, 3))) is None


class _WholeRowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + gradients[0].flip(0)


def test_a_backward_that_crosses_documents(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    def cross(batch: PackedBatch) -> Tensor:
        return _WholeRowBackward.apply(response_log_probs(model, batch))

    text = complaint(lambda: assert_packing_equivalent(cross, rollouts, packs=PACKS, parameters=model))

    assert text.startswith("the gradient of ")
    assert "the backward crosses a document's boundary" in text
