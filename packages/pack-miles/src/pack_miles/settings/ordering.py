"""Options about the order of samples that do not fit others, row by row, in the order they are told."""

from collections.abc import Iterator

from pack_miles.settings.config import Config
from pack_miles.settings.refusal import Refusal


def ordering_rows() -> Iterator[Refusal]:
    """Yield what expert-balanced packing needs, then what balanced order needs, then options that would do nothing."""
    yield from _expert_rows()
    yield from _order_rows()


def _expert(config: Config) -> bool:
    return config.core.expert_balanced_packing


def _lengths_alone(config: Config) -> bool:
    return config.pack_order == "balanced" and not _expert(config)


def _expert_rows() -> Iterator[Refusal]:
    yield Refusal(
        "expert-world",
        lambda c: _expert(c) and not c.run.ranks > c.core.expert_parallel_size > 1,
        lambda c: (
            f"core.expert_balanced_packing = true needs world > expert_parallel_size > 1, but run.ranks = "
            f"{c.run.ranks} and core.expert_parallel_size = {c.core.expert_parallel_size}: with one replica, or one "
            "owner of all experts, no order of samples changes the load of an expert's owner"
        ),
        lambda c: (
            "change the two, or set core.expert_balanced_packing = false and core.pack_order = balanced, which evens "
            "out lengths on any ranks"
        ),
    )
    yield Refusal(
        "expert-packing",
        lambda c: _expert(c) and not c.core.sequence_packing,
        lambda c: "core.expert_balanced_packing = true requires core.sequence_packing = true: it balances packs",
        lambda c: "turn packing on, or leave expert_balanced_packing out",
    )
    yield Refusal(
        "expert-replay",
        lambda c: _expert(c) and not c.miles.use_rollout_routing_replay,
        lambda c: (
            "core.expert_balanced_packing = true requires miles.use_rollout_routing_replay = true: only replayed "
            "routes are known before the forward"
        ),
        lambda c: (
            "set use_rollout_routing_replay = true, or core.expert_balanced_packing = false and core.pack_order = "
            "balanced, which needs no routes"
        ),
    )
    yield Refusal(
        "expert-balance-data",
        lambda c: _expert(c) and c.miles.balance_data,
        lambda c: (
            "core.expert_balanced_packing and miles.balance_data are both true and exclude each other: balance_data "
            "changes the stride partition that the planned order is laid out for"
        ),
        lambda c: "set balance_data = false",
    )
    yield Refusal(
        "expert-arrival",
        lambda c: _expert(c) and c.core.pack_order == "arrival" and "core.pack_order" in c.written,
        lambda c: (
            "core.pack_order = 'arrival' contradicts core.expert_balanced_packing = true, which reorders the samples "
            "of every optimizer step"
        ),
        lambda c: "leave pack_order out (it is balanced then), or set core.expert_balanced_packing = false",
    )


def _order_rows() -> Iterator[Refusal]:
    yield Refusal(
        "balanced-balance-data",
        lambda c: _lengths_alone(c) and c.miles.balance_data,
        lambda c: (
            "core.pack_order = 'balanced' and miles.balance_data = true both share samples out over ranks: "
            "balance_data changes the stride partition that the planned order is laid out for"
        ),
        lambda c: "set balance_data = false: pack_order = balanced does what it is for, and more",
    )
    yield Refusal(
        "method-experts",
        lambda c: not _expert(c) and c.core.expert_balance_method == "reference",
        lambda c: (
            "core.expert_balance_method = 'reference' needs core.expert_balanced_packing = true: that search follows "
            "routes only"
        ),
        lambda c: "leave expert_balance_method out, or turn expert-balanced packing on",
    )
    yield Refusal(
        "slots-experts",
        lambda c: not _expert(c) and c.core.expert_balance_max_slot_assignments is not None,
        lambda c: (
            f"core.expert_balance_max_slot_assignments = {c.core.expert_balance_max_slot_assignments} needs "
            "core.expert_balanced_packing = true: without counted routes no load is known to keep below it"
        ),
        lambda c: "leave it out, or turn expert-balanced packing on",
    )
