"""Use an installed package as a newcomer would; run by `nox -s build` in an environment with only its wheel."""

import importlib.util
import subprocess
import sys
from importlib.metadata import distributions

BESIDE_PIP = {"pip", "setuptools", "wheel"}


def smoke_core() -> None:
    """Check what pack-core brings along, and that it packs."""
    installed = {distribution.name.lower() for distribution in distributions()} - BESIDE_PIP
    assert installed == {"pack-core", "attrs", "msgspec"}, installed
    assert importlib.util.find_spec("torch") is None

    from pack_core import Sample, Topology, dispatch_counts, pack, plan, verify

    assert list(pack([300, 200, 400, 600], capacity=1024)) == [[0, 1, 2], [3]]
    samples = [Sample(id=i, length=10 + i) for i in range(8)]
    assert verify(plan(samples, topology=Topology(ranks=2), capacity=64, step_samples=8), samples) == []

    # Without NumPy: routes counted and samples reordered in plain Python.
    counts = dispatch_counts(
        [bytes([i % 4]) * (9 + i) for i in range(8)], [10 + i for i in range(8)], layers=1, experts=4, top_k=1
    )
    topology = Topology(ranks=4, expert_parallel=2)
    even = plan(samples, topology=topology, capacity=64, step_samples=8, pack_order="balanced", counts=counts)
    assert verify(even, samples, counts) == []
    assert even.work[0].critical_work_proxy < even.arrival[0].critical_work_proxy


def smoke_miles() -> None:
    """Check that all three import from their wheels, and that the command answers."""
    import pack_core
    import pack_miles
    import pack_torch

    for package in (pack_core, pack_torch, pack_miles):
        assert "site-packages" in str(package.__file__), package.__file__
        assert importlib.util.find_spec(f"{package.__name__}.__init__") is not None
    told = subprocess.run([sys.executable, "-m", "pack_miles", "--version"], capture_output=True, text=True, check=True)
    assert "0." in told.stdout


if __name__ == "__main__":
    {"pack-core": smoke_core, "pack-miles": smoke_miles}[sys.argv[1]]()
    sys.stdout.write(f"{sys.argv[1]}: used from its wheel\n")
