import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pack_core import Sample, verify
from pack_miles.config import Config
from pack_miles.errors import InputError
from pack_miles.forecast import PROXY_NOTE, forecast, forecast_file, row_limits
from support.miles_config import NODE, make_config
from support.miles_rows import routes, row, write_jsonl


def two_ranks(folder: Path, **changes: Any) -> Config:
    """Return a configuration of two ranks, steps of eight samples and rows of 128 tokens."""
    settings = {"run__ranks": 2, "core__expert_parallel_size": 1, "miles__rollout_batch_size": 2}
    return make_config(folder, **(settings | {"core__max_sequence_length": 128, "core__max_policy_lag": 0} | changes))


def samples(lengths: list[int]) -> list[Sample]:
    return [Sample(id=n, length=length) for n, length in enumerate(lengths)]


def test_a_step_worked_by_hand(tmp_path: Path) -> None:
    """Rank 0 holds 17 19 23 29 and needs one pack, rank 1 holds 87 13 89 11 and needs two: both take two."""
    told = forecast(two_ranks(tmp_path), samples([17, 87, 19, 13, 23, 89, 29, 11]))

    assert told.plan.steps[0].packs == (((0, 2), (4, 6)), ((1, 3), (5, 7)))
    (step,) = told.as_dict()["steps"]
    assert step == {
        "packs_per_rank": 2,
        "packs_per_rank_bound": 2,  # ceil(288 / (2 * 128))
        "fill_fraction": 288 / (2 * 2 * 128),
        "max_pack_tokens": 100,
        "model_tokens": 288,
        "attention_token_work": 100 + 100,
        "attention_token_work_bound": 144,
        "attention_pair_work": (87**2 + 13**2) + (89**2 + 11**2),
        "attention_pair_work_bound": 8900,  # half of 17,800, the sum of all squares
    }
    assert (told.forwards, told.single_forwards) == (2, 4)


def test_sums_cover_every_step_and_the_tail_stays_untouched(tmp_path: Path) -> None:
    told = forecast(two_ranks(tmp_path), samples([17, 87, 19, 13, 23, 89, 29, 11] * 2 + [5, 6, 7])).as_dict()

    assert (told["samples"], told["complete_steps"], told["tail_samples"]) == (19, 2, 3)
    assert told["total"]["packs_per_rank"] == 4
    assert told["total"]["attention_token_work"] == 400
    assert told["total"]["attention_pair_work_bound"] == 17800
    assert told["total"]["fill_fraction"] == 288 / (2 * 2 * 128)
    assert (told["forwards_per_rank"], told["one_sample_a_row_forwards_per_rank"]) == (4, 8)
    assert told["notes"] == ["the last 3 samples do not fill an optimizer step and stay untouched", PROXY_NOTE]


def test_without_packing_every_row_holds_one_sample(tmp_path: Path) -> None:
    config = two_ranks(tmp_path, core__sequence_packing=False, core__packing_max_tokens=None)

    told = forecast(config, samples([17, 87, 19, 13, 23, 89, 29, 11]))

    assert told.plan.steps[0].packs == (((0,), (2,), (4,), (6,)), ((1,), (3,), (5,), (7,)))
    assert told.forwards == told.single_forwards == 4
    assert "packing is off: every row holds one sample" in told.notes


def test_fewer_samples_than_a_step_are_said_to_be_so(tmp_path: Path) -> None:
    told = forecast(two_ranks(tmp_path), samples([5, 6]))

    assert told.plan.steps == ()
    assert told.notes[0] == "no complete optimizer step: 2 samples are fewer than miles.global_batch_size = 8"
    json.dumps(told.as_dict(), allow_nan=False)


def test_a_sample_that_fits_no_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"7.*129"):
        forecast(two_ranks(tmp_path), samples([5] * 7 + [129]))


