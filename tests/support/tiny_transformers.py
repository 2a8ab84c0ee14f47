"""What the tests on models of transformers share: sizes small enough to build in no time, and a stand-in for flash."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
#: Of models that take the width of a head on its own.
DECODER = SIZES | {"head_dim": 8}

#: Eager flex attention warns that it is slow; on a CPU it is all there is.
FLEX_IS_SLOW = "ignore:flex_attention called without torch.compile"


def flash_stand_in(calls: list[dict[str, Any]]) -> Any:
    """A function in flash attention's place: notes what it is told, and computes from the lengths alone."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **told: Any) -> Any:
        calls.append({"mask": mask, **told})
        ends = told["cu_seq_lens_q"].tolist()
        parts = [
            nn.functional.scaled_dot_product_attention(
                *(one[:, :, first:last] for one in (query, key, value)), is_causal=True, enable_gqa=True
            )
            for first, last in pairwise(ends)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None

    return attend


def assert_told_documents(calls: list[dict[str, Any]], ends: list[int], longest: int) -> None:
    """Check that every layer was told where documents end, and given no mask."""
    assert len(calls) == SIZES["num_hidden_layers"]
    for told in calls:
        assert told["mask"] is None
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            assert told[name].dtype == torch.int32
            assert told[name].tolist() == ends
        assert (told["max_length_q"], told["max_length_k"]) == (longest, longest)
