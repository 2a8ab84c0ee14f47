"""Measure planning, batch building, and packed against one-sample-a-row updates.

    python benchmarks/run.py [--quick]

Every result is checked before it is timed. It reports medians and spreads of one run on one machine, and never fails
on an absolute time.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from pack_core import Sample, Topology, pack, plan, verify
from pack_torch import (
    ModelConfig,
    PackedBatch,
    Rollout,
    SmallModel,
    build_batch,
    normalization,
    policy_loss,
    response_log_probs,
)
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

#: What was run, the seconds of each run, and a word on the result.
Row = tuple[str, list[float], str]


def lognormal(count: int, median: int, capacity: int, seed: int) -> list[int]:
    """Return lengths with a long tail, clipped to the capacity."""
    random = Random(seed)
    return [min(capacity, max(1, round(median * random.lognormvariate(0, 0.8)))) for _ in range(count)]


def timed(action: Callable[[], object], runs: int) -> list[float]:
    """Return the seconds of each run after one that is not counted."""
    action()
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure_packing(quick: bool) -> Row:
    count = 100_000 if quick else 1_000_000
    lengths = lognormal(count, 350, 4096, seed=1)
    packing = pack(lengths, capacity=4096)
    assert [index for places in packing for index in places] == list(range(count))
    bound = -(-sum(lengths) // 4096)
    return (
        f"pack {count:,} lengths, next_fit, 4096",
        timed(lambda: pack(lengths, capacity=4096), 5),
        (f"{len(packing):,} packs, {len(packing) - bound:,} over the bound"),
    )


def measure_plan(quick: bool) -> Row:
    lengths = lognormal(512, 1500, 6144, seed=2)
    samples = [Sample(id=i, length=length) for i, length in enumerate(lengths)]

    def act() -> object:
        return plan(samples, topology=Topology(ranks=8, expert_parallel=2), capacity=6144, step_samples=512)

    chosen = plan(samples, topology=Topology(ranks=8, expert_parallel=2), capacity=6144, step_samples=512)
    assert verify(chosen, samples) == []
    step = chosen.work[0]
    return (
        "plan 512 samples on 8 ranks, 6144",
        timed(act, 5 if quick else 20),
        (
            f"{step.packs_per_rank} packs a rank (bound {chosen.bounds[0].packs_per_rank}), "
            f"fill {step.fill_fraction:.2f}"
        ),
    )


def rollouts_of(lengths: list[int], vocabulary: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, length in enumerate(lengths):
        response = length - max(1, length // 3)
        made.append(
            Rollout(
                id=number,
                tokens=torch.randint(vocabulary, (length,), generator=generator),
                response_length=response,
                advantages=torch.randn(response, generator=generator),
            )
        )
    return made


def measure_batches(quick: bool) -> list[Row]:
    lengths = lognormal(256, 1500, 6144, seed=4)
    rollouts = rollouts_of(lengths, 50_000)
    packs = list(pack(lengths, capacity=6144))
    tokens = [rollout.tokens for rollout in rollouts]

    def build() -> object:
        return [build_batch(rollouts, places) for places in packs]

    def concatenate() -> object:
        return [torch.cat([tokens[index] for index in places]) for places in packs]

    batches = [build_batch(rollouts, places) for places in packs]
    assert torch.equal(torch.cat([batch.input_ids for batch in batches]), torch.cat(tokens))
    runs = 5 if quick else 20
    return [
        (f"build {len(packs)} packed batches of 6144", timed(build, runs), f"{sum(lengths):,} tokens"),
        ("torch.cat of the same tokens alone", timed(concatenate, runs), "the floor of the row above"),
    ]


def measure_updates(quick: bool) -> list[Row]:
    """Time forward and backward of one step of short samples, packed and one sample a row, and compare gradients."""
    config = ModelConfig(
        64,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )
    model = SmallModel(config, seed=0)
    lengths = lognormal(64, 24, 128, seed=5)
    rollouts = rollouts_of(lengths, 64)
    total = normalization(rollouts).denominator("token")

    def step(batches: list[PackedBatch]) -> list[torch.Tensor]:
        model.zero_grad()
        for batch in batches:
            log_probs = response_log_probs(model, batch)
            loss = policy_loss(log_probs, batch, old_log_probs=log_probs)
            (loss.numerator / total).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    packed = [build_batch(rollouts, places) for places in pack(lengths, capacity=512)]
    apart = [build_batch(rollouts, [index]) for index in range(len(rollouts))]
    for one, other in zip(step(packed), step(apart), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    runs = 3 if quick else 10
    return [
        (f"update of 64 samples, {len(packed)} packs of 512", timed(lambda: step(packed), runs), "same gradients"),
        ("update of 64 samples, one sample a row", timed(lambda: step(apart), runs), f"{len(apart)} forwards"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows = [measure_packing(quick), measure_plan(quick), *measure_batches(quick), *measure_updates(quick)]
    table = Table(
        title=f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread"
    )
    for heading in ("what", "median ms", "min to max", "result"):
        table.add_column(heading, justify="left" if heading in ("what", "result") else "right")
    for what, seconds, remark in rows:
        low, middle, high = (1000 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
        table.add_row(what, f"{middle:,.2f}", f"{low:,.2f} to {high:,.2f}", remark)
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "latest.json"
    file.write_text(json.dumps([{"what": w, "seconds": s, "result": r} for w, s, r in rows], indent=1) + "\n")
    sys.stdout.write(f"results: {file}\n")


if __name__ == "__main__":
    main()
