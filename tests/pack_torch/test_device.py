"""What a GPU would refuse, found without one: tensors of a row, a model and a loss that lie on two devices."""

from __future__ import annotations

import attrs
import pytest
import torch
from pack_torch import (
    Rollout,
    SmallModel,
    build_batch,
    full_gradients,
    load_balancing_loss,
    policy_loss,
    router_z_loss,
    scored_rows,
    scored_targets,
    target_log_probs,
)
from pack_torch.testing import assert_documents_isolated, assert_packing_equivalent
from support.far_device import far_device
from support.torch_cases import HYBRID, PACKS, make_rollouts, record_routes


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return record_routes(SmallModel(HYBRID, seed=3, dtype=torch.float64), make_rollouts())


def gradients(
    rollouts: list[Rollout], device: torch.device, attention: str, recompute: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and gradients of one pack under policy and router losses, on the CPU again."""
    model = SmallModel(HYBRID, seed=3, dtype=torch.float64, attention=attention, recompute=recompute).to(device)
    batch = build_batch(rollouts, PACKS[2], replay=True).to(device)
    output = model(batch, router_logits=True)
    rows = scored_rows(batch.doc_lens, batch.response_lens).to(device)
    scored = target_log_probs(model.logits(output.hidden[rows]), scored_targets(batch))
    routed = output.routes[:, list(HYBRID.moe_layers)]
    loss = policy_loss(scored, batch).numerator
    loss = loss + 0.1 * load_balancing_loss(output.router_logits, routed, batch.doc_lens).numerator
    (loss + 0.1 * router_z_loss(output.router_logits, batch.doc_lens).numerator).backward()
    return scored.detach().cpu(), {name: value.cpu() for name, value in full_gradients(model).items()}


def test_the_device_that_is_not_there_refuses_tensors_of_the_cpu_and_only_those() -> None:
    with far_device() as device:
        far = torch.arange(4).to(device)

        assert far.device == device
        assert (far + far.new_ones(4)).cpu().tolist() == [1, 2, 3, 4]
        assert far[torch.tensor([3, 0])].tolist() == [3, 0]
        with pytest.raises(RuntimeError, match="aten::add was given tensors of two devices"):
            far + torch.arange(4)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["segment", "dense"])
def test_rows_model_and_losses_stay_on_the_device_they_were_put_on(
    rollouts: list[Rollout], attention: str, recompute: bool
) -> None:
    expected, wanted = gradients(rollouts, torch.device("cpu"), attention, recompute)

    with far_device() as device:
        found, got = gradients(rollouts, device, attention, recompute)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-12)


def test_the_oracle_probes_a_row_where_it_lies(rollouts: list[Rollout]) -> None:
    with far_device() as device:
        model = SmallModel(HYBRID, seed=3, dtype=torch.float64).to(device)
        batch = build_batch(rollouts, [0, 1], replay=True).to(device)

        assert_documents_isolated(model, batch, embedding=model.embedding)


def test_metadata_of_a_row_lies_where_the_row_does() -> None:
    with far_device() as device:
        batch = build_batch(make_rollouts(), [3, 0, 4]).to(device)

        for name in ("cu_seqlens", "jagged_offsets", "seq_idx", "document_ids", "position_ids"):
            assert getattr(batch, name).device == device, name
        assert batch.concat("advantages").device == device
        mask = batch.block_mask(2)
        assert mask.kv_num_blocks.device == mask.full_kv_indices.device == device


def test_rollouts_on_the_device_are_all_the_oracle_needs_to_compare_there(rollouts: list[Rollout]) -> None:
    with far_device() as device:
        model = SmallModel(HYBRID, seed=3, dtype=torch.float64).to(device)
        there = [attrs.evolve(r, tokens=r.tokens.to(device), routes=r.routes.to(device)) for r in rollouts[:4]]

        assert_packing_equivalent(model, there)
