"""Options about the order of samples that would do nothing, row by row."""

from collections.abc import Iterator

from pack_miles.settings.config import Config
from pack_miles.settings.refusal import Refusal


def ordering_rows() -> Iterator[Refusal[Config]]:
    """Yield options of the search for an order that would do nothing as the others are."""
    yield Refusal(
        "method-experts",
        lambda c: not c.core.expert_balanced_packing and c.core.expert_balance_method == "reference",
        lambda c: (
            "core.expert_balance_method = 'reference' needs core.expert_balanced_packing = true: that search follows "
            "routes only"
        ),
        lambda c: "leave expert_balance_method out, or turn expert-balanced packing on",
    )
    yield Refusal(
        "slots-experts",
        lambda c: not c.core.expert_balanced_packing and c.core.expert_balance_max_slot_assignments is not None,
        lambda c: (
            f"core.expert_balance_max_slot_assignments = {c.core.expert_balance_max_slot_assignments} needs "
            "core.expert_balanced_packing = true: without counted routes no load is known to keep below it"
        ),
        lambda c: "leave it out, or turn expert-balanced packing on",
    )
