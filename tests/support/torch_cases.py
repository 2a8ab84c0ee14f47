"""Small models, rollouts and whole optimizer steps that several tests share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from pack_core import Topology
from pack_torch import (
    ModelConfig,
    Rollout,
    SmallModel,
    build_batch,
    build_groups,
    clip_gradients,
    full_gradients,
    full_state,
    gradient_norm,
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

CONFIG = ModelConfig(
    vocab_size=23,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    dense_layers_indices=(0,),
)

#: Kimi delta attention, full attention, Kimi delta attention; latent experts in the last two.
HYBRID = attrs.evolve(
    CONFIG,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    linear_key_head_dim=4,
    linear_conv_kernel_dim=3,
    moe_latent_dim=6,
)

#: (tokens, response tokens) of eight samples: equal lengths, a response of 0, one token of prompt.
SHAPES = ((5, 3), (8, 5), (6, 2), (7, 6), (5, 0), (8, 7), (3, 1), (9, 4))

#: One rank's packs of the eight samples, and two ranks' (by stride), in several documents a row.
PACKS = ((0, 1, 2), (3, 4), (5, 6, 7))
PACKS_OF_TWO = (((0, 2), (4, 6)), ((1, 3, 5), (7,)))
PACKS_OF_FOUR = (((0, 4),), ((1, 5),), ((2, 6),), ((3, 7),))


def make_rollouts(seed: int = 0) -> list[Rollout]:
    """Eight rollouts with interior masks, sample 2 fully masked, and clipping active on both sides."""
    draw = torch.Generator().manual_seed(seed)
    rollouts = []
    for index, (length, response) in enumerate(SHAPES):
        mask = torch.rand(response, generator=draw) > 0.25
        mask[:1] = True
        rollouts.append(
            Rollout(
                id=f"sample-{index}",
                tokens=torch.randint(0, CONFIG.vocab_size, (length,), generator=draw),
                response_length=response,
                loss_mask=torch.zeros(response) if index == 2 else mask,
                group=index // 2,
                advantages=torch.full((response,), 1.0 if index % 3 else -1.0, dtype=torch.float64),
                old_log_probs=-3.1 + 0.4 * torch.randn(response, generator=draw, dtype=torch.float64),
            )
        )
    return rollouts


def record_routes(model: SmallModel, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same rollouts with the routes of a live forward of each alone, less the row of the last token."""
    recorded = []
    for rollout in rollouts:
        with torch.no_grad():
            routes = model(build_batch([rollout], [0])).routes
        recorded.append(attrs.evolve(rollout, routes=routes[:-1]))
    return recorded


def accumulate(
    model: SmallModel,
    rollouts: Sequence[Rollout],
    packs: Sequence[Sequence[int]],
    reduction: str = "token",
    replay: bool = True,
    router: Mapping[str, Any] | None = None,
) -> tuple[float, dict[Any, torch.Tensor]]:
    """Forward and backward over `packs`; this rank's loss and the log-probabilities by sample id.

    With `router`, the options of the balancing loss, both router losses are added, from the same forward.
    """
    counts = normalization(rollouts)
    denominator = counts.denominator(reduction)
    loss, log_probs = 0.0, {}
    for pack in packs:
        batch = build_batch(rollouts, pack, replay=replay)
        if router is None:
            scored = response_log_probs(model, batch)
            part = policy_loss(scored, batch, reduction=reduction).numerator / denominator
        else:
            output = model(batch, router_logits=True)
            rows = scored_rows(batch.doc_lens, batch.response_lens)
            scored = target_log_probs(model.logits(output.hidden[rows]), scored_targets(batch))
            part = policy_loss(scored, batch, reduction=reduction).numerator / denominator
            routes = output.routes[:, list(model.config.moe_layers)]
            balance = load_balancing_loss(output.router_logits, routes, batch.doc_lens, **router)
            size = router_z_loss(output.router_logits, batch.doc_lens, reduction="response").numerator
            documents, tokens = counts.samples, counts.model_tokens
            part = part + 0.5 * balance.numerator / (documents if router["reduction"] == "response" else tokens)
            part = part + 0.1 * size / documents
        part.backward()
        loss += float(part.detach())
        log_probs |= {r.id: values for r, values in zip(batch.rollouts, batch.split(scored.detach()), strict=True)}
    return loss, log_probs


