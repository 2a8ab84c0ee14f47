"""Losses and metrics of packed batches of every format against one sample at a time, in float64, gradients too."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pack_torch import (
    Batch,
    Multimodal,
    PackCollator,
    PackedBatch,
    Preference,
    Sft,
    SharedPrompt,
    SmallModel,
    batch_log_probs,
    build_pack,
    dpo_loss,
    group_sizes,
    kl_loss,
    normalization,
    policy_loss,
    sample_metrics,
    sft_loss,
)
from support.format_cases import VOCABULARY, small_model
from torch import Tensor, nn

DRAW = np.random.default_rng(7)


def drawn(count: int) -> list[int]:
    return DRAW.integers(0, VOCABULARY, count).tolist()


class WithLogits(nn.Module):
    """The small model as trainers know models: what it returns has `logits`."""

    def __init__(self, model: SmallModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PackedBatch) -> Any:
        return SimpleNamespace(logits=self.model.logits(self.model(batch).hidden)[None])


def alone(model: SmallModel, tokens: list[int]) -> Tensor:
    """Log-probabilities `[T, V]` of one document by itself."""
    batch = PackedBatch(torch.tensor(tokens), (len(tokens),))
    return torch.log_softmax(model.logits(model(batch).hidden), dim=-1)


def answer_alone(model: SmallModel, prompt: list[int], answer: list[int]) -> Tensor:
    """Log-probabilities of an answer's tokens after its prompt, nothing else in the row."""
    rows = alone(model, prompt + answer)
    return torch.stack([rows[len(prompt) - 1 + place, token] for place, token in enumerate(answer)])


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, materialize_grads=True)
    assert any(bool(one.any()) for one in found)
    return list(found)


def assert_same(found: Tensor, expected: Tensor, model: SmallModel) -> None:
    one, two = float(found.detach()), float(expected.detach())
    assert abs(one - two) <= 1e-9 * max(1, abs(two))
    for one, two in zip(gradients(found, model), gradients(expected, model), strict=True):
        assert float(((one - two).abs() / two.abs().clamp(min=1)).max()) <= 1e-9


def batch_of(format: Any, rows: list[dict[str, Any]], *, cut: int = 2, mask: str = "varlen") -> Batch:
    """Two packs of these rows in one batch."""
    packs = [build_pack(part, format=format, capacity=64) for part in (rows[:cut], rows[cut:])]
    return PackCollator(mask=mask)(packs)


def forward(model: SmallModel, batch: Batch) -> Any:
    return WithLogits(model)(**batch.model_inputs("pack_torch"))


@pytest.mark.parametrize("attention", ["segment", "dense"])
@pytest.mark.parametrize("mode", ["aligned", "tokens"])
def test_sft_equals_one_document_at_a_time(mode: str, attention: str) -> None:
    model = small_model(attention)
    texts = [drawn(count) for count in (5, 3, 7, 1)]
    if mode == "aligned":
        labels = [[token if place % 3 else -100 for place, token in enumerate(drawn(len(one)))] for one in texts]
        rows = [{"input_ids": one, "labels": two} for one, two in zip(texts, labels, strict=True)]
    else:
        prompts = [2, 0, 3, 1]
        rows = [{"input_ids": one, "prompt_length": two} for one, two in zip(texts, prompts, strict=True)]
        labels = [
            [text[t + 1] if prompt <= t + 1 < len(text) else -100 for t in range(len(text))]
            for text, prompt in zip(texts, prompts, strict=True)
        ]
    per_document = [
        nn.functional.nll_loss(alone(model, text), torch.tensor(own), reduction="sum", ignore_index=-100)
        for text, own in zip(texts, labels, strict=True)
    ]
    counts = [sum(label != -100 for label in own) for own in labels]

    batch = batch_of(Sft(label_mode=mode), rows)
    loss = sft_loss(forward(model, batch), batch)

    assert loss.active_tokens == sum(counts)
    assert_same(loss.numerator, torch.stack(per_document).sum(), model)
    means = torch.stack([one / count for one, count in zip(per_document, counts, strict=True) if count]).sum()
    assert_same(sft_loss(forward(model, batch), batch, reduction="response").numerator, means, model)
    found = sample_metrics(forward(model, batch), batch)
    assert [one.tokens for one in found.values()] == [5, 3, 7, 1]
    assert [one.active_tokens for one in found.values()] == counts
    for one, expected in zip(found.values(), per_document, strict=True):
        assert one.log_prob == pytest.approx(-float(expected.detach()), abs=1e-9)


