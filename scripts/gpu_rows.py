"""Rows of `gpu_check.py` on kernels, isolation and speed: each returns its figures, or raises why there are none."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from gpu_bench import BF16, LIMITS, Bench, NotRun, best, drawn_rollout, fla_runs, relative, require, usable
from pack_core import pack
from pack_torch import PackedBatch, Rollout, SmallModel, build_batch, policy_loss, recurrence, response_log_probs
from pack_torch.fla_kernels import KERNELS, choose_kernel
from pack_torch.probe import score
from pack_torch.testing import assert_documents_isolated, assert_packing_equivalent
from torch import Tensor

FLA_KERNELS = tuple(KERNELS)
WAYS = ("packed", "padded", "one at a time")


def attention(name: str, dtype: torch.dtype, bench: Bench) -> str:
    """Compare a backend, with a window and fewer key heads where it has them, with a softmax written out in float64."""
    backend = usable(bench, name, dtype)
    lengths = tuple(rollout.length for rollout in bench.rollouts)
    batch = PackedBatch(torch.zeros(sum(lengths), dtype=torch.int64), lengths).to(bench.device)
    draw = torch.Generator().manual_seed(3)
    heads, size = 4, bench.config.hidden_size // bench.config.num_attention_heads
    counts = (heads, *[heads // 2 if backend.grouped_heads else heads] * 2, heads)
    *inputs, weights = (
        torch.randn(batch.tokens, count, size, generator=draw).to(bench.device, dtype) for count in counts
    )
    figures = {}
    for window in (None, 9) if backend.window else (None,):
        parts = [part.detach().requires_grad_() for part in inputs]
        found = backend(*parts, batch, window=window)
        exact = [part.detach().double().requires_grad_() for part in inputs]
        expected = torch.cat([_softmax(*rows, window) for rows in zip(*(p.split(lengths) for p in exact), strict=True)])
        got, wanted = torch.autograd.grad(found, parts, weights), torch.autograd.grad(expected, exact, weights.double())
        suffix = f" (window {window})" if window else ""
        figures[f"output{suffix}"] = relative(found, expected)
        figures[f"gradients{suffix}"] = max(map(relative, got, wanted))
    return require(figures, LIMITS[dtype].relative)


def _softmax(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    rows = torch.arange(query.shape[0], device=query.device)
    distance = rows[:, None] - rows
    seen = (distance >= 0) & (distance < (window or len(rows)))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def kernel(name: str, bench: Bench) -> str:
    """Compare one of fla's kernels with the loop in plain torch, in float32."""
    if not fla_runs(name, bench.device):
        try:
            choose_kernel(name, "fla", torch.empty(1, 1, 1, dtype=BF16, device=bench.device))
        except ValueError as why:
            raise NotRun(str(why)) from None
    lengths = tuple(rollout.length for rollout in bench.rollouts)
    draw = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(sum(lengths), *shape, generator=draw).to(bench.device)

    if name == "short_convolution":
        inputs, options = [drawn(64), drawn(64)[:64, :4].contiguous()], {"activation": "silu"}
    else:
        decay = -drawn(2, 64).exp() if name == "kimi_delta_attention" else -drawn(2).exp()
        inputs, options = [drawn(2, 64), drawn(2, 64), drawn(2, 64), decay, drawn(2).sigmoid()], {"l2norm": True}
    narrow = [part if place == 3 else part.to(BF16) for place, part in enumerate(inputs)]  # a decay stays wide
    function: Callable[..., Tensor] = getattr(recurrence, name)
    results = []
    for backend, parts in (("fla", narrow), ("torch", [part.float() for part in narrow])):
        parts = [part.detach().requires_grad_() for part in parts]
        found = function(*parts, lengths, backend=backend, **options)
        results.append((found, torch.autograd.grad(found.float().square().sum(), parts)))
    (found, got), (expected, wanted) = results
    figures = {"output": relative(found, expected), "gradients": max(map(relative, got, wanted))}
    return require(figures, LIMITS[BF16].relative)


