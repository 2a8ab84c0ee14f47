"""A tiny OLMo-core model with everything packing must survive: delta attention, full attention, latent experts."""

from __future__ import annotations

from typing import Any

import torch
from pack_miles.core.model import CoreModel, build_core
from support.olmo_cases import VOCABULARY, nudge

WIDTH, LATENT, EXPERTS, TOP_K = 32, 16, 4, 2

#: (decoder layers, experts, choices): layer 0 has shared experts alone, 1 and 2 route.
ROUTED = (3, EXPERTS, TOP_K)


def expert_config(*, recompute: bool = False, **router: Any) -> Any:
    """Delta attention with shared experts, full attention and delta attention with latent routed experts."""
    from olmo_core.config import DType
    from olmo_core.nn.attention import AttentionBackendName, AttentionConfig
    from olmo_core.nn.attention.kda import KimiDeltaAttentionConfig
    from olmo_core.nn.ddp.block import OLMoDDPTransformerBlockConfig
    from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
    from olmo_core.nn.lm_head import LMHeadConfig
    from olmo_core.nn.moe.moe import LatentMoEConfig
    from olmo_core.nn.moe.v2.routed_experts import RoutedExpertsConfig
    from olmo_core.nn.moe.v2.router import MoERouterConfigV2
    from olmo_core.nn.moe.v2.shared_experts import SharedExpertsConfig
    from olmo_core.nn.rope import RoPEConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerType
    from olmo_core.nn.transformer.config import OLMoDDPModelConfig

    norm = LayerNormConfig(name=LayerNormType.rms, bias=False)
    full = AttentionConfig(
        n_heads=4, n_kv_heads=2, bias=False, rope=RoPEConfig(), qk_norm=norm, backend=AttentionBackendName.torch
    )
    delta = KimiDeltaAttentionConfig(n_heads=2, head_dim=8)

    def block(mixer: Any, routed: bool) -> Any:
        shared = SharedExpertsConfig(WIDTH, 24, num_experts=1, bias=False, dtype=DType.float32)
        parts: dict[str, Any] = {"shared_experts": shared}
        if routed:
            parts["routed_experts"] = RoutedExpertsConfig(LATENT, 12, EXPERTS, bias=False, dtype=DType.float32)
            parts["routed_experts_router"] = MoERouterConfigV2(WIDTH, EXPERTS, TOP_K, dtype=DType.float32, **router)
            parts["latent_moe"] = LatentMoEConfig(LATENT)
        return OLMoDDPTransformerBlockConfig(
            name=TransformerBlockType.moe_fused_v2, sequence_mixer=mixer, layer_norm=norm, use_peri_norm=True, **parts
        )

    return OLMoDDPModelConfig(
        name=TransformerType.moe_fused_v2,
        d_model=WIDTH,
        vocab_size=VOCABULARY,
        n_layers=3,
        block={"shared": block(delta, False), "full": block(full, True), "delta": block(delta, True)},
        block_pattern=["shared", "full", "delta"],
        lm_head=LMHeadConfig(layer_norm=norm, bias=False),
        recompute_each_block=recompute,
    )


def expert_model(
    *,
    packed: bool = True,
    replay: bool = True,
    recompute: bool = False,
    dtype: torch.dtype = torch.float32,
    **router: Any,
) -> CoreModel:
    """The same weights whatever is asked: for packed rows, or Core's own attention on one sample a row."""
    core = build_core(expert_config(**router), attention="segment" if packed else "torch", recompute=recompute)
    core.to(dtype)
    nudge(core)
    return CoreModel(core, packed=packed, replay=replay)