def preference_rows() -> list[dict[str, Any]]:
    rows = []
    for name, (prompt, good, bad) in zip("abc", [(3, 4, 2), (1, 2, 5), (2, 0, 1)], strict=True):
        row: dict[str, Any] = {"prompt_ids": drawn(prompt), "chosen_ids": drawn(good), "rejected_ids": drawn(bad)}
        row |= {"chosen_ref_log_probs": DRAW.normal(-3, 0.5, good), "rejected_ref_log_probs": DRAW.normal(-3, 0.5, bad)}
        masks = {"chosen_mask": [1] * good, "rejected_mask": [0, *[1] * (bad - 1)]}
        rows.append(row | masks | {"id": name})
    return rows


@pytest.mark.parametrize("shared", [False, True])
def test_preference_equals_one_answer_at_a_time(shared: bool) -> None:
    model, rows = small_model(), preference_rows()
    scores = {}
    for row in rows:
        for side in ("chosen", "rejected"):
            log_probs = torch.zeros(0, dtype=torch.float64)
            if row[f"{side}_ids"]:
                log_probs = answer_alone(model, row["prompt_ids"], row[f"{side}_ids"])
            kept = torch.tensor(row[f"{side}_mask"], dtype=torch.float64)
            scores[row["id"], side] = ((log_probs - torch.tensor(row[f"{side}_ref_log_probs"])) * kept).sum()
    margins = [0.5 * (scores[row["id"], "chosen"] - scores[row["id"], "rejected"]) for row in rows]
    expected = -nn.functional.logsigmoid(torch.stack(margins)).sum()

    batch = batch_of(Preference(shared=shared), rows)
    loss = dpo_loss(forward(model, batch), batch, beta=0.5)

    assert loss.groups == ("a", "b", "c")
    assert loss.margins.tolist() == pytest.approx([float(margin.detach()) for margin in margins], abs=1e-9)
    assert_same(loss.numerator, expected, model)
    assert batch.shares_prompts is shared
    other = small_model()
    nn.init.normal_(other.embedding, std=0.3, generator=torch.Generator().manual_seed(1))
    by_model = dpo_loss(forward(model, batch), batch, ref_log_probs=forward(other, batch))
    by_hand = dpo_loss(forward(model, batch), batch, ref_log_probs=batch_log_probs(forward(other, batch), batch))
    assert float(by_model.numerator.detach()) == float(by_hand.numerator.detach())
    assert not other.embedding.grad


def completions() -> list[dict[str, Any]]:
    rows = []
    for prompt, answers in [(3, [4, 2, 3]), (1, [2, 5]), (4, [3])]:
        row: dict[str, Any] = {"prompt_ids": drawn(prompt), "completion_ids": [drawn(one) for one in answers]}
        row |= {"advantages": DRAW.normal(size=len(answers)).tolist()}
        row |= {"old_log_probs": [DRAW.normal(-3.1, 0.3, one).tolist() for one in answers]}
        row |= {"ref_log_probs": [DRAW.normal(-3.1, 0.3, one).tolist() for one in answers]}
        rows.append(row | {"completion_mask": [[int(place != 1) for place in range(one)] for one in answers]})
    return rows


def clipped_alone(model: SmallModel, row: dict[str, Any], number: int) -> list[Tensor]:
    """The clipped losses of one completion's active tokens, token by token."""
    losses = []
    log_probs = answer_alone(model, row["prompt_ids"], row["completion_ids"][number])
    for place, log_prob in enumerate(log_probs):
        if row["completion_mask"][number][place]:
            ratio = torch.exp(log_prob - row["old_log_probs"][number][place])
            advantage = row["advantages"][number]
            losses.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)))
    return losses


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduction", ["token", "response", "group"])
def test_group_relative_policy_loss_equals_one_completion_at_a_time(reduction: str, shared: bool) -> None:
    model, rows = small_model(), completions()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        for number in range(len(row["completion_ids"])):
            own = torch.stack(clipped_alone(model, row, number))
            mean = own.mean()
            total = (
                total + {"token": own.sum(), "response": mean, "group": mean / len(row["completion_ids"])}[reduction]
            )

    batch = batch_of(SharedPrompt(shared=shared), rows)
    sizes = group_sizes(batch.rollouts) if reduction == "group" else None
    loss = policy_loss(forward(model, batch), batch, reduction=reduction, group_sizes=sizes)

    assert_same(loss.numerator, total, model)
    active = sum(sum(mask) for row in rows for mask in row["completion_mask"])
    assert loss.active_tokens == active
    counts = normalization(batch.rollouts)
    assert (counts.samples, counts.active_tokens) == (6, active)


