"""Rows from `packed_steps` handed to MILES' own policy loss, against one sample a row, on fixed logits."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from pack_miles.miles.steps import packed_steps
from pack_miles.training.collectives import World
from pack_miles.training.column import ColumnOptions
from torch import Tensor

LENGTHS, RESPONSES, VOCABULARY = [5, 8, 6, 7], [3, 5, 2, 4], 11


def actor_data() -> dict[str, Any]:
    """What a rank's actor holds before its update: a mask with a hole, a sample masked from end to end."""
    draw = torch.Generator().manual_seed(17)
    masks = [torch.ones(response, dtype=torch.int32) for response in RESPONSES]
    masks[1][1] = 0
    masks[2][:] = 0
    old = [torch.full((response,), -2.4) + torch.linspace(-0.3, 0.3, response) for response in RESPONSES]
    return {
        "tokens": [torch.randint(VOCABULARY, (length,), generator=draw) for length in LENGTHS],
        "total_lengths": list(LENGTHS),
        "response_lengths": list(RESPONSES),
        "loss_masks": masks,
        "rewards": [1.0, -1.0, 1.0, -1.0],
        "sample_indices": [0, 1, 2, 3],
        "log_probs": old,
        "rollout_log_probs": [one + torch.linspace(-0.4, 0.4, len(one)) for one in old],
        "ref_log_probs": [one + 0.17 for one in old],
        "advantages": [torch.full((response,), 1.0 - 2.0 * (n % 2)) for n, response in enumerate(RESPONSES)],
    }


def options_of_miles(tis: bool, per_token: bool) -> Namespace:
    return Namespace(
        qkv_format="thd",
        true_on_policy_mode=True,
        rollout_temperature=1.0,
        allgather_cp=False,
        use_rollout_logprobs=False,
        entropy_coef=0.0,
        use_opsm=False,
        advantage_estimator="grpo",
        eps_clip=0.2,
        eps_clip_high=0.28,
        get_mismatch_metrics=False,
        use_tis=tis,
        tis_clip=1.1,
        tis_clip_low=0.9,
        custom_tis_function_path=None,
        custom_pg_loss_reducer_function_path=None,
        use_kl_loss=True,
        kl_loss_coef=0.03,
        kl_loss_type="k3",
        use_unbiased_kl=False,
        calculate_per_token_loss=per_token,
        log_probs_chunk_size=-1,
        dump_details=None,
    )


def loss_over(capacity: int, args: Namespace, table: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the summed loss of a step in rows of a capacity, the gradient of every sample's logits, how many rows."""
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
    from miles.backends.training_utils.loss import policy_loss_function

    logits = table.clone().requires_grad_()
    cut = dict(enumerate(logits.split(LENGTHS)))
    options = ColumnOptions(step_samples=4, capacity=capacity, equalize="samples", max_documents=None)
    (rows,) = packed_steps(actor_data(), options, World(rank=0, size=1), max_length=8)
    total = torch.zeros(())
    for row in rows:
        reduce = get_sum_of_sample_mean(
            row["total_lengths"],
            row["response_lengths"],
            row["loss_masks"],
            calculate_per_token_loss=args.calculate_per_token_loss,
        )
        of_row = torch.cat([cut[index] for index in row["sample_indices"]])[None]
        loss, _ = policy_loss_function(args, row, of_row, reduce)
        total = total + loss
    total.backward()
    return total.detach(), logits.grad, len(rows)


@pytest.mark.parametrize("tis", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_miles_own_loss_of_packed_rows_is_that_of_one_sample_a_row(tis: bool, per_token: bool) -> None:
    table = torch.randn(sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(17)) * 0.3
    args = options_of_miles(tis, per_token)
    packed, packed_gradient, two = loss_over(16, args, table)
    single, single_gradient, four = loss_over(8, args, table)
    assert (two, four) == (2, 4)
    torch.testing.assert_close(packed, single, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(packed_gradient, single_gradient, rtol=1e-6, atol=1e-7)
    assert float(packed_gradient.abs().max()) > 1e-3, "a comparison of zeros proves nothing"
    ends = [sum(LENGTHS[: n + 1]) - 1 for n in range(4)]
    assert float(packed_gradient[ends].abs().max()) == 0.0
