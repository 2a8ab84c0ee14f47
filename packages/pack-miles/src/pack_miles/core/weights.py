"""The weights of an OLMo-core checkpoint, read into a model that holds all of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pack_miles.core.library import load
from pack_miles.core.sharding import WRAPPED
from pack_miles.errors import InputError, input_error

#: What Core calls a weight in a checkpoint, by its name in the model: its trainers differ, and wrap models differently.
#: Its optimizer for mixtures of experts saves its float32 copies alone, flat, as `main`.
SPELLINGS = ("model.{}", "model.module.{}", "{}", "module.{}", "{}.main", "module.{}.main", "model_buffer.{}")


@torch.no_grad()
def load_weights(core: nn.Module, folder: Path) -> None:
    """Set every weight of a model to what a checkpoint holds, all or none; no rank waits for another.

    The number of ranks that wrote it, and how it was spread over them, do not matter: each reads it as one whole.

    Args:
        core: a built model, its experts not yet spread over ranks.
        folder: the checkpoint's `model_and_optim`.

    Raises:
        InputError: it cannot be read, lacks a weight of the model, or has one of another shape; lists all of them.
    """
    # Half a second on every start of a rank, for what few runs do.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as read_into

    reader = load().CheckpointReader(str(folder))
    try:
        held: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a torn or foreign folder fails in its own ways
        raise InputError(f"{folder} is no checkpoint of OLMo-core ({error}); copy the checkpoint again") from error
    own = {name.replace(WRAPPED, ""): tensor for name, tensor in core.state_dict().items()}
    keys = {name: _key(name, held) for name in own}
    if problems := list(_problems(own, keys, held)):
        raise input_error(f"the weights of {folder} do not fit the model of its config.json", problems)
    read: dict[str, Any] = {key: torch.empty(held[key].size, dtype=torch.float32) for key in keys.values()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant: every rank reads alone
            read_into(read, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        told = str(error).strip().rpartition("\n")[2]
        raise InputError(f"{folder} cannot be read: {told}; copy the checkpoint again") from error
    for name, tensor in own.items():
        tensor.copy_(read[keys[name]].view(tensor.shape))


def _key(name: str, held: Mapping[str, Any]) -> str:
    return next((key for spelling in SPELLINGS if (key := spelling.format(name)) in held), "")


def _problems(own: Mapping[str, Tensor], keys: Mapping[str, str], held: Mapping[str, Any]) -> Iterator[str]:
    for name, tensor in own.items():
        if not keys[name]:
            yield f"{name} is not in it; give the checkpoint that was saved with this configuration"
            continue
        size = tuple(held[keys[name]].size)
        flat = keys[name].endswith(".main")
        if size != ((tensor.numel(),) if flat else tuple(tensor.shape)):
            yield f"{name} has shape {list(size)} in it but {list(tensor.shape)} in the model; was config.json changed?"
