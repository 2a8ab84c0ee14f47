"""Whether a built OLMo-core model keeps the documents of a packed row apart, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from pack_miles.core.attention import check_flash_4, segment_backend
from pack_miles.core.library import Library, load
from pack_miles.core.replay import blocks
from pack_miles.errors import input_error

USE = "set attention_backend to flash_2, flash_3 (Hopper), flash_4 (Blackwell) or segment (any device)"


def check_documents_apart(core: nn.Module) -> None:
    """Raise unless everything in a built model that mixes tokens is known to keep documents apart.

    What counts is what was built: without CUDA, Core takes torch attention whatever the configuration says, and some
    mixers take document lengths and ignore them. Only classes listed here pass, so that one nobody has looked at does
    not.

    Args:
        core: a built `Transformer` or `OLMoDDPModel`.

    Raises:
        InputError: lists every layer at fault, why, and what to do.
    """
    library = load()
    problems = [*_model_problems(core)]
    for layer, block in blocks(core).items():
        problems += _block_problems(library, f"blocks.{layer}", block)
    if problems:
        raise input_error("this OLMo-core model cannot train packed rows", problems)
    if any(type(module) is library.Flash4Backend for module in core.modules()):
        check_flash_4(library)


def _model_problems(core: Any) -> Iterator[str]:
    if getattr(core, "_cp_load_balancer", None) is not None:
        yield (
            "the model: context parallelism counts positions over the shard, not over the document; set the CP degree "
            "to 1, or pack one sample a row"
        )
    if getattr(core, "_tp_enabled", False):
        yield "the model: tensor parallelism is on; this adapter drives data and expert parallelism only, set it to 1"
    if core.lm_head is None or core.embeddings is None:
        yield "the model: it is one stage of a pipeline; this adapter drives whole models only, set the PP degree to 1"
    if getattr(core, "tbo", False):
        yield "the model: two_batch_overlap cuts a batch in two, and a packed row is a batch of one; set it to false"


def _block_problems(library: Library, name: str, block: Any) -> Iterator[str]:
    known = (
        library.TransformerBlock,
        library.ScaledBlock,
        library.ReorderedBlock,
        library.PeriNormBlock,
        library.NormalizedBlock,
        library.DDPBlock,
    )
    if type(block) not in known:
        yield (
            f"{name}: {type(block).__name__} is not among the blocks known to hand document lengths on; use one of "
            f"{', '.join(kind.__name__ for kind in known)}"
        )
        return
    mixers = [(path, module) for path, module in block.named_modules() if isinstance(module, library.SequenceMixer)]
    if not mixers:
        yield f"{name}: no sequence mixer was found in it; use attention or kimi_delta_attention"
    for path, mixer in mixers:
        yield from _mixer_problems(library, f"{name}.{path}", mixer)
    yield from _expert_problems(library, name, block)


def _mixer_problems(library: Library, name: str, mixer: Any) -> Iterator[str]:
    if type(mixer) in (library.KimiDeltaAttention, library.GatedDeltaNet):
        if getattr(mixer, "cp_enabled", False):
            yield f"{name}: context parallelism is on; set the CP degree to 1"
        return
    if type(mixer) not in (library.Attention, library.NormalizedAttention, library.FusedAttention):
        yield (
            f"{name}: {type(mixer).__name__} is not known to start anew at every document (Core's Mamba2 mixer takes "
            "document lengths and ignores them); use attention, kimi_delta_attention or gated_delta_net, or pack one "
            "sample a row"
        )
        return
    backend = type(mixer.backend)
    flash = (library.Flash2Backend, library.Flash3Backend, library.Flash4Backend)
    if backend not in (*flash, segment_backend()):
        fallback = " (Core falls back to it where CUDA is missing)" if backend is library.TorchBackend else ""
        yield f"{name}: its backend is {backend.__name__}{fallback}, which cannot keep documents apart; {USE}"
    if mixer.backend.cp_enabled:
        yield f"{name}: context parallelism is on; set the CP degree to 1"
    rope = getattr(mixer, "rope", None)
    if rope is not None and type(rope) is not library.RotaryEmbedding:
        yield (
            f"{name}: {type(rope).__name__} counts positions over the whole row; use the default rotary embedding, "
            "which starts anew at every document"
        )
    if getattr(mixer, "kv_cache_manager", None) is not None:
        yield f"{name}: it holds a key-value cache, which is for generation; build the model without one"


def _expert_problems(library: Library, name: str, block: Any) -> Iterator[str]:
    router = getattr(block, "routed_experts_router", None)
    if router is None:
        return
    if getattr(router, "requires_segment_ids", False):
        yield (
            f"{name}.routed_experts_router: EMO routing finds documents by end-of-sequence tokens, not by their "
            "lengths, and a truncated response has none; use a plain router, or pack one sample a row"
        )
    if block.ep_enabled and block.ep.no_sync:
        yield (
            f"{name}: the expert-parallel path {str(block.ep.path)!r} may drop tokens over its capacity, and then what "
            "else is in the row decides what a document computes; set ep.path to sync_1d"
        )
