"""The routers' auxiliary losses in real OLMo-core, weighed by the optimizer step and not by its packs."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pack_miles.core.arguments import auxiliary_denominator
from pack_miles.core.model import CoreModel, build_core
from pack_miles.errors import InputError
from pack_torch import build_batch, normalization, response_log_probs
from support.olmo_cases import PACKS, dense_config, make_rollouts
from support.olmo_experts import EXPERTS, ROUTED, TOP_K, expert_config, expert_model
from torch import Tensor

pytestmark = pytest.mark.usefixtures("cpu_leaves")

WEIGHT = "core.blocks.2.routed_experts_router.weight"


def router_gradient(model: CoreModel, packs: Sequence[Sequence[int]], factor: float) -> tuple[Tensor, list[Tensor]]:
    """The last router's gradient with a policy loss of 0, and its inputs, one per pack."""
    inputs: list[Tensor] = []
    router = model.core.blocks["2"].routed_experts_router
    hook = router.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0].detach()))
    model.zero_grad()
    rollouts = make_rollouts(ROUTED)
    for pack in packs:
        batch = build_batch(rollouts, pack, replay=True)
        (response_log_probs(model.dividing(factor), batch).sum() * 0.0).backward()
    hook.remove()
    return router.weight.grad.clone(), inputs


def test_z_loss_is_the_steps_whatever_the_packs() -> None:
    """The squares of all tokens' log-sum-exp over the tokens of the step, by hand."""
    model = expert_model(z_loss_weight=0.1)
    factor = auxiliary_denominator(normalization(make_rollouts(ROUTED)))
    assert factor == 51
    for packs in (PACKS, [range(8)]):
        found, inputs = router_gradient(model, packs, factor)
        weight = model.core.blocks["2"].routed_experts_router.weight.detach().clone().requires_grad_()
        logits = torch.cat([rows[0] for rows in inputs]) @ weight.view(EXPERTS, -1).T
        assert logits.shape == (51, EXPERTS)
        (0.1 * logits.logsumexp(dim=-1).square().sum() / 51).backward()
        torch.testing.assert_close(found, weight.grad, rtol=1e-5, atol=1e-7)


def test_load_balancing_is_per_forward_and_weighed_by_its_tokens() -> None:
    """E / k * sum over packs of counts . mean scores, over the tokens of the step."""
    model = expert_model(lb_loss_weight=0.1)
    found, inputs = router_gradient(model, PACKS, 51)
    weight = model.core.blocks["2"].routed_experts_router.weight.detach().clone().requires_grad_()
    rollouts = make_rollouts(ROUTED)
    total = torch.zeros(())
    for pack, rows in zip(PACKS, inputs, strict=True):
        chosen = torch.cat([torch.cat([rollouts[i].routes[:, 2], torch.tensor([[0, 1]])]) for i in pack])
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
        scores = (rows[0] @ weight.view(EXPERTS, -1).T).softmax(dim=-1)
        total = total + 0.1 * EXPERTS / TOP_K * counts @ scores.mean(dim=0) / 51
    total.backward()
    torch.testing.assert_close(found, weight.grad, rtol=1e-5, atol=1e-7)


def test_recomputation_does_not_add_them_twice() -> None:
    options = {"z_loss_weight": 0.1, "lb_loss_weight": 0.1}
    kept, _ = router_gradient(expert_model(**options), PACKS, 51)
    again, _ = router_gradient(expert_model(**options, recompute=True), PACKS, 51)
    assert torch.equal(kept, again)


def test_a_training_forward_without_the_factor_is_refused_and_scoring_needs_none() -> None:
    model = expert_model(z_loss_weight=0.1, lb_loss_weight=0.01)
    batch = build_batch(make_rollouts(ROUTED), PACKS[0], replay=True)
    with pytest.raises(ValueError, match=r"auxiliary losses \(lb_loss_weight, z_loss_weight\) but no loss_div_factor"):
        model(batch)
    with torch.no_grad():
        scored = response_log_probs(model, batch)
    model.eval()
    torch.testing.assert_close(response_log_probs(model, batch), scored, rtol=0, atol=0)
    assert expert_model()(batch).hidden.requires_grad


def test_the_weights_of_a_run_file_stand_in_for_those_of_the_configuration() -> None:
    def built(config: Any, **weights: float | None) -> CoreModel:
        return CoreModel(build_core(config, attention="segment", **weights), replay=True)

    wanted = built(expert_config(lb_loss_weight=0.1, z_loss_weight=0.2))
    found = built(expert_config(z_loss_weight=0.7), lb_loss_weight=0.1, z_loss_weight=0.2)
    off = built(expert_config(lb_loss_weight=0.1, z_loss_weight=0.7), lb_loss_weight=0.0, z_loss_weight=0.0)
    kept = built(expert_config(z_loss_weight=0.7), lb_loss_weight=None, z_loss_weight=None)
    assert found.auxiliary_losses() == ["lb_loss_weight", "z_loss_weight"]
    assert (off.auxiliary_losses(), kept.auxiliary_losses()) == ([], ["z_loss_weight"])
    assert torch.equal(router_gradient(found, PACKS, 51)[0], router_gradient(wanted, PACKS, 51)[0])
    with pytest.raises(InputError, match=r"z_loss_weight = 0\.1 but no layer has routed experts"):
        build_core(dense_config(), attention="segment", z_loss_weight=0.1)
