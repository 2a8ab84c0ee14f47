"""Rows of `gpu_check.py` that train: two updates, packed against one at a time, on one rank and on two."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing
from gpu_bench import BF16, LIMITS, Bench, Limits, NotRun, best, relative, require, usable
from pack_core import Topology
from pack_torch import (
    SmallModel,
    build_groups,
    load_balancing_loss,
    normalization,
    policy_loss,
    reduce_gradients,
    response_log_probs,
    router_z_loss,
    scored_rows,
    scored_targets,
    target_log_probs,
)
from pack_torch.precision import wide
from torch import Tensor
from torch.nn import Parameter

LEARNING_RATE = 1e-4
SCORING_TOLERANCE = 1e-3

#: How long a rank waits for another, so that one that died cannot hold the check up.
PATIENCE = timedelta(seconds=60)


class Masters:
    """Wide copies of a model's weights: gradients of its packs add up in them, and Adam moves them."""

    def __init__(self, model: SmallModel) -> None:
        """Copy the weights."""
        self.model = model
        self.named = {name: Parameter(wide(own.detach()).clone()) for name, own in model.named_parameters()}
        self.experts = [self.named[name] for name, own in model.named_parameters() if self._routed(own)]

    def _routed(self, own: Tensor) -> bool:
        return any(own is expert for expert in self.model.expert_parameters())

    def dense_parameters(self) -> list[Parameter]:
        """Return all but the experts, as `reduce_gradients` asks."""
        return [one for one in self.named.values() if not any(one is expert for expert in self.experts)]

    def expert_parameters(self) -> list[Parameter]:
        """Return the experts, as `reduce_gradients` asks."""
        return self.experts

    def collect(self) -> None:
        """Add the gradients of one backward, and take them off the model."""
        for name, own in self.model.named_parameters():
            if own.grad is not None:
                before = self.named[name].grad
                self.named[name].grad = wide(own.grad) if before is None else before + wide(own.grad)
                own.grad = None

    def hand_out(self) -> None:
        """Give the model the weights as they are now."""
        with torch.no_grad():
            for name, own in self.model.named_parameters():
                own.copy_(self.named[name])


def train(bench: Bench, model: SmallModel, packs: Sequence[Sequence[int]], topology: Topology) -> dict[str, Any]:
    """Return what two updates see and leave, on the CPU: the first anchored on a checked scoring pass, then none."""
    groups = build_groups(topology, PATIENCE)
    masters = Masters(model)
    optimizer = torch.optim.Adam(masters.named.values(), lr=LEARNING_RATE)
    denominator = normalization(bench.rollouts).denominator("token")
    found: dict[str, Any] = {}
    for update in (1, 2):
        optimizer.zero_grad()
        for indices in packs:
            batch = bench.row(indices)
            scored = response_log_probs(model, batch)
            anchor = scored.detach()
            if update == 1:
                with torch.no_grad():
                    anchor = response_log_probs(model, batch)
                off = float((anchor - scored.detach()).abs().mean())
                assert off <= SCORING_TOLERANCE, f"the scoring check is off by {off:.3g} in the mean"
            (policy_loss(scored, batch, old_log_probs=anchor).numerator / denominator).backward()
            masters.collect()
            for rollout, values in zip(batch.rollouts, batch.split(scored.detach()), strict=True):
                found[f"log-probabilities {update} {rollout.id}"] = values.cpu()
        reduce_gradients(masters, groups)
        for name, master in masters.named.items():
            assert master.grad is not None
            found[f"gradients {update} {name}"] = master.grad.cpu()
        optimizer.step()
        masters.hand_out()
    for name, master in masters.named.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{moment} 2 {name}"] = optimizer.state[master][moment].cpu()
    return found


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limits: Limits) -> str:
    """Return how far two trainings are apart, log-probabilities by token and all else by group of parameters."""
    off = torch.cat([(found[name] - expected[name]).abs() for name in found if name.startswith("log-")])
    mean, largest = float(off.mean()), float(off.max())
    words = f"log-probabilities {mean:.2g} in the mean, {largest:.2g} at most"
    within = mean <= limits.mean and largest <= limits.largest
    assert within, f"{words}, over the limits"
    groups: dict[str, list[str]] = {}
    for name in found:
        if not name.startswith("log-"):
            groups.setdefault(re.sub(r"blocks\.\d+\.", "", name), []).append(name)
    worst: dict[str, float] = {}
    for group, names in groups.items():
        one, two = (torch.cat([side[name].flatten() for name in names]) for side in (found, expected))
        kind = " ".join(group.split()[:2])
        worst[kind] = max(worst.get(kind, 0.0), relative(one, two))
        assert bool(two.any()), f"{group} is all 0, so nothing was compared"
    return f"{words}; {require(worst, limits.relative)}"


