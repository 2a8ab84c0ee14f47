"""The table of everything that is refused: what a run file, MILES' arguments, a machine and samples show."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pack_miles.core.source import source_error
from pack_miles.errors import counted
from pack_miles.miles.collected import DATA
from pack_miles.miles.hosted import HOSTED
from pack_miles.miles.refusals import RUN
from pack_miles.settings.arguments import settings_of
from pack_miles.settings.combinations import COMBINATIONS, SMALL_ATTENTION
from pack_miles.settings.config import Config
from pack_miles.settings.formats import core, here
from pack_miles.settings.machine import ATTENTION_FUNCTIONS, Machine, holds_run, probe, writable
from pack_miles.settings.refusal import Refusal, refuse_all, told
from pack_miles.standing import Standing, latest, read
from pack_miles.tasks import TASKS

#: What a flash backend needs of the device.
FLASH = {
    "flash_2": "a CUDA device",
    "flash_3": "compute capability 9.x",
    "flash_4": "compute capability 10.0 to 12.0",
}


def refuse(config: Config) -> None:
    """Raise every refusal of scopes `config` and `arguments` that applies; needs no hardware and no torch.

    Raises:
        InputError: listing them all.
    """
    refuse_all(config.file, refused(config))


def refused(config: Config) -> list[tuple[str, str]]:
    """Return code and text of every row that a run file runs into by itself, in the order they are told."""
    settings = settings_of(config)
    # A run that samples and trains a task here never meets MILES.
    rows = RUN if here(config) else (*RUN, *HOSTED)
    return [*told(COMBINATIONS, config), *told(rows, settings)]


def refuse_machine(config: Config, machine: Machine | None = None) -> None:
    """Raise every refusal of scope `machine` that applies to a machine, this one when none is given.

    Raises:
        InputError: listing them all.
    """
    refuse_all(config.file, told(machine_refusals(probe(config) if machine is None else machine), config))


def table(machine: Machine) -> tuple[Refusal[Any], ...]:
    """Return the whole table, as it stands for a machine: run files, MILES' arguments, machines, samples."""
    return (*COMBINATIONS, *RUN, *HOSTED, *machine_refusals(machine), *DATA)


def machine_refusals(machine: Machine) -> tuple[Refusal[Config], ...]:
    """Return every row of scope `machine`, as they stand for one machine."""
    return (*_hardware_rows(machine), *_extra_rows(machine), *_model_rows(machine), *_start_rows(machine))


def _capability_fits(backend: str, machine: Machine) -> bool:
    if machine.capability is None:
        return False
    return {
        "flash_3": machine.capability[0] == 9,
        "flash_4": (10, 0) <= machine.capability <= (12, 0),
    }.get(backend, True)


def _local_ranks(config: Config, machine: Machine) -> int:
    """Return the ranks that will run on this machine, as far as it is known; where a Ray cluster puts them is not."""
    if config.run.engine == "ray" and machine.cluster and machine.world is None:
        return 0
    return machine.local_ranks or config.run.ranks


def _hardware_rows(machine: Machine) -> Iterator[Refusal[Config]]:
    torch = not machine.torch_error  # without it nothing is known of the devices
    here = "compute capability {}.{}".format(*machine.capability) if machine.capability else "no CUDA device"
    yield Refusal(
        "torch",
        lambda c: bool(machine.torch_error),
        lambda c: f"torch cannot be imported ({machine.torch_error})",
        lambda c: "install torch; validate and plan need none",
        scope="machine",
    )
    yield Refusal(
        "nccl-devices",
        lambda c: torch and c.run.backend == "nccl" and machine.cuda_devices < _local_ranks(c, machine),
        lambda c: (
            f"run.backend = 'nccl' needs a CUDA device for each of {_local_ranks(c, machine)} ranks; "
            f"here {'is' if machine.cuda_devices == 1 else 'are'} {machine.cuda_devices}"
        ),
        lambda c: "set run.backend = gloo, fewer ranks, or start on a GPU node",
        scope="machine",
    )
    yield Refusal(
        "flash-device",
        lambda c: (
            torch and c.core.attention_backend in FLASH and not _capability_fits(c.core.attention_backend, machine)
        ),
        lambda c: (
            f"core.attention_backend = {c.core.attention_backend!r} needs {FLASH[c.core.attention_backend]}; "
            f"here is {here}"
        ),
        lambda c: "choose the backend of this GPU: flash_4 on 10.0 to 12.0, flash_3 on 9.x, flash_2 on others",
        scope="machine",
    )
    yield Refusal(
        "attention-function",
        lambda c: (
            torch
            and c.core.attention_backend in ATTENTION_FUNCTIONS
            and c.core.attention_backend not in machine.attention
        ),
        lambda c: (
            f"core.attention_backend = {c.core.attention_backend!r} needs "
            f"{'.'.join(ATTENTION_FUNCTIONS[c.core.attention_backend])}, which cannot be imported"
        ),
        lambda c: "install the package that provides it, or choose another backend",
        scope="machine",
    )


