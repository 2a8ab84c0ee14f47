"""A configuration as the trainer's host takes it: MILES' command-line arguments, and the Core options inside them."""

import json
from typing import Any

from pack_miles.settings.config import Config
from pack_miles.settings.sections import MODEL_FILES, OPTIONS

#: Switches that MILES spells by what they turn off.
NEGATED = {"grpo_std_normalization": "--disable-grpo-std-normalization", "offload_train": "--no-offload-train"}

#: Core options that the trainer this contract comes from does not have, and their defaults.
OURS = {
    "packing_equalize": "tokens",
    "scoring_check_max_tolerance": None,
    "expert_balance_method": "priced",
    "expert_balance_guard": "baseline",
    "expert_balance_max_slot_assignments": None,
}

#: Core options about the order of samples, and those of them that say how to search without routes.
ORDERING = tuple(
    one.key
    for one in OPTIONS
    if one.section == "core" and (one.key == "pack_order" or one.key.startswith("expert_balance"))
)
SEARCHED = (
    "pack_order",
    "expert_balance_search_proposals",
    "expert_balance_search_seconds",
    "expert_balance_guard",
)

#: The hook by which that trainer reorders a collection.
REORDER_HOOK = "pack_miles.producer.reorder_samples"


def core_options(config: Config) -> dict[str, Any]:
    """Return the resolved Core options, JSON-able; those that only this project knows are left out unless set."""
    options: dict[str, Any] = dict(config.resolved()["core"])
    for name, default in OURS.items():
        if options[name] == default:
            del options[name]
    for name in [name for name in options if name not in _ordering(config) and name in ORDERING]:
        del options[name]
    return options


def _ordering(config: Config) -> tuple[str, ...]:
    """Return the options about order that mean something; with none of them on, nothing tells of them."""
    if config.core.expert_balanced_packing:
        return tuple(name for name in ORDERING if name != "pack_order")  # implied, and not one of that trainer's
    return SEARCHED if config.pack_order == "balanced" else ()


def miles_options(config: Config) -> dict[str, Any]:
    """Return the resolved MILES options by MILES' own names, those the trainer fixes included; None is absence."""
    fixed = {
        "train_backend": "olmo_core",
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": config.run.ranks,
        "offload_train": False,
        "data_pad_size_multiplier": 1,
        "seed": config.run.seed,
        "rollout_seed": config.data.seed,
        "save": config.output.root,
        "use_wandb": config.tracking.use_wandb,
    }
    source, described = config.model.source, (config.model.source or "").endswith(MODEL_FILES)
    given = {
        "hf_checkpoint": source if config.model.format == "hf" else None,
        "load": source if config.model.format == "olmo_core" and not described else None,
        "prompt_data": config.data.prompt_data,
    }
    hook = {"rollout_sample_filter_path": REORDER_HOOK} if config.core.expert_balanced_packing else {}
    return {**fixed, **given, **hook, **config.resolved()["miles"]}


def miles_arguments(config: Config) -> list[str]:
    """Return MILES' argument vector: its options in kebab case, then the Core options as one JSON text.

    A switch that is off emits nothing, unless MILES spells it by what it turns off.

    >>> from pack_miles.settings.sections import Output
    >>> arguments = miles_arguments(Config(name="a", output=Output(root="runs")))
    >>> arguments[:2], "--disable-grpo-std-normalization" in arguments, "--balance-data" in arguments
    (['--train-backend', 'olmo_core'], True, False)
    """
    arguments: list[str] = []
    for key, value in miles_options(config).items():
        arguments += _argument(key, value)
    return [*arguments, "--olmo-core-config", json.dumps(core_options(config), sort_keys=True)]


def _argument(key: str, value: Any) -> list[str]:
    if key in NEGATED:
        return [] if value else [NEGATED[key]]
    flag = "--" + key.replace("_", "-")
    if value is None or value is False:
        return []
    return [flag] if value is True else [flag, str(value)]
