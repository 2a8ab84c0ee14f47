"""The routers' auxiliary losses of the small model in the trainer: what they weigh, and that only training has them."""

from typing import Any

import pytest
import torch
from pack_miles.training.small import RouterWeights, SmallPolicy
from pack_torch import ModelConfig, PackedBatch, Rollout, build_batch, response_log_probs
from torch import Tensor

SIZES = ModelConfig(
    12,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=16,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
)
PACKS = ((0, 1), (2, 3, 4))
TOKENS = 4 + 5 + 6 + 7 + 8


def policy(**options: Any) -> SmallPolicy:
    return SmallPolicy(SIZES, seed=3, dtype=torch.float64, **options)


def batches() -> list[PackedBatch]:
    draw = torch.Generator().manual_seed(7)
    rollouts = []
    for number in range(5):
        length = 4 + number
        routes = torch.rand(length - 1, 3, 4, generator=draw).argsort(dim=-1)[..., :2]
        tokens = torch.randint(0, 12, (length,), generator=draw)
        rollouts.append(Rollout(number, tokens, 2, routes=routes))
    return [build_batch(rollouts, pack, replay=True) for pack in PACKS]


def gradients(model: SmallPolicy) -> dict[str, Tensor]:
    """The gradients of a policy loss of 0: those of the router losses alone."""
    model.zero_grad()
    for batch in batches():
        (response_log_probs(model.dividing(TOKENS), batch).sum() * 0.0).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def by_hand(aux: float, z: float) -> dict[str, Tensor]:
    """E / k times counts by mean scores, and the squares of the logits' log-sum-exp, over the tokens of the step."""
    model = policy()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches():
        logits = model(batch, router_logits=True).router_logits
        for place, layer in enumerate(SIZES.moe_layers):
            counts = torch.bincount(batch.routes[:, layer].flatten(), minlength=4).double()
            total = total + aux * 4 / 2 * counts @ logits[:, place].softmax(dim=-1).mean(dim=0) / TOKENS
            total = total + z * logits[:, place].exp().sum(dim=-1).log().square().sum() / TOKENS
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("aux", "z"), [(0.1, 0.0), (0.0, 0.1), (0.1, 0.03)])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_backward_adds_the_router_losses_over_the_tokens_of_the_step(aux: float, z: float, recompute: bool) -> None:
    found, wanted = gradients(policy(router_weights=RouterWeights(aux, z), recompute=recompute)), by_hand(aux, z)
    assert any("router" in name and bool(value.abs().max() > 0) for name, value in wanted.items())
    for name, value in found.items():
        torch.testing.assert_close(value, wanted.get(name, torch.zeros_like(value)), rtol=1e-12, atol=1e-14)


def test_without_weights_nothing_is_added_and_scores_are_the_same_with_them() -> None:
    plain, weighed = policy(), policy(router_weights=RouterWeights(0.1, 0.1))
    assert plain.auxiliary_losses() == []
    assert weighed.auxiliary_losses() == ["router_aux_loss_weight", "router_z_loss_weight"]
    assert all(float(value.abs().max()) == 0 for value in gradients(plain).values())
    for batch in batches():
        assert torch.equal(response_log_probs(plain, batch), response_log_probs(weighed.dividing(1.0), batch))