def test_a_shared_prompt_is_computed_once_and_changes_no_gradient() -> None:
    model, rows = small_model(), completions()
    tree, apart = (batch_of(SharedPrompt(shared=shared), rows) for shared in (True, False))
    assert apart.tokens - tree.tokens == 2 * 3 + 1 * 1
    ours, theirs = (batch_log_probs(forward(model, batch), batch) for batch in (tree, apart))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert_same(kl_loss(ours, tree).numerator, kl_loss(theirs, apart).numerator, model)
    for one, two in zip(
        sample_metrics(ours, tree).values(), sample_metrics(forward(model, apart), apart).values(), strict=True
    ):
        assert one.log_prob == pytest.approx(two.log_prob, abs=1e-9)
        assert (one.tokens, one.active_tokens) == (two.tokens, two.active_tokens)


def test_supervised_loss_of_branches_learns_every_branch() -> None:
    model, rows = small_model(), completions()
    for row in rows:
        del row["completion_mask"]
    expected = -torch.stack(
        [answer_alone(model, row["prompt_ids"], one).sum() for row in rows for one in row["completion_ids"]]
    ).sum()
    batch = batch_of(SharedPrompt(), rows)
    assert_same(sft_loss(forward(model, batch), batch).numerator, expected, model)


def test_a_window_sees_the_prompt_from_every_branch_as_if_alone() -> None:
    model = small_model(sliding_window=3)
    row = {"prompt_ids": drawn(3), "completion_ids": [drawn(4), drawn(2), drawn(3)]}
    batch = PackCollator()([build_pack([row], format=SharedPrompt())])
    expected = torch.cat([answer_alone(model, row["prompt_ids"], one) for one in row["completion_ids"]])
    torch.testing.assert_close(batch_log_probs(forward(model, batch), batch), expected, rtol=0, atol=1e-12)


def test_flex_attention_gives_what_the_dense_mask_gives() -> None:
    batch = batch_of(SharedPrompt(), completions())
    with torch.no_grad():
        dense, flex = (batch_log_probs(forward(small_model(name), batch), batch) for name in ("dense", "flex"))
    torch.testing.assert_close(flex, dense, rtol=0, atol=1e-9)


def test_a_branch_feels_its_prompt_and_nothing_of_the_other_branches() -> None:
    model, rows = small_model(), completions()
    batch = batch_of(SharedPrompt(), rows)
    with torch.no_grad():
        before = batch.split(batch_log_probs(forward(model, batch), batch))
        rows[0]["completion_ids"][0] = [(token + 1) % VOCABULARY for token in rows[0]["completion_ids"][0]]
        moved = batch_of(SharedPrompt(), rows)
        after = moved.split(batch_log_probs(forward(model, moved), moved))
    assert not torch.equal(before[0], after[0])
    assert all(torch.equal(one, two) for one, two in zip(before[1:], after[1:], strict=True))


@pytest.mark.parametrize("name", ["segment", "torch"])
def test_attention_that_knows_lengths_alone_refuses_branches(name: str) -> None:
    batch = PackCollator()([build_pack(completions()[:1], format=SharedPrompt())])
    with pytest.raises(
        ValueError, match=rf"{name!r} knows documents by their lengths alone, .* use one of dense, flex"
    ):
        forward(small_model(name), batch)


