"""Cases of the rows of the table of refusals about sampling while training; read as those of `test_refusals`."""

from typing import Any

from support.miles_config import NODE, SMALL

#: A small run whose workers sample while it trains.
ASYNC: dict[str, Any] = SMALL | {
    "miles.fully_async": True,
    "miles.use_tis": True,
    "core.max_policy_lag": 3,
    "run.engine": "ray",
    "run.rollout_workers": 2,
}

#: Code -> base, the settings it refuses, words of its message, and the nearest settings that pass.
ASYNCHRONOUS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "async-correction": (
        ASYNC,
        {"miles.use_tis": False},
        "miles.fully_async = true, but nothing corrects for the weights having changed since a sample was drawn; set "
        "miles.use_tis = true, or miles.use_rollout_logprobs = true",
        {"miles.use_tis": False, "miles.use_rollout_logprobs": True},
    ),
    "tis-anchor": (
        ASYNC,
        {"miles.use_rollout_logprobs": True},
        "both miles.use_tis = true and miles.use_rollout_logprobs = true: a ratio anchored at the rollout's "
        "log-probabilities holds the correction already, and would be corrected twice; keep one of them",
        {"miles.use_rollout_logprobs": False},
    ),
    "tis-limits": (
        SMALL,
        {"miles.use_tis": True, "miles.tis_clip_low": 0.9, "miles.tis_clip": 0.8},
        "miles.tis_clip_low = 0.9 is above miles.tis_clip = 0.8; take a lower limit",
        {"miles.use_tis": True, "miles.tis_clip_low": 0.8, "miles.tis_clip": 0.8},
    ),
    "async-engine": (
        ASYNC,
        {"run.engine": "spawn"},
        "miles.fully_async = true with run.engine = 'spawn': ranks and rollout workers are actors of Ray; set "
        "run.engine = ray",
        {"run.engine": "ray"},
    ),
    "async-backend": (
        ASYNC,
        {"run.backend": "nccl"},
        "miles.fully_async = true with run.backend = 'nccl': rollout workers of this release sample on CPUs",
        {"run.backend": "gloo"},
    ),
    "async-lag": (
        NODE,
        {"miles.fully_async": True, "miles.use_tis": True},
        "miles.fully_async = true with core.max_policy_lag = 0: every sample would be too old to train",
        {"miles.fully_async": True, "miles.use_tis": True, "core.max_policy_lag": 1},
    ),
}
