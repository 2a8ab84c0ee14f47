"""OLMo-core as installed here: the one place that imports it, and that says so when it is not what was built for."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import attrs

from pack_miles.errors import InputError, input_error

#: The release this adapter was written and tested against. It reads names that no release promises to keep.
CORE_VERSION = "3.0.0"

INSTALL = f"install it with: pip install 'pack-miles[core]' (ai2-olmo-core=={CORE_VERSION})"

#: What is used: our name for it -> its module and its path inside.
NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Transformer": ("olmo_core.nn.transformer", "Transformer"),
        "TransformerConfig": ("olmo_core.nn.transformer", "TransformerConfig"),
        "prepare_inputs": ("olmo_core.nn.transformer", "Transformer._prepare_inputs"),
        "apply_activation_checkpointing": ("olmo_core.nn.transformer", "Transformer.apply_activation_checkpointing"),
        "CheckpointingMode": ("olmo_core.nn.transformer.config", "TransformerActivationCheckpointingMode"),
        "TransformerBlock": ("olmo_core.nn.transformer.block", "TransformerBlock"),
        "ScaledBlock": ("olmo_core.nn.transformer.block", "LayerNormScaledTransformerBlock"),
        "ReorderedBlock": ("olmo_core.nn.transformer.block", "ReorderedNormTransformerBlock"),
        "PeriNormBlock": ("olmo_core.nn.transformer.block", "PeriNormTransformerBlock"),
        "NormalizedBlock": ("olmo_core.nn.transformer.block", "NormalizedTransformerBlock"),
        "DDPModel": ("olmo_core.nn.ddp.model", "OLMoDDPModel"),
        "DDPBlock": ("olmo_core.nn.ddp.block", "OLMoDDPTransformerBlock"),
        "LMHead": ("olmo_core.nn.lm_head", "LMHead"),
        "SequenceMixer": ("olmo_core.nn.attention.base", "SequenceMixer"),
        "AttentionConfig": ("olmo_core.nn.attention", "AttentionConfig"),
        "Attention": ("olmo_core.nn.attention", "Attention"),
        "NormalizedAttention": ("olmo_core.nn.attention", "NormalizedAttention"),
        "FusedAttention": ("olmo_core.nn.attention", "FusedAttentionV2"),
        "KimiDeltaAttention": ("olmo_core.nn.attention.kda", "KimiDeltaAttention"),
        "GatedDeltaNet": ("olmo_core.nn.attention.recurrent", "GatedDeltaNet"),
        "BackendName": ("olmo_core.nn.attention.backend", "AttentionBackendName"),
        "TorchBackend": ("olmo_core.nn.attention.backend", "TorchAttentionBackend"),
        "Flash2Backend": ("olmo_core.nn.attention.backend", "FlashAttention2Backend"),
        "Flash3Backend": ("olmo_core.nn.attention.backend", "FlashAttention3Backend"),
        "Flash4Backend": ("olmo_core.nn.attention.backend", "FlashAttention4Backend"),
        "dispatch_flash_4": ("olmo_core.nn.attention.flash_attn_api", "dispatch_flash_attn_4"),
        "RotaryEmbedding": ("olmo_core.nn.rope", "RotaryEmbedding"),
        "CheckpointReader": ("olmo_core.distributed.checkpoint.filesystem", "RemoteFileSystemReader"),
        "RouterV2": ("olmo_core.nn.moe.v2.router", "MoERouterV2"),
        "router_get_top_k": ("olmo_core.nn.moe.v2.router", "MoERouterV2.get_top_k"),
        "GatingFunction": ("olmo_core.nn.moe.router", "MoERouterGatingFunction"),
    }
)


@attrs.frozen
class Library:
    """The names of OLMo-core that are used, by ours: `library.Attention`."""

    version: str
    names: Mapping[str, Any] = attrs.field(repr=False)

    def __getattr__(self, name: str) -> Any:
        """Return what OLMo-core calls one of `NAMES`."""
        try:
            return self.names[name]
        except KeyError:
            raise AttributeError(name) from None


def missing() -> str:
    """Return why OLMo-core cannot be driven here, as far as is known without importing it; "" when it can."""
    try:
        version = importlib.metadata.version("ai2-olmo-core")
    except importlib.metadata.PackageNotFoundError:
        return f"model.format = 'olmo_core' needs the package ai2-olmo-core; {INSTALL}"
    if version.partition("+")[0] != CORE_VERSION:
        return f"ai2-olmo-core is {version} but this release drives {CORE_VERSION} only; {INSTALL}"
    return ""


@cache
def load() -> Library:
    """Return OLMo-core, imported on the first call.

    Raises:
        InputError: it is not installed, is another version, cannot be imported, or lacks a name that is used.
    """
    if problem := missing():
        raise InputError(problem)
    return collect(importlib.metadata.version("ai2-olmo-core"), importlib.import_module)


def collect(version: str, find: Callable[[str], Any]) -> Library:
    """Return the library of a version, each name looked up in the modules that `find` gives.

    Raises:
        InputError: another version than `CORE_VERSION`, or names that are gone; lists all of them.

    >>> collect("2.6.0", importlib.import_module)
    Traceback (most recent call last):
    pack_miles.errors.InputError: ai2-olmo-core is 2.6.0 but this release drives 3.0.0 only; install it with: ...
    """
    if version.partition("+")[0] != CORE_VERSION:
        raise InputError(f"ai2-olmo-core is {version} but this release drives {CORE_VERSION} only; {INSTALL}")
    found: dict[str, Any] = {}
    gone: list[str] = []
    for name, (module, path) in NAMES.items():
        try:
            value = find(module)
            for part in path.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError) as error:
            gone.append(f"{module}.{path} is gone ({error}); reinstall ai2-olmo-core=={CORE_VERSION} unchanged")
        else:
            found[name] = value
    if gone:
        raise input_error(f"ai2-olmo-core {version}", gone)
    return Library(version, MappingProxyType(found))
