"""Sampling: what it records is what the model says of the finished sequence."""

import pytest
import torch
from pack_miles.training.sampling import Sampled, _choose, sample
from pack_torch import ModelConfig, PackedBatch, SmallModel

CONFIG = ModelConfig(
    vocab_size=7,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=16,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
)
END = 6
PROMPTS = [[1, 2, 3], [4], [5, 5], [1, 2, 3]]


def draw(seed: int, temperature: float = 1.0) -> tuple[SmallModel, list[Sampled]]:
    model = SmallModel(CONFIG, seed=3, dtype=torch.float64)
    draws = torch.rand(len(PROMPTS), 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model, sample(model, PROMPTS, draws, end=END, temperature=temperature)


def test_log_probs_and_routes_are_those_of_each_finished_sequence_alone() -> None:
    model, drawn = draw(seed=0, temperature=0.7)
    assert {one.response_length for one in drawn} != {9}, "some response should stop early"
    for prompt, one in zip(PROMPTS, drawn, strict=True):
        tokens = torch.tensor(one.tokens)
        with torch.no_grad():
            output = model(PackedBatch(tokens, (len(tokens),)))
            scores = torch.log_softmax(model.logits(output.hidden) / 0.7, -1)
        rows = range(len(prompt) - 1, len(tokens) - 1)
        expected = [float(scores[row, tokens[row + 1]]) for row in rows]
        assert one.log_probs == pytest.approx(expected, abs=1e-12)
        assert torch.equal(one.routes, output.routes[:-1])


def test_a_response_ends_at_its_end_token_or_at_the_limit() -> None:
    _, drawn = draw(seed=1)
    for prompt, one in zip(PROMPTS, drawn, strict=True):
        response = one.tokens[len(prompt) :]
        assert one.tokens[: len(prompt)] == prompt
        assert len(response) == one.response_length == len(one.log_probs)
        assert END not in response[:-1]
        assert response[-1] == END or len(response) == 9


def test_the_draws_alone_decide_and_each_sample_has_its_own() -> None:
    def tokens(seed: int) -> list[list[int]]:
        return [one.tokens for one in draw(seed)[1]]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    model, together = draw(seed=5)
    draws = torch.rand(len(PROMPTS), 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for place, prompt in enumerate(PROMPTS):
        (alone,) = sample(model, [prompt], draws[place : place + 1], end=END, temperature=1.0)
        assert alone.tokens == together[place].tokens, "who else is sampled beside it must not matter"


def test_a_draw_chooses_the_token_in_whose_share_it_falls() -> None:
    shares = torch.tensor([[0.2, 0.3, 0.5]]).log().repeat(5, 1)
    draws = torch.tensor([0.0, 0.1999, 0.2001, 0.5001, 0.9999999999], dtype=torch.float64)
    assert _choose(shares, draws).tolist() == [0, 0, 1, 2, 2]
    # Rounding may leave the sum of shares under the draw: the last token gets it, not one past the end.
    assert _choose(torch.tensor([[0.5, 0.4999]]).log(), torch.tensor([0.99999])).tolist() == [1]
