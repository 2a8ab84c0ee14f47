"""Sweep expert parallel degree and pack budget: packs, fill, dispatch skew and trained tokens a second.

    python benchmarks/sweep.py [--quick]

Every cell is a run of `pack-miles train` on four CPU ranks: the small model, routes recorded and replayed, one
optimizer step a collection. The learning rate is 0, so that all cells train the same samples, which is checked. Times
are those of the updates after the first two. A count of packs or expert choices is not a time, and times of ranks that
share a few CPU cores say nothing about GPUs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
from matplotlib.figure import Figure
from pack_core import dispatch_counts, fold, owners, work
from pack_miles.planning import plan_samples
from pack_miles.samples import RolloutRow, read_rows, to_samples
from pack_miles.settings.config import Config, load_config
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
RANKS, WARMUP = 4, 2
DEGREES, BUDGETS = (1, 2, 4), (64, 128, 256)

RUN = """
schema_version = 1
name = "sweep"
[output]
root = "out"
[data]
task = "sort"
[trainer]
sequence_packing = true
packing_max_tokens = {budget}
max_sequence_length = 40
expert_parallel_size = {degree}
attention_backend = "segment"
global_batch_size = {samples}
num_rollout = {collections}
use_rollout_routing_replay = true
[inference]
rollout_batch_size = {prompts}
n_samples_per_prompt = 8
rollout_max_response_len = 20
[optimizer]
lr = 0.0
[tracking]
progress = false
[run]
ranks = {ranks}
save_rollouts = true
"""


@attrs.frozen
class Cell:
    """What one run came to; packs, fill and skew are means over its updates."""

    degree: int
    budget: int
    packs: float
    fill: float
    skew: float
    tokens: int
    seconds: float
    digest: str

    @property
    def rate(self) -> float:
        """Trained tokens a second, all ranks together, waiting for the slowest in each update."""
        return self.tokens / self.seconds


def train(degree: int, budget: int, collections: int, prompts: int) -> Cell:
    """Run one cell in a folder of its own and return what its files say."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "run.toml"
        sizes = {"collections": collections, "prompts": prompts, "samples": 8 * prompts}
        file.write_text(RUN.format(degree=degree, budget=budget, ranks=RANKS, **sizes))
        line = [sys.executable, "-m", "pack_miles", "train", str(file)]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return read_cell(load_config(file), Path(name) / "out")


def read_cell(config: Config, root: Path) -> Cell:
    """Return what the contract files and the saved rollouts of a run say."""
    updates: dict[int, list[dict[str, Any]]] = {}
    packs, fill = [], []
    for rank in range(RANKS):
        for line in (root / f"training_contract_rank{rank}.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "optimizer":
                updates.setdefault(event["step"], []).append(event)
            elif event["event"] == "packing" and event["pass"] == "training":
                packs.append(event["packs"])
                fill.append(event["fill_fraction"])
    warm = [own for step, own in sorted(updates.items()) if step > WARMUP]
    files = sorted((root / "rollouts").glob("*.jsonl.gz"))
    collections = [list(read_rows(file)) for file in files]
    return Cell(
        degree=config.core.expert_parallel_size,
        budget=config.capacity,
        packs=statistics.fmean(packs),
        fill=statistics.fmean(fill),
        skew=statistics.fmean(skew(config, rows) for rows in collections),
        tokens=sum(own[0]["normalization"]["model_tokens"] for own in warm),
        seconds=sum(max(event["elapsed_seconds"] for event in own) for own in warm),
        digest=str([[row.tokens for row in rows] for rows in collections]),
    )


def skew(config: Config, rows: list[RolloutRow]) -> float:
    """Return the mean dispatch skew of a collection's step, from its recorded routes."""
    model, samples = config.model, to_samples(rows)
    counts = dispatch_counts(
        [row.rollout_routed_experts for row in rows],
        [sample.length for sample in samples],
        layers=model.num_hidden_layers,
        experts=model.n_routed_experts,
        top_k=model.num_experts_per_tok,
        dense_layers=model.dense_layers_indices,
    )
    folded = fold(counts, owners(model.n_routed_experts, config.core.expert_parallel_size))
    (step,) = plan_samples(config, samples, None).steps
    found = work(step, [sample.length for sample in samples], config.capacity, folded)
    assert found.skew_mean is not None
    return found.skew_mean


def picture(cells: list[Cell], file: Path) -> None:
    """Draw every quantity over the budget, one line a degree."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    shown = {"packs a rank": "packs", "fill": "fill", "dispatch skew": "skew", "trained tokens a second": "rate"}
    for axes, (title, field) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for degree in DEGREES:
            own = [cell for cell in cells if cell.degree == degree]
            axes.plot([cell.budget for cell in own], [getattr(cell, field) for cell in own], "o-", label=f"EP {degree}")
        axes.set(title=title, xlabel="pack budget (tokens)", xscale="log", xticks=BUDGETS, ylim=(0, None))
        axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
        axes.minorticks_off()
    figure.axes[0].legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer collections")
    collections = 4 if parser.parse_args().quick else 12
    cells = [train(degree, budget, collections, prompts=16) for degree in DEGREES for budget in BUDGETS]
    assert len({cell.digest for cell in cells}) == 1, "all cells train the same samples"
    table = Table(title=f"{RANKS} ranks, 128 samples an update, updates {WARMUP + 1} to {collections} timed")
    headings = ("EP", "budget", "packs a rank", "fill", "dispatch skew", "update s", "trained tokens/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for cell in cells:
        update = cell.seconds / (collections - WARMUP)
        values = (f"{cell.packs:.1f}", f"{cell.fill:.2f}", f"{cell.skew:.3f}", f"{update:.2f}", f"{cell.rate:,.0f}")
        table.add_row(str(cell.degree), str(cell.budget), *values)
    Console().print(table)
    sys.stdout.write("A count of packs or expert choices is not a time; ranks here share the cores of one machine.\n")
    RESULTS.mkdir(exist_ok=True)
    picture(cells, RESULTS / "sweep.svg")
    told = [attrs.asdict(cell, filter=lambda field, _: field.name != "digest") for cell in cells]
    (RESULTS / "sweep.json").write_text(json.dumps(told, indent=1) + "\n")
    sys.stdout.write(f"results: {RESULTS / 'sweep.json'}, picture: {RESULTS / 'sweep.svg'}\n")


if __name__ == "__main__":
    main()
