"""Real OLMo-core with delta attention, full attention and latent experts: packing and replay change nothing."""

import copy
import re
from typing import Any

import attrs
import pytest
import torch
from pack_miles.core.model import CoreModel, build_core
from pack_miles.core.replay import RouterHook, routers
from pack_miles.errors import InputError
from pack_torch import build_batch, normalization, policy_loss, response_log_probs
from pack_torch.testing import assert_documents_isolated
from support.olmo_cases import PACKS, SINGLES, dense_config, distance, gradients, make_rollouts, scores, two_updates
from support.olmo_experts import ROUTED, expert_config, expert_model
from torch import Tensor

pytestmark = pytest.mark.usefixtures("cpu_leaves")

DTYPES = [torch.float32, torch.float64]


def hooks_of(model: CoreModel) -> list[RouterHook]:
    return [router.get_top_k.__self__ for router in routers(model.core).values()]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_row_scores_as_core_scores_one_sample_a_row(dtype: torch.dtype, replay: bool) -> None:
    packed, alone = expert_model(dtype=dtype), expert_model(packed=False, dtype=dtype)
    rollouts = make_rollouts(ROUTED)
    for packs in (PACKS, [range(8)]):
        found = scores(packed, rollouts, packs, replay)
        for one, two in zip(found, scores(alone, rollouts, SINGLES, replay), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_adamw_steps_on_packed_rows_are_those_on_one_sample_a_row(dtype: torch.dtype, recompute: bool) -> None:
    rollouts = make_rollouts(ROUTED)
    packed = expert_model(dtype=dtype, recompute=recompute)
    found, parameters, moments = two_updates(packed, rollouts, PACKS, replay=True)
    wanted, other_parameters, other_moments = two_updates(
        expert_model(packed=False, dtype=dtype), rollouts, SINGLES, replay=True
    )
    for one, two in zip(found, wanted, strict=True):
        assert distance(one, two) < 1e-5
    assert distance(parameters, other_parameters) < 1e-5
    assert distance(moments, other_moments) < 1e-5


@pytest.mark.parametrize("replay", [False, True])
def test_recomputation_changes_no_bit(replay: bool) -> None:
    rollouts = make_rollouts(ROUTED)
    found, runs = [], []
    for recompute in (False, True):
        model = expert_model(recompute=recompute)
        ran: list[int] = []
        for layer, router in routers(model.core).items():
            router.register_forward_pre_hook(lambda module, arguments, layer=layer, ran=ran: ran.append(layer))
        found.append(gradients(model, rollouts, PACKS, replay=replay))
        runs.append(ran)
    assert runs == [[1, 2] * 3, [1, 2, 2, 1] * 3]
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_a_recomputation_keeps_the_choices_of_its_forward() -> None:
    """Rounding may turn a near tie on the second run; a router that always does so changes nothing."""
    rollouts = make_rollouts(ROUTED)
    wanted = gradients(expert_model(), rollouts, PACKS)
    model = expert_model(recompute=True)
    for hook in hooks_of(model):
        calls: list[int] = []

        def fickle(scores: Tensor, original: Any = hook.original, calls: list[int] = calls) -> tuple[Tensor, Tensor]:
            calls.append(1)
            weights, ids = original(scores)
            return weights, ids if len(calls) % 2 else (ids + 1) % 4

        hook.original = fickle
    found = gradients(model, rollouts, PACKS)
    for name, value in wanted.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("recompute", [False, True])
def test_two_forwards_under_way_at_once_keep_their_own_choices(recompute: bool) -> None:
    """Nothing of a forward stays in the routers: the first row's recomputation comes after the second's forward."""
    rollouts = make_rollouts(ROUTED)
    packs = [(0, 1, 2), (4, 3)]
    wanted = gradients(expert_model(), rollouts, packs, replay=True)
    model = expert_model(recompute=recompute)
    tokens = normalization(rollouts).denominator("token")
    batches = [build_batch(rollouts, pack, replay=True) for pack in packs]
    losses = [policy_loss(response_log_probs(model, batch), batch).numerator / tokens for batch in batches]
    for loss in losses:
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert distance(found, wanted) < 1e-6
    assert all(hook.running == [] for hook in hooks_of(model))


def test_no_document_of_a_row_feels_another() -> None:
    model = expert_model()
    batch = build_batch(make_rollouts(ROUTED), range(8), replay=True)
    assert_documents_isolated(model, batch, embedding=model.core.embeddings)


def test_recorded_experts_run_and_a_documents_own_last_row_is_synthetic() -> None:
    """Counted where the experts run: rows each expert of layer 2 gets, against the recorded ids."""
    model = expert_model()
    seen: list[list[int]] = []
    experts = model.core.blocks["2"].routed_experts
    experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[1].tolist()))
    rollouts = make_rollouts(ROUTED)
    with torch.no_grad():
        output = model(build_batch(rollouts, (1, 4), replay=True))
    counts = [0, 0, 0, 0]
    for index in (1, 4):
        for choices in [*rollouts[index].routes[:, 2].tolist(), [0, 1]]:
            for expert in choices:
                counts[expert] += 1
    assert seen == [counts]
    assert output.routes[:, 0].unique().tolist() == [-1]
    assert output.routes[7, 1:].tolist() == output.routes[12, 1:].tolist() == [[0, 1], [0, 1]]
    assert output.routes[8, 1:].tolist() == rollouts[4].routes[0, 1:].tolist()


