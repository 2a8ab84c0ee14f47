"""What this machine has, as far as a run needs it. Torch is imported here only, and only when asked."""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import attrs

from pack_miles.core.library import missing
from pack_miles.settings.config import Config

#: Attention backend -> the function a packed row calls: a package that imports but lacks it cannot run.
ATTENTION_FUNCTIONS = {
    "flash_2": ("flash_attn", "flash_attn_varlen_func"),
    "flash_3": ("flash_attn_interface", "flash_attn_varlen_func"),
    "flash_4": ("flash_attn.cute", "flash_attn_varlen_func"),
    "te": ("transformer_engine.pytorch", "DotProductAttention"),
}

#: Optional package, an extra of pack-miles by the same name -> a function of it: a folder that is merely called so has
#: none.
EXTRAS = {"ray": ("ray", "init"), "wandb": ("wandb", "init")}

#: How MILES names the files of its own event log, one a process; its reader takes every JSONL file below their folder.
MILES_EVENTS = "*_cell*_rank*.jsonl"


@attrs.frozen
class Machine:
    """What one process sees of its machine.

    `torch_error` is why torch cannot be imported, "" when it can; `core_error` why OLMo-core cannot be driven,
    looked at where a run asks for it; `capability` the compute capability of the first CUDA device; `attention` the
    backends whose function is importable, `extras` those of `EXTRAS` that are. `rank` and `world` are what a launcher
    announced (None when started by hand), `local_ranks` the processes it puts on this machine; `cluster` is the
    address of the Ray cluster that was given, "" for none. `foreign` is the folder of MILES' own events that
    `output.root` is or lies in, "" for none.
    """

    torch_error: str = ""
    core_error: str = ""
    cuda_devices: int = 0
    capability: tuple[int, int] | None = None
    attention: frozenset[str] = frozenset()
    extras: frozenset[str] = frozenset()
    rank: int | None = None
    world: int | None = None
    local_ranks: int | None = None
    cluster: str = ""
    foreign: str = ""


def probe(config: Config, environ: Mapping[str, str] = os.environ) -> Machine:
    """Return what this machine has of what the configuration needs; `environ` is where a launcher announces itself."""
    announced = Machine(
        core_error=missing() if config.model.format == "olmo_core" else "",
        rank=_number(environ.get("RANK")),
        world=_number(environ.get("WORLD_SIZE")),
        local_ranks=_number(environ.get("LOCAL_WORLD_SIZE")),
        cluster=environ.get("RAY_ADDRESS", ""),
        foreign=foreign_events(config.output.root),
        extras=frozenset(name for name in wanted_extras(config) if _callable(*EXTRAS[name])),
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
        attention=frozenset(
            [backend] if backend in ATTENTION_FUNCTIONS and _callable(*ATTENTION_FUNCTIONS[backend]) else []
        ),
    )


def holds_run(root: str) -> bool:
    """Return whether a folder holds events of a run; empty files are those of a start that came to nothing."""
    return any(file.stat().st_size for file in Path(root).glob("training_contract_rank*.jsonl"))


def wanted_extras(config: Config) -> tuple[str, ...]:
    """Return the optional packages a run needs."""
    wanted = {"ray": config.run.engine == "ray", "wandb": config.tracking.use_wandb}
    return tuple(name for name, needed in wanted.items() if needed)


def foreign_events(root: str) -> str:
    """Return the folder of MILES' own events that a folder is or lies in, "" for none."""
    path = Path(root)
    return next((str(one) for one in (path, *path.parents) if one.is_dir() and _any(one, MILES_EVENTS)), "")


def _any(folder: Path, pattern: str) -> bool:
    return next(folder.glob(pattern), None) is not None


def writable(root: str) -> bool:
    """Return whether a folder can be written, or made; nothing is written to find out."""
    path = Path(root)
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _callable(module: str, function: str) -> bool:
    try:
        return callable(getattr(import_module(module), function, None))
    except Exception:  # a broken optional package fails in its own ways, and each means the same here
        return False