def train(
    rollouts: Sequence[Rollout],
    packs: Sequence[Sequence[int]],
    *,
    topology: Topology | None = None,
    reduction: str = "token",
    recompute: bool = False,
    attention: str = "segment",
    seed: int = 3,
    config: ModelConfig = CONFIG,
    router: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Two Adam steps over the same packs in float64; every number they leave."""
    groups = build_groups(topology or Topology(1))
    model = SmallModel(
        config,
        seed=seed,
        dtype=torch.float64,
        attention=attention,
        recompute=recompute,
        expert_group=groups.expert,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps = []
    for _ in range(2):
        optimizer.zero_grad()
        loss, log_probs = accumulate(model, rollouts, packs, reduction, router=router)
        reduce_gradients(model, groups)
        gradients, norm = full_gradients(model), gradient_norm(model, groups)
        clip_gradients(model, 1e9, groups)
        optimizer.step()
        steps.append({"loss": loss, "log_probs": log_probs, "gradients": gradients, "norm": norm})
    return {"steps": steps, "state": full_state(model)} | adam_moments(model, optimizer)


def adam_moments(model: SmallModel, optimizer: torch.optim.Adam) -> dict[str, dict[str, torch.Tensor]]:
    """Both moments by parameter name, experts gathered; the model's gradients are lost."""
    found = {}
    for moment in ("exp_avg", "exp_avg_sq"):
        for parameter in model.parameters():
            parameter.grad = optimizer.state[parameter][moment]
        found[moment] = full_gradients(model)
    return found


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-9) -> None:
    """Every entry within tolerance * max(1, |expected|)."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    error = ((actual - expected).abs() / expected.abs().clamp(min=1)).max() if expected.numel() else torch.zeros(())
    assert float(error) <= tolerance, f"{what}: off by {float(error)}"


def assert_same_training(parts: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """The ranks' results together are the result of one process: losses add up, samples are disjoint, weights agree."""
    for step, wanted in enumerate(expected["steps"]):
        found = [part["steps"][step] for part in parts]
        log_probs: dict[Any, torch.Tensor] = {}
        for one in found:
            assert not log_probs.keys() & one["log_probs"].keys()
            log_probs |= one["log_probs"]
        assert log_probs.keys() == wanted["log_probs"].keys()
        for name, values in wanted["log_probs"].items():
            assert_close(log_probs[name], values, f"step {step} log-probabilities of {name}")
        assert abs(sum(one["loss"] for one in found) - wanted["loss"]) <= 1e-9 * max(1, abs(wanted["loss"]))
        for one in found:
            assert abs(one["norm"] - wanted["norm"]) <= 1e-9 * max(1, wanted["norm"])
            for name, values in wanted["gradients"].items():
                assert_close(one["gradients"][name], values, f"step {step} gradient of {name}")
    for part in parts:
        for kind in ("state", "exp_avg", "exp_avg_sq"):
            assert part[kind].keys() == expected[kind].keys()
            for name, values in expected[kind].items():
                assert_close(part[kind][name], values, f"{kind} of {name} after two steps")


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Names of the torch.distributed collectives called inside the block, in order."""
    names = [
        "all_reduce", "all_to_all_single", "all_to_all", "all_gather", "all_gather_into_tensor", "all_gather_object",
        "broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "barrier",
        "broadcast_object_list", "send", "recv",
    ]  # fmt: skip
    originals = {name: getattr(dist, name) for name in names}
    calls: list[str] = []

    def counting(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            return originals[name](*arguments, **keywords)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