def test_a_proxy_is_said_not_to_be_a_wall_time(tmp_path: Path) -> None:
    assert "not wall times" in forecast(two_ranks(tmp_path), samples([5] * 8)).notes[-1]


def test_rows_without_routes_are_counted_when_replay_is_on(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", [row(4, 2, rollout_routed_experts=routes(4)), row(4, 2), row(4, 2)])

    on = forecast_file(two_ranks(tmp_path, miles__use_rollout_routing_replay=True), path)
    off = forecast_file(two_ranks(tmp_path), path)

    assert any(note.startswith("2 rows bring no routes") for note in on.notes)
    one = forecast_file(two_ranks(tmp_path, miles__use_rollout_routing_replay=True), write_jsonl(path, [row(4, 2)]))
    assert any(note.startswith("1 row brings no routes") for note in one.notes)
    assert not any("routes" in note for note in off.notes)


@pytest.mark.parametrize(
    ("masked", "unmasked", "note"),
    [
        (3, 1, "1 of 4 rows brings no loss_mask: all its tokens count"),
        (1, 2, "2 of 3 rows bring no loss_mask: all their tokens count"),
        (2, 0, None),
        (0, 2, None),
    ],
)
def test_rows_without_a_mask_are_counted_when_others_have_one(
    tmp_path: Path, masked: int, unmasked: int, note: str | None
) -> None:
    rows = [row(4, 2, loss_mask=[1, 1])] * masked + [row(4, 2)] * unmasked

    told = forecast_file(two_ranks(tmp_path), write_jsonl(tmp_path / "a", rows))

    assert [one for one in told.notes if "loss_mask" in one] == ([note] if note else [])


def test_token_ids_are_held_to_the_task_of_the_small_model(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", [row(4, 2) | {"tokens": [1, 2, 12, 3]}])
    node = make_config(tmp_path, NODE)

    with pytest.raises(InputError, match=r"has tokens\[2\] = 12; the model of the run has token ids 0 to 11"):
        forecast_file(two_ranks(tmp_path), path)
    assert forecast_file(node, path).samples == 1
    assert (row_limits(two_ranks(tmp_path)).vocabulary, row_limits(node).vocabulary) == (12, None)


def test_one_sample_of_a_step_is_told_in_the_singular(tmp_path: Path) -> None:
    told = forecast(two_ranks(tmp_path), samples([5]))

    assert told.notes[0] == "no complete optimizer step: 1 sample is fewer than miles.global_batch_size = 8"


def test_a_file_is_held_to_the_limits_of_the_configuration(tmp_path: Path) -> None:
    long = write_jsonl(tmp_path / "long", [row(129, 2)])
    foreign = write_jsonl(tmp_path / "foreign", [row(4, 2, rollout_routed_experts=routes(4, layers=2))])
    replayed = two_ranks(tmp_path, miles__use_rollout_routing_replay=True)

    with pytest.raises(InputError, match="the sample of line 1 has 129 tokens but max_sequence_length is 128"):
        forecast_file(replayed, long)
    with pytest.raises(InputError, match="routes of 2 layers at row 0, expected 3"):
        forecast_file(replayed, foreign)
    forecast_file(two_ranks(tmp_path), foreign)
    assert (row_limits(replayed).experts, row_limits(replayed).moe_layers) == (8, (1, 2))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_the_plan_holds_its_invariants_and_never_goes_below_its_bounds(tmp_path: Path, lengths: list[int]) -> None:
    told = forecast(make_config(tmp_path), samples(lengths))

    assert verify(told.plan, samples(lengths)) == []
    assert len(told.plan.steps) == len(lengths) // 8
    assert told.forwards <= told.single_forwards
    for step in told.as_dict()["steps"]:
        assert step["packs_per_rank"] >= step["packs_per_rank_bound"]
        assert step["attention_token_work"] >= step["attention_token_work_bound"]
        assert step["attention_pair_work"] >= step["attention_pair_work_bound"]
        assert 0 < step["fill_fraction"] <= 1
