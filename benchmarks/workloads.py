"""Collections to plan: lengths and where the tokens of every sample go, made from a seed or read from a file."""

import json
import math
from array import array
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray
from pack_core import DispatchCounts, Topology


@attrs.frozen
class Workload:
    """One optimizer step to be planned."""

    name: str
    topology: Topology
    capacity: int
    lengths: NDArray[np.int64]
    table: NDArray[np.int64]

    @property
    def counts(self) -> DispatchCounts:
        """Return the counts by destination."""
        _, layers, places = self.table.shape
        flat = array("i", self.table.astype(np.int32).tobytes())
        return DispatchCounts(tuple(range(layers)), layers, places, flat)


def panel(samples: int, ranks: int, degree: int, capacity: int, *, layers: int = 19, seed: int = 0) -> Workload:
    """Return a step in the manner of the published panels: long-tailed lengths, six topics, top-16."""
    random = np.random.default_rng(seed)
    lengths = _long_tailed(random, samples, capacity)
    topics = random.dirichlet([8] * degree, size=(6, layers))
    table = _drawn(random, lengths, topics[random.integers(0, 6, samples)])
    return Workload(f"{samples}, {ranks}, {degree}, {capacity}", Topology(ranks, degree), capacity, lengths, table)


def workloads(seed: int = 0, rollouts: Path | None = None) -> list[Workload]:
    """Return six kinds of steps on 16 ranks with 4 destinations: 256 samples, 12 layers, top-8."""
    random, samples, degree, layers, capacity = np.random.default_rng(seed), 256, 4, 12, 8192
    even = random.dirichlet([8] * degree, size=(6, layers))
    tailed = _long_tailed(random, samples, capacity)
    uniform = random.integers(64, capacity // 2, samples)
    groups = random.dirichlet([4] * degree, size=(samples // 8, layers))
    hot = random.dirichlet([8] * degree, size=(6, layers))
    hot[:, :, 0] += 1.0
    hot /= hot.sum(axis=2, keepdims=True)
    skewed = random.dirichlet([0.7] * degree, size=(6, layers))
    topics = random.integers(0, 6, samples)
    cases = [
        ("uniform lengths", uniform, even[topics]),
        ("long-tailed lengths", tailed, even[topics]),
        ("prompt groups share routes", tailed, np.repeat(groups, 8, axis=0)),
        ("one hot expert", tailed, hot[topics]),
        ("heavy skew across layers", tailed, skewed[topics]),
    ]
    if rollouts is not None:
        real = _real_lengths(rollouts, samples)
        cases.append(("real lengths (GSM8K)", real, even[topics]))
    limits = {"real lengths (GSM8K)": 1024}
    return [
        Workload(name, Topology(16, degree), limits.get(name, capacity), lengths, _drawn(random, lengths, routes, 8))
        for name, lengths, routes in cases
    ]


def large(samples: int, ranks: int, degree: int, layers: int, *, packs: int = 7, seed: int = 0) -> Workload:
    """Return a step of about `packs` packs a rank: the scale at which speed is stated."""
    random = np.random.default_rng(seed)
    lengths = _long_tailed(random, samples, 8192)
    capacity = max(8192, math.ceil(lengths.sum() / ranks / (packs - 0.4)))
    topics = random.dirichlet([8] * degree, size=(6, layers))
    table = _drawn(random, lengths, topics[random.integers(0, 6, samples)], 8)
    return Workload(f"{samples}, {ranks}, {degree}", Topology(ranks, degree), capacity, lengths, table)


def _long_tailed(random: np.random.Generator, samples: int, longest: int) -> NDArray[np.int64]:
    lengths = np.exp(random.normal(math.log(longest / 4), 0.8, samples))
    return np.clip(lengths, 64, longest).astype(np.int64)


def _drawn(
    random: np.random.Generator, lengths: NDArray[np.int64], routes: NDArray[np.float64], top_k: int = 16
) -> NDArray[np.int64]:
    chosen = [random.multinomial(int(length) * top_k, route) for length, route in zip(lengths, routes, strict=True)]
    return np.asarray(chosen, dtype=np.int64)


def _real_lengths(path: Path, samples: int) -> NDArray[np.int64]:
    import gzip

    lengths = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            lengths.append(len(json.loads(line)["tokens"]))
            if len(lengths) == samples:
                break
    return np.asarray(lengths, dtype=np.int64)
