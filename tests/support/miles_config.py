"""Run files for tests: one valid base, and any option changed by its dotted name."""

import json
import re
from pathlib import Path
from typing import Any

from pack_miles.settings.config import Config, load_config

#: A small packed run of two optimizer steps a collection that no row of the table refuses.
SMALL: dict[str, Any] = {
    "output.root": "out",
    "data.task": "sort",
    "core.sequence_packing": True,
    "core.packing_max_tokens": 128,
    "core.max_sequence_length": 64,
    "core.expert_parallel_size": 2,
    "core.attention_backend": "segment",
    "core.max_policy_lag": 1,
    "miles.rollout_batch_size": 4,
    "miles.n_samples_per_prompt": 4,
    "miles.global_batch_size": 8,
    "miles.rollout_max_response_len": 20,
    "run.ranks": 4,
}

#: A run of a checkpoint on GPUs, as `SMALL` not refused by its configuration.
NODE: dict[str, Any] = {
    "model.format": "hf",
    "model.source": "org/model",
    "output.root": "out",
    "data.prompt_data": "prompts.jsonl",
    "core.sequence_packing": True,
    "core.max_sequence_length": 6144,
    "core.expert_parallel_size": 2,
    "core.attention_backend": "flash_4",
    "miles.rollout_max_prompt_len": 2048,
    "miles.rollout_max_response_len": 4096,
    "miles.rollout_max_context_len": 6144,
    "run.ranks": 8,
    "run.backend": "nccl",
}


def toml(settings: dict[str, Any], *, name: str = "test", schema_version: int = 1) -> str:
    """Return the text of a run file; a value of None leaves its option out."""
    sections: dict[str, list[str]] = {}
    for place, value in settings.items():
        section, _, key = place.partition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    lines = [f"schema_version = {schema_version}", f'name = "{name}"']
    for section, entries in sections.items():
        lines += [f"[{section}]", *entries]
    return "\n".join(lines) + "\n"


def write_toml(folder: Path, settings: dict[str, Any], **head: Any) -> Path:
    """Write a run file into a folder and return its path."""
    path = folder / "run.toml"
    path.write_text(toml(settings, **head))
    return path


def without_lines(words: str) -> str:
    """Return a message without the ` (line n)` of the options it names."""
    return re.sub(r" \(line \d+\)", "", words)


def make_config(folder: Path, base: dict[str, Any] = SMALL, **changes: Any) -> Config:
    """Return a configuration of `base` with options changed; `core__max_policy_lag=2` changes that dotted name."""
    changed = {place.replace("__", "."): value for place, value in changes.items()}
    return load_config(write_toml(folder, base | changed))
