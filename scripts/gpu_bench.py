"""Where and on what the rows of `gpu_check.py` run, how far apart results may be, and how a row says it cannot run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from pack_core import pack
from pack_torch import (
    AttentionBackend,
    ModelConfig,
    PackedBatch,
    Rollout,
    SmallModel,
    build_batch,
    choose_attention,
    get_attention,
)
from pack_torch.fla_kernels import choose_kernel
from pack_torch.hardware import hardware_of
from torch import Tensor

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@attrs.frozen
class Limits:
    """How far packed and one at a time may be apart: log-probabilities, mean and largest; relative L2 of all else."""

    mean: float
    largest: float
    relative: float


LIMITS = {BF16: Limits(0.005, 0.05, 0.05), FP32: Limits(1e-5, 1e-4, 0.005)}
LIMITS_IN_WORDS = (
    "limits: "
    + "; ".join(
        f"{name}: log-probabilities apart by {LIMITS[dtype].mean:g} in the mean, {LIMITS[dtype].largest:g} at most, "
        f"gradients, Adam's moments and kernels by {LIMITS[dtype].relative:.1%} relative L2"
        for name, dtype in (("bfloat16", BF16), ("float32", FP32))
    )
    + "; float64: every number within 1e-9 * max(1, |x|); documents apart: exactly 0"
)


class NotRun(Exception):
    """A row that cannot run here; the message says why."""


@attrs.frozen(eq=False)
class Bench:
    """Where and on what everything runs: samples, their packs, the model's sizes, and those of the timed model."""

    device: torch.device
    config: ModelConfig
    rollouts: list[Rollout]
    packs: list[list[int]]
    timed_config: ModelConfig
    timed_lengths: list[int]
    timed_capacity: int

    @classmethod
    def build(cls, device: torch.device, tiny: bool) -> Bench:
        """Return the samples with routes recorded one at a time, cut into packs."""
        lengths, capacity = ([5, 19, 7, 11, 3, 26, 8, 2], 48) if tiny else ([17, 187, 19, 130, 23, 289, 64, 11], 384)
        width = 32 if tiny else 256
        kinds = ("linear_attention", "full_attention") * 2
        config = ModelConfig(
            8 * width, hidden_size=width, num_hidden_layers=4, num_attention_heads=width // (16 if tiny else 64),
            intermediate_size=2 * width, moe_intermediate_size=width, n_routed_experts=8, num_experts_per_tok=2,
            layer_types=kinds, moe_latent_dim=width // 2,
        )  # fmt: skip
        linear = device.type == "cpu" or fla_runs("kimi_delta_attention", device)
        timed = attrs.evolve(
            config,
            hidden_size=width if tiny else 1024,
            num_attention_heads=2 if tiny else 16,
            vocab_size=64 if tiny else 8_000,
            layer_types=kinds if linear else ("full_attention",) * 4,
        )
        torch.manual_seed(17)
        model = SmallModel(config, seed=17).to(device)
        rollouts = [
            _recorded(model, drawn_rollout(place, length, config.vocab_size)) for place, length in enumerate(lengths)
        ]
        draw = torch.Generator().manual_seed(17)
        steps = torch.rand(8 if tiny else 32, generator=draw)
        timed_lengths = ((3 + 17 * steps) if tiny else 64 * 32**steps).long().tolist()
        packs = list(pack(lengths, capacity=capacity, strategy="next_fit"))
        return cls(device, config, rollouts, packs, timed, timed_lengths, 48 if tiny else 4096)

    def model(self, dtype: torch.dtype, attention: str, recompute: bool = False, group: Any = None) -> SmallModel:
        """Return the model, always with the same weights."""
        model = SmallModel(
            self.config, seed=17, dtype=dtype, attention=attention, recompute=recompute, expert_group=group
        )
        return model.to(self.device)

    def row(self, indices: Sequence[int]) -> PackedBatch:
        """Return these samples as one row, their routes laid along it."""
        return build_batch(self.rollouts, indices, replay=True).to(self.device)


def drawn_rollout(place: int, length: int, vocabulary: int) -> Rollout:
    """Return a sample of its own seed: a third of it prompt, holes in the mask, advantages that alternate."""
    draw = torch.Generator().manual_seed(place)
    response = length - max(1, length // 3)
    mask = torch.rand(response, generator=draw) > 0.2
    mask[-1] = True
    side = 1.0 if place % 2 else -1.0
    tokens = torch.randint(vocabulary, (length,), generator=draw)
    return Rollout(place, tokens, response, loss_mask=mask, advantages=[side] * response)


def _recorded(model: SmallModel, rollout: Rollout) -> Rollout:
    with torch.no_grad():
        routes = model(build_batch([rollout], [0]).to(model.head.weight.device)).routes
    return attrs.evolve(rollout, routes=routes[:-1].cpu())


def fla_runs(name: str, device: torch.device) -> bool:
    """Return whether fla's kernel of this name would be used on the device."""
    return choose_kernel(name, "auto", torch.empty(1, 1, 1, dtype=BF16, device=device)) == "fla"


def usable(bench: Bench, name: str, dtype: torch.dtype) -> AttentionBackend:
    """Return the backend; raise NotRun with its own words where it cannot train here."""
    backend = get_attention(name)
    lack = backend.lack(hardware_of(bench.device), backward=True, dtype=dtype)
    if lack:
        raise NotRun(f"{name} {lack}")
    return backend


def best(bench: Bench) -> str:
    """Return the backend that `choose_attention` takes here for bfloat16."""
    return choose_attention(bench.device, dtype=BF16)[0].name


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the L2 norm of the difference over that of what was expected; not finite is infinitely far."""
    one, two = found.detach().double(), expected.detach().double()
    size, off = float(two.norm()), float((one - two).norm())
    return (off / size if size else off) if off == off else float("inf")


def require(figures: Mapping[str, float], limit: float) -> str:
    """Return the figures in words; raise AssertionError where one is over the limit, or no number."""
    words = ", ".join(f"{name} {value:.2g}" for name, value in figures.items())
    over = [name for name, value in figures.items() if not value <= limit]
    assert not over, f"{' and '.join(over)} over the limit of {limit:g}: {words}"
    return words
