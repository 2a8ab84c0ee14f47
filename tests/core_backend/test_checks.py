"""The allow-list: layers of built OLMo-core models that would mix documents are refused by name."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pack_miles.core.attention import check_flash_4
from pack_miles.core.checks import check_documents_apart
from pack_miles.core.library import load
from pack_miles.core.model import CoreModel, build_core
from pack_miles.errors import InputError
from support.olmo_cases import dense_config
from support.olmo_experts import expert_config


def problems_of(core: Any) -> list[str]:
    what = "this OLMo-core model cannot train packed rows: "
    with pytest.raises(InputError, match=what) as caught:
        check_documents_apart(core)
    return [problem.removeprefix(what) for problem in caught.value.problems]


@pytest.mark.filterwarnings("ignore:Backend is set to")
@pytest.mark.parametrize("configured", ["torch", "flash_2", "flash_3"])
def test_torch_attention_is_refused_whatever_the_configuration_says(configured: str) -> None:
    """Without CUDA, Core builds torch attention for flash_2 and only warns."""
    core = build_core(dense_config(), attention=configured)
    found = problems_of(core)
    assert [problem.split(":")[0] for problem in found] == ["blocks.0.attention", "blocks.1.attention"]
    assert all("backend is TorchAttentionBackend (Core falls back to it where CUDA is missing)" in p for p in found)
    assert all("set attention_backend to flash_2, flash_3 (Hopper), flash_4 (Blackwell) or segment" in p for p in found)


def test_one_layer_of_many_is_enough() -> None:
    core = build_core(dense_config(n_layers=3), attention="segment")
    check_documents_apart(core)
    core.blocks["1"].attention.backend.__class__ = load().TorchBackend
    [problem] = problems_of(core)
    assert problem.startswith("blocks.1.attention: ")


def test_a_backend_nobody_has_looked_at_is_refused() -> None:
    core = build_core(dense_config(), attention="segment")
    kind = type(core.blocks["0"].attention.backend)
    core.blocks["0"].attention.backend.__class__ = type("Mine", (kind,), {})
    [problem] = problems_of(core)
    assert "its backend is Mine, which cannot keep documents apart" in problem


def mamba_config() -> Any:
    from olmo_core.config import DType
    from olmo_core.nn.attention.recurrent import NemotronMamba2Config

    config = dense_config()
    mixer = NemotronMamba2Config(
        ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=8, n_groups=2, chunk_size=4, dtype=DType.float32
    )
    config.block = {"full": config.block, "mamba": config.block.replace(sequence_mixer=mixer)}
    config.block_pattern = ["full", "mamba"]
    return config


def test_a_mixer_that_ignores_document_lengths_is_refused_and_rightly() -> None:
    core = build_core(mamba_config(), attention="segment")
    [problem] = problems_of(core)
    assert problem.startswith("blocks.1.attention: NemotronMamba2Mixer is not known to start anew at every document")
    assert "use attention, kimi_delta_attention or gated_delta_net" in problem
    mixer = core.blocks["1"].attention
    rows = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    told = mixer(rows, cu_doc_lens=torch.tensor([0, 4, 8], dtype=torch.int32), max_doc_len=4)
    assert torch.equal(told, mixer(rows))


def test_a_rotary_embedding_that_counts_over_the_row_is_refused() -> None:
    from olmo_core.nn.rope import RoPEConfig, RoPEType

    config = dense_config()
    config.block.sequence_mixer.rope = RoPEConfig(name=RoPEType.complex)
    found = problems_of(build_core(config, attention="segment"))
    assert "blocks.0.attention: ComplexRotaryEmbedding counts positions over the whole row" in found[0]


def test_a_block_nobody_has_looked_at_is_refused() -> None:
    core = build_core(dense_config(), attention="segment")
    core.blocks["1"].__class__ = type("MyBlock", (type(core.blocks["1"]),), {})
    [problem] = problems_of(core)
    assert problem.startswith("blocks.1: MyBlock is not among the blocks known to hand document lengths on")


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("_cp_load_balancer", object(), "context parallelism counts positions over the shard"),
        ("_tp_enabled", True, "tensor parallelism is on"),
        ("lm_head", None, "it is one stage of a pipeline"),
        ("embeddings", None, "it is one stage of a pipeline"),
    ],
)
def test_parallelism_that_this_adapter_does_not_drive_is_refused(attribute: str, value: Any, words: str) -> None:
    core = build_core(dense_config(), attention="segment")
    assert hasattr(core, attribute)
    setattr(core, attribute, value)
    [problem] = problems_of(core)
    assert words in problem


def test_attention_under_context_parallelism_is_refused() -> None:
    core = build_core(dense_config(), attention="segment")
    core.blocks["1"].attention.backend.cp_enabled = True
    [problem] = problems_of(core)
    assert problem == "blocks.1.attention: context parallelism is on; set the CP degree to 1"


@pytest.mark.usefixtures("cpu_leaves")
def test_hybrid_layers_with_latent_experts_pass_and_their_attention_is_still_looked_at() -> None:
    check_documents_apart(build_core(expert_config(), attention="segment"))
    [problem] = problems_of(build_core(expert_config(), attention="torch"))
    assert problem.startswith("blocks.1.attention: its backend is TorchAttentionBackend")


@pytest.mark.usefixtures("cpu_leaves")
def test_emo_routing_is_refused() -> None:
    from olmo_core.nn.moe.emo import EmoRouterConfig

    emo = EmoRouterConfig(eos_token_id=0, min_document_expert_pool=2, max_document_expert_pool=3)
    found = problems_of(build_core(expert_config(emo=emo), attention="segment"))
    assert [problem.split(":")[0] for problem in found] == [f"blocks.{n}.routed_experts_router" for n in (1, 2)]


@pytest.mark.usefixtures("cpu_leaves")
def test_expert_parallel_paths_that_drop_tokens_are_refused() -> None:
    core = build_core(expert_config(), attention="segment")
    core.blocks["2"]._ep_enabled = True
    check_documents_apart(core)
    core.blocks["2"].ep.path = "rowwise_nvshmem"
    [problem] = problems_of(core)
    assert problem.startswith("blocks.2: the expert-parallel path 'rowwise_nvshmem' may drop tokens over its capacity")


def newest_kernel(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    min_seqlen_k: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (None, None),
) -> None:
    """The parameters of flash-attention 4.0.0b36, as far as Core names them."""


def bundled_kernel(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (None, None),
) -> None:
    """The parameters of the copy inside flash-attention 2.8.3, which takes no longest length."""


flash_attn_4: Any = None


def positional_dispatch(
    q: Any, k: Any, v: Any, *, cu_seqlens: Any = None, max_seqlen: Any = None, causal: bool = False
) -> Any:
    """How Core called flash-attention 4 up to 2.6.0."""
    kernel = flash_attn_4.flash_attn_varlen_func
    return kernel(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=causal)[0]


def test_the_pinned_core_binds_flash_attention_4_by_name() -> None:
    check_flash_4(load(), newest_kernel)


def test_a_core_that_binds_flash_attention_4_by_place_is_refused() -> None:
    old: Any = SimpleNamespace(version="2.6.0", dispatch_flash_4=positional_dispatch)
    words = "ai2-olmo-core 2.6.0 calls flash-attention 4 with 7 arguments by place and without the names cu_seqlens_q"
    with pytest.raises(InputError, match=re.escape(words)):
        check_flash_4(old, newest_kernel)


def test_a_kernel_without_those_names_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"does not take max_seqlen_q, max_seqlen_k, which ai2-olmo-core 3\.0\.0 gives it"
    ):
        check_flash_4(load(), bundled_kernel)


def test_flash_attention_4_is_asked_for_before_core_falls_back() -> None:
    with pytest.raises(InputError, match=r"attention_backend = 'flash_4': flash_attn\.cute\.flash_attn_varlen_func"):
        build_core(dense_config(), attention="flash_4")


def test_a_model_with_a_flash_4_layer_is_checked_for_it() -> None:
    core = build_core(dense_config(), attention="segment")
    core.blocks["0"].attention.backend.__class__ = load().Flash4Backend
    with pytest.raises(InputError, match="attention_backend = 'flash_4'"):
        check_documents_apart(core)


def test_refused_models_are_not_built() -> None:
    with pytest.raises(InputError, match="2 problems"):
        CoreModel(build_core(dense_config()))