def test_replaying_a_forwards_own_choices_gives_its_own_gradients() -> None:
    """Core's own gating gradient is the oracle: top-k and gather by Core, without a hook in the way."""
    rollouts = make_rollouts(ROUTED)
    model = expert_model()
    batch = build_batch(rollouts, range(8))
    routes = model(batch).routes
    for hook in hooks_of(model):
        hook.router.get_top_k = hook.original
    wanted = gradients(model, rollouts, [range(8)])
    start, recorded = 0, []
    for rollout in rollouts:
        recorded.append(attrs.evolve(rollout, routes=routes[start : start + rollout.length - 1].clamp(min=0)))
        start += rollout.length
    # The last row of a document is scored by nobody and its experts are synthetic: it moves nothing.
    found = gradients(expert_model(), recorded, [range(8)], replay=True)
    assert distance(found, wanted) < 1e-6
    gates = [name for name in found if name.endswith("routed_experts_router.weight")]
    assert len(gates) == 2
    assert all(float(wanted[name].norm()) > 1e-4 for name in gates)


def test_the_gating_gradient_lives_under_replay() -> None:
    """Against finite differences of the loss along the router's own gradient."""
    rollouts = make_rollouts(ROUTED)
    model = expert_model(dtype=torch.float64)
    name = "core.blocks.1.routed_experts_router.weight"
    weight = dict(model.named_parameters())[name]
    batch = build_batch(rollouts, range(8), replay=True)

    def loss() -> Tensor:
        return response_log_probs(model, batch).square().sum()

    [gradient] = torch.autograd.grad(loss(), [weight])
    along = gradient / gradient.norm()
    with torch.no_grad():
        weight.add_(along, alpha=1e-3)
        above = float(loss())
        weight.sub_(along, alpha=2e-3)
        below = float(loss())
    assert float(gradient.norm()) > 0.01
    assert (above - below) / 2e-3 == pytest.approx(float(gradient.norm()), rel=1e-3)


def test_the_reference_routes_for_itself() -> None:
    """Without routes in the batch a model with a hook chooses as Core chooses."""
    rollouts = make_rollouts(ROUTED)
    model = expert_model()
    own = scores(model, rollouts, PACKS, replay=False)
    replayed = scores(model, rollouts, PACKS, replay=True)
    for hook in hooks_of(model):
        hook.router.get_top_k = hook.original
    core = scores(model, rollouts, PACKS, replay=False)
    assert all(torch.equal(one, two) for one, two in zip(own, core, strict=True))
    assert float((torch.cat(own) - torch.cat(replayed)).detach().abs().max()) > 0.01


@pytest.mark.parametrize(
    ("router", "words"),
    [
        ({"gating_function": "topk_softmax"}, "gating 'topk_softmax' chooses from the logits and passes the hook by"),
        ({"uniform_expert_assignment": True}, "uniform_expert_assignment overrides recorded choices"),
        ({"random_expert_assignment": True}, "random_expert_assignment overrides recorded choices"),
    ],
)
def test_replay_is_refused_where_the_hook_does_not_reach(router: dict[str, Any], words: str) -> None:
    from olmo_core.nn.moe.router import MoERouterGatingFunction

    if "gating_function" in router:
        router = {"gating_function": MoERouterGatingFunction(router["gating_function"])}
    expert_model(replay=False, **router)
    with pytest.raises(InputError) as caught:
        expert_model(replay=True, **router)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "blocks.1.routed_experts_router",
        "blocks.2.routed_experts_router",
    ]
    assert all(words in problem for problem in caught.value.problems)


def test_sigmoid_gating_with_a_selection_bias_replays() -> None:
    from olmo_core.nn.moe.router import MoERouterGatingFunction

    options: Any = {"gating_function": MoERouterGatingFunction.sigmoid, "score_correction_bias": True}
    rollouts = make_rollouts(ROUTED)
    packed = expert_model(**options, normalize_expert_weights=1.0)
    alone = expert_model(packed=False, **options, normalize_expert_weights=1.0)
    found, wanted = (
        gradients(model, rollouts, packs, replay=True) for model, packs in ((packed, PACKS), (alone, SINGLES))
    )
    assert distance(found, wanted) < 1e-5


