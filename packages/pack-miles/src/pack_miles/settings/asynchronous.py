"""What an asynchronous run, and a correction of its log-probabilities, need of other options."""

from collections.abc import Iterator

from pack_miles.settings.config import Config
from pack_miles.settings.formats import here
from pack_miles.settings.refusal import Refusal


def asynchronous_rows() -> Iterator[Refusal[Config]]:
    """Yield the rows of the table that are about sampling while training."""
    yield from _correction_rows()
    yield Refusal(
        "async-engine",
        lambda c: _workers(c) and c.run.engine != "ray",
        lambda c: (
            f"miles.fully_async = true with run.engine = {c.run.engine!r}: ranks and rollout workers are actors of Ray"
        ),
        lambda c: "set run.engine = ray, or miles.fully_async = false",
    )
    yield Refusal(
        "async-backend",
        lambda c: _workers(c) and c.run.backend == "nccl",
        lambda c: (
            "miles.fully_async = true with run.backend = 'nccl': rollout workers of this release sample on CPUs, and "
            "publishing weights to them from GPUs is not implemented"
        ),
        lambda c: "set run.backend = gloo, or miles.fully_async = false",
    )
    yield Refusal(
        "async-lag",
        lambda c: c.miles.fully_async and not here(c) and c.core.max_policy_lag == 0,
        lambda c: "miles.fully_async = true with core.max_policy_lag = 0: every sample would be too old to train",
        lambda c: "set max_policy_lag = 1 or more, or fully_async = false",
    )


def _workers(config: Config) -> bool:
    return config.miles.fully_async and here(config)


def _correction_rows() -> Iterator[Refusal[Config]]:
    yield Refusal(
        "async-correction",
        lambda c: c.miles.fully_async and not (c.miles.use_tis or c.miles.use_rollout_logprobs),
        lambda c: (
            "miles.fully_async = true, but nothing corrects for the weights having changed since a sample was drawn"
        ),
        lambda c: "set miles.use_tis = true, or miles.use_rollout_logprobs = true",
    )
    yield Refusal(
        "tis-anchor",
        lambda c: c.miles.use_tis and c.miles.use_rollout_logprobs,
        lambda c: (
            "both miles.use_tis = true and miles.use_rollout_logprobs = true: a ratio anchored at the rollout's "
            "log-probabilities holds the correction already, and would be corrected twice"
        ),
        lambda c: "keep one of them",
    )
    yield Refusal(
        "tis-limits",
        lambda c: c.miles.use_tis and c.miles.tis_clip_low > c.miles.tis_clip,
        lambda c: f"miles.tis_clip_low = {c.miles.tis_clip_low:g} is above miles.tis_clip = {c.miles.tis_clip:g}",
        lambda c: "take a lower limit that is not above the upper one",
    )
