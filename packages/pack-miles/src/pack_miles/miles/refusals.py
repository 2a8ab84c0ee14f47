"""The table of what the producer hook refuses: arguments under which a planned order would not reach the trainer."""

from collections.abc import Callable
from pathlib import Path

import attrs

from pack_miles.errors import input_error
from pack_miles.miles.options import HOOKS, Settings
from pack_miles.miles.rewards import installed_rule, normalizes_by_group

#: The backends of MILES as it is published.
STOCK = ("megatron", "fsdp")

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@attrs.frozen
class ProducerRefusal:
    """One row: `applies` to settings that reorder, the `reason` with the values, the `remedy`."""

    code: str
    applies: Callable[[Settings], bool]
    reason: Callable[[Settings], str]
    remedy: str

    def text(self, settings: Settings) -> str:
        """Return reason and remedy as one sentence."""
        return f"{self.reason(settings)}; {self.remedy}"


def refuse_settings(settings: Settings) -> None:
    """Raise every row that applies, together; nothing when the hook reorders nothing.

    Raises:
        InputError: with each reason and remedy.
    """
    if not settings.enabled:
        return
    if problems := [row.text(settings) for row in REFUSALS if row.applies(settings)]:
        raise input_error("the producer hook", problems)


def _switch(code: str, name: str, why: str, remedy: str = "") -> ProducerRefusal:
    flag = "--" + name.replace("_", "-")
    return ProducerRefusal(
        code, lambda s: bool(s.arg(name)), lambda s: f"{flag} is on, {why}", remedy or f"leave {flag} out"
    )


def _other(settings: Settings, seam: str) -> bool:
    """Whether the hook of a seam, given or not, is another than the one that is being asked."""
    name, ours = HOOKS["groups" if seam == "groups" else "rewards"]
    given = settings.arg(name)
    return given != ours if settings.seam == seam else given is not None


def _in_miles_events(settings: Settings) -> bool:
    details, events = settings.arg("dump_details"), settings.arg("save_debug_event_data")
    folders = [Path(details) / "events"] if details else []
    folders += [Path(events)] if events else []
    path = settings.log_path
    return path is not None and any(path.absolute().is_relative_to(folder.absolute()) for folder in folders)


def _ranks_do_not_share(settings: Settings) -> bool:
    step = settings.arg("global_batch_size")
    return not isinstance(step, int) or settings.ranks < 1 or step < 1 or step % settings.ranks > 0


def _no_second_set(settings: Settings) -> bool:
    degree = settings.core.expert_parallel_size
    return not settings.ranks > degree > 1 or settings.ranks % degree > 0


