"""The terms of a run: what its configuration says about how far sampling may run ahead of training."""

from pack_miles.asynchronous.ledger import Terms
from pack_miles.settings.config import Config


def terms_of(config: Config) -> Terms:
    """Return the terms that a configuration sets."""
    return Terms(
        groups=config.miles.rollout_batch_size,
        steps=config.steps_per_collection,
        max_policy_lag=config.core.max_policy_lag,
        collections=config.miles.num_rollout,
    )