def isolation(name: str, dtype: torch.dtype, bench: Bench) -> str:
    """Change each document in turn, and ask for the same bits in all others; NaN too, where nothing multiplies it."""
    usable(bench, name, dtype)
    model = bench.model(dtype, name)
    probe = name in ("segment", "varlen")
    embedding = model.embedding if probe else None
    assert_documents_isolated(model, bench.row(max(bench.packs, key=len)), embedding=embedding)
    return "others unchanged to the last bit" + (", NaN stays in its document" if probe else "")


def sensitivity(bench: Bench) -> str:
    """Take a row for one document on purpose: the limits must catch it, or the rows above and below say nothing."""
    model = bench.model(BF16, best(bench))

    def joined(batch: PackedBatch) -> Any:
        return model(PackedBatch(batch.input_ids, (batch.tokens,), routes=batch.routes))

    joined.logits = model.logits  # type: ignore[attr-defined]
    batch = bench.row(bench.packs[0])
    with torch.no_grad():
        off = (score(joined, batch) - score(model, batch)).abs()
    mean, limit = float(off.mean()), LIMITS[BF16].mean
    assert mean > limit, f"a row taken for one document is off by {mean:.2g} in the mean, within the limit of {limit:g}"
    return f"off by {mean:.2g} in the mean, {float(off.max()):.2g} at most"


def oracle(bench: Bench) -> str:
    """Ask `pack_torch.testing` about the model in float64, where the bounds are those of the tests on a CPU."""
    even, there = -math.log(bench.config.vocab_size), bench.device
    rollouts = [
        attrs.evolve(
            one,
            tokens=one.tokens.to(there),
            routes=None if one.routes is None else one.routes.to(there),
            old_log_probs=torch.full((one.response_length,), even),
        )
        for one in bench.rollouts
    ]
    assert_packing_equivalent(bench.model(torch.float64, "segment"), rollouts, packs=bench.packs)
    return "log-probabilities, loss, gradients, weights and Adam's moments over two updates"


def timing(way: str, bench: Bench) -> str:
    """Measure forward, backward and optimizer over the same samples, the best of three after one to warm up."""
    config = bench.timed_config
    name = best(bench)
    model = SmallModel(config, seed=17, dtype=BF16, attention=name).to(bench.device)
    rollouts = [drawn_rollout(place, length, config.vocab_size) for place, length in enumerate(bench.timed_lengths)]
    packs = list(pack(bench.timed_lengths, capacity=bench.timed_capacity, strategy="next_fit"))
    if way == "one at a time":
        packs = [[index] for index in range(len(rollouts))]
    elif way == "padded":
        rollouts = [_padded(rollout, max(bench.timed_lengths)) for rollout in rollouts]
    batches = [build_batch(rollouts, indices).to(bench.device) for indices in packs]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    cuda = bench.device.type == "cuda"
    seconds = []
    for trial in range(4):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        optimizer.zero_grad()
        for batch in batches:
            scored = response_log_probs(model, batch)
            policy_loss(scored, batch, old_log_probs=scored.detach()).numerator.backward()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        seconds += [time.perf_counter() - begin] * (trial > 0)
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at the peak" if cuda else "memory not measured"
    layers = "with KDA" if "linear_attention" in (config.layer_types or ()) else "without KDA, for fla does not run"
    real = sum(bench.timed_lengths)
    return (
        f"{1000 * min(seconds):.0f} ms ({statistics.median(seconds) * 1000:.0f} median), {peak}; {real:,} real tokens "
        f"of {sum(batch.tokens for batch in batches):,} in {len(batches)} forwards; {name}, {layers}"
    )


def _padded(rollout: Rollout, length: int) -> Rollout:
    """Return the rollout as a padded row costs: filled up at its end to `length`, the filling masked."""
    more = length - rollout.length
    return Rollout(
        rollout.id,
        torch.cat([rollout.tokens, torch.zeros(more, dtype=torch.int64)]),
        rollout.response_length + more,
        loss_mask=torch.cat([rollout.loss_mask, torch.zeros(more, dtype=torch.bool)]),
        advantages=torch.cat([rollout.advantages, torch.zeros(more)]),
    )
