"""The producer hook: MILES' samples in an order whose stride partition gives every rank its planned column.

MILES deals position p of a collection to rank `p % ranks`, so an order is all it takes to say who trains what, and
when. There are two places to put it in, and one planner behind both:

- `reorder_samples`, for `--rollout-sample-filter-path`, before rewards are normalized; only where MILES normalizes by
  `group_index`, and only inside MILES' own rollout functions.
- `reorder_and_normalize`, for `--custom-reward-post-process-path`, everywhere.

Both do nothing of their own unless `pack_order = "balanced"` or `expert_balanced_packing` is set, and change nothing
unless all of it has been found right.
"""

import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from pack_miles.contract.events import ExpertSchedule
from pack_miles.contract.sink import ContractSink
from pack_miles.errors import InputError
from pack_miles.miles.options import read_settings
from pack_miles.miles.plan import Ordering, order_samples
from pack_miles.miles.refusals import refuse_settings
from pack_miles.miles.rewards import Rewards, grouped_rewards, miles_rewards

logger = logging.getLogger(__name__)


def reorder_samples(args: Any, groups: list[list[Any]]) -> None:
    """Reorder a collection of groups in place: each keeps its size and becomes a mere container.

    MILES calls it with its arguments when a rollout is complete, before it flattens, trims and normalizes.

    Args:
        args: MILES' arguments.
        groups: of samples, one list a prompt.

    Raises:
        ValueError: the arguments do not allow reordering, or a sample cannot be planned; `groups` is then unchanged.

    >>> from argparse import Namespace
    >>> groups = [["never", "looked", "at"]]
    >>> reorder_samples(Namespace(), groups), groups
    (None, [['never', 'looked', 'at']])
    """
    settings = read_settings(args, "groups")
    if not settings.enabled:
        return
    refuse_settings(settings)
    samples = _flat(groups)
    ordering = order_samples(settings, samples, groups=groups)
    _tell(ordering, settings.log_path)
    left = iter([samples[place] for place in ordering.order])
    for group in groups:
        group[:] = [next(left) for _ in group]


def reorder_and_normalize(args: Any, samples: list[Any]) -> Rewards:
    """Reorder a flat collection in place, and return its rewards, as they came and normalized by `group_index`.

    MILES makes its training data of the same list afterwards. The rewards of each sample are those it has in arrival
    order, to the last bit. Switched off it returns what MILES' own normalization does.

    Args:
        args: MILES' arguments.
        samples: the collection, flattened and trimmed.

    Returns:
        The rewards and the normalized rewards, both in the new order.

    Raises:
        ValueError: as `reorder_samples`; `samples` is then unchanged.
    """
    settings = read_settings(args, "rewards")
    if not settings.enabled:
        return miles_rewards(args, samples)
    refuse_settings(settings)
    ordering = order_samples(settings, samples)
    # In arrival order, for a mean of float32 numbers depends on the order in which they are added.
    raw, normalized = grouped_rewards(args, samples)
    _tell(ordering, settings.log_path)
    samples[:] = [samples[place] for place in ordering.order]
    return [raw[place] for place in ordering.order], [normalized[place] for place in ordering.order]


def _flat(groups: list[list[Any]]) -> list[Any]:
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise InputError("the collection is no list of lists of samples; give what MILES' rollout functions return")
    return [sample for group in groups for sample in group]


def _tell(ordering: Ordering, path: Path | None) -> None:
    """Write the event to its file, where there is one, and to the log as one line."""
    if ordering.event is None:
        return
    event = msgspec.structs.replace(ordering.event, step=_lines(path))
    _encode(event)  # what is written below takes as long again, and its own time can only be told beforehand
    event = msgspec.structs.replace(event, planning_seconds=time.monotonic() - ordering.started)
    if path is not None:
        with ContractSink(path, rank=0) as sink:
            sink.write(event)
    logger.info("expert_schedule %s", _encode(event))


def _encode(event: ExpertSchedule) -> str:
    return msgspec.json.encode(event, order="sorted").decode()


def _lines(path: Path | None) -> int:
    return path.read_bytes().count(b"\n") if path is not None and path.exists() else 0
