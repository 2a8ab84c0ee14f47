"""The producer hook against MILES' own sample, conversion, normalization and split, from its PyPI wheel.

The wheel's rollout module cannot be imported without an inference engine, so the functions asked are compiled out of
its source.
"""

import ast
import itertools
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from miles.utils.types import Sample
from pack_miles.miles.rewards import grouped_rewards, installed_rule, normalizes_by_group
from pack_miles.miles.samples import read_debug_rollouts, to_rollout, to_row, to_sample
from pack_miles.producer import reorder_and_normalize
from support.miles_collections import arguments, collection, expert_arguments, stride_columns, write_checkpoint

LENGTHS = [5 + (7 * i) % 8 for i in range(36)]
NAMES = (
    "_post_process_rewards",
    "_convert_samples_to_train_data",
    "_split_train_data_by_dp",
    "_save_debug_rollout_data",
)


@pytest.fixture(scope="module")
def manager() -> Callable[[Namespace], Any]:
    """A maker of the wheel's rollout manager, of which only the functions asked are there."""
    folder = Path(next(iter(find_spec("miles").submodule_search_locations)))
    tree = ast.parse((folder / "ray" / "rollout.py").read_text())
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RolloutManager")
    kept: list[ast.stmt] = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name in NAMES]
    assert sorted(node.name for node in kept) == sorted(NAMES), "the wheel names its functions differently"
    made = ast.ClassDef("Manager", [], [], kept, [], **({"type_params": []} if hasattr(owner, "type_params") else {}))
    module = ast.fix_missing_locations(ast.Module([made], []))
    names: dict[str, Any] = {
        "torch": torch,
        "Sample": Sample,
        "Path": Path,
        "itertools": itertools,
        "logger": SimpleNamespace(info=lambda text: None),
        "Box": lambda stored: stored,
        "ray": SimpleNamespace(put=lambda data: data),
    }
    exec(compile(module, "rollout.py", "exec"), names)

    def make(args: Namespace, callback: Any = None) -> Any:
        one = names["Manager"]()
        one.args = args
        one.custom_reward_post_process_func = callback
        one.custom_convert_samples_to_train_data_func = None
        return one

    return make


def real(samples: Any) -> list[Sample]:
    fields = set(Sample.__dataclass_fields__)
    return [Sample(**{name: value for name, value in vars(one).items() if name in fields}) for one in samples]


def test_the_real_sample_is_read(manager: Any) -> None:
    for hand_made, sample in zip(collection(LENGTHS, experts=4), real(collection(LENGTHS, experts=4)), strict=True):
        sample.validate()
        assert to_row(sample) == to_row(hand_made) == to_row(sample.to_dict())
        assert to_sample(sample) == to_sample(hand_made)
        rollout = to_rollout(sample)
        assert rollout.tokens.tolist() == sample.tokens
        assert rollout.loss_mask.int().tolist() == sample.loss_mask
        assert numpy.array_equal(rollout.routes.numpy(), sample.rollout_routed_experts)
        assert list(rollout.weight_versions) == sample.weight_versions


def test_what_miles_saves_for_debugging_is_read(manager: Any, tmp_path: Path) -> None:
    samples = real(collection(LENGTHS, experts=4))
    args = arguments(save_debug_rollout_data=str(tmp_path / "{rollout_id}.pt"))
    manager(args)._save_debug_rollout_data(samples, 7, evaluation=False)
    assert read_debug_rollouts(tmp_path / "7.pt") == [to_row(sample) for sample in samples]


def shards(manager: Any, args: Namespace, samples: list[Sample], callback: Any = None) -> list[dict[str, Any]]:
    maker = manager(args, callback)
    return maker._split_train_data_by_dp(maker._convert_samples_to_train_data(samples), dp_size=4)


def by_index(shards: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    found = {}
    for shard in shards:
        lengths = [shard["total_lengths"][at] for at in shard["partition"]]
        keys = ("rewards", "loss_masks", "weight_versions", "tokens", "rollout_log_probs", "response_lengths")
        for place, index in enumerate(shard["sample_indices"]):
            step = place // 4
            found[index] = (step, lengths[place], *(shard[key][place] for key in keys))
    return found


@pytest.mark.parametrize("experts", [False, True])
def test_miles_own_split_gives_every_rank_its_planned_column(manager: Any, tmp_path: Path, experts: bool) -> None:
    checkpoint = write_checkpoint(tmp_path)
    given = {"n_samples_per_prompt": 4, "rollout_batch_size": 9, "grpo_std_normalization": False}
    args = expert_arguments(checkpoint, packing_max_tokens=24, **given) if experts else arguments(**given)
    arrival = real(collection(LENGTHS, experts=4))
    # As many samples as prompts times samples, groups side by side: here the wheel's positional rule is right.
    unplanned = shards(manager, args, list(arrival))
    planned = shards(manager, args, samples := list(arrival), reorder_and_normalize)
    assert [sample.index for sample in samples] != list(range(36))
    for rank, steps in enumerate(stride_columns(36, ranks=4, step=16)):
        want = [samples[at].index for step in steps for at in step]
        assert planned[rank]["sample_indices"][: len(want)] == want
    before, after = by_index(unplanned), by_index(planned)
    assert before.keys() == after.keys() == set(range(36))
    for index in range(32):
        assert after[index][0] == before[index][0], "a sample left its optimizer step"
        assert after[index][2] == pytest.approx(before[index][2], abs=1e-6)
        assert (after[index][1], *after[index][3:]) == (before[index][1], *before[index][3:])


def test_the_wheel_normalizes_by_position_and_the_probe_says_so(manager: Any) -> None:
    assert not normalizes_by_group(lambda args, samples: manager(args)._post_process_rewards(samples))


def test_the_wheel_without_its_engine_is_no_rule_to_trust() -> None:
    assert not normalizes_by_group(installed_rule())


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "reinforce_plus_plus_baseline", "ppo"])
@pytest.mark.parametrize("scaled", [False, True])
def test_by_group_equals_the_wheel_where_groups_lie_side_by_side(manager: Any, estimator: str, scaled: bool) -> None:
    args = arguments(
        advantage_estimator=estimator, grpo_std_normalization=scaled, n_samples_per_prompt=4, rollout_batch_size=9
    )
    samples = real(collection(LENGTHS))
    assert grouped_rewards(args, samples) == manager(args)._post_process_rewards(samples)


def test_switched_off_the_callback_returns_what_the_wheel_does(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(pack_order=None, n_samples_per_prompt=4, rollout_batch_size=9)
    wheel = SimpleNamespace(RolloutManager=type(manager(args)))
    monkeypatch.setattr(
        "pack_miles.miles.rewards.import_module",
        lambda name: wheel if name == "miles.ray.rollout" else (_ for _ in ()).throw(ImportError(name)),
    )
    for samples in (real(collection(LENGTHS)), real(collection(LENGTHS[:30]))):
        before = list(samples)
        got = reorder_and_normalize(args, samples)
        assert got == manager(args)._post_process_rewards(samples)
        assert all(now is then for now, then in zip(samples, before, strict=True))
