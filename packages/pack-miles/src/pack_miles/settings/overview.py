"""What a configuration comes to: the areas it was checked in, and everything `plan` prints, as plain data."""

from typing import Any

import attrs

from pack_miles.asynchronous.terms import terms_of
from pack_miles.errors import counted
from pack_miles.reporting.forecast import Forecast
from pack_miles.scoring_pass import decide
from pack_miles.settings.arguments import core_options, miles_arguments, miles_options
from pack_miles.settings.config import Config
from pack_miles.settings.formats import here


def shape(config: Config) -> dict[str, int]:
    """Return the numbers a run is cut into."""
    return {
        "samples_per_collection": config.collection_samples,
        "samples_per_optimizer_step": config.step_samples,
        "optimizer_steps_per_collection": config.steps_per_collection,
        "collections": config.miles.num_rollout,
        "ranks": config.run.ranks,
        "expert_parallel_size": config.core.expert_parallel_size,
        "replicas": config.topology.replicas,
        "samples_per_rank_and_step": config.step_samples // config.run.ranks,
        "max_policy_lag_optimizer_steps": config.core.max_policy_lag,
    }


def scoring(config: Config) -> dict[str, Any]:
    """Return the decision about the scoring pass, and the checks of the configuration."""
    return attrs.asdict(decide(config)) | {
        "check_interval": config.core.scoring_check_interval,
        "check_tolerance": config.core.scoring_check_tolerance,
        "check_max_tolerance": config.core.scoring_check_max_tolerance,
    }


def overview(config: Config, rollouts: Forecast | None = None) -> dict[str, Any]:
    """Return what `plan` prints, for JSON; `runtime_validated` says that no machine was looked at."""
    return {
        "name": config.name,
        "configuration_digest": config.digest,
        "runtime_validated": False,
        "core": core_options(config),
        "miles": miles_options(config),
        "argv": miles_arguments(config),
        "shape": shape(config),
        "scoring_pass": scoring(config),
        "rollouts": None if rollouts is None else rollouts.as_dict(),
    }


def areas(config: Config) -> list[tuple[str, str]]:
    """Return what was checked, one area and its outcome in words a line."""
    core, miles, numbers = config.core, config.miles, shape(config)
    on = core.sequence_packing
    replay = "replayed from the rollout" if miles.use_rollout_routing_replay else "the trainer's own"
    decision = decide(config)
    return [
        ("file", f"{config.file}: run {config.name!r}, digest {config.digest}"),
        ("model", f"{config.model.format}, {core.attention_backend} attention, router choices {replay}"),
        ("data", f"task {config.data.task}" if config.data.task else f"prompts {config.data.prompt_data}"),
        (
            "packing",
            f"on, rows of {config.capacity:,} tokens at most, samples of {core.max_sequence_length:,}"
            if on
            else f"off, one sample a row of {core.max_sequence_length:,} tokens at most",
        ),
        *([("order", _order(config))] if config.pack_order == "balanced" else []),
        (
            "ranks",
            f"{config.run.ranks} over {config.run.backend}, expert parallel degree {core.expert_parallel_size}, "
            f"replicas: {numbers['replicas']}",
        ),
        (
            "steps",
            f"{config.collection_samples:,} samples a collection in optimizer steps of {config.step_samples:,} "
            f"({config.steps_per_collection} a collection), policy lag up to {core.max_policy_lag}",
        ),
        *([("rollouts", _rollouts(config))] if miles.fully_async else []),
        (
            "loss",
            f"mean over {config.reduction}s, ratio clipped at -{miles.eps_clip:g} and +{miles.eps_clip_high:g}"
            + (f", importance weights in [{miles.tis_clip_low:g}, {miles.tis_clip:g}]" if miles.use_tis else ""),
        ),
        ("scoring", f"{'standalone' if decision.standalone else 'skipped, checked when due'}: {decision.reason}"),
        ("output", config.output.root),
    ]


def _rollouts(config: Config) -> str:
    if not here(config):
        return "sampled while training, by MILES"
    ahead = terms_of(config).ahead
    return (
        f"sampled while training by {counted(config.run.rollout_workers, 'worker')}, from weights of up to "
        f"{counted(ahead, 'collection')} before"
    )


def _order(config: Config) -> str:
    core = config.core
    stride = core.expert_balance_layer_stride
    layers = "every routed layer" if stride == 1 else f"1 in {stride} routed layers"
    return (
        "samples balanced inside each optimizer step by "
        + (f"expert load ({layers}) and lengths" if core.expert_balanced_packing else "lengths")
        + f", at most {core.expert_balance_search_proposals:,} proposals a step and "
        f"{core.expert_balance_search_seconds:g} s a collection"
    )
