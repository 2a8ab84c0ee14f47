"""What the configuration of a checkpoint says about its experts: the layout that recorded routes have."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import msgspec
from pack_core.errors import RoutingError
from pack_core.recording import Recording, recording

from pack_miles.errors import InputError

#: The kind of model whose experts are counted, by the `model_type` of its configuration.
KIND = "olmo3moe"

SIZES = ("num_hidden_layers", "n_routed_experts", "num_experts_per_tok")


@attrs.frozen
class ModelLayout:
    """How a model's routes are laid out: `[tokens - 1, layers, top_k]`, ids below `experts`.

    Attributes:
        layers: decoder layers, dense ones too.
        experts: routed experts of a layer.
        top_k: experts a token is sent to.
        dense_layers: layers that do not route.
        selected: the layers to count, under the stride.
    """

    layers: int
    experts: int
    top_k: int
    dense_layers: tuple[int, ...]
    selected: tuple[int, ...]


@lru_cache(maxsize=8)
def model_layout(checkpoint: str | Path, stride: int = 1) -> ModelLayout:
    """Return the layout that a Hugging Face checkpoint of the Olmo3-MoE kind declares in its `config.json`.

    Args:
        checkpoint: the checkpoint's directory, or the `config.json` itself.
        stride: count every so manieth of the layers that route, from the first.

    Raises:
        InputError: there is no such file, it is of another kind, or its sizes cannot be; names file and field.
    """
    path = Path(checkpoint)
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        read: Any = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); expert counts need the configuration of a local Hugging Face "
            "checkpoint, given by --hf-checkpoint"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); copy the checkpoint again") from None
    kind = read.get("model_type") if isinstance(read, dict) else None
    if kind != KIND:
        raise InputError(
            f"{path}: model_type is {kind!r}, and experts are counted for {KIND!r} alone; use such a checkpoint, or "
            "set pack_order = 'balanced' without expert_balanced_packing to even out lengths"
        )
    layers, experts, top_k = (_size(read, name, path) for name in SIZES)
    dense = read.get("dense_layers_indices")
    dense = [0] if dense is None else dense  # as OLMo-core's own class of this configuration fills it in
    how = _recording(path, layers, experts, top_k, dense, stride)
    return ModelLayout(layers, experts, top_k, tuple(sorted(set(dense))), how.selected)


def layout_error(checkpoint: str | Path, stride: int = 1) -> str:
    """Return why the experts of a checkpoint cannot be counted, "" when they can."""
    try:
        model_layout(checkpoint, stride)
    except InputError as error:
        return str(error)
    return ""


def _recording(path: Path, layers: int, experts: int, top_k: int, dense: Any, stride: int) -> Recording:
    if not isinstance(dense, list):
        raise InputError(f"{path}: dense_layers_indices is {dense!r}; it must be a list of layer numbers")
    try:
        return recording(layers=layers, experts=experts, top_k=top_k, dense_layers=dense, layer_stride=stride)
    except RoutingError as error:
        raise InputError(f"{path}: {error}") from None


def _size(read: dict[str, Any], name: str, path: Path) -> int:
    value = read.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{path}: {name} is {value!r}; it must be a whole number of at least 1")
    return value
