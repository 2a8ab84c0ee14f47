"""Every row of the hook's table, triggered by arguments alone, and where its options are read from."""

import json
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from pack_miles.errors import InputError
from pack_miles.miles.hosted import HOSTED
from pack_miles.miles.layout import model_layout
from pack_miles.miles.options import read_settings
from pack_miles.miles.refusals import RUN, refuse_settings
from pack_miles.miles.rewards import ProbeSample, grouped_rewards, installed_rule, miles_rewards, normalizes_by_group
from pack_miles.producer import reorder_and_normalize, reorder_samples
from support.miles_collections import (
    REWARD_CALLBACK,
    SAMPLE_FILTER,
    arguments,
    as_filter,
    collection,
    expert_arguments,
    in_groups,
    write_checkpoint,
)
from support.refusal_cases import ARGUMENT_CASES, write_checkpoints


def applying(args: Namespace, seam: str) -> list[str]:
    settings = read_settings(args, seam)
    return [row.code for row in (*RUN, *HOSTED) if row.applies(settings)]


@pytest.fixture
def allowed(tmp_path: Path) -> list[Namespace]:
    return [arguments(), expert_arguments(write_checkpoint(tmp_path)), arguments(pack_order=None)]


def test_what_is_allowed_is_not_refused(allowed: list[Namespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pack_miles.miles.hosted.installed_rule", lambda: grouped_rewards)
    for args in allowed:
        assert applying(args, "rewards") == []
        assert applying(as_filter(args), "groups") == []


@pytest.mark.parametrize("code", list(ARGUMENT_CASES))
def test_each_row_is_triggered_and_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    write_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    given, reason = ARGUMENT_CASES[code]
    filtering = code == "positional-rewards"
    args = as_filter(arguments(**given)) if filtering else arguments(**given)
    settings = read_settings(args, "groups" if filtering else "rewards")
    row = next(row for row in (*RUN, *HOSTED) if row.code == code)
    assert row.applies(settings)
    with pytest.raises(InputError) as refused:
        refuse_settings(settings)
    (told,) = [problem for problem in refused.value.problems if reason in problem]
    assert told.removeprefix("the producer hook: ") == row.text(settings)
    assert len(told.split("; ")) > 1


@pytest.mark.parametrize("code", list(ARGUMENT_CASES))
def test_a_refused_run_reorders_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    write_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    samples = collection([4, 9, 2, 7] * 9)
    before, args = list(samples), arguments(**ARGUMENT_CASES[code][0])
    filtering = code == "positional-rewards"
    groups = in_groups(samples, [4] * 9)
    with pytest.raises(InputError):
        reorder_samples(as_filter(args), groups) if filtering else reorder_and_normalize(args, samples)
    assert [sample for group in groups for sample in group] == before
    assert all(now is then for now, then in zip(samples, before, strict=True))


def test_every_row_about_arguments_has_a_case() -> None:
    assert {row.code for row in (*RUN, *HOSTED)} == set(ARGUMENT_CASES)
    assert {row.scope for row in (*RUN, *HOSTED)} == {"arguments"}


def test_a_miles_that_normalizes_by_position_is_refused_at_the_filter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in (None, by_position):
        monkeypatch.setattr("pack_miles.miles.hosted.installed_rule", lambda rule=rule: rule)
        assert applying(as_filter(arguments()), "groups") == ["positional-rewards"]
        assert applying(arguments(), "rewards") == []


def test_the_filter_beside_another_filter_or_any_callback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pack_miles.miles.hosted.installed_rule", lambda: grouped_rewards)
    assert applying(arguments(), "groups") == ["sample-filter", "reward-callback"]
    other = as_filter(arguments())
    other.custom_reward_post_process_path = "mine.rewards"
    assert applying(other, "groups") == ["reward-callback"]


def test_a_filter_of_the_users_own_may_run_before_the_callback() -> None:
    assert applying(arguments(rollout_sample_filter_path="mine.filter"), "rewards") == []


@pytest.mark.parametrize("nodes", [None, 0])
def test_ranks_that_are_not_told_are_refused(nodes: int | None) -> None:
    assert applying(arguments(actor_num_nodes=nodes), "rewards") == ["ranks"]


def test_off_nothing_is_refused() -> None:
    given = {name: value for case, _ in ARGUMENT_CASES.values() for name, value in case.items()}
    refuse_settings(
        read_settings(arguments(**{**given, "pack_order": None, "expert_balanced_packing": False}), "groups")
    )


OPTIONS = {"pack_order": "balanced", "packing_max_tokens": 6144, "expert_balance_search_proposals": 7}


@pytest.mark.parametrize(
    "args",
    [
        Namespace(olmo_core_config=json.dumps({**OPTIONS, "compile_model": False})),
        Namespace(core=OPTIONS),
        Namespace(**OPTIONS),
        Namespace(**{f"core.{name}": value for name, value in OPTIONS.items()}),
        Namespace(core=OPTIONS, olmo_core_config=json.dumps(OPTIONS), packing_max_tokens=6144),
    ],
    ids=["json", "section", "names", "dotted", "agreeing"],
)
def test_options_are_read_wherever_they_are_written(args: Namespace) -> None:
    core = read_settings(args, "rewards").core
    assert (core.pack_order, core.packing_max_tokens, core.expert_balance_search_proposals) == ("balanced", 6144, 7)
    assert (core.expert_balance_layer_stride, core.expert_balance_search_seconds) == (1, 0.25)


#: Options of Core that the producer does not look at, as a trainer's whole configuration holds them.
OTHERS = """
    attention_backend row_specialization activation_checkpointing compile_model compile_optimizer use_reduce_scatter
    max_policy_lag router_aux_loss_grouping router_aux_loss_reduction router_z_loss_reduction router_aux_count_source
    router_z_loss_weight scoring_pass_required scoring_check_interval scoring_check_tolerance replay_diagnostics
    max_train_rollout_logprob_abs_diff diagnostic_interval publication_mode engine_drain_timeout snapshot_capacity
    weight_sync_mode expert_publication stream_moe_export filter_zero_std_groups reward_config fp32_lm_head
    scoring_check_max_tolerance
"""


def test_options_of_the_trainer_are_no_misspelt_ones_of_the_producer() -> None:
    text = json.dumps(dict.fromkeys(OTHERS.split(), 1) | {"pack_order": "balanced", "model_config": None})
    settings = read_settings(Namespace(olmo_core_config=text), "rewards")
    assert settings.enabled
    assert settings.core.model_config is None


def test_a_search_is_as_the_options_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pack_miles.producer")
    given = {"expert_balance_method": "reference", "expert_balance_guard": "reference"}
    reorder_and_normalize(expert_arguments(write_checkpoint(tmp_path), **given), collection([6] * 16, experts=4))
    (record,) = caplog.records
    told = json.loads(record.getMessage().removeprefix("expert_schedule "))
    assert told["blocks"][0]["search"]["method"] == told["blocks"][0]["search"]["baseline"] == "reference"
    with pytest.raises(InputError, match="expert_balance_method must be"):
        reorder_and_normalize(arguments(expert_balance_method="random"), collection([4] * 16))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (Namespace(core={"pack_order": "balanced"}, pack_order="arrival"), "pack_order is 'balanced' in section core"),
        (Namespace(olmo_core_config="{"), "no JSON text"),
        (Namespace(olmo_core_config="[1]"), "names and values"),
        (Namespace(core={"expert_balance_packing": True}), "did you mean 'expert_balanced_packing'"),
        (Namespace(core={"expert_balance_layer_stride": 0}), "core.expert_balance_layer_stride must be"),
        (Namespace(expert_balance_search_seconds=float("nan")), "finite"),
        (Namespace(expert_balance_search_proposals=1.5), "an integer"),
        (Namespace(pack_order="random"), "arrival | balanced"),
    ],
)
def test_options_that_cannot_be_are_refused(args: Namespace, message: str) -> None:
    with pytest.raises(InputError) as refused:
        read_settings(args, "rewards")
    assert message in str(refused.value)