def test_models_with_recurrent_layers_refuse_shared_prompts_with_the_reason() -> None:
    model = small_model(layer_types=("linear_attention", "full_attention"))
    batch = PackCollator()([build_pack(completions()[:1], format=SharedPrompt())])
    with pytest.raises(
        ValueError, match=r"linear_attention layers, whose state after a prompt would run on .* shared=F"
    ):
        forward(model, batch)
    row = completions()[0]
    apart = PackCollator()([build_pack([row], format=SharedPrompt(shared=False))])
    expected = torch.cat([answer_alone(model, row["prompt_ids"], one) for one in row["completion_ids"]])
    torch.testing.assert_close(batch_log_probs(forward(model, apart), apart), expected, rtol=0, atol=1e-12)


def test_padded_logits_and_logits_of_one_row_are_scored_alike() -> None:
    rows = [{"input_ids": drawn(count)} for count in (4, 2, 5)]
    format = Sft(label_mode="tokens")
    flat, padded = batch_of(format, rows), batch_of(format, rows, mask="dense")
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_hand = sum(
        -float(torch.log_softmax(table[a], 0)[b])
        for row in rows
        for a, b in zip(row["input_ids"], row["input_ids"][1:], strict=False)
    )
    nested = PackCollator(mask="nested")([build_pack(rows, format=format)])
    jagged = nn.functional.embedding(nested.model_inputs()["input_ids"], table)
    for batch, logits in ((flat, table[flat.input_ids]), (padded, table[padded.input_ids]), (nested, jagged)):
        assert float(sft_loss(logits, batch).numerator) == pytest.approx(by_hand, rel=1e-12)
    with pytest.raises(ValueError, match=r"logits have shape \[2, 64, 23\] but the batch has 11 rows"):
        sft_loss(table[padded.input_ids], flat)


def test_temperature_divides_logits_and_leaves_log_probabilities_alone() -> None:
    batch = PackCollator()([build_pack([{"input_ids": [0, 1]}], format=Sft(label_mode="tokens"))])
    logits = torch.tensor([[[0.0, 2.0], [0.0, 0.0]]])
    cold = batch_log_probs(logits, batch, temperature=0.5)
    assert float(cold) == pytest.approx(-math.log(1 + math.exp(-4)), rel=1e-4)
    assert batch_log_probs(cold, batch, temperature=7.0) is cold


def test_nothing_to_learn_is_a_finite_zero_with_a_graph() -> None:
    model = small_model()
    rows = [{"input_ids": drawn(3), "labels": [-100] * 3}, {"input_ids": drawn(2), "labels": [-100] * 2}]
    batch = batch_of(Sft(), rows, cut=1)
    loss = sft_loss(forward(model, batch), batch)
    loss.numerator.backward()
    assert (float(loss.numerator.detach()), loss.active_tokens) == (0.0, 0)
    assert all(one.grad is None or not bool(one.grad.any()) for one in model.parameters())


def test_payloads_pack_to_what_documents_give_alone() -> None:
    """Pixels take their placeholders' places in the embedding; a tied head reads it."""
    table = small_model().embedding
    nine = 9
    rows = [
        {"input_ids": [9, 9, 1, 2], "images": [torch.tensor([[0.5, 1.0], [0.25, -1.0]])]},
        {"input_ids": [3, 9, 4], "images": [torch.tensor([[2.0, -0.5]])]},
        {"input_ids": [5, 6], "images": []},
    ]

    def seen(tokens: Tensor, pixels: Tensor) -> Tensor:
        hidden = nn.functional.embedding(tokens, table)
        hidden = hidden.masked_scatter((tokens == nine)[:, None], pixels.to(hidden) @ table[:2])
        return torch.log_softmax(hidden @ table.T, dim=-1)

    def joined(images: list[Tensor]) -> dict[str, Tensor]:
        return {"pixels": torch.cat(images)}

    expected = torch.zeros((), dtype=torch.float64)
    for row in rows:
        tokens = torch.tensor(row["input_ids"])
        pixels = torch.cat([*row["images"], torch.zeros(0, 2)])
        scored = seen(tokens, pixels)
        for place, token in enumerate(row["input_ids"][1:]):
            if token != nine:
                expected = expected - scored[place, token]
    batch = batch_of(Multimodal(joined, Sft(label_mode="tokens"), placeholder=nine), rows)
    told = batch.model_inputs("pack_torch")
    logits = seen(told["batch"].input_ids, told["pixels"])
    found = sft_loss(logits, batch).numerator
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
