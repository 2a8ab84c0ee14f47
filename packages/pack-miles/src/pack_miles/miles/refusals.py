"""Rows of the table about MILES' arguments: what would keep planned rows or a planned order from the trainer.

A run file makes such arguments too, so the rows are asked of it as they are of the arguments a producer hook meets.
"""

from collections.abc import Callable, Iterator

from pack_miles.core.source import set_options
from pack_miles.miles.hosted import HOSTED
from pack_miles.miles.options import HOOKS, Settings
from pack_miles.settings.refusal import Refusal, refuse_all, told


def refuse_settings(settings: Settings) -> None:
    """Raise every row that applies, together; nothing when the hook reorders nothing.

    Raises:
        InputError: with each reason and remedy.
    """
    if settings.enabled:
        refuse_all("the producer hook", told((*RUN, *HOSTED), settings))


def _row(
    code: str,
    applies: Callable[[Settings], bool],
    reason: Callable[[Settings], str],
    remedy: Callable[[Settings], str],
) -> Refusal[Settings]:
    return Refusal(code, applies, reason, remedy, scope="arguments")


def _switch(code: str, name: str, why: str) -> Refusal[Settings]:
    """Return the row of a switch of MILES that must stay off."""
    return _row(
        code, lambda s: bool(s.arg(name)), lambda s: f"miles.{name} = true: {why}", lambda s: f"leave miles.{name} out"
    )


def _row_rows() -> Iterator[Refusal[Settings]]:
    yield _row(
        "packing-off-limit",
        lambda s: s.core.packing_max_tokens is not None and not s.core.sequence_packing,
        lambda s: f"core.packing_max_tokens = {s.core.packing_max_tokens} requires core.sequence_packing = true",
        lambda s: (
            "turn packing on, or leave packing_max_tokens out (the flag --core.packing_max_tokens none unsets what a "
            "file sets)"
        ),
    )
    yield _row(
        "packing-cover",
        lambda s: s.core.sequence_packing and s.capacity < s.core.max_sequence_length,
        lambda s: (
            f"core.packing_max_tokens = {s.capacity} must cover core.max_sequence_length = "
            f"{s.core.max_sequence_length}: the longest sample has to fit one row"
        ),
        lambda s: f"raise packing_max_tokens to {s.core.max_sequence_length}, or lower max_sequence_length",
    )
    yield _row(
        "qkv-format",
        lambda s: s.core.sequence_packing and s.arg("qkv_format") not in (None, "thd"),
        lambda s: (
            f"miles.qkv_format = {s.arg('qkv_format')!r} contradicts core.sequence_packing = true, whose layout is "
            "'thd': rows of samples end to end"
        ),
        lambda s: "leave qkv_format out, or set it to thd",
    )
    yield _row(
        "micro-batch",
        lambda s: (s.arg("micro_batch_size") or 1) != 1,
        lambda s: (
            f"miles.micro_batch_size = {s.arg('micro_batch_size')}: a forward takes one row, never a padded batch"
        ),
        lambda s: "set it to 1, and core.sequence_packing = true for several samples in a row",
    )
    yield _row(
        "context-parallel",
        lambda s: (s.arg("context_parallel_size") or 1) != 1,
        lambda s: (
            f"miles.context_parallel_size = {s.arg('context_parallel_size')}: ranks would share a row, and OLMo-core "
            "then counts positions over the shard instead of over each document of it"
        ),
        lambda s: "set it to 1, or leave it out",
    )
    yield _row(
        "model-parallel",
        lambda s: any((s.arg(name) or 1) != 1 for name in _CUTS),
        lambda s: (
            ", ".join(f"miles.{name} = {s.arg(name)}" for name in _CUTS if (s.arg(name) or 1) != 1)
            + ": ranks that share samples are not planned for; OLMo-core packs rows under data and expert parallelism "
            "only"
        ),
        lambda s: "set them to 1, or leave them out",
    )
    yield _row(
        "emo-routing",
        lambda s: s.core.sequence_packing and bool(_emo(s)),
        lambda s: (
            f"{s.model_file} sets {', '.join(_emo(s))}, and EMO routing takes its documents from end-of-sequence "
            "tokens, not from the packs"
        ),
        lambda s: "set core.sequence_packing = false for it, or use a plain router",
    )


_CUTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def _emo(settings: Settings) -> tuple[str, ...]:
    return set_options(settings.model_file, "emo") if settings.model_file else ()


