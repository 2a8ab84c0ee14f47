"""One rank of the actor, driven by hand: what it refuses, what it counts, and that nothing moves when it stops."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import pack_core
import pytest
import torch
from pack_miles.contract.sink import ContractSink, contract_path
from pack_miles.settings.config import Config
from pack_miles.tasks import TASKS
from pack_miles.training.actor import Actor
from pack_miles.training.collectives import World
from pack_miles.training.scoring import DisagreementError
from pack_miles.training.trainer import build
from pack_torch import PackedBatch, Rollout, SmallModel
from support.miles_config import make_config
from support.miles_runs import TINY, events

SAMPLES = 8

ALONE = TINY | {
    "run.ranks": 1,
    "core.expert_parallel_size": 1,
    "core.max_policy_lag": 0,
    "model.dtype": "float64",
    "miles.rollout_batch_size": 2,
    "miles.global_batch_size": 8,
}


MakeActor = Callable[..., Actor]


@pytest.fixture
def make_actor(tmp_path: Path) -> Iterator[MakeActor]:
    """A maker of actors of one rank and one optimizer step a collection of eight samples, in float64."""
    sinks = []

    def make(**changes: Any) -> Actor:
        config = make_config(tmp_path, ALONE | {"output.root": str(tmp_path / "out")}, **changes)
        sinks.append(ContractSink(contract_path(Path(config.output.root), 0), 0))
        ticks = map(float, count())
        actor, _ = build(config, TASKS["sort"], World(0, 1), sinks[-1], lambda: next(ticks), torch.device("cpu"))
        return actor

    yield make
    for sink in sinks:
        sink.close()


def make_rollouts(config: Config, model: SmallModel) -> list[Rollout]:
    """Return eight samples of growing length with recorded routes of their own."""
    generator = torch.Generator().manual_seed(1)
    shape = (config.model.num_hidden_layers, config.model.num_experts_per_tok)
    made = []
    for number in range(SAMPLES):
        length = 6 + number
        made.append(
            Rollout(
                id=number,
                tokens=torch.randint(0, 12, (length,), generator=generator),
                response_length=4,
                group=number // 4,
                routes=torch.stack([torch.arange(2).expand(shape)] * (length - 1)).to(torch.int32),
                advantages=torch.full((4,), 1.0 if number % 2 else -1.0, dtype=torch.float64),
                rollout_log_probs=torch.full((4,), -2.0, dtype=torch.float64),
                weight_versions=("0",),
            )
        )
    return made


def plan_of(config: Config, rollouts: list[Rollout], capacity: int | None = None) -> pack_core.Plan:
    """Return the plan of the samples, over the configured capacity unless another is given."""
    return pack_core.plan(
        [pack_core.Sample(id=r.id, length=r.length, group=r.group) for r in rollouts],
        topology=pack_core.Topology(ranks=1),
        capacity=capacity or config.capacity,
        step_samples=SAMPLES,
    )


def train(actor: Actor, rollouts: list[Rollout], capacity: int | None = None) -> None:
    actor.train(0, rollouts, plan_of(actor.config, rollouts, capacity))


def before(actor: Actor) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in actor.model.parameters()]


def assert_nothing_moved(actor: Actor, weights: list[torch.Tensor], root: Path) -> None:
    assert actor.completed_steps == 0
    assert all(torch.equal(one, other) for one, other in zip(actor.model.parameters(), weights, strict=True))
    assert events(root, 0, "optimizer") == []


def test_an_update_of_several_packs_counts_once(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor()
    rollouts = make_rollouts(actor.config, actor.model)
    assert plan_of(actor.config, rollouts).steps[0].packs_per_rank == 2
    train(actor, rollouts)
    (update,) = events(tmp_path / "out", 0, "optimizer")
    assert (actor.completed_steps, update["step"], update["local_microbatches"]) == (1, 1, 2)
    assert update["normalization"]["active_tokens"] == SAMPLES * 4
    assert update["normalization"]["model_tokens"] == sum(range(6, 14))
    assert update["scoring_pass"] == "checked"


def test_a_step_without_one_active_token_stops(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor()
    weights = before(actor)
    masked = [
        attrs.evolve(rollout, loss_mask=torch.zeros(4, dtype=torch.bool))
        for rollout in make_rollouts(actor.config, actor.model)
    ]
    with pytest.raises(ValueError, match="none of the step's 8 samples has a token that trains"):
        train(actor, masked)
    assert_nothing_moved(actor, weights, tmp_path / "out")


def test_one_fully_masked_sample_is_no_nan_and_no_token(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor(miles__calculate_per_token_loss=False)
    rollouts = make_rollouts(actor.config, actor.model)
    rollouts[3] = attrs.evolve(rollouts[3], loss_mask=torch.zeros(4, dtype=torch.bool))
    train(actor, rollouts)
    (update,) = events(tmp_path / "out", 0, "optimizer")
    assert update["normalization"]["active_tokens"] == (SAMPLES - 1) * 4
    assert update["normalization"]["samples"] == SAMPLES
    assert all(torch.isfinite(parameter).all() for parameter in actor.model.parameters())


def test_scoring_that_disagrees_with_training_stops_before_the_step(
    make_actor: MakeActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make_actor()
    weights = before(actor)
    honest = Actor._scored

    def shifted(self: Actor, rollout: Rollout, log_probs: torch.Tensor, ref: torch.Tensor) -> Rollout:
        return honest(self, rollout, log_probs + 0.01, ref)

    monkeypatch.setattr(Actor, "_scored", shifted)
    with pytest.raises(DisagreementError, match=r"differ by 0\.01 on average over 32 active tokens"):
        train(actor, make_rollouts(actor.config, actor.model))
    assert_nothing_moved(actor, weights, tmp_path / "out")
    (check,) = events(tmp_path / "out", 0, "scoring_check")
    assert check["mean_abs"] == pytest.approx(0.01)
    assert check["tokens_above_edge"] == 32


def test_packs_that_differ_from_the_plan_stop(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor()
    weights = before(actor)
    with pytest.raises(ValueError, match="but the plan says"):
        train(actor, make_rollouts(actor.config, actor.model), capacity=50)
    assert_nothing_moved(actor, weights, tmp_path / "out")


@pytest.mark.parametrize(("version", "age"), [(("1",), "-1 updates old"), ((), "names no policy version")])
def test_a_sample_of_an_impossible_policy_version_stops(
    make_actor: MakeActor, version: tuple[str, ...], age: str
) -> None:
    actor = make_actor()
    rollouts = make_rollouts(actor.config, actor.model)
    rollouts[5] = attrs.evolve(rollouts[5], weight_versions=version)
    with pytest.raises(ValueError, match=f"sample 5.*{age}"):
        train(actor, rollouts)
    assert actor.completed_steps == 0


def test_routes_out_of_range_are_named_before_any_forward(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor()
    rollouts = make_rollouts(actor.config, actor.model)
    routes = rollouts[2].routes.clone()
    routes[1, 2, 0] = 4
    rollouts[2] = attrs.evolve(rollouts[2], routes=routes)
    with pytest.raises(ValueError, match="sample 2"):
        train(actor, rollouts)
    rollouts[2] = attrs.evolve(rollouts[2], routes=None)
    with pytest.raises(ValueError, match="sample 2 has no routes but replay is on"):
        train(actor, rollouts)


def test_a_gradient_that_is_not_finite_is_rejected_and_written_down(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor()
    rollouts = make_rollouts(actor.config, actor.model)
    weights = before(actor)
    actor.model.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(RuntimeError, match="gradient of update 1 is not finite"):
        train(actor, rollouts)
    assert_nothing_moved(actor, weights, tmp_path / "out")
    (rejected,) = events(tmp_path / "out", 0, "optimizer_rejected")
    assert rejected["gradient_norm"] is None


def test_kl_in_the_advantages_takes_the_log_ratio_to_the_reference_off(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor(miles__kl_coef=0.5)
    rollouts = make_rollouts(actor.config, actor.model)
    assert actor.scoring_pass.standalone
    scored = actor._scored(rollouts[1], torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.5, -2.0, -1.0, -4.0]))
    # Advantage 1 everywhere, log-ratios 0.5, 0, -2, 0, each halved.
    assert scored.advantages.tolist() == [0.75, 1.0, 2.0, 1.0]
    train(actor, rollouts)
    assert actor.completed_steps == 1


def test_dropout_scores_standalone_and_is_not_compared(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor(model__dropout=0.2)
    assert "dropout" in actor.scoring_pass.reason
    train(actor, make_rollouts(actor.config, actor.model))
    assert events(tmp_path / "out", 0, "scoring_check") == []
    assert events(tmp_path / "out", 0, "optimizer")[0]["scoring_pass"] == "standalone"


@pytest.mark.parametrize("field", ["advantages", "rollout_log_probs"])
def test_a_number_that_is_not_finite_is_named_where_it_trains_and_ignored_where_it_does_not(
    make_actor: MakeActor, field: str
) -> None:
    actor = make_actor()
    rollouts = make_rollouts(actor.config, actor.model)
    broken = getattr(rollouts[4], field).clone()
    broken[2] = float("nan")
    rollouts[4] = attrs.evolve(rollouts[4], **{field: broken})
    with pytest.raises(ValueError, match=f"sample 4: {field} is nan at response token 2"):
        train(actor, rollouts)
    mask = torch.tensor([True, True, False, True])
    rollouts[4] = attrs.evolve(rollouts[4], loss_mask=mask)
    train(actor, rollouts)
    assert all(torch.isfinite(parameter).all() for parameter in actor.model.parameters())


def test_rollouts_without_log_probabilities_train_unless_they_are_to_be_compared(
    make_actor: MakeActor, tmp_path: Path
) -> None:
    actor = make_actor()
    bare = [attrs.evolve(rollout, rollout_log_probs=None) for rollout in make_rollouts(actor.config, actor.model)]
    train(actor, bare)
    assert events(tmp_path / "out", 0, "scores") == []
    strict = make_actor(core__max_train_rollout_logprob_abs_diff=0.5)
    with pytest.raises(ValueError, match="sample 0 has no rollout_log_probs"):
        train(strict, bare)


def test_the_reference_routes_for_itself_and_the_policy_replays(
    make_actor: MakeActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make_actor(miles__kl_coef=0.5)
    seen = set()
    honest = Actor._forward

    def watch(self: Actor, model: SmallModel, batch: PackedBatch) -> torch.Tensor:
        seen.add(("reference" if model is self.reference else "policy", "live" if batch.routes is None else "replayed"))
        return honest(self, model, batch)

    monkeypatch.setattr(Actor, "_forward", watch)
    train(actor, make_rollouts(actor.config, actor.model))
    assert seen == {("policy", "replayed"), ("reference", "live")}


def test_router_losses_are_weighed_as_the_run_file_says_and_the_policy_objective_is_the_same(
    make_actor: MakeActor, tmp_path: Path
) -> None:
    told = []
    for name, changes in {"plain": {}, "weighed": {"router_aux_loss_weight": 0.5, "router_z_loss_weight": 0.5}}.items():
        options = {f"core__{key}": value for key, value in changes.items()}
        actor = make_actor(output__root=str(tmp_path / name), **options)
        train(actor, make_rollouts(actor.config, actor.model))
        told += events(tmp_path / name, 0, "optimizer")
    plain, weighed = told
    assert weighed["gradient_norm"] > 1.01 * plain["gradient_norm"]
    assert weighed["local_policy_objective"] == plain["local_policy_objective"]