def test_replay_of_a_dense_model_is_refused() -> None:
    with pytest.raises(InputError, match="no layer has routed experts; set use_rollout_routing_replay = false"):
        CoreModel(build_core(dense_config(), attention="segment"), replay=True)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ((2, 4, 2), "routes have 2 layers and top_k 2 but the model has 3 layers and top_k 2"),
        ((3, 4, 3), "routes have 3 layers and top_k 3 but the model has 3 layers and top_k 2"),
    ],
)
def test_routes_of_another_model_are_refused(routes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        expert_model()(build_batch(make_rollouts(routes), [0], replay=True))


def test_an_expert_that_does_not_exist_names_its_sample() -> None:
    rollouts = make_rollouts(ROUTED)
    rollouts[1].routes[3, 2, 0] = 4
    with pytest.raises(
        ValueError, match=r"sample 'sample-1': row 3 of layer 2 is routed to expert 4 but experts are 0 to 3"
    ):
        expert_model()(build_batch(rollouts, [0, 1], replay=True))


def test_routes_for_a_model_built_without_replay_are_refused() -> None:
    with pytest.raises(ValueError, match="the batch has routes but the model was built without replay"):
        expert_model(replay=False)(build_batch(make_rollouts(ROUTED), [0], replay=True))


def test_a_forward_that_loses_the_choices_on_the_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = expert_model()
    original = model.core._prepare_inputs

    def copying(*arguments: Any, **named: Any) -> Any:
        prepared = original(*arguments, **named)
        prepared[2]["loss_div_factor"] = prepared[2]["loss_div_factor"].clone()
        return prepared

    monkeypatch.setattr(model.core, "_prepare_inputs", copying)
    with pytest.raises(RuntimeError, match=r"the routers of layers \[1, 2\] ran without this forward's choices"):
        model(build_batch(make_rollouts(ROUTED), [0], replay=True))


def test_a_model_takes_one_hook() -> None:
    model = expert_model()
    with pytest.raises(ValueError, match=r"blocks\.1 already has a replay hook"):
        CoreModel(model.core, packed=False)


def test_what_draws_random_numbers_is_named() -> None:
    assert expert_model().stochastic() == []
    named = expert_model(jitter_eps=0.1).stochastic()
    assert named == [f"blocks.{layer}.routed_experts_router.jitter_eps" for layer in (1, 2)]


def test_gating_that_passes_the_hook_by_is_still_seen() -> None:
    from olmo_core.nn.moe.router import MoERouterGatingFunction

    model = expert_model(replay=False, gating_function=MoERouterGatingFunction.topk_softmax)
    seen: list[Tensor] = []
    router = model.core.blocks["2"].routed_experts_router
    router.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0][0]))
    output = model(build_batch(make_rollouts(ROUTED), range(8)))
    logits = seen[0] @ router.weight.view(4, -1).T
    assert output.routes[:, 2].tolist() == logits.topk(2, dim=-1).indices.tolist()


def test_scoring_and_the_training_forward_give_the_same_bits() -> None:
    model = expert_model(recompute=True)
    for replay in (False, True):
        batch = build_batch(make_rollouts(ROUTED), PACKS[2], replay=replay)
        trained = response_log_probs(model.train(), batch)
        with torch.no_grad():
            assert torch.equal(response_log_probs(model.eval(), batch), trained)


def test_a_copy_kept_as_the_reference_has_hooks_of_its_own() -> None:
    model = expert_model()
    rollouts = make_rollouts(ROUTED)
    before = scores(model, rollouts, PACKS, replay=True), scores(model, rollouts, PACKS, replay=False)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)
    after = scores(reference, rollouts, PACKS, replay=True), scores(reference, rollouts, PACKS, replay=False)
    assert torch.equal(torch.cat(before[0]), torch.cat(after[0]))
    assert torch.equal(torch.cat(before[1]), torch.cat(after[1]))
    for own, other in zip(hooks_of(model), hooks_of(reference), strict=True):
        assert own.router is not other.router
        assert other.original.__self__ is other.router


def test_a_router_that_returns_other_experts_than_recorded_is_an_error() -> None:
    model = expert_model()
    router = model.core.blocks["1"].routed_experts_router
    original = router.forward
    router.forward = lambda *arguments, **named: (lambda out: (out[0], (out[1] + 1) % 4, *out[2:]))(
        original(*arguments, **named)
    )
    with pytest.raises(RuntimeError, match=r"the routers of layers \[1\] ran without this forward's choices"):
        model(build_batch(make_rollouts(ROUTED), [0], replay=True))


def test_a_saved_configuration_builds_the_same_model() -> None:
    one, two = build_core(expert_config()), build_core(expert_config().as_config_dict())
    assert type(one) is type(two)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
