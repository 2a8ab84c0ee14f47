"""The oracle for other people's models: silent where packing is sound, and gone without a trace."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from pack_torch import (
    PackedBatch,
    Rollout,
    SmallModel,
    build_batch,
    policy_loss,
    response_log_probs,
    scored_rows,
    testing,
)
from pack_torch import model as model_module
from pack_torch.testing import assert_documents_isolated, assert_packing_equivalent, explain
from support.mixer_model import VOCAB, MixerModel
from support.torch_cases import CONFIG, PACKS, make_rollouts, record_routes
from torch import Tensor, nn


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return record_routes(SmallModel(CONFIG, seed=3, dtype=torch.float64), make_rollouts())


def plain(rollouts: list[Rollout]) -> list[Rollout]:
    return [attrs.evolve(rollout, routes=None) for rollout in rollouts]


@pytest.mark.parametrize("attention", ["segment", "dense"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_small_model_passes(rollouts: list[Rollout], recompute: bool, attention: str) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64, recompute=recompute, attention=attention)

    assert_packing_equivalent(model, rollouts)
    assert_packing_equivalent(model, rollouts, packs=PACKS, replay=False)
    assert_documents_isolated(model, build_batch(rollouts, (0, 1, 3, 5), replay=True))


def test_a_model_of_every_mixer_passes(rollouts: list[Rollout]) -> None:
    model = MixerModel()

    assert_packing_equivalent(model, plain(rollouts), packs=PACKS)
    assert_documents_isolated(model, build_batch(plain(rollouts), (0, 1, 3, 5)))


def test_a_function_passes_and_any_loss_that_adds_up(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    def function(batch: PackedBatch) -> Tensor:
        return response_log_probs(model, batch)

    for parameters in (model, dict(model.named_parameters()), list(model.parameters()), []):
        assert_packing_equivalent(
            function,
            rollouts,
            parameters=parameters,
            loss=lambda log_probs, batch: policy_loss(log_probs, batch, reduction="response").numerator / 8,
        )


def test_rollouts_without_advantages_are_compared_by_their_likelihood(rollouts: list[Rollout]) -> None:
    bare = [Rollout(r.id, r.tokens, r.response_length) for r in rollouts]

    assert_packing_equivalent(SmallModel(CONFIG, seed=3, dtype=torch.float64), bare)


def test_parameters_and_gradients_are_left_as_they_were(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    assert_packing_equivalent(model, rollouts)
    with pytest.raises(AssertionError):
        assert_packing_equivalent(model, rollouts, loss=lambda log_probs, batch: log_probs.mean())

    assert all(torch.equal(parameter, kept[name]) for name, parameter in model.named_parameters())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.embedding.grad is None
    assert not any(module._forward_hooks for module in model.modules())


def test_nan_in_one_document_stays_there_with_segments_and_leaks_through_a_mask(rollouts: list[Rollout]) -> None:
    batch = build_batch(rollouts, (0, 1, 3), replay=True)
    assert set(range(CONFIG.vocab_size)) - set(batch.input_ids.tolist())
    segment = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    dense = SmallModel(CONFIG, seed=3, dtype=torch.float64, attention="dense")
    kept = segment.embedding.detach().clone()

    assert_documents_isolated(segment, batch, embedding=segment.embedding)
    assert torch.equal(segment.embedding, kept)
    assert_documents_isolated(dense, batch)
    with pytest.raises(AssertionError, match=r"became NaN: .*Likely cause: mask multiplies: 0 \* NaN is NaN"):
        assert_documents_isolated(dense, batch, embedding=dense.embedding)
    assert torch.equal(dense.embedding, kept)


def test_recurrent_mixers_keep_nan_in_its_document(rollouts: list[Rollout]) -> None:
    model = MixerModel(mixers="positions convolution gated kimi")
    batch = build_batch(plain(rollouts), (0, 1, 3))

    assert_documents_isolated(model, batch, embedding=model.embedding)


def test_a_difference_is_told_with_its_place_and_size(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    def off(batch: PackedBatch) -> Tensor:
        log_probs = response_log_probs(model, batch).clone()
        if batch.documents > 2:  # sample 1, response tokens 3 and 4, behind the 3 of sample 0
            log_probs[3 + 3] += 0.25
            log_probs[3 + 4] -= 0.5
        return log_probs

    finding = explain(off, build_batch(rollouts, (0, 1, 2), replay=True))

    assert finding is not None
    assert (finding.document, finding.sample, finding.token, finding.layer) == (1, "sample-1", 3, None)
    assert finding.packed - finding.single == pytest.approx(0.25)
    assert finding.size == pytest.approx(0.5)
    assert finding.cause == "not found"
    with pytest.raises(AssertionError, match=r"pack 0: sample 'sample-1' .* response token 3 .* is 0\.5\."):
        assert_packing_equivalent(off, rollouts, packs=[(0, 1, 2), (3, 4), (5, 6), (7,)], parameters=model)


def test_a_difference_within_the_tolerance_is_none(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float32)

    assert explain(model, build_batch(rollouts, (0, 1, 3), replay=True), tolerance=1e-5) is None


def test_rotary_positions_that_run_on_are_no_fault(rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch) -> None:
    turn = model_module.rotation
    monkeypatch.setattr(model_module, "rotation", lambda places, *rest: turn(torch.arange(places.numel()), *rest))

    assert_packing_equivalent(SmallModel(CONFIG, seed=3, dtype=torch.float64), rollouts, packs=PACKS)


def test_a_difference_is_told_even_where_the_experiments_cannot_run(rollouts: list[Rollout]) -> None:
    def short_rows_only(batch: PackedBatch) -> Tensor:
        if batch.tokens > 20:
            raise RuntimeError("no more than 20 tokens")
        return scored_rows(batch.doc_lens, batch.response_lens).double()

    finding = explain(short_rows_only, build_batch(plain(rollouts), (0, 1)))

    assert finding is not None
    assert finding.sample == "sample-1"
    assert finding.cause == "not found"
    assert "RuntimeError: no more than 20 tokens" in finding.evidence


def test_what_agrees_in_nothing_is_no_proof(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    unused = [torch.nn.Parameter(torch.ones(2))]

    with pytest.raises(AssertionError, match="the loss is nan one at a time too"):
        assert_packing_equivalent(model, rollouts, loss=lambda log_probs, batch: log_probs.sum() * torch.nan)
    with pytest.raises(AssertionError, match="every gradient is zero"):
        assert_packing_equivalent(lambda batch: response_log_probs(model, batch), rollouts, parameters=unused)


def test_the_oracles_names_are_these() -> None:
    assert testing.__all__ == ["Finding", "assert_documents_isolated", "assert_packing_equivalent", "explain"]


def test_what_cannot_be_compared_is_refused(rollouts: list[Rollout]) -> None:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)

    def refused(error: type[Exception], message: str, function: Any = model, **keywords: Any) -> None:
        with pytest.raises(error, match=message):
            assert_packing_equivalent(function, **{"rollouts": rollouts} | keywords)

    refused(ValueError, "there are 1 rollouts; give at least two", rollouts=rollouts[:1])
    refused(ValueError, "do not hold each of the 8 rollouts exactly once", packs=[(0, 1), (1, 2)])
    refused(TypeError, "give `parameters`", function=lambda batch: response_log_probs(model, batch))
    refused(TypeError, "the model returned int", function=lambda batch: 3, parameters=[])
    refused(ValueError, r"returned shape \[1\] but", function=lambda batch: torch.zeros(1), parameters=[])
    with pytest.raises(ValueError, match="the row has one document"):
        assert_documents_isolated(model, build_batch(rollouts, (0,)))
    every = [Rollout("a", list(range(VOCAB)), 3), Rollout("b", [1, 2], 1)]
    with pytest.raises(ValueError, match="uses all 23 tokens"):
        assert_documents_isolated(model, build_batch(every, (0, 1)), embedding=model.embedding, tolerance=1e-12)


def test_a_training_forward_that_is_not_what_scoring_gave_is_found(rollouts: list[Rollout]) -> None:
    # Half a unit less, in every cut alike, and only where gradients are on: no comparison of cuts can see it.
    model = SmallModel(CONFIG, seed=0, dtype=torch.float64)

    def other_in_training(batch: PackedBatch) -> Tensor:
        return response_log_probs(model, batch) - 0.5 * torch.is_grad_enabled()

    with pytest.raises(AssertionError, match=r"in the training forward .* in the scoring pass.*off by 0\.5.*dropout"):
        assert_packing_equivalent(other_in_training, rollouts, parameters=model)


class Rounding(nn.Module):
    """What rounds differently in a row of several documents."""

    def forward(self, tokens: Tensor, documents: int) -> Tensor:
        return tokens + 1e-8 * documents


class Leaking(nn.Module):
    """What sees all that lies before."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.cumsum(0)


class RoundingAndLeaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rounding, self.leaking = Rounding(), Leaking()

    def forward(self, batch: PackedBatch) -> Tensor:
        rows = scored_rows(batch.doc_lens, batch.response_lens)
        return -0.01 * self.leaking(self.rounding(batch.input_ids.double(), batch.documents))[rows]


def test_rounding_below_the_tolerance_is_not_taken_for_the_fault(rollouts: list[Rollout]) -> None:
    model, batch = RoundingAndLeaking(), build_batch(plain(rollouts), (0, 1, 3))
    finding = explain(model, batch)
    assert finding is not None
    assert str(finding.layer).startswith("rounding"), "asked exactly, it differs first"
    with pytest.raises(AssertionError, match=r"mask ignored: .* The first output to differ is that of leaking"):
        assert_documents_isolated(model, batch, tolerance=1e-6)