def by_position(args: Any, samples: Any) -> tuple[list[float], list[float]]:
    rewards = [sample.get_reward_value(args) for sample in samples]
    means = [sum(rewards[at : at + 2]) / 2 for at in range(0, len(rewards), 2)]
    return rewards, [reward - means[place // 2] for place, reward in enumerate(rewards)]


def raising(args: Any, samples: Any) -> tuple[list[float], list[float]]:
    raise RuntimeError("not for probes")


def test_the_probe_tells_group_index_from_neighbours() -> None:
    assert normalizes_by_group(grouped_rewards)
    assert not any(normalizes_by_group(rule) for rule in (by_position, raising, None))


class Manager:
    """The older layout: a method of an actor's class, which Ray wraps."""

    def _post_process_rewards(self, samples: list[Any]) -> Any:
        if self.custom_reward_post_process_func is not None:
            return self.custom_reward_post_process_func(self.args, samples)
        return by_position(self.args, samples)


def newer(args: Any, samples: Any, custom_reward_post_process_func: Any, prompt_group_sizes: Any = None) -> Any:
    assert custom_reward_post_process_func is None
    assert prompt_group_sizes is None
    return grouped_rewards(args, samples)


def test_the_installed_rule_is_miles_own_in_either_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [ProbeSample(place, place % 2, float(place**2)) for place in range(4)]
    args = arguments(pack_order=None, grpo_std_normalization=False)
    modules = {"miles.ray.rollout": Namespace(RolloutManager=Manager)}

    def found(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(name)
        return modules[name]

    monkeypatch.setattr("pack_miles.miles.rewards.import_module", found)
    assert miles_rewards(args, samples) == ([0.0, 1.0, 4.0, 9.0], [-0.5, 0.5, -2.5, 2.5])
    wrapped = Namespace(__ray_metadata__=Namespace(modified_class=Manager))
    modules["miles.ray.rollout"] = Namespace(RolloutManager=wrapped)
    assert reorder_and_normalize(args, samples) == ([0.0, 1.0, 4.0, 9.0], [-0.5, 0.5, -2.5, 2.5])
    modules["miles.ray.rollout.train_data_conversion"] = Namespace(_post_process_rewards=newer)
    assert miles_rewards(args, samples) == ([0.0, 1.0, 4.0, 9.0], [-2.0, -4.0, 2.0, 4.0])
    modules.clear()
    assert installed_rule() is None
    with pytest.raises(InputError, match="was not found"):
        miles_rewards(args, samples)


def test_off_with_several_adapters_is_refused_for_the_callback_is_not_told_prompt_sizes() -> None:
    with pytest.raises(InputError, match="no callback is told"):
        miles_rewards(arguments(multi_lora_n_adapters=2), collection([4] * 4))


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"grpo_std_normalization": False}, [-1.0, -2.0, 1.0, 2.0]),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, [-1.0, -2.0, 1.0, 2.0]),
        ({"advantage_estimator": "ppo"}, [0.0, 10.0, 2.0, 14.0]),
        ({"rewards_normalization": False}, [0.0, 10.0, 2.0, 14.0]),
        # Deviations sqrt(2) and sqrt(8).
        ({}, [-0.7071063, -0.7071065, 0.7071063, 0.7071065]),
    ],
)
def test_rewards_of_two_groups_by_hand(given: dict[str, Any], want: list[float]) -> None:
    samples = [ProbeSample(place, place % 2, reward) for place, reward in enumerate([0.0, 10.0, 2.0, 14.0])]
    raw, rewards = grouped_rewards(arguments(**given), samples)
    assert raw == [0.0, 10.0, 2.0, 14.0]
    assert rewards == pytest.approx(want, abs=1e-6)


