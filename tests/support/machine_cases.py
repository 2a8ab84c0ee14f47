"""Cases of the rows that look at the machine: run file, machine, what is told, and the nearest that passes."""

from pathlib import Path
from typing import Any

import attrs
from pack_miles.settings.machine import Machine
from pack_miles.standing import Standing, write
from support.miles_config import NODE, SMALL, make_config

#: A machine on which the run of `NODE` lacks nothing.
BLACKWELL = Machine(cuda_devices=8, capability=(10, 0), attention=frozenset(["flash_4"]))


#: What turns `NODE` into a run of an OLMo-core model that is trained here.
CORE: dict[str, Any] = {
    "model.format": "olmo_core",
    "model.source": "model.json",
    "data.prompt_data": None,
    "data.task": "sort",
    "core.attention_backend": "segment",
}

#: Code -> base, changes, machine, words of what is told; changes and machine that pass.
MACHINE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Machine, str, dict[str, Any], Machine]] = {
    "torch": (SMALL, {}, Machine(torch_error="ImportError: no"), "cannot be imported (ImportError: no)", {}, Machine()),
    "nccl-devices": (
        SMALL,
        {"run.backend": "nccl"},
        Machine(cuda_devices=3),
        "needs a CUDA device for each of 4 ranks; here are 3",
        {"run.backend": "nccl"},
        Machine(cuda_devices=4),
    ),
    "flash-device": (
        NODE,
        {},
        attrs.evolve(BLACKWELL, capability=(9, 0)),
        "core.attention_backend = 'flash_4' needs compute capability 10.0 to 12.0; here is compute capability 9.0",
        {},
        BLACKWELL,
    ),
    "attention-function": (
        NODE,
        {},
        attrs.evolve(BLACKWELL, attention=frozenset()),
        "needs flash_attn.cute.flash_attn_varlen_func, which cannot be imported",
        {},
        BLACKWELL,
    ),
    "train-format": (NODE, {}, BLACKWELL, "model.format = 'hf' cannot be trained by this release", {}, BLACKWELL),
    "core-library": (
        NODE,
        CORE,
        attrs.evolve(BLACKWELL, core_error="model.format = 'olmo_core' needs the package ai2-olmo-core; install it"),
        "model.format = 'olmo_core' needs the package ai2-olmo-core; install it",
        CORE,
        BLACKWELL,
    ),
    "core-source": (
        NODE,
        CORE | {"model.source": "org/model"},
        BLACKWELL,
        "model.source = 'org/model' is no .json or .toml file and no folder; save one with json.dump(",
        CORE,
        BLACKWELL,
    ),
    "core-data": (
        NODE,
        CORE | {"data.task": None, "data.prompt_data": "prompts.jsonl", "core.attention_backend": "flash_4"},
        BLACKWELL,
        "cannot be trained by this release: it has no tokenizer and no inference engine, and samples embedded",
        CORE,
        BLACKWELL,
    ),
    "core-attention": (
        NODE,
        CORE | {"core.attention_backend": "flash_4"},
        BLACKWELL,
        "core.attention_backend = 'flash_4' cannot be trained by this release: OLMo-core's flash and te kernels",
        CORE,
        BLACKWELL,
    ),
    "world-size": (
        SMALL,
        {},
        Machine(rank=0, world=2),
        "run.ranks = 4, but the launcher started 2 processes",
        {},
        Machine(rank=0, world=4),
    ),
    "ray": (
        SMALL,
        {"run.engine": "ray"},
        Machine(),
        "run.engine = 'ray' needs the package ray, which cannot be imported; install it: pip install 'pack-miles[ray]'",
        {"run.engine": "ray"},
        Machine(extras=frozenset(["ray"])),
    ),
    "ray-launcher": (
        SMALL,
        {"run.engine": "ray"},
        Machine(rank=0, world=4, extras=frozenset(["ray"])),
        "run.engine = 'ray' under a launcher: this process was started as one rank",
        {},
        Machine(rank=0, world=4),
    ),
    "wandb": (
        SMALL,
        {"tracking.use_wandb": True},
        Machine(),
        "needs the package wandb, which cannot be imported; install it: pip install 'pack-miles[wandb]'",
        {"tracking.use_wandb": True},
        Machine(extras=frozenset(["wandb"])),
    ),
    "miles-events": (
        SMALL,
        {"output.root": "dump/events/run"},
        Machine(foreign="dump/events"),
        "is, or lies in, 'dump/events', where MILES keeps its own events",
        {"output.root": "dump/run"},
        Machine(),
    ),
    "output-writable": (SMALL, {"output.root": "run.toml/x"}, Machine(), "cannot be written", {}, Machine()),
    "output-used": (
        SMALL,
        {"output.root": "used"},
        Machine(),
        "already holds a run",
        {"output.root": "saved", "run.resume": True},
        Machine(),
    ),
    "resume-nothing": (
        SMALL,
        {"run.resume": True},
        Machine(),
        "run.resume = true, but output.root",
        {"output.root": "saved", "run.resume": True},
        Machine(),
    ),
    "resume-ranks": (
        SMALL,
        {"output.root": "saved", "run.resume": True, "run.ranks": 2},
        Machine(),
        "was written by 4 ranks",
        {"output.root": "saved", "run.resume": True},
        Machine(),
    ),
    "resume-configuration": (
        SMALL,
        {"output.root": "saved", "run.resume": True, "miles.lr": 0.5},
        Machine(),
        "was written under configuration",
        {"output.root": "saved", "run.resume": True, "miles.num_rollout": 7},
        Machine(),
    ),
}


def leave_runs(folder: Path) -> None:
    """Leave two runs in a folder: `used` without a checkpoint, `saved` with one of `SMALL` on its four ranks."""
    for name in ("used", "saved"):
        (folder / name).mkdir()
        (folder / name / "training_contract_rank0.jsonl").write_text("{}\n")
    saved = folder / "saved" / "checkpoints" / "collection_000002"
    saved.mkdir(parents=True)
    digest = make_config(folder).digest
    write(saved, Standing(rollouts=2, completed_steps=4, world_size=4, configuration=digest))
