"""Models of OLMo-core as the trainer holds them: which it refuses, that they run, and their weights as one whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pack_core import Topology
from pack_miles.core.fitness import check_runs, check_trainable
from pack_miles.core.model import CoreModel, build_core
from pack_miles.errors import InputError
from pack_miles.settings.config import Config
from pack_miles.training.policy import build_policies
from pack_miles.training.small import SmallPolicy
from pack_torch import Groups, ModelConfig, build_batch
from support.miles_config import make_config
from support.olmo_cases import dense_config, make_rollouts
from support.olmo_experts import ROUTED, expert_config
from support.olmo_ranks import states_on_rank
from support.olmo_runs import CORE, write_run

Run = Callable[..., list[Any]]


def configured(folder: Path, model: Any, **options: Any) -> Config:
    write_run(folder, model)
    return make_config(folder, CORE | {"run.ranks": 1}, **options)


def problems(folder: Path, model: Any, vocabulary: int = 12, **options: Any) -> str:
    config = configured(folder, model, **options)
    with pytest.raises(InputError) as caught:
        check_trainable(CoreModel(build_core(model, attention="segment")), config, vocabulary)
    return str(caught.value)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    told = problems(tmp_path, dense_config(), vocabulary=30)
    assert "vocab_size is 29 but task 'sort' speaks 30 token ids; set vocab_size to 30 or more" in told


@pytest.mark.usefixtures("cpu_leaves")
def test_routers_that_draw_or_drift_are_refused_by_name(tmp_path: Path) -> None:
    told = problems(tmp_path, expert_config(jitter_eps=0.1))
    assert "blocks.1.routed_experts_router.jitter_eps" in told
    assert "draw random numbers in training" in told
    told = problems(tmp_path, expert_config(bias_gamma=0.1))
    assert "blocks.2.routed_experts_router: bias_gamma moves a bias after every step" in told


@pytest.mark.usefixtures("cpu_leaves")
def test_a_loss_over_the_tokens_of_a_forward_does_not_go_with_expert_balancing(tmp_path: Path) -> None:
    balanced = {
        "core__expert_balanced_packing": True,
        "core__expert_parallel_size": 2,
        "run__ranks": 4,
        "miles__use_rollout_routing_replay": True,
    }
    told = problems(tmp_path, expert_config(lb_loss_weight=0.1, z_loss_weight=0.1), **balanced)
    assert "lb_loss_weight with core.expert_balanced_packing = true" in told
    config = configured(tmp_path, expert_config(z_loss_weight=0.1), **balanced)
    check_trainable(CoreModel(build_core(expert_config(z_loss_weight=0.1), attention="segment")), config, 12)


@pytest.mark.usefixtures("cpu_leaves")
def test_a_kernel_that_is_missing_is_found_by_running_and_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CoreModel(build_core(expert_config(), attention="segment"))
    before = model.full_state()
    check_runs(model, torch.device("cpu"))
    assert all(torch.equal(value, before[name]) for name, value in model.full_state().items())

    def missing() -> None:
        raise RuntimeError("no CUDA here\nand more")

    monkeypatch.setattr(torch.cuda, "current_stream", missing)
    with pytest.raises(InputError, match=r"does not run on cpu: no CUDA here; its mixtures of experts"):
        check_runs(model, torch.device("cpu"))


def test_a_model_that_core_cannot_build_here_is_refused() -> None:
    with pytest.raises(InputError, match=r"OLMo-core cannot build this model here: KimiDeltaAttention requires"):
        build_core(expert_config(), attention="segment")


def test_a_mapping_that_is_no_model_of_core_is_refused() -> None:
    with pytest.raises(InputError, match=r"OLMo-core 3\.0\.0 cannot read the model configuration: "):
        build_core({"hidden_size": 3})


def test_one_seed_gives_one_model_whatever_it_is_for(tmp_path: Path) -> None:
    options = {"miles__kl_coef": 0.1, "core__activation_checkpointing": True, "run__seed": 5}
    config = configured(tmp_path, dense_config(), **options)
    made = build_policies(config, 12, Groups(Topology(1)), torch.device("cpu"))
    assert made.reference is not None
    first = made.model.full_state()
    assert first["core.blocks.0.attention.w_q.weight"].dtype == torch.float64
    for other in (made.sampler, made.reference):
        assert other.full_state().keys() == first.keys(), "names do not tell of recomputation"
        assert all(torch.equal(value, first[name]) for name, value in other.full_state().items())
    sixth = make_config(tmp_path, CORE | {"run.ranks": 1}, run__seed=6)
    moved = build_policies(sixth, 12, Groups(Topology(1)), torch.device("cpu")).model.full_state()
    assert not torch.equal(moved["core.blocks.0.attention.w_q.weight"], first["core.blocks.0.attention.w_q.weight"])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = CoreModel(build_core(dense_config(), attention="segment"))
    before = model.full_state()
    wrong = {name: value + 1 for name, value in before.items()}
    wrong["core.lm_head.norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"core\.lm_head\.norm\.weight has shape \[3\] in the state but \[32\]"):
        model.load_full_state(wrong)
    del wrong["core.lm_head.norm.weight"]
    with pytest.raises(ValueError, match=r"differ in core\.lm_head\.norm\.weight \(1 in all\)"):
        model.load_full_state(wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.full_state().items())


def test_shared_experts_are_gathered_in_order_and_shared_out_again(run_on_ranks: Run) -> None:
    answers = run_on_ranks(2, states_on_rank)
    assert answers[0]["whole"].keys() == answers[0]["expected"].keys()
    for answer in answers:
        for name, value in answer["expected"].items():
            assert torch.equal(answer["whole"][name], value), name
            assert torch.equal(answer["doubled"][name], 2 * value), name


@pytest.mark.usefixtures("cpu_leaves")
def test_both_backends_answer_the_same_questions() -> None:
    core = CoreModel(build_core(expert_config(), attention="segment"), replay=True)
    sizes = ModelConfig(
        29,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=8,
        moe_intermediate_size=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )
    batch = build_batch(make_rollouts(ROUTED), [0, 1], replay=True)
    assert batch.routes is not None
    for model in (core, SmallPolicy(sizes, seed=1)):
        assert (model.geometry.layers, model.geometry.vocabulary) == (3, 29)
        assert (model.geometry.moe_layers, model.geometry.experts, model.geometry.top_k) == ((1, 2), 4, 2)
        assert (model.auxiliary_losses(), model.stochastic()) == ([], [])
        model.check(batch)
        output = model.dividing(13.0)(batch)
        assert output.routes.shape == (13, 3, 2)
        assert torch.equal(output.routes[:, 1:], batch.routes[:, 1:].to(torch.int32)), (
            "the recorded choices are executed"
        )
        assert model.logits(output.hidden).shape == (13, 29)
        both = [*model.dense_parameters(), *model.expert_parameters()]
        assert sorted(map(id, both)) == sorted(map(id, model.parameters()))
