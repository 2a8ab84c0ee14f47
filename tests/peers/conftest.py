"""MILES, made importable without the heavy packages its wheel declares."""

import sys
from types import ModuleType

import pytest


@pytest.fixture(scope="session", autouse=True)
def miles() -> None:
    """Make MILES importable here: its modules import ray by name, none of the functions asked use it."""
    ray, util, strategies = (ModuleType(name) for name in ("ray", "ray.util", "ray.util.scheduling_strategies"))
    ray.__dict__.update(util=util, remote=lambda **options: lambda thing: thing)
    strategies.__dict__.update(NodeAffinitySchedulingStrategy=object)
    sys.modules.update({"ray": ray, "ray.util": util, "ray.util.scheduling_strategies": strategies})
    from miles.backends.training_utils import parallel

    alone = parallel.GroupInfo(rank=0, size=1, group=None)
    names = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp")
    parallel.set_parallel_state(parallel.ParallelState(**dict.fromkeys(names, alone)))