def test_a_rollout_of_several_samples_has_one_vote() -> None:
    # Rollout 7 has two samples of reward 0; one vote each makes the mean 1, not 2/3.
    rollouts = [(0, 7, 0.0), (1, 7, 0.0), (2, None, 2.0)]
    samples = [ProbeSample(index, 0, reward, rollout) for index, rollout, reward in rollouts]
    assert grouped_rewards(arguments(grpo_std_normalization=False), samples)[1] == [-1.0, -1.0, 1.0]
    samples[1] = ProbeSample(1, 0, 0.5, 7)
    with pytest.raises(ValueError, match="rollout 7 have rewards"):
        grouped_rewards(arguments(), samples)


def test_equal_rewards_and_groups_of_one_are_not_divided_by_zero() -> None:
    samples = [ProbeSample(0, 0, 3.0), ProbeSample(1, 1, 5.0), ProbeSample(2, 1, 5.0)]
    assert grouped_rewards(arguments(), samples)[1] == [0.0, 0.0, 0.0]


def test_a_layout_by_hand(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, num_hidden_layers=6, dense_layers_indices=[0, 3])
    layout = model_layout(folder, 2)
    assert (layout.layers, layout.experts, layout.top_k) == (6, 4, 2)
    assert (layout.dense_layers, layout.selected) == ((0, 3), (1, 4))
    assert model_layout(folder / "config.json", 1).selected == (1, 2, 4, 5)


@pytest.mark.parametrize("given", ["absent", None])
def test_a_configuration_that_names_no_dense_layers_has_the_first(tmp_path: Path, given: Any) -> None:
    assert model_layout(write_checkpoint(tmp_path, dense_layers_indices=given), 1).selected == (1,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "olmo3"}, "model_type is 'olmo3'"),
        ({"n_routed_experts": 0}, "n_routed_experts is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_experts_per_tok": 2.0}, r"num_experts_per_tok is 2\.0"),
        ({"num_experts_per_tok": 5}, "top_k is 5"),
        ({"dense_layers_indices": [2]}, "dense layer 2 does not exist"),
        ({"dense_layers_indices": [-1]}, "dense layer"),
        ({"dense_layers_indices": "0"}, "must be a list"),
        ({"dense_layers_indices": [0, 1]}, "all 2 layers are dense"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_layout(write_checkpoint(tmp_path, **changed), 1)


def test_a_missing_or_damaged_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: cannot be read"):
        model_layout(tmp_path / "nowhere", 1)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        model_layout(tmp_path, 1)


def test_emo_routing_is_refused_with_packing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, emo_max_document_expert_pool=3, emo_eos_token_id=None)
    samples = collection([6] * 16, experts=4)
    with pytest.raises(InputError, match="sets emo_max_document_expert_pool, and EMO routing"):
        reorder_and_normalize(expert_arguments(folder), samples)
    assert [sample.index for sample in samples] == list(range(16))


def test_the_hooks_are_where_the_flags_say() -> None:
    from importlib import import_module

    for path in (SAMPLE_FILTER, REWARD_CALLBACK):
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))
