"""What planning, building batches and writing events cost of the demo's steps, rollouts and updates included."""

import contextlib
import io
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Row
from pack_miles.contract.sink import ContractSink
from pack_miles.settings.config import load_config
from pack_miles.training import rank, trainer
from pack_miles.training.actor import Actor

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"


def measure(quick: bool) -> list[Row]:
    """Run the demo on one rank in this process, with a stopwatch around what packing adds."""
    collections = 3 if quick else 10
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "output.root": f"{folder}/demo",
            "miles.num_rollout": str(collections),
            "run.ranks": "1",
            "core.expert_parallel_size": "1",
            "tracking.progress": "false",
        }
        config = load_config(DEMO, list(changes.items()))
        spent: defaultdict[str, list[float]] = defaultdict(list)
        with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()):
            watched: list[tuple[str, Any, str]] = [
                ("rollouts", trainer, "_collect"),
                ("planning", trainer, "_plan"),
                ("update", Actor, "train"),
                ("building batches", Actor, "_rows"),
                ("writing events", ContractSink, "write"),
            ]
            for name, owner, attribute in watched:
                stack.enter_context(_watch(owner, attribute, spent[name]))
            status = rank.run_rank(0, config, "", debug=True)
        assert status == 0
    sums = {name: sum(each) for name, each in spent.items()}
    whole = sums["rollouts"] + sums["planning"] + sums["update"]
    added = sums["planning"] + sums["building batches"] + sums["writing events"]
    training = whole - sums["rollouts"]
    rows = [Row(f"demo, {collections} collections", name, tuple(each)) for name, each in spent.items()]
    share, of_training = added / whole, added / training
    said = f"planning, batches and events: {share:.2%} of the step, {of_training:.2%} of it without its rollouts"
    figures = {"share": share, "share of training": of_training}
    return [*rows, Row(f"demo, {collections} collections", "whole step", (whole / collections,), said, figures)]


@contextlib.contextmanager
def _watch(owner: Any, attribute: str, spent: list[float]) -> Any:
    plain: Callable[..., object] = getattr(owner, attribute)

    def watched(*given: object, **named: object) -> object:
        begin = time.perf_counter()
        try:
            return plain(*given, **named)
        finally:
            spent.append(time.perf_counter() - begin)

    setattr(owner, attribute, watched)
    try:
        yield
    finally:
        setattr(owner, attribute, plain)
