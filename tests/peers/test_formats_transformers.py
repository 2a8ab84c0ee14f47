"""Batches of every format through small random models of transformers, against one sample at a time in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from pack_torch import (
    Multimodal,
    PackCollator,
    Preference,
    Sft,
    SharedPrompt,
    build_pack,
    dpo_loss,
    policy_loss,
    sft_loss,
)
from support.tiny_transformers import DECODER, SIZES
from torch import Tensor, nn

#: Relative to the value; eager attention takes its softmax in float32.
CLOSE = {"sdpa": 1e-9, "eager": 1e-5}
DRAW = torch.Generator().manual_seed(11)


def llama(attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(17)
    config = transformers.LlamaConfig(**DECODER, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).double().eval()


def gpt2() -> nn.Module:
    torch.manual_seed(17)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, attn_implementation="sdpa")
    return transformers.GPT2LMHeadModel(config).double().eval()


#: What a gradient may be off, relative to all of them: the norms of llama compute in float32, and a prompt's gradient
#: is rounded once where it is shared and once a branch where it is not. Values agree to 1e-9 in both.
MODELS = [(gpt2, 1e-9), (llama, 1e-6)]


def drawn(count: int) -> list[int]:
    return torch.randint(5, 64, (count,), generator=DRAW).tolist()


def answer_alone(model: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    """Log-probabilities of an answer's tokens, the model asked as its documentation does."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def assert_same(
    found: Tensor, expected: Tensor, model: nn.Module, gradients: float = 1e-9, values: float = 1e-9
) -> None:
    torch.testing.assert_close(found, expected, rtol=values, atol=0)
    one, two = (
        torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
        for loss in (found, expected)
    )
    assert float(two.norm()) > 0
    assert float((one - two).norm() / two.norm()) <= gradients


COMPLETIONS = [
    {
        "prompt_ids": drawn(prompt),
        "completion_ids": [drawn(count) for count in counts],
        "advantages": [1.0, -0.5, 2.0][: len(counts)],
        "old_log_probs": [[-4.2] * count for count in counts],
    }
    for prompt, counts in [(5, (4, 2, 6)), (1, (3, 3)), (7, (2,))]
]
PAIRS = [
    {
        "prompt_ids": drawn(prompt),
        "chosen_ids": drawn(good),
        "rejected_ids": drawn(bad),
        "chosen_ref_log_probs": [-4.0] * good,
        "rejected_ref_log_probs": [-4.3] * bad,
    }
    for prompt, good, bad in [(4, 3, 5), (2, 6, 1), (3, 2, 2)]
]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_snippet_of_supervised_training_equals_one_document_at_a_time(attention: str) -> None:
    model = llama(attention)
    texts = [drawn(count) for count in (9, 4, 12, 6)]
    packs = [
        build_pack([{"input_ids": one} for one in part], format=Sft(label_mode="tokens"), capacity=20)
        for part in (texts[:2], texts[2:])
    ]
    expected = torch.stack(
        [
            nn.functional.cross_entropy(
                model(input_ids=torch.tensor([text])).logits[0, :-1], torch.tensor(text[1:]), reduction="sum"
            )
            for text in texts
        ]
    ).sum()
    batch = PackCollator(mask="dense")(packs)
    assert batch.input_ids.shape == (2, 20)
    assert_same(
        sft_loss(model(**batch.model_inputs(model)), batch).numerator,
        expected,
        model,
        CLOSE[attention],
        CLOSE[attention],
    )
    if attention == "sdpa":
        assert_same(sft_loss(model(**batch.model_inputs("sdpa")), batch).numerator, expected, model)


@pytest.mark.parametrize(("build", "gradients"), MODELS)
@pytest.mark.parametrize("shared", [True, False])
def test_completions_of_shared_prompts_equal_one_at_a_time_under_a_mask_of_four_axes(
    shared: bool, build: Callable[[], nn.Module], gradients: float
) -> None:
    model = build()
    losses = []
    for row in COMPLETIONS:
        for answer, advantage in zip(row["completion_ids"], row["advantages"], strict=True):
            ratio = (answer_alone(model, row["prompt_ids"], answer) + 4.2).exp()
            losses.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)).sum())
    format = SharedPrompt(shared=shared)
    packs = [build_pack(part, format=format, capacity=40) for part in (COMPLETIONS[:1], COMPLETIONS[1:])]
    batch = PackCollator(mask="dense")(packs)
    assert batch.shares_prompts is shared
    found = policy_loss(model(**batch.model_inputs(model)), batch).numerator
    assert_same(found, torch.stack(losses).sum(), model, gradients)


