"""Group-relative, sequence-level, held-ratio and preference losses against TRL's own trainers, from its PyPI wheel.

TRL's losses are methods of trainers that load models and data sets; asked here with a stand-in for the trainer, they
compute on padded rows what ours compute on packed ones. Where the two differ, a test says how: a mean of means over
accumulated micro-batches, the limits of CISPO, ratios that overflow, and what a masked token may hold. TRL has no mean
over prompts, so the `group` reduction has no counterpart; it makes advantages and importance weights inside its loop
of generation, where they cannot be asked alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import transformers
from pack_torch import (
    Rollout,
    build_batch,
    chunked_log_probs,
    dpo_loss,
    entropy_bonus,
    kl_loss,
    normalization,
    policy_loss,
)
from pack_torch.huggingface import HuggingFaceModel
from support.loss_cases import clipping_rollouts
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PACKS = [[0, 3], [5, 1, 2], [4]]
LENGTH = 7  # what stands for a response in dr_grpo
LOW, HIGH = 0.2, 0.28
#: TRL's name and its level of ratios -> our kind and reduction.
SAME = {
    ("grpo", "token"): ("ppo", "response"),
    ("bnpo", "token"): ("ppo", "token"),
    ("dapo", "token"): ("ppo", "token"),
    ("dr_grpo", "token"): ("ppo", "constant"),
    ("grpo", "sequence"): ("gspo", "response"),
    ("bnpo", "sequence"): ("gspo", "token"),
    ("dr_grpo", "sequence"): ("gspo", "constant"),
    ("cispo", "token"): ("cispo", "token"),
}


@pytest.fixture
def rollouts() -> list[Rollout]:
    return clipping_rollouts()


@pytest.fixture
def values(rollouts: list[Rollout]) -> list[Tensor]:
    """The current log-probabilities of each sample, moved the way that clips whole samples too."""
    draw = torch.Generator().manual_seed(23)
    made = []
    for rollout in rollouts:
        spread = torch.randn(rollout.response_length, generator=draw, dtype=torch.float64) * 0.8
        made.append((spread - 2.4 + 0.5 * rollout.advantages).requires_grad_())
    return made


def grid(parts: list[Tensor]) -> Tensor:
    """Samples as padded rows `[B, T]`."""
    return pad_sequence(parts, batch_first=True)


def theirs(
    rollouts: list[Rollout], values: list[Tensor], loss_type: str, level: str = "token", **changed: Any
) -> tuple[Tensor, dict[str, list[float]]]:
    """TRL's loss of these samples as one micro-batch, and the metrics it logs."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = grid([rollout.loss_mask.double() for rollout in rollouts])
    ones = torch.ones(len(rollouts), 2, dtype=torch.int64)
    inputs = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.ones_like(mask, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": torch.tensor([float(rollout.advantages[:1].sum()) for rollout in rollouts], dtype=torch.float64),
        "old_per_token_logps": grid([rollout.old_log_probs for rollout in rollouts]),
        "num_items_in_batch": mask.sum(),
    }
    if changed.get("beta"):
        inputs["ref_per_token_logps"] = grid([rollout.ref_log_probs for rollout in rollouts])
    inputs |= changed.pop("inputs", {})
    entropies = grid(changed.pop("entropies", [torch.zeros_like(one) for one in values]))
    options = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1} | changed.pop("args", {})
    one_process = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=False)
    settings = {
        "accelerator": one_process,
        "args": SimpleNamespace(**options),
        "model": SimpleNamespace(training=True),
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "beta": 0.0,
        "max_completion_length": LENGTH,
        "current_gradient_accumulation_steps": 1,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "use_adaptive_entropy": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (grid(values), entropies, None),
    }
    trainer = SimpleNamespace(**settings | changed)
    return GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics["train"]


