"""Real OLMo-core, dense: a packed row computes what Core computes for each document alone."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pack_miles.core.library import load
from pack_miles.core.model import CoreModel, build_core
from pack_torch import build_batch, response_log_probs
from pack_torch.testing import assert_documents_isolated, assert_packing_equivalent
from support.olmo_cases import (
    PACKS,
    SINGLES,
    dense_config,
    distance,
    gradients,
    make_rollouts,
    nudge,
    scores,
    twins,
    two_updates,
    windowed_config,
)

CONFIGS = {"full": dense_config, "window": windowed_config}

#: Core computes its norms and rotary embedding in float32, whatever the weights are.
DTYPES = [torch.float32, torch.float64]


def softmax_attention(q: Any, k: Any, v: Any, lengths: list[int], window: int, scale: float) -> Any:
    """Causal attention of packed documents, token by token in NumPy."""
    out, start = np.zeros_like(q), 0
    for length in lengths:
        for token in range(start, start + length):
            first = max(start, token - window + 1)
            for head in range(q.shape[1]):
                kept = head * k.shape[1] // q.shape[1]
                weights = np.exp([q[token, head] @ k[past, kept] * scale for past in range(first, token + 1)])
                out[token, head] = weights / weights.sum() @ v[first : token + 1, kept]
        start += length
    return out


@pytest.mark.parametrize(("window", "scale"), [(-1, None), (2, None), (-1, 0.3)])
def test_segment_attention_is_the_softmax_of_each_document_by_itself(window: int, scale: float | None) -> None:
    config = dense_config() if window < 0 else windowed_config()
    backend = build_core(config, attention="segment").blocks["0"].attention.backend
    backend.window_size, backend.scale = ((window - 1, 0) if window > 0 else (-1, -1)), scale
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 9, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    found = backend((q, k, v), cu_doc_lens=torch.tensor([0, 4, 5, 9], dtype=torch.int32), max_doc_len=4)
    wanted = softmax_attention(
        *(part[0].numpy() for part in (q, k, v)), [4, 1, 4], window if window > 0 else 9, scale or 1 / math.sqrt(8)
    )
    np.testing.assert_allclose(found[0].numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_packed_row_scores_as_core_scores_one_sample_a_row(config: str, dtype: torch.dtype) -> None:
    packed, alone = twins(CONFIGS[config](), dtype)
    rollouts = make_rollouts()
    for packs in (PACKS, [range(8)], [(7, 2, 5), (1, 0, 3, 6, 4)]):
        for one, two in zip(scores(packed, rollouts, packs), scores(alone, rollouts, SINGLES), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_two_adamw_steps_on_packed_rows_are_those_on_one_sample_a_row(
    config: str, dtype: torch.dtype, recompute: bool
) -> None:
    packed, alone = twins(CONFIGS[config](), dtype, recompute=recompute)
    rollouts = make_rollouts()
    found, parameters, moments = two_updates(packed, rollouts, PACKS)
    wanted, other_parameters, other_moments = two_updates(alone, rollouts, SINGLES)
    for one, two in zip(found, wanted, strict=True):
        assert distance(one, two) < 1e-5
    assert distance(parameters, other_parameters) < 1e-5
    assert distance(moments, other_moments) < 1e-5


def test_recomputation_changes_no_bit() -> None:
    rollouts = make_rollouts()
    kept, _ = twins(dense_config(), torch.float32)
    again, _ = twins(dense_config(), torch.float32, recompute=True)
    assert "CheckpointWrapper" in {type(module).__name__ for module in again.modules()}
    one, two = gradients(kept, rollouts, PACKS), gradients(again, rollouts, PACKS)
    assert len(one) == len(two)
    for value, other in zip(one.values(), two.values(), strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("config", CONFIGS)
def test_no_document_of_a_row_feels_another(config: str) -> None:
    packed, _ = twins(CONFIGS[config](), torch.float32)
    batch = build_batch(make_rollouts(), range(8))
    assert_documents_isolated(packed, batch, embedding=packed.core.embeddings)


def test_the_shipped_oracle_finds_packing_equivalent() -> None:
    packed, _ = twins(dense_config(), torch.float64)
    assert_packing_equivalent(packed, make_rollouts(), packs=PACKS, tolerance=1e-6)


def test_core_alone_mixes_documents_when_it_is_given_one_of_the_two_arguments() -> None:
    """The trap itself: were it closed in Core, the guard could go."""
    core = build_core(dense_config(), attention="segment")
    nudge(core)
    tokens = torch.arange(9).unsqueeze(0)
    lengths = torch.tensor([[4, 5]], dtype=torch.int32)
    whole, half = core(tokens), core(tokens, doc_lens=lengths)
    apart = core(tokens, doc_lens=lengths, max_doc_lens=[5])
    assert torch.equal(whole, half)
    assert (apart - whole)[0, 4:].abs().max() > 0.1
    torch.testing.assert_close(apart[:, 4:], core(tokens[:, 4:]), rtol=0, atol=1e-5)


def test_hidden_rows_and_the_head_give_cores_own_logits() -> None:
    packed, alone = twins(dense_config(), torch.float64)
    batch = build_batch(make_rollouts(), [3])
    output = packed(batch)
    assert output.hidden.shape == (7, 32)
    assert output.routes.shape == (7, 2, 0)
    torch.testing.assert_close(
        packed.logits(output.hidden), alone.core(batch.input_ids.unsqueeze(0))[0], rtol=0, atol=1e-9
    )


def test_normalized_and_fused_attention_keep_documents_apart_too() -> None:
    from olmo_core.nn.attention import AttentionType
    from olmo_core.nn.transformer import TransformerConfig

    fused = dense_config(n_kv_heads=4, qk_norm=False)
    fused.block.sequence_mixer.name = AttentionType.fused_v2
    normalized = TransformerConfig.ngpt_like(d_model=32, vocab_size=29, n_layers=2, n_heads=4)
    kinds = load()
    for config, kind in ((fused, kinds.FusedAttention), (normalized, kinds.NormalizedAttention)):
        core = build_core(config, attention="segment")
        nudge(core)
        assert type(core.blocks["0"].attention) is kind
        model = CoreModel(core)
        assert_documents_isolated(model, build_batch(make_rollouts(), range(8)), embedding=core.embeddings)
        rollouts = make_rollouts()
        for one, two in zip(scores(model, rollouts, PACKS), scores(model, rollouts, SINGLES), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_a_saved_configuration_builds_the_same_weights() -> None:
    config = dense_config()
    one, two = build_core(config), build_core(config.as_config_dict())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    batch = build_batch(make_rollouts(), [1])
    first = response_log_probs(CoreModel(one, packed=False), batch)
    assert torch.equal(first, response_log_probs(CoreModel(two, packed=False), batch))
