"""The oracle on small random models of Hugging Face transformers, built from configurations: nothing is fetched."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from pack_torch import PackedBatch, Rollout, build_batch, scored_rows, target_log_probs
from pack_torch.huggingface import HuggingFaceModel
from pack_torch.testing import assert_documents_isolated, assert_packing_equivalent, explain
from support.tiny_transformers import DECODER, FLEX_IS_SLOW, assert_told_documents, flash_stand_in
from torch import Tensor, nn

EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",  # the grouped product has no float64
}
LENGTHS = [(9, 5), (6, 4), (11, 7), (5, 2)]  # tokens, and of these response
FORWARD = {"sdpa": 1e-9, "eager": 1e-6}  # eager attention takes its softmax in float32
GRADIENTS = {"sdpa": 1e-9, "eager": 1e-5}  # relative, over all of them
MODELS = ["llama", "qwen3_moe"]

FLEX_MASK_IS_OLD = "ignore:_compile flag on create_block_mask:DeprecationWarning"


def built(kind: str, attention: str, **options: Any) -> nn.Module:
    """A causal model in float64, the same weights for every attention."""
    torch.manual_seed(17)
    if kind == "llama":
        config = transformers.LlamaConfig(**DECODER, attn_implementation=attention, **options)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**DECODER, **EXPERTS, attn_implementation=attention, **options)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        linear = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
        linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
        shared = {"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]}
        config = transformers.Qwen3NextConfig(**DECODER, **EXPERTS, **linear, **shared, attn_implementation=attention)
        model = transformers.Qwen3NextForCausalLM(config)
    return model.double().eval()


@pytest.fixture
def rollouts() -> list[Rollout]:
    draw = torch.Generator().manual_seed(5)
    return [
        Rollout(name, torch.randint(0, 64, (length,), generator=draw), response)
        for name, (length, response) in zip("abcd", LENGTHS, strict=True)
    ]


def by_positions(model: nn.Module, **options: Any) -> Any:
    """What many do: positions that start anew, and no word of the documents."""

    def call(batch: PackedBatch) -> Tensor:
        rows = scored_rows(batch.doc_lens, batch.response_lens)
        output = model(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], **options)
        return target_log_probs(output.logits[0, rows], batch.input_ids[rows + 1])

    return call


def loss_alone(model: nn.Module, rollout: Rollout) -> Tensor:
    """Negative log-likelihood of a response on a row of its own, asked of the model as its documentation does."""
    prompt = rollout.length - rollout.response_length
    logits = model(input_ids=rollout.tokens[None]).logits[0]
    return nn.functional.cross_entropy(logits[prompt - 1 : -1], rollout.tokens[prompt:], reduction="sum")


def relative_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """L2 norm of the difference of two lists of gradients, over that of the second."""
    one, two = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (found, expected))
    assert float(two.norm()) > 0
    return float((one - two).norm() / two.norm())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_rows_are_equivalent_and_isolated_under_an_explicit_mask(
    kind: str, attention: str, rollouts: list[Rollout]
) -> None:
    model = HuggingFaceModel(built(kind, attention))
    assert_packing_equivalent(model, rollouts, tolerance=FORWARD[attention])
    # The router of the mixture chooses anew, so the experts' products change shape, and with it their last bits.
    exact = 0.0 if kind == "llama" else FORWARD[attention]
    assert_documents_isolated(model, build_batch(rollouts, [0, 1, 2, 3]), tolerance=exact)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_of_a_packed_row_are_those_of_the_model_asked_sample_by_sample(
    kind: str, attention: str, rollouts: list[Rollout]
) -> None:
    model = built(kind, attention)
    expected = torch.stack([loss_alone(model, rollout) for rollout in rollouts])
    wanted = torch.autograd.grad(expected.sum(), list(model.parameters()), materialize_grads=True)
    batch = build_batch(rollouts, [2, 0, 3, 1])
    log_probs = HuggingFaceModel(model)(batch)
    found = torch.stack([-part.sum() for part in batch.split(log_probs)])
    torch.testing.assert_close(found, expected[[2, 0, 3, 1]], rtol=FORWARD[attention], atol=0)
    got = torch.autograd.grad(-log_probs.sum(), list(model.parameters()), materialize_grads=True)
    assert relative_error(got, wanted) <= GRADIENTS[attention]


@pytest.mark.filterwarnings(FLEX_IS_SLOW)
@pytest.mark.parametrize("kind", MODELS)
def test_the_block_mask_gives_what_one_document_a_row_gives_under_flex_attention(
    kind: str, rollouts: list[Rollout]
) -> None:
    model = HuggingFaceModel(built(kind, "flex_attention"))
    batch = build_batch(rollouts, [3, 1, 0, 2])
    assert explain(model, batch, tolerance=1e-6) is None
    assert_documents_isolated(model, batch, tolerance=1e-6)
    with torch.no_grad():
        dense = HuggingFaceModel(built(kind, "sdpa"))(batch)
        torch.testing.assert_close(model(batch), dense, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="flex attention has no backward on a CPU"):
        model(batch)


@pytest.mark.filterwarnings(FLEX_IS_SLOW, FLEX_MASK_IS_OLD)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("kind", MODELS)
def test_positions_without_a_mask_are_caught_and_called_a_mask_ignored(
    kind: str, attention: str, rollouts: list[Rollout]
) -> None:
    model = built(kind, attention)
    row = build_batch(rollouts, [0, 1, 2])
    with torch.no_grad():
        finding = explain(by_positions(model), row, tolerance=1e-6, module=model)
        assert finding is not None
        assert finding.cause == "mask ignored"
        assert "model.layers.0.self_attn" in str(finding.layer)
        with pytest.raises(AssertionError, match=r"moved when sample 'a' .* got other tokens.*mask ignored"):
            assert_documents_isolated(by_positions(model), row, module=model, tolerance=1e-6)
        # Without a cache the model finds the documents in the positions; that is its own doing, and may change.
        assert explain(by_positions(model, use_cache=False), row, tolerance=1e-6) is None
    if attention != "flex_attention":
        with pytest.raises(AssertionError, match="Likely cause: mask ignored"):
            assert_packing_equivalent(by_positions(model), rollouts, parameters=model, tolerance=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("decay", "cause"), [(None, "convolution not reset"), (-4.0, "state leaked")], ids=["as_drawn", "long_memory"]
)
def test_a_released_linear_attention_model_leaks_and_the_oracle_says_so(
    decay: float | None, cause: str, attention: str, rollouts: list[Rollout]
) -> None:
    inner = built("qwen3_next", attention)
    mixer = inner.get_submodule("model.layers.0.linear_attn")
    if decay is not None:  # as drawn the state is all but forgotten within a few tokens, and the convolution remains
        nn.init.constant_(mixer.A_log, decay)
    model = HuggingFaceModel(inner)
    says = rf"The first output to differ is that of model.model.layers.0.linear_attn.*Likely cause: {cause}"
    with pytest.raises(AssertionError, match=says):
        assert_packing_equivalent(model, rollouts, tolerance=1e-6)
    with pytest.raises(AssertionError, match=rf"moved when sample .* got other tokens.*Likely cause: {cause}"):
        assert_documents_isolated(model, build_batch(rollouts, [0, 1, 2]), tolerance=1e-6)
    # One document a row is what such a model is safe with.
    assert_packing_equivalent(model, rollouts, packs=[[0], [1], [2], [3]], tolerance=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_linear_attention_model_on_rows_of_one_document_is_the_model_itself(
    attention: str, rollouts: list[Rollout]
) -> None:
    # Its delta rule computes in float32 under every attention, so the bounds are those of eager attention.
    model = built("qwen3_next", attention)
    expected = torch.stack([loss_alone(model, rollout) for rollout in rollouts])
    wanted = torch.autograd.grad(expected.sum(), list(model.parameters()), materialize_grads=True)

    adapter = HuggingFaceModel(model)
    found = torch.stack([-adapter(build_batch([rollout], [0])).sum() for rollout in rollouts])
    got = torch.autograd.grad(found.sum(), list(model.parameters()), materialize_grads=True)

    torch.testing.assert_close(found, expected, rtol=FORWARD["eager"], atol=0)
    assert relative_error(got, wanted) <= GRADIENTS["eager"]


@pytest.mark.parametrize("kind", MODELS)
def test_flash_attention_is_told_the_lengths_and_nothing_else(
    kind: str, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    known = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(known, "flash_attention_2", flash_stand_in(calls))
    inner = built(kind, "sdpa")
    inner.config._attn_implementation = "flash_attention_2"  # building with it asks for the kernels
    model = HuggingFaceModel(inner)
    batch = build_batch(rollouts, [1, 0])
    with torch.no_grad():
        model(batch)
    assert_told_documents(calls, [0, 6, 15], longest=9)
    for told in calls:
        assert type(told["max_length_q"]) is int
        assert told["position_ids"].tolist() == [[*range(6), *range(9)]]
    assert_packing_equivalent(model, rollouts)


def test_a_model_that_cannot_be_told_is_refused_with_what_it_lacks() -> None:
    sizes = {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    mamba = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, n_groups=1, state_size=8))
    with pytest.raises(ValueError, match=r"Mamba2ForCausalLM.forward takes no position_ids"):
        HuggingFaceModel(mamba, boundaries="mask")
    model = built("llama", "sdpa")
    with pytest.raises(ValueError, match="boundaries is 'padding' but must be one of"):
        HuggingFaceModel(model, boundaries="padding")  # type: ignore[arg-type]
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ValueError, match=r"attention implementation 'paged\|sdpa'; load it with"):
        HuggingFaceModel(model)


def test_a_mask_that_would_do_away_with_a_window_is_refused(rollouts: list[Rollout]) -> None:
    torch.manual_seed(17)
    config = transformers.MistralConfig(**DECODER, sliding_window=9, attn_implementation="sdpa")
    model = HuggingFaceModel(transformers.MistralForCausalLM(config).double().eval())
    assert_packing_equivalent(model, [rollouts[0], rollouts[1], rollouts[3]])
    with pytest.raises(ValueError, match="sample 'c' has 11 tokens but some layers of MistralForCausalLM see 9"):
        model(build_batch(rollouts, [0, 2]))


def test_a_forward_without_logits_to_keep_is_scored_from_the_same_rows(rollouts: list[Rollout]) -> None:
    class Older(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = built("llama", "sdpa")
            self.config = self.inner.config

        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
            output = self.inner(input_ids, attention_mask, position_ids, use_cache=use_cache)
            return SimpleNamespace(logits=output.logits)

    older, batch = Older(), build_batch(rollouts, [0, 1, 2])
    with torch.no_grad():
        torch.testing.assert_close(HuggingFaceModel(older)(batch), HuggingFaceModel(older.inner)(batch))