#: Every row, in the order in which they are told.
REFUSALS: tuple[ProducerRefusal, ...] = (
    ProducerRefusal(
        "sample-filter",
        lambda s: (
            _other(s, "groups") if s.seam == "groups" else s.arg("rollout_sample_filter_path") == HOOKS["groups"][1]
        ),
        lambda s: (
            f"--rollout-sample-filter-path is {s.arg('rollout_sample_filter_path')!r} beside the hook of "
            f"--{HOOKS[s.seam][0].replace('_', '-')}, and only one planner may be on"
        ),
        "give one of our two hooks, in its own flag",
    ),
    ProducerRefusal(
        "reward-callback",
        lambda s: _other(s, "rewards"),
        lambda s: (
            f"--custom-reward-post-process-path is {s.arg('custom_reward_post_process_path')!r}, whose use of the "
            "samples' order is unknown"
        ),
        f"leave it out, or set it to {HOOKS['rewards'][1]} alone",
    ),
    ProducerRefusal(
        "conversion-callback",
        lambda s: s.arg("custom_convert_samples_to_train_data_path") is not None,
        lambda s: (
            f"--custom-convert-samples-to-train-data-path is {s.arg('custom_convert_samples_to_train_data_path')!r}, "
            "which replaces the reward callback and may order samples by itself"
        ),
        "leave it out",
    ),
    ProducerRefusal(
        "positional-rewards",
        lambda s: s.seam == "groups" and not normalizes_by_group(installed_rule()),
        lambda s: (
            "this MILES does not normalize rewards by group_index, so samples reordered before that would get the "
            "advantages of others"
        ),
        f"use --custom-reward-post-process-path {HOOKS['rewards'][1]} instead of the sample filter",
    ),
    ProducerRefusal(
        "pack-order",
        lambda s: s.core.expert_balanced_packing and s.core.pack_order == "arrival",
        lambda s: "core.expert_balanced_packing = true reorders samples and core.pack_order = 'arrival' forbids it",
        "set core.pack_order = 'balanced' or leave it out",
    ),
    _switch("balance-data", "balance_data", "which deals samples to ranks anew and undoes the planned order"),
    _switch("balance-flops", "balance_by_flops", "which deals samples to ranks anew and undoes the planned order"),
    _switch(
        "dynamic-global-batch", "use_dynamic_global_batch_size", "so the samples of an optimizer step are not known"
    ),
    _switch("dynamic-micro-batches", "use_dynamic_batch_size", "so MILES packs rows itself and not as planned"),
    _switch("partial-rollout", "partial_rollout", "and rollouts continued under newer weights are not supported"),
    ProducerRefusal(
        "multi-lora",
        lambda s: bool(s.arg("multi_lora") or s.arg("multi_lora_n_adapters")),
        lambda s: "several LoRA adapters are trained, whose steps and reward groups are formed otherwise",
        "train one model",
    ),
    _switch("indep-dp", "indep_dp", "so samples are dealt to ranks after a rank may have failed"),
    ProducerRefusal(
        "model-parallel",
        lambda s: any((s.arg(name) or 1) != 1 for name in PARALLEL),
        lambda s: (
            ", ".join(f"{name} = {s.arg(name)}" for name in PARALLEL if (s.arg(name) or 1) != 1)
            + ": ranks that share samples are not planned for"
        ),
        "set them to 1",
    ),
    ProducerRefusal(
        "ranks",
        _ranks_do_not_share,
        lambda s: (
            f"global_batch_size is {s.arg('global_batch_size')} over {s.ranks} ranks (actor_num_nodes x "
            "actor_num_gpus_per_node), which must share it evenly"
        ),
        "set --global-batch-size to a multiple of the ranks, and say how many there are",
    ),
    ProducerRefusal(
        "micro-batch-size",
        lambda s: (s.arg("micro_batch_size") or 1) != 1,
        lambda s: f"micro_batch_size is {s.arg('micro_batch_size')}, and a row is planned as one micro-batch",
        "set --micro-batch-size 1",
    ),
    ProducerRefusal(
        "row-layout",
        lambda s: s.core.sequence_packing and s.arg("qkv_format") not in (None, "thd"),
        lambda s: f"qkv_format is {s.arg('qkv_format')!r}, and packed rows are sliced as 'thd'",
        "set --qkv-format thd",
    ),
    ProducerRefusal(
        "stock-backend",
        lambda s: s.core.sequence_packing and s.arg("train_backend") in STOCK,
        lambda s: (
            f"core.sequence_packing = true and --train-backend is {s.arg('train_backend')!r}, which runs one sample a "
            "row under micro_batch_size 1"
        ),
        "leave core.sequence_packing out, or use a MILES with the Core backend",
    ),
    ProducerRefusal(
        "budget-alone",
        lambda s: s.core.packing_max_tokens is not None and not s.core.sequence_packing,
        lambda s: f"core.packing_max_tokens = {s.core.packing_max_tokens} requires core.sequence_packing = true",
        "turn packing on or leave the budget out",
    ),
    ProducerRefusal(
        "budget-too-small",
        lambda s: s.core.sequence_packing and s.capacity < s.core.max_sequence_length,
        lambda s: (
            f"core.packing_max_tokens = {s.core.packing_max_tokens} must cover core.max_sequence_length = "
            f"{s.core.max_sequence_length}"
        ),
        "raise the one or lower the other",
    ),
    ProducerRefusal(
        "log-directory",
        _in_miles_events,
        lambda s: f"{s.log_path} lies in MILES' own event directory, whose reader takes every JSONL file for its own",
        "set --save, --dump-details or --save-debug-event-data to another directory",
    ),
    ProducerRefusal(
        "expert-sets",
        lambda s: s.counts_experts and _no_second_set(s),
        lambda s: (
            f"core.expert_balanced_packing needs world > core.expert_parallel_size > 1, whole sets of experts; here "
            f"are {s.ranks} ranks of degree {s.core.expert_parallel_size}"
        ),
        "change the degree, or set core.pack_order = 'balanced' alone to even out lengths",
    ),
    ProducerRefusal(
        "unpacked-experts",
        lambda s: s.counts_experts and not s.core.sequence_packing,
        lambda s: "core.expert_balanced_packing requires core.sequence_packing = true",
        "turn packing on",
    ),
    ProducerRefusal(
        "auxiliary-loss",
        lambda s: s.counts_experts and bool(s.core.router_aux_loss_weight or s.arg("moe_aux_loss_coeff")),
        lambda s: (
            f"core.router_aux_loss_weight is {s.core.router_aux_loss_weight} (moe_aux_loss_coeff "
            f"{s.arg('moe_aux_loss_coeff')}), and the router's auxiliary loss depends on which samples share a row"
        ),
        "set core.router_aux_loss_weight = 0; the z-loss may stay",
    ),
    ProducerRefusal(
        "no-replay",
        lambda s: s.counts_experts and not s.arg("use_rollout_routing_replay"),
        lambda s: "core.expert_balanced_packing counts recorded routes, which the trainer must replay",
        "give --use-rollout-routing-replay",
    ),
    ProducerRefusal(
        "model-config",
        lambda s: s.counts_experts and s.core.model_config is not None,
        lambda s: "core.model_config is given, and expert counts are read from the HF configuration alone",
        "leave core.model_config out",
    ),
    ProducerRefusal(
        "checkpoint",
        lambda s: s.counts_experts and not s.arg("hf_checkpoint"),
        lambda s: "core.expert_balanced_packing reads the model's HF configuration, and hf_checkpoint is not given",
        "give --hf-checkpoint",
    ),
)