def _model_rows(machine: Machine) -> Iterator[Refusal[Config]]:
    """Yield what of the formats can be planned for MILES but not trained by `train`, and why."""
    yield Refusal(
        "train-format",
        lambda c: c.model.format == "hf",
        lambda c: (
            "model.format = 'hf' cannot be trained by this release: it trains the small model and models of OLMo-core"
        ),
        lambda c: "set model.format to small or olmo_core to train; validate and plan work for every format",
        scope="machine",
    )
    yield Refusal(
        "core-library",
        lambda c: core(c) and bool(machine.core_error),
        lambda c: machine.core_error.partition("; ")[0],
        lambda c: machine.core_error.partition("; ")[2],
        scope="machine",
    )
    yield Refusal(
        "core-source",
        lambda c: core(c) and bool(source_error(c.model.source)),
        lambda c: source_error(c.model.source).partition("; ")[0],
        lambda c: source_error(c.model.source).partition("; ")[2],
        scope="machine",
    )
    yield Refusal(
        "core-data",
        lambda c: core(c) and c.data.task is None,
        lambda c: (
            f"data.prompt_data = {c.data.prompt_data!r} with model.format = 'olmo_core' cannot be trained by this "
            "release: it has no tokenizer and no inference engine, and samples embedded tasks only"
        ),
        lambda c: f"give data.task (one of: {', '.join(TASKS)}) to train; validate and plan work for prompts",
        scope="machine",
    )
    yield Refusal(
        "core-attention",
        lambda c: core(c) and c.core.attention_backend not in SMALL_ATTENTION,
        lambda c: (
            f"core.attention_backend = {c.core.attention_backend!r} cannot be trained by this release: OLMo-core's "
            "flash and te kernels take bfloat16, and models are trained here in float32 or float64"
        ),
        lambda c: "set core.attention_backend = segment to train; validate and plan work for every backend",
        scope="machine",
    )


def _extra_rows(machine: Machine) -> Iterator[Refusal[Config]]:
    yield Refusal(
        "ray",
        lambda c: c.run.engine == "ray" and machine.world is None and "ray" not in machine.extras,
        lambda c: "run.engine = 'ray' needs the package ray, which cannot be imported",
        lambda c: "install it: pip install 'pack-miles[ray]', or set run.engine = spawn",
        scope="machine",
    )
    yield Refusal(
        "ray-launcher",
        lambda c: c.run.engine == "ray" and machine.world is not None,
        lambda c: "run.engine = 'ray' under a launcher: this process was started as one rank (RANK and WORLD_SIZE)",
        lambda c: "start it without the launcher, or set run.engine = spawn",
        scope="machine",
    )
    yield Refusal(
        "wandb",
        lambda c: c.tracking.use_wandb and machine.rank in (None, 0) and "wandb" not in machine.extras,
        lambda c: "tracking.use_wandb = true needs the package wandb, which cannot be imported",
        lambda c: (
            "install it: pip install 'pack-miles[wandb]', or leave it false: the events under output.root carry the "
            "same numbers"
        ),
        scope="machine",
    )


def _start_rows(machine: Machine) -> Iterator[Refusal[Config]]:
    # Another rank may have begun to write before this one looks: only the first judges the folder.
    first = machine.rank in (None, 0)
    yield Refusal(
        "world-size",
        lambda c: machine.world not in (None, c.run.ranks),
        lambda c: (
            f"run.ranks = {c.run.ranks}, but the launcher started {machine.world} "
            f"process{'' if machine.world == 1 else 'es'}"
        ),
        lambda c: "make them equal",
        scope="machine",
    )
    yield Refusal(
        "output-writable",
        lambda c: first and not writable(c.output.root),
        lambda c: (
            f"output.root = {c.output.root!r} cannot be written: it, or the part of it that exists, "
            "is no folder of yours"
        ),
        lambda c: "choose another folder, or its permissions",
        scope="machine",
    )
    yield Refusal(
        "miles-events",
        lambda c: first and bool(machine.foreign),
        lambda c: (
            f"output.root = {c.output.root!r} is, or lies in, {machine.foreign!r}, where MILES keeps its own events; "
            "its reader takes every JSONL file below that folder for one of its own"
        ),
        lambda c: "choose a folder outside",
        scope="machine",
    )
    yield Refusal(
        "output-used",
        lambda c: first and holds_run(c.output.root) and not c.run.resume,
        lambda c: f"output.root = {c.output.root!r} already holds a run",
        lambda c: "choose another folder, remove that one, or set run.resume = true to go on",
        scope="machine",
    )
    yield Refusal(
        "resume-nothing",
        lambda c: first and c.run.resume and latest(Path(c.output.root)) is None,
        lambda c: f"run.resume = true, but output.root = {c.output.root!r} holds no checkpoint of a run",
        lambda c: "set run.resume = false and an empty folder to start one, or name the folder of the run",
        scope="machine",
    )
    yield Refusal(
        "resume-ranks",
        lambda c: c.run.resume and (saved := _saved(c)) is not None and saved.world_size != c.run.ranks,
        lambda c: (
            f"run.ranks = {c.run.ranks}, but the newest checkpoint of output.root = {c.output.root!r} was written by "
            f"{counted(getattr(_saved(c), 'world_size', 0), 'rank')}"
        ),
        lambda c: "resume with as many ranks as the run was started with",
        scope="machine",
    )
    yield Refusal(
        "resume-configuration",
        lambda c: c.run.resume and (saved := _saved(c)) is not None and saved.configuration != c.digest,
        lambda c: (
            f"the newest checkpoint of output.root = {c.output.root!r} was written under configuration "
            f"{getattr(_saved(c), 'configuration', None)}, this one is {c.digest}"
        ),
        lambda c: "resume with the options the run was started with (its run_started event holds them), or start anew",
        scope="machine",
    )


def _saved(config: Config) -> Standing | None:
    newest = latest(Path(config.output.root))
    return read(newest) if newest else None
