"""Real OLMo-core with linear attention between full attention: its memory starts anew at every document."""

from typing import Any

import pytest
import torch
from pack_torch import build_batch
from pack_torch.testing import assert_documents_isolated
from support.olmo_cases import PACKS, SINGLES, dense_config, distance, make_rollouts, scores, twins, two_updates

pytestmark = pytest.mark.usefixtures("cpu_leaves")


def hybrid_config(kind: str) -> Any:
    """Linear, full, linear attention in Core's plain transformer."""
    from olmo_core.nn.attention.kda import KimiDeltaAttentionConfig
    from olmo_core.nn.attention.recurrent import GatedDeltaNetConfig

    mixer = {
        "kimi": KimiDeltaAttentionConfig(n_heads=2, head_dim=8, conv_size=3),
        "gated": GatedDeltaNetConfig(n_heads=2, n_v_heads=4, head_dim=8, expand_v=1.0),
    }[kind]
    config = dense_config(n_layers=3)
    config.block = {"full": config.block, "linear": config.block.replace(sequence_mixer=mixer)}
    config.block_pattern = ["linear", "full", "linear"]
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["kimi", "gated"])
def test_packed_rows_score_and_train_as_one_sample_a_row(kind: str, dtype: torch.dtype) -> None:
    packed, alone = twins(hybrid_config(kind), dtype)
    rollouts = make_rollouts()
    for one, two in zip(scores(packed, rollouts, PACKS), scores(alone, rollouts, SINGLES), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    found, parameters, _ = two_updates(packed, rollouts, PACKS)
    wanted, other_parameters, _ = two_updates(alone, rollouts, SINGLES)
    for one, two in zip(found, wanted, strict=True):
        assert distance(one, two) < 1e-5
    assert distance(parameters, other_parameters) < 1e-5


@pytest.mark.parametrize("kind", ["kimi", "gated"])
def test_no_document_of_a_row_feels_another(kind: str) -> None:
    packed, _ = twins(hybrid_config(kind), torch.float32)
    batch = build_batch(make_rollouts(), range(8))
    assert_documents_isolated(packed, batch, embedding=packed.core.embeddings)


@pytest.mark.parametrize("kind", ["kimi", "gated"])
def test_without_boundaries_the_memory_leaks(kind: str) -> None:
    """What the isolation above is worth: the same layers, told of one document, let the first reach the second."""
    _, alone = twins(hybrid_config(kind), torch.float32)
    tokens = torch.arange(12).unsqueeze(0)
    changed = tokens.clone()
    changed[0, :6] += 1
    moved = (alone.core(tokens) - alone.core(changed))[0, 6:].abs().max()
    assert float(moved.detach()) > 1e-3
