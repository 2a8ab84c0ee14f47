"""A configuration as the trainer's host takes it: MILES' command-line arguments, and the Core options inside them."""

import json
from typing import Any

from pack_miles.core.source import largest
from pack_miles.miles.options import HOOKS, NAMES, Seam, Settings
from pack_miles.miles.options import Core as HookCore
from pack_miles.settings.config import Config
from pack_miles.settings.formats import here
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

#: Core options that are left to the trainer's own defaults unless set.
UNSET = ("router_aux_loss_weight", "router_z_loss_weight")

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


def core_options(config: Config) -> dict[str, Any]:
    """Return the resolved Core options, JSON-able; those that only this project knows are left out unless set."""
    options: dict[str, Any] = dict(config.resolved()["core"])
    for name, default in OURS.items():
        if options[name] == default:
            del options[name]
    for name in [name for name in UNSET if options[name] is None]:
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
    miles = dict(config.resolved()["miles"])
    if not config.miles.use_tis:
        del miles["tis_clip"], miles["tis_clip_low"]  # they limit nothing
    name, path = HOOKS[_seam(config)]
    if config.pack_order == "balanced" and miles[name] is None:
        miles[name] = path
    return {**fixed, **given, **miles}


def _seam(config: Config) -> Seam:
    """Return where the producer hook goes: where the trainer that these arguments are from has it, if it has one."""
    callback = config.miles.custom_reward_post_process_path == HOOKS["rewards"][1]
    return "groups" if config.core.expert_balanced_packing and not callback else "rewards"


def settings_of(config: Config) -> Settings:
    """Return what the producer hook would read in the arguments of a configuration, before anything starts."""
    core = {name: getattr(config.core, name) for name in NAMES if hasattr(config.core, name)}
    if core["pack_order"] == "arrival" and "core.pack_order" not in config.written:
        core["pack_order"] = None
    if core["router_aux_loss_weight"] is None:
        core["router_aux_loss_weight"] = _auxiliary_weight(config)
    args = miles_options(config) | {"qkv_format": config.miles.qkv_format, "model_source": config.model.source}
    return Settings(HookCore(**core), args, _seam(config), config.written, starting=False)


def _auxiliary_weight(config: Config) -> float:
    """Return the weight of the load-balancing loss where the run file leaves it to the model or to MILES' trainer."""
    if config.model.format == "small":
        return 0.0
    if here(config):
        return largest(config.model.source or "", "lb_loss_weight")
    return HookCore().router_aux_loss_weight


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
