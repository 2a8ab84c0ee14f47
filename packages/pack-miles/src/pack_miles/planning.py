"""The plan a configuration makes of samples: what `plan` forecasts and what the trainer follows, one call for both."""

from collections.abc import Sequence

from pack_core import Plan, Sample, plan

from pack_miles.config import Config


def plan_samples(config: Config, samples: Sequence[Sample]) -> Plan:
    """Return the plan of samples in arrival order.

    Raises:
        PackError: a sample fits no row, or two share an id; it is named.
    """
    return plan(
        samples,
        topology=config.topology,
        capacity=config.capacity,
        step_samples=config.step_samples,
        equalize=config.core.packing_equalize,
        max_documents=config.max_documents,
    )