@pytest.mark.parametrize(("build", "gradients"), MODELS)
@pytest.mark.parametrize("shared", [True, False])
def test_pairs_equal_one_answer_at_a_time_under_a_mask_of_four_axes(
    shared: bool, build: Callable[[], nn.Module], gradients: float
) -> None:
    model = build()
    margins = []
    for row in PAIRS:
        good, bad = (
            (answer_alone(model, row["prompt_ids"], row[f"{side}_ids"]) - row[f"{side}_ref_log_probs"][0]).sum()
            for side in ("chosen", "rejected")
        )
        margins.append(0.1 * (good - bad))
    expected = -nn.functional.logsigmoid(torch.stack(margins)).sum()
    packs = [build_pack(part, format=Preference(shared=shared), capacity=32) for part in (PAIRS[:2], PAIRS[2:])]
    batch = PackCollator(mask="dense")(packs)
    loss = dpo_loss(model(**batch.model_inputs(model)), batch)
    assert loss.margins.tolist() == pytest.approx([float(one.detach()) for one in margins], rel=1e-9)
    assert_same(loss.numerator, expected, model, gradients)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_the_same_trees() -> None:
    packs = [build_pack(part, format=SharedPrompt(), capacity=40) for part in (COMPLETIONS[:1], COMPLETIONS[1:])]
    flex, dense = (PackCollator(mask=mask)(packs) for mask in ("flex", "dense"))
    with torch.no_grad():
        found = policy_loss(llama("flex_attention")(**flex.model_inputs()), flex).numerator
        expected = policy_loss(llama()(**dense.model_inputs("sdpa")), dense).numerator
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_models_with_recurrent_layers_are_known_and_refused() -> None:
    sizes = {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    mamba = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, n_groups=1, state_size=8))
    mamba.config._attn_implementation = "sdpa"
    linear = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    experts["shared_expert_intermediate_size"] = 16
    kinds = ["linear_attention", "full_attention"]
    config = transformers.Qwen3NextConfig(**DECODER, **experts, **linear, layer_types=kinds, attn_implementation="sdpa")
    batch = PackCollator(mask="dense")([build_pack(COMPLETIONS[:1], format=SharedPrompt())])
    for model in (mamba, transformers.Qwen3NextForCausalLM(config)):
        with pytest.raises(ValueError, match="has recurrent layers, whose state after a prompt would run on"):
            batch.model_inputs(model)


# A vision-language model: an image is a grid of patches, four of which become one token.
IMAGE, BEGIN, END = 60, 61, 62
PATCH = 3 * 2 * 14 * 14


def qwen2_vl() -> nn.Module:
    torch.manual_seed(17)
    config = transformers.Qwen2VLConfig(
        text_config={
            **SIZES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        video_token_id=63,
        attn_implementation="sdpa",
    )
    return transformers.Qwen2VLForConditionalGeneration(config).double().eval()


def image(height: int, width: int) -> dict[str, Tensor]:
    pixels = torch.randn(height * width, PATCH, generator=DRAW, dtype=torch.float64)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def joined(images: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([one[name] for one in images]) for name in images[0]}


def spoken(*parts: int | dict[str, Tensor]) -> dict[str, Any]:
    """A document of so many words, images among them."""
    tokens: list[int] = []
    images = [part for part in parts if isinstance(part, dict)]
    for part in parts:
        if isinstance(part, dict):
            tokens += [BEGIN, *[IMAGE] * (part["pixel_values"].shape[0] // 4), END]
        else:
            tokens += torch.randint(5, 60, (part,), generator=DRAW).tolist()
    return {"input_ids": tokens, "images": images}


def grid_positions(row: Mapping[str, Any]) -> list[list[int]]:
    """Time, height and width of every token: text counts on in all three, an image's tokens by their place in it."""
    positions: list[list[int]] = [[], [], []]
    grids = [one["image_grid_thw"][0].tolist() for one in row["images"]]
    tokens, place, count = row["input_ids"], 0, 0
    while place < len(tokens):
        if tokens[place] != IMAGE:
            for axis in positions:
                axis.append(count)
            place, count = place + 1, count + 1
            continue
        _, height, width = grids.pop(0)
        for line in range(height // 2):
            for column in range(width // 2):
                for axis, step in zip(positions, (0, line, column), strict=True):
                    axis.append(count + step)
        place, count = place + height * width // 4, count + max(height, width) // 2
    return positions


def test_a_vision_language_model_gives_packed_what_it_gives_one_document_at_a_time() -> None:
    model = qwen2_vl()
    rows = [spoken(3, image(4, 6), 4, image(4, 4), 2), spoken(5), spoken(image(6, 4), 3), spoken(2, image(4, 4), 3)]
    losses = []
    for row in rows:
        told = joined(row["images"]) if row["images"] else {}
        tokens = torch.tensor([row["input_ids"]])
        kinds = {"mm_token_type_ids": (tokens == IMAGE).int()} if row["images"] else {}
        logits = model(input_ids=tokens, **told, **kinds).logits[0, :-1]  # it finds the positions itself
        labels = tokens[0, 1:].masked_fill(tokens[0, 1:] == IMAGE, -100)
        losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    format = Multimodal(joined, Sft(label_mode="tokens"), placeholder=IMAGE, positions=grid_positions)
    packs = [build_pack(part, format=format, capacity=48) for part in (rows[:2], rows[2:])]
    batch = PackCollator(mask="dense")(packs)
    told = batch.model_inputs(model)
    assert told["position_ids"].shape == (3, 2, 48)
    found = sft_loss(model(**told), batch).numerator
    assert_same(found, torch.stack(losses).sum(), model)
