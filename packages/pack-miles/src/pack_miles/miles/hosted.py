"""Rows of the table about MILES' arguments that matter only where MILES itself hosts the run."""

from collections.abc import Callable
from pathlib import Path

from pack_miles.miles.layout import layout_error
from pack_miles.miles.options import HOOKS, Settings
from pack_miles.miles.rewards import installed_rule, normalizes_by_group
from pack_miles.settings.refusal import Refusal

#: The backends of MILES as it is published.
STOCK = ("megatron", "fsdp")


def _row(
    code: str, applies: Callable[[Settings], bool], reason: Callable[[Settings], str], remedy: str
) -> Refusal[Settings]:
    return Refusal(code, applies, reason, lambda s: remedy, scope="arguments")


def _in_miles_events(settings: Settings) -> bool:
    details, events = settings.arg("dump_details"), settings.arg("save_debug_event_data")
    folders = [Path(details) / "events"] if details else []
    folders += [Path(events)] if events else []
    path = settings.log_path
    return path is not None and any(path.absolute().is_relative_to(folder.absolute()) for folder in folders)


def _ranks_do_not_share(settings: Settings) -> bool:
    step = settings.arg("global_batch_size")
    return not isinstance(step, int) or settings.ranks < 1 or step < 1 or step % settings.ranks > 0


def _ranks_do_not_divide(settings: Settings) -> bool:
    return settings.counts_experts and settings.ranks % settings.core.expert_parallel_size > 0


def _kind(settings: Settings) -> str:
    """Return why the experts of the checkpoint cannot be counted, "" where they can or the file is not here."""
    if not settings.counts_experts or not settings.arg("hf_checkpoint") or settings.model_file is None:
        return ""
    return layout_error(settings.model_file, settings.core.expert_balance_layer_stride)


#: Every row, in the order they are told.
HOSTED: tuple[Refusal[Settings], ...] = (
    _row(
        "positional-rewards",
        # What is installed is looked at where MILES runs; elsewhere nothing is known of it.
        lambda s: s.enabled and s.starting and s.seam == "groups" and not normalizes_by_group(installed_rule()),
        lambda s: (
            "this MILES does not normalize rewards by group_index, so samples reordered before that would get the "
            "advantages of others"
        ),
        f"use --custom-reward-post-process-path {HOOKS['rewards'][1]} instead of the sample filter",
    ),
    _row(
        "multi-lora",
        lambda s: s.enabled and bool(s.arg("multi_lora") or s.arg("multi_lora_n_adapters")),
        lambda s: "several LoRA adapters are trained, whose steps and reward groups are formed otherwise",
        "train one model",
    ),
    _row(
        "indep-dp",
        lambda s: s.enabled and bool(s.arg("indep_dp")),
        lambda s: "--indep-dp is on, so samples are dealt to ranks after a rank may have failed",
        "leave --indep-dp out",
    ),
    _row(
        "ranks",
        lambda s: s.enabled and s.starting and _ranks_do_not_share(s),
        lambda s: (
            f"global_batch_size is {s.arg('global_batch_size')} over {s.ranks} ranks (actor_num_nodes x "
            "actor_num_gpus_per_node), which must share it evenly"
        ),
        "set --global-batch-size to a multiple of the ranks, and say how many there are",
    ),
    _row(
        "expert-sets",
        lambda s: s.starting and _ranks_do_not_divide(s),
        lambda s: f"{s.ranks} ranks are no whole sets of core.expert_parallel_size = {s.core.expert_parallel_size}",
        "choose a degree that divides the ranks",
    ),
    _row(
        "stock-backend",
        lambda s: s.enabled and s.core.sequence_packing and s.arg("train_backend") in STOCK,
        lambda s: (
            f"core.sequence_packing = true and --train-backend is {s.arg('train_backend')!r}, which runs one sample a "
            "row under micro_batch_size 1"
        ),
        "leave core.sequence_packing out, or use a MILES with the Core backend",
    ),
    _row(
        "log-directory",
        lambda s: s.enabled and _in_miles_events(s),
        lambda s: f"{s.log_path} lies in MILES' own event directory, whose reader takes every JSONL file for its own",
        "set --save, --dump-details or --save-debug-event-data to another directory",
    ),
    _row(
        "model-config",
        lambda s: s.counts_experts and s.core.model_config is not None,
        lambda s: "core.model_config is given, and expert counts are read from the HF configuration alone",
        "leave core.model_config out",
    ),
    _row(
        "checkpoint",
        lambda s: s.counts_experts and not s.arg("hf_checkpoint"),
        lambda s: "core.expert_balanced_packing reads the model's HF configuration, and no HF checkpoint is given",
        "give --hf-checkpoint (model.format = hf and model.source)",
    ),
    Refusal(
        "model-kind",
        lambda s: bool(_kind(s)),
        lambda s: _kind(s).partition("; ")[0],
        lambda s: _kind(s).partition("; ")[2],
        scope="arguments",
    ),
)