def ours(
    rollouts: list[Rollout],
    values: list[Tensor],
    kind: str,
    reduction: str,
    weights: list[Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """The same from packed rows: numerators of all packs over the denominator of the step."""
    total = torch.zeros((), dtype=torch.float64)
    for pack in PACKS:
        batch, row = build_batch(rollouts, pack), torch.cat([values[place] for place in pack])
        factors = None if weights is None else torch.cat([weights[place] for place in pack])
        total = total + policy_loss(row, batch, kind=kind, reduction=reduction, weights=factors, **options).numerator
    return total / denominator(rollouts, reduction)


def denominator(rollouts: list[Rollout], reduction: str) -> int:
    return normalization(rollouts).denominator(reduction, length=LENGTH if reduction == "constant" else None)


def assert_same(mine: Tensor, other: Tensor, values: list[Tensor]) -> None:
    """Equal losses, and equal gradients of every sample."""
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    found, expected = (torch.autograd.grad(loss, values, retain_graph=True) for loss in (mine, other))
    assert any(bool(gradient.any()) for gradient in expected)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def cispo_limits(high: float) -> dict[str, float]:
    """TRL holds CISPO's ratio from above alone, at epsilon_high itself rather than 1 + epsilon_high."""
    return {"eps_clip": 1.0, "eps_clip_high": high - 1}


@pytest.mark.parametrize(("loss_type", "level"), list(SAME))
def test_packed_losses_equal_theirs_on_padded_rows(
    rollouts: list[Rollout], values: list[Tensor], loss_type: str, level: str
) -> None:
    kind, reduction = SAME[loss_type, level]
    cispo = kind == "cispo"

    other, metrics = theirs(rollouts, values, loss_type, level, epsilon_high=1.28 if cispo else HIGH)
    mine = ours(rollouts, values, kind, reduction, **cispo_limits(1.28) if cispo else {})

    assert_same(mine, other, values)
    assert max(metrics.get("clip_ratio/region_mean", metrics.get("cispo_clip_ratio"))) > 0, "nothing clips"


def test_the_clipped_share_is_theirs(rollouts: list[Rollout], values: list[Tensor]) -> None:
    _, metrics = theirs(rollouts, values, "bnpo")
    rows = [(torch.cat([values[i] for i in pack]), build_batch(rollouts, pack)) for pack in PACKS]
    clipped = sum(int(policy_loss(row, batch).clipped) for row, batch in rows)

    assert clipped / normalization(rollouts).active_tokens == pytest.approx(metrics["clip_ratio/region_mean"][0])


def test_their_delta_is_the_dual_clip(rollouts: list[Rollout], values: list[Tensor]) -> None:
    likelier = [(one.detach() + 1.0).requires_grad_() for one in values]
    plain, _ = theirs(rollouts, likelier, "bnpo")
    held, _ = theirs(rollouts, likelier, "bnpo", args={"delta": 1.4})

    assert_same(ours(rollouts, likelier, "ppo", "token", dual_clip=1.4), held, likelier)
    assert bool(held < plain), "the dual clip holds a token"


@pytest.mark.parametrize(("loss_type", "reduction"), [("grpo", "response"), ("bnpo", "token"), ("dr_grpo", "constant")])
def test_divergence_as_a_loss_term_is_theirs_and_importance_weights_leave_it_alone(
    rollouts: list[Rollout], values: list[Tensor], loss_type: str, reduction: str
) -> None:
    weights = [torch.linspace(0.5, 2.0, max(one.numel(), 1)).double()[: one.numel()] for one in values]
    importance = {"use_vllm": True, "inputs": {"importance_sampling_ratio": grid(weights)}}

    other, _ = theirs(rollouts, values, loss_type, beta=0.3, **importance)
    mine = ours(rollouts, values, "ppo", reduction, weights=weights)
    for pack in PACKS:
        batch, row = build_batch(rollouts, pack), torch.cat([values[i] for i in pack])
        mine = mine + 0.3 * kl_loss(row, batch, kind="k3", reduction=reduction).numerator / denominator(
            rollouts, reduction
        )

    assert_same(mine, other, values)


@pytest.mark.parametrize(("loss_type", "reduction"), [("grpo", "response"), ("bnpo", "token")])
def test_their_entropy_bonus_is_a_mean_over_tokens_whatever_the_loss(
    rollouts: list[Rollout], values: list[Tensor], loss_type: str, reduction: str
) -> None:
    entropies = [one**2 for one in values]

    other, _ = theirs(rollouts, values, loss_type, entropies=entropies, _entropy_bonus_enabled=True, entropy_coef=0.1)
    mine = ours(rollouts, values, "ppo", reduction)
    for pack in PACKS:
        bonus = entropy_bonus(torch.cat([entropies[i] for i in pack]), build_batch(rollouts, pack), reduction="token")
        mine = mine + 0.1 * bonus.numerator / denominator(rollouts, "token")

    assert_same(mine, other, values)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_update_anchored_on_its_own_forward_is_theirs_without_old_log_probs(
    rollouts: list[Rollout], values: list[Tensor], level: str
) -> None:
    kind, reduction = SAME["grpo", level]
    anchored = [attrs.evolve(one, old_log_probs=own.detach()) for one, own in zip(rollouts, values, strict=True)]

    other, metrics = theirs(rollouts, values, "grpo", level, inputs={"old_per_token_logps": None})

    assert_same(ours(anchored, values, kind, reduction), other, values)
    assert metrics["clip_ratio/region_mean"] == [0.0]


def test_difference_their_accumulated_micro_batches_are_a_mean_of_means(
    rollouts: list[Rollout], values: list[Tensor]
) -> None:
    packs = [[0, 3], [1, 2, 4, 5]]
    parts = []
    for pack in packs:
        own = [rollouts[i] for i in pack], [values[i] for i in pack]
        parts.append(theirs(*own, "bnpo", current_gradient_accumulation_steps=2)[0])
    whole, _ = theirs(rollouts, values, "bnpo")
    tokens = [sum(rollouts[i].active_tokens for i in pack) for pack in packs]
    assert tokens == [7, 5]

    mine = ours(rollouts, values, "ppo", "token")

    assert_same(mine, whole, values)
    # (own mean + own mean) / 2, where the step's mean weighs the first with 7/12 and the second with 5/12.
    assert float(sum(parts).detach()) != pytest.approx(float(whole.detach()), rel=1e-3)
    assert_same(2 * (7 * parts[0] + 5 * parts[1]) / 12, whole, values)


def test_their_dapo_counts_the_whole_step_and_so_adds_up(rollouts: list[Rollout], values: list[Tensor]) -> None:
    packs = [[0, 3], [1, 2, 4, 5]]
    # The count is of the generation batch, here of one step in two micro-batches.
    whole = {"num_items_in_batch": torch.tensor(12.0)}
    accumulated = {"current_gradient_accumulation_steps": 2, "args": {"steps_per_generation": 2}, "inputs": whole}

    parts = [theirs([rollouts[i] for i in p], [values[i] for i in p], "dapo", **accumulated)[0] for p in packs]

    assert_same(ours(rollouts, values, "ppo", "token"), sum(parts), values)


def test_difference_their_cispo_has_no_lower_limit_and_names_the_upper_one_itself() -> None:
    old = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    one = Rollout("a", [1, 2, 3], 2, advantages=[1.0, 1.0], old_log_probs=old)
    new = (old + torch.tensor([4.0, 0.5], dtype=torch.float64).log()).requires_grad_()  # ratios 4 and 1/2
    batch = build_batch([one], [0])

    other, _ = theirs([one], [new], "cispo", epsilon_high=2.0)
    mine = policy_loss(new, batch, kind="cispo", eps_clip=0.2, eps_clip_high=1.0).numerator / 2

    # Both hold 4 at 2; theirs leaves 1/2, ours holds it at 0.8.
    assert float(other.detach()) == pytest.approx((2 * (2 - math.log(4)) + 0.5 * (2 + math.log(2))) / 2, rel=1e-12)
    assert float(mine.detach()) == pytest.approx((2 * (2 - math.log(4)) + 0.8 * (2 + math.log(2))) / 2, rel=1e-12)
    assert_same(policy_loss(new, batch, kind="cispo", **cispo_limits(2.0)).numerator / 2, other, [new])


def test_difference_their_ratio_is_not_held_at_e_to_the_20() -> None:
    one = Rollout("a", [1, 2], 1, advantages=[-1.0], old_log_probs=torch.tensor([-30.0], dtype=torch.float64))
    new = torch.zeros(1, dtype=torch.float64)
    other, _ = theirs([one], [new], "grpo")
    mine = policy_loss(new, build_batch([one], [0])).numerator

    assert float(other) == pytest.approx(math.exp(30))
    assert float(mine) == pytest.approx(math.exp(20))
    # In float32 a ratio of e^89 is infinite.
    far = attrs.evolve(one, old_log_probs=torch.tensor([-89.0]))
    assert math.isinf(float(theirs([far], [new.float()], "grpo")[0]))
    assert float(policy_loss(new.float(), build_batch([far], [0])).numerator) == pytest.approx(math.exp(20))


def test_difference_a_masked_nan_reaches_their_loss(rollouts: list[Rollout], values: list[Tensor]) -> None:
    torn = [one.detach().clone() for one in values]
    torn[1][1] = torch.nan  # of the sample with a masked token in the middle
    assert not bool(rollouts[1].loss_mask[1])

    assert math.isnan(float(theirs(rollouts, torn, "grpo")[0]))  # 0 * NaN
    assert torch.equal(ours(rollouts, torn, "ppo", "response"), ours(rollouts, values, "ppo", "response"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_log_probs_and_entropy_equal_their_selective_log_softmax(temperature: float) -> None:
    from trl.trainer.utils import selective_log_softmax_and_entropy

    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, 8, generator=draw, dtype=torch.float64).requires_grad_()
    head = torch.randn(29, 8, generator=draw, dtype=torch.float64).requires_grad_()
    targets = torch.randint(29, (11,), generator=draw)

    other, spread = selective_log_softmax_and_entropy(hidden @ head.T, targets, temperature=temperature)
    mine, entropy = chunked_log_probs(hidden, head, targets, chunk=4, temperature=temperature, entropy=True)

    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, spread, rtol=1e-12, atol=1e-12)
    assert_same((mine + entropy).square().sum(), (other + spread).square().sum(), [hidden, head])


def test_preference_loss_of_a_packed_row_is_theirs_of_padded_pairs_through_one_llama() -> None:
    """Loss and parameter gradients: their fused head on right-padded rows, ours on one packed row."""
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(17)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, head_dim=8, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).double().eval()
    draw = torch.Generator().manual_seed(5)
    samples = []
    for name, group, length, mask in [
        ("good 1", 1, 9, [1, 1, 0, 0, 1]),  # a masked tool turn inside
        ("good 2", 2, 4, [1]),
        ("bad 1", 1, 6, [1, 1, 1]),
        ("bad 2", 2, 8, [1, 1, 1, 1]),
    ]:
        tokens = torch.randint(0, 64, (length,), generator=draw)
        ref = torch.randn(len(mask), generator=draw, dtype=torch.float64) - 4
        samples.append(Rollout(name, tokens, len(mask), loss_mask=mask, group=group, ref_log_probs=ref))
    parameters = list(model.parameters())

    order = [3, 0, 1, 2]  # the two of a pair lie anywhere in the row
    batch = build_batch(samples, order)
    loss = dpo_loss(HuggingFaceModel(model)(batch), batch, chosen={"good 1", "good 2"}, beta=0.4)
    mine = loss.numerator / loss.pairs
    found = torch.autograd.grad(mine, parameters)

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    scores = torch.stack([one.ref_log_probs[one.loss_mask].sum() for one in samples])
    inputs = {
        "input_ids": grid([one.tokens for one in samples]),
        "attention_mask": grid([torch.ones(one.length, dtype=torch.int64) for one in samples]),
        "completion_mask": grid(
            [torch.cat((torch.zeros(one.length - one.response_length), one.loss_mask)) for one in samples]
        ),
        "ref_chosen_logps": scores[:2],
        "ref_rejected_logps": scores[2:],
    }
    one_process = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        accelerator=one_process,
        model=model,
        beta=0.4,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        use_weighting=False,
        ld_alpha=None,
        aux_loss_enabled=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    other = DPOTrainer._compute_loss(trainer, model, inputs, False)
    expected = torch.autograd.grad(other, parameters)

    # Their fused head takes its softmax in float32 whatever comes in; the margins differ by as much.
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)
    assert trainer._metrics["eval"]["rewards/margins"] == pytest.approx([float(loss.margins.mean())], rel=1e-5)
    assert trainer._metrics["eval"]["rewards/accuracies"] == [loss.preferred / loss.pairs]
    off, size = (
        torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for gradients in ([one - two for one, two in zip(found, expected, strict=True)], expected)
    )
    assert size > 0
    assert off <= 1e-5 * size