def _partition_rows() -> Iterator[Refusal[Settings]]:
    undone = "it deals samples to ranks anew, and position p of a step has to go to rank p % ranks as planned"
    yield _switch("dynamic-global-batch", "use_dynamic_global_batch_size", "the samples of a step are not known")
    yield _switch(
        "dynamic-micro-batches", "use_dynamic_batch_size", "MILES packs rows itself, and only one planner may be on"
    )
    yield _switch("balance-data", "balance_data", undone)
    yield _switch("balance-flops", "balance_by_flops", undone)
    yield _row(
        "partial-rollout",
        lambda s: s.enabled and bool(s.arg("partial_rollout")),
        lambda s: "miles.partial_rollout = true: rollouts continued under newer weights are not reordered",
        lambda s: "leave miles.partial_rollout out, or samples in arrival order",
    )


def _callback_rows() -> Iterator[Refusal[Settings]]:
    yield _row(
        "sample-filter",
        lambda s: s.enabled and _other_filter(s),
        lambda s: (
            f"miles.rollout_sample_filter_path = {s.arg('rollout_sample_filter_path')!r} stands beside or in place of "
            f"the hook of --{HOOKS[s.seam][0].replace('_', '-')}, and only one planner may be on"
        ),
        lambda s: "leave miles.rollout_sample_filter_path out, or give one of our two hooks in its own flag",
    )
    yield _row(
        "reward-callback",
        lambda s: s.enabled and _other_rewards(s),
        lambda s: (
            f"miles.custom_reward_post_process_path = {s.arg('custom_reward_post_process_path')!r}: what it makes of "
            "the order of samples is not known"
        ),
        lambda s: f"leave it out, or set it to {HOOKS['rewards'][1]} alone",
    )
    yield _row(
        "conversion-callback",
        lambda s: s.enabled and s.arg("custom_convert_samples_to_train_data_path") is not None,
        lambda s: (
            "miles.custom_convert_samples_to_train_data_path = "
            f"{s.arg('custom_convert_samples_to_train_data_path')!r}: it replaces the reward callback and may order "
            "samples by itself"
        ),
        lambda s: "leave it out",
    )


def _other_filter(settings: Settings) -> bool:
    given, ours = settings.arg("rollout_sample_filter_path"), HOOKS["groups"][1]
    # A filter of the user's own may run before the other hook.
    return bool(given != ours if settings.seam == "groups" else given == ours)


def _other_rewards(settings: Settings) -> bool:
    given, ours = settings.arg("custom_reward_post_process_path"), HOOKS["rewards"][1]
    return bool(given != ours if settings.seam == "rewards" else given is not None)


def _expert_rows() -> Iterator[Refusal[Settings]]:
    yield _row(
        "expert-world",
        lambda s: s.counts_experts and not s.ranks > s.core.expert_parallel_size > 1,
        lambda s: (
            f"core.expert_balanced_packing = true needs world > expert_parallel_size > 1, but run.ranks = {s.ranks} "
            f"and core.expert_parallel_size = {s.core.expert_parallel_size}: with one replica, or one owner of all "
            "experts, no order of samples changes the load of an expert's owner"
        ),
        lambda s: (
            "change the two, or set core.expert_balanced_packing = false and core.pack_order = balanced, which evens "
            "out lengths on any ranks"
        ),
    )
    yield _row(
        "expert-packing",
        lambda s: s.counts_experts and not s.core.sequence_packing,
        lambda s: "core.expert_balanced_packing = true requires core.sequence_packing = true: it balances packs",
        lambda s: "turn packing on, or leave expert_balanced_packing out",
    )
    yield _row(
        "auxiliary-loss",
        lambda s: s.counts_experts and bool(s.core.router_aux_loss_weight or s.arg("moe_aux_loss_coeff")),
        lambda s: (
            f"core.router_aux_loss_weight is {s.core.router_aux_loss_weight or s.arg('moe_aux_loss_coeff'):g}, its "
            "default if it was left out, with core.expert_balanced_packing = true: that loss is a mean over the tokens "
            "of a forward, so another order would train another loss"
        ),
        lambda s: "set core.router_aux_loss_weight = 0 (and no moe_aux_loss_coeff); the z-loss may stay",
    )
    yield _row(
        "expert-replay",
        lambda s: s.counts_experts and not s.arg("use_rollout_routing_replay"),
        lambda s: (
            "core.expert_balanced_packing = true requires miles.use_rollout_routing_replay = true: only replayed "
            "routes are known before the forward"
        ),
        lambda s: (
            "set use_rollout_routing_replay = true, or core.expert_balanced_packing = false and core.pack_order = "
            "balanced, which needs no routes"
        ),
    )
    yield _row(
        "expert-arrival",
        lambda s: s.counts_experts and s.core.pack_order == "arrival",
        lambda s: (
            "core.pack_order = 'arrival' contradicts core.expert_balanced_packing = true, which reorders the samples "
            "of every optimizer step"
        ),
        lambda s: "leave pack_order out (it is balanced then), or set core.expert_balanced_packing = false",
    )


#: Rows for every run, in the order they are told.
RUN: tuple[Refusal[Settings], ...] = (*_row_rows(), *_expert_rows(), *_partition_rows(), *_callback_rows())