def packed_alone(name: str, dtype: torch.dtype, bench: Bench) -> str:
    """Compare two updates on packed rows, recomputation off and on, with two updates one sample a row."""
    usable(bench, name, dtype)
    singles = [[index] for index in range(len(bench.rollouts))]
    expected = train(bench, bench.model(dtype, name), singles, Topology(1))
    words = {}
    for recompute in (False, True):
        found = train(bench, bench.model(dtype, name, recompute), bench.packs, Topology(1))
        words["recomputed" if recompute else "kept"] = _compare(found, expected, LIMITS[dtype])
    same = words["kept"] == words["recomputed"]
    return words["kept"] + (", recomputed alike" if same else f"; recomputed: {words['recomputed']}")


def combined(bench: Bench) -> str:
    """Train once with router losses: finite, replayed as recorded, divided by the whole step; not compared."""
    model = bench.model(BF16, best(bench), recompute=True)
    masters, counts = Masters(model), normalization(bench.rollouts)
    before = {name: master.detach().clone() for name, master in masters.named.items()}
    optimizer = torch.optim.Adam(masters.named.values(), lr=LEARNING_RATE)
    layers = list(bench.config.moe_layers)
    tokens = 0
    for indices in bench.packs:
        batch = bench.row(indices)
        assert batch.routes is not None
        output = model(batch, router_logits=True)
        assert torch.equal(output.routes[:, layers], batch.routes[:, layers].int()), "other experts ran than recorded"
        rows = scored_rows(batch.doc_lens, batch.response_lens).to(bench.device)
        scored = target_log_probs(model.logits(output.hidden[rows]), scored_targets(batch))
        policy = policy_loss(scored, batch, old_log_probs=scored.detach()).numerator / counts.denominator("token")
        balance = load_balancing_loss(output.router_logits, output.routes[:, layers], batch.doc_lens)
        size = router_z_loss(output.router_logits, batch.doc_lens)
        tokens += balance.tokens
        loss = policy + (0.01 * balance.numerator + 0.001 * size.numerator) / counts.model_tokens
        assert bool(loss.isfinite()), f"the loss is {float(loss)}"
        loss.backward()
        masters.collect()
    assert tokens == counts.model_tokens, f"{tokens} tokens were counted of {counts.model_tokens}"
    optimizer.step()
    still = [name for name, master in masters.named.items() if torch.equal(master, before[name])]
    wrong = [name for name, master in masters.named.items() if not bool(master.isfinite().all())]
    assert not still + wrong, f"did not move: {still}; not finite: {wrong}"
    return f"finite, every weight moved, recorded experts ran, {tokens} tokens counted"


def expert_parallel(bench: Bench) -> str:
    """Train packed rows on two ranks that share the experts, and compare with one rank, one sample a row."""
    count = torch.cuda.device_count() if bench.device.type == "cuda" else 2
    if count < 2:
        raise NotRun(f"there is {count} GPU and two are needed")
    name = best(bench)
    expected = train(bench, bench.model(BF16, name), [[i] for i in range(len(bench.rollouts))], Topology(1))
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_share, (bench, name, expected, directory), nprocs=2)
        return "; ".join(f"rank {rank}: {(Path(directory) / str(rank)).read_text()}" for rank in (0, 1))


def _share(rank: int, bench: Bench, name: str, expected: dict[str, Tensor], directory: str) -> None:
    cuda = bench.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
        bench = attrs.evolve(bench, device=torch.device("cuda", rank))
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{directory}/store"
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=2, timeout=PATIENCE)
    try:
        mine = list(range(rank, len(bench.rollouts), 2))
        half = len(mine) // 2
        model = bench.model(BF16, name, group=build_groups(Topology(2, 2), PATIENCE).expert)
        found = train(bench, model, [mine[:half], mine[half:]], Topology(2, 2))
        own = {}
        for key in found:
            share = expected[key].shape[0] // 2
            own[key] = expected[key][rank * share :][:share] if ".experts." in key else expected[key]
        (Path(directory) / str(rank)).write_text(_compare(found, own, LIMITS[BF16]))
    finally:
        dist.destroy_process_group()
