"""One optimizer step for eight ranks: its time, and what is lost to waiting for the heaviest rank, pack by pack.

Work of a sample of n tokens is n (24,576 + n). Lengths are long-tailed, as of rollouts: exp of a normal draw around
8,192, clipped to 64 and 32,768. Every schedule is checked: each sample once, as many packs on every rank, none over the
capacity. Where verl is installed, its own balancing does the same, at the smaller size: shares of equal count by
Karmarkar-Karp over work, then each rank's micro-batches. Times are processor time, each draw's least of three.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from balancing import module_of
from measure import Row, uncollected
from pack_core import schedule

RANKS, LINEAR = 8, 24_576
Step = Sequence[Sequence[Sequence[int]]]


def rollouts(count: int, seed: int) -> list[int]:
    draw = np.random.default_rng(seed)
    return np.clip(np.exp(draw.normal(np.log(8_192), 0.8, count)), 64, 32_768).astype(int).tolist()


def measure(quick: bool) -> list[Row]:
    rows = []
    for count, draws in ((512, 5 if quick else 20), (4_096, 2 if quick else 5)):
        for capacity in (32_768, 65_536):
            steps: dict[str, Callable[[list[int], int], Step]] = {"schedule": _ours}
            if count == 512 and find_spec("verl"):
                steps["verl"] = _verl
            work = f"{count:,} rollouts, {RANKS} ranks, {capacity}"
            rows += [_row(work, who, step, capacity, count, draws) for who, step in steps.items()]
    return rows


def _ours(lengths: list[int], capacity: int) -> Step:
    return schedule(lengths, RANKS, capacity).packs


def _verl(lengths: list[int], capacity: int) -> Step:
    module = module_of("verl", "utils/seqlen_balancing.py")
    shares = module.get_seqlen_balanced_partitions(list(map(_work, lengths)), RANKS, True)
    most, step = 0, []
    for _ in range(2):  # every rank once more with as many micro-batches as the one with the most
        step = []
        for share in shares:
            own = [lengths[i] for i in share]
            count = max(most, -(-sum(own) // capacity))
            while max(sum(own[i] for i in part) for part in _parts(module, own, count)) > capacity:
                count += 1
            step.append([[share[i] for i in part] for part in _parts(module, own, count)])
        most = max(map(len, step))
    return step


def _parts(module: Any, own: list[int], count: int) -> list[list[int]]:
    parts: list[list[int]] = module.get_seqlen_balanced_partitions(own, count, False)
    return sorted(parts, key=lambda part: -sum(_work(own[i]) for i in part))


def _row(work: str, who: str, step: Callable[[list[int], int], Step], capacity: int, count: int, draws: int) -> Row:
    seconds, waits, ranks, tokens, over = [], [], [], [], []
    for seed in range(draws):
        lengths = rollouts(count, seed)
        tries = []
        for _ in range(3):
            with uncollected():
                begin = time.process_time()
                made = step(lengths, capacity)
                tries.append(time.process_time() - begin)
        seconds.append(min(tries))
        _check(made, lengths, capacity)
        loads = [[sum(_work(lengths[i]) for i in pack) for pack in rank] for rank in made]
        held = [sum(lengths[i] for pack in rank for i in pack) for rank in made]
        mean = sum(map(sum, loads)) / RANKS
        waits.append(sum(map(max, zip(*loads, strict=True))) / mean - 1)
        ranks.append(max(map(sum, loads)) / mean - 1)
        tokens.append(max(held) * RANKS / sum(held) - 1)
        over.append(len(made[0]) - -(-sum(lengths) // (RANKS * capacity)))
    wait, rank, token = (statistics.median(each) for each in (waits, ranks, tokens))
    said = f"waiting {wait:.2%} (most {max(waits):.2%}), rank work {rank:.2%} off, tokens {token:.2%} off"
    said += f", {statistics.median(over):g} packs over the bound"
    return Row(work, who, tuple(seconds), said, {"waiting": wait, "rank work": rank, "tokens": token})


def _work(length: int) -> int:
    return length * (LINEAR + length)


def _check(step: Step, lengths: list[int], capacity: int) -> None:
    assert sorted(i for rank in step for pack in rank for i in pack) == list(range(len(lengths)))
    assert len({len(rank) for rank in step}) == 1
    assert max(sum(lengths[i] for i in pack) for rank in step for pack in rank) <= capacity
