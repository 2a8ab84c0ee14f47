"""Rollouts and OLMo-core models that the tests of the Core backend share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pack_miles.core.model import CoreModel, build_core
from pack_torch import Rollout, build_batch, normalization, policy_loss, response_log_probs
from torch import Tensor

VOCABULARY = 29

#: (tokens, response tokens) of eight samples: equal lengths, a response of 0, one token of prompt, eight tokens.
SHAPES = ((5, 3), (8, 5), (6, 2), (7, 6), (5, 0), (8, 7), (3, 1), (9, 4))

#: Rows of three, two and three documents.
PACKS = ((0, 1, 2), (3, 4), (5, 6, 7))

#: Every sample in a row of its own.
SINGLES = tuple((index,) for index in range(len(SHAPES)))

LEARNING_RATE = 1e-3


def make_rollouts(routed: tuple[int, int, int] | None = None) -> list[Rollout]:
    """Eight rollouts with masked tokens; with recorded choices where `(layers, experts, top_k)` are given."""
    draw = torch.Generator().manual_seed(5)
    rollouts = []
    for index, (length, response) in enumerate(SHAPES):
        mask = torch.rand(response, generator=draw) > 0.25
        mask[:1] = True
        routes = None
        if routed is not None:
            layers, experts, top_k = routed
            routes = torch.rand(length - 1, layers, experts, generator=draw).argsort(dim=-1)[..., :top_k]
        rollouts.append(
            Rollout(
                id=f"sample-{index}",
                tokens=torch.randint(0, VOCABULARY - 4, (length,), generator=draw),
                response_length=response,
                loss_mask=mask,
                routes=routes,
                advantages=torch.randn(response, generator=draw, dtype=torch.float64),
                old_log_probs=-3.4 + 0.3 * torch.randn(response, generator=draw, dtype=torch.float64),
            )
        )
    return rollouts


def dense_config(**options: Any) -> Any:
    """Two layers of grouped-query attention with query and key norms."""
    from olmo_core.nn.transformer import TransformerConfig

    sizes = {"d_model": 32, "vocab_size": VOCABULARY, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "qk_norm": True}
    return TransformerConfig.llama_like(**(sizes | options))


def windowed_config() -> Any:
    """The same with a sliding window of three tokens in the first layer."""
    from olmo_core.nn.attention import SlidingWindowAttentionConfig

    window = SlidingWindowAttentionConfig(
        pattern=[3, -1], force_full_attention_on_first_layer=False, force_full_attention_on_last_layer=False
    )
    return dense_config(sliding_window=window)


def nudge(core: Any) -> None:
    """Move the weights off their small initial values, so that attention and routing have something to say."""
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=draw).to(parameter.dtype))


def twins(config: Any, dtype: torch.dtype, *, recompute: bool = False) -> tuple[CoreModel, CoreModel]:
    """A model for packed rows, and Core untouched on one sample a row: its own attention, told of no documents."""
    packed = build_core(config, attention="segment", recompute=recompute).to(dtype)
    nudge(packed)
    alone = build_core(config, attention="torch", recompute=recompute).to(dtype)
    alone.load_state_dict(packed.state_dict())
    return CoreModel(packed), CoreModel(alone, packed=False)


def scores(
    model: Any, rollouts: Sequence[Rollout], packs: Sequence[Sequence[int]], replay: bool = False
) -> list[Tensor]:
    """Log-probabilities per rollout, whatever the packs."""
    found: dict[int, Tensor] = {}
    for pack in packs:
        batch = build_batch(rollouts, pack, replay=replay)
        found.update(zip(pack, batch.split(response_log_probs(model, batch)), strict=True))
    return [found[index] for index in range(len(rollouts))]


def gradients(
    model: Any,
    rollouts: Sequence[Rollout],
    packs: Sequence[Sequence[int]],
    *,
    replay: bool = False,
    through: Callable[[Any], Any] = lambda model: model,
) -> dict[str, Tensor]:
    """The gradient of the policy loss over the step's active tokens, one backward a pack."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    tokens = normalization(rollouts).denominator("token")
    for pack in packs:
        batch = build_batch(rollouts, pack, replay=replay)
        (policy_loss(response_log_probs(through(model), batch), batch).numerator / tokens).backward()
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def two_updates(
    model: Any, rollouts: Sequence[Rollout], packs: Sequence[Sequence[int]], *, replay: bool = False
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of two AdamW steps, the parameters after them, and AdamW's second moments."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6)
    seen = []
    for _ in range(2):
        seen.append(gradients(model, rollouts, packs, replay=replay))
        optimizer.step()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    moments = {
        name: optimizer.state[p]["exp_avg_sq"].sqrt() for name, p in model.named_parameters() if p in optimizer.state
    }
    return seen, parameters, moments


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The L2 distance of two sets of tensors over the length of the second."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name].double() - value.double()).square().sum()) for name, value in expected.items())
    size = sum(float(value.double().square().sum()) for value in expected.values())
    assert size > 0
    return (off / size) ** 0.5
