"""What this machine has, as far as a run needs it. Torch is imported here only, and only when asked."""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import attrs

from pack_miles.config import Config
from pack_miles.core.library import missing

#: Attention backend -> the function a packed row calls: a package that imports but lacks it cannot run.
ATTENTION_FUNCTIONS = {
    "flash_2": ("flash_attn", "flash_attn_varlen_func"),
    "flash_3": ("flash_attn_interface", "flash_attn_varlen_func"),
    "flash_4": ("flash_attn.cute", "flash_attn_varlen_func"),
    "te": ("transformer_engine.pytorch", "DotProductAttention"),
}


@attrs.frozen
class Machine:
    """What one process sees of its machine.

    `torch_error` is why torch cannot be imported, "" when it can; `core_error` why OLMo-core cannot be driven,
    looked at where a run asks for it; `capability` the compute capability of the first CUDA device; `attention` the
    backends whose function is importable. `rank` and `world` are what a launcher announced (None when started by
    hand), `local_ranks` the processes it puts on this machine.
    """

    torch_error: str = ""
    core_error: str = ""
    cuda_devices: int = 0
    capability: tuple[int, int] | None = None
    attention: frozenset[str] = frozenset()
    rank: int | None = None
    world: int | None = None
    local_ranks: int | None = None


def probe(config: Config, environ: Mapping[str, str] = os.environ) -> Machine:
    """Return what this machine has of what the configuration needs; `environ` is where a launcher announces itself."""
    announced = Machine(
        core_error=missing() if config.model.format == "olmo_core" else "",
        rank=_number(environ.get("RANK")),
        world=_number(environ.get("WORLD_SIZE")),
        local_ranks=_number(environ.get("LOCAL_WORLD_SIZE")),
    )
    try:
        torch = import_module("torch")
    except Exception as error:
        return attrs.evolve(announced, torch_error=f"{type(error).__name__}: {error}")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = config.core.attention_backend
    return attrs.evolve(
        announced,
        cuda_devices=devices,
        capability=tuple(torch.cuda.get_device_capability(0)) if devices else None,
        attention=frozenset([backend] if backend in ATTENTION_FUNCTIONS and _callable(backend) else []),
    )


def holds_run(root: str) -> bool:
    """Return whether a folder holds events of a run; empty files are those of a start that came to nothing."""
    return any(file.stat().st_size for file in Path(root).glob("training_contract_rank*.jsonl"))


def writable(root: str) -> bool:
    """Return whether a folder can be written, or made; nothing is written to find out."""
    path = Path(root)
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _callable(backend: str) -> bool:
    module, function = ATTENTION_FUNCTIONS[backend]
    try:
        return callable(getattr(import_module(module), function, None))
    except Exception:  # a broken optional package fails in its own ways, and each means the same here
        return False
