"""What is planned of a collection: which routes are counted, which order is asked for, and what is told of both."""

import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pack_core
import pytest
from pack_core import RoutingError, Sample
from pack_miles.planning import count_rows, in_arrival, loads_of, over_layers, plan_collection, plan_samples
from pack_miles.samples import RolloutRow
from pack_miles.settings.config import Config
from pack_miles.settings.geometry import Geometry
from pack_miles.settings.overview import areas
from pack_miles.training.observed import balance_event, differences
from support.miles_config import SMALL, make_config

#: Four layers, the first dense; four experts, two to a token; four ranks in pairs.
ROUTED: dict[str, Any] = SMALL | {
    "model.num_hidden_layers": 4,
    "model.n_routed_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.dense_layers_indices": [0],
    "core.expert_balanced_packing": True,
    "miles.use_rollout_routing_replay": True,
}


def row(index: int, routes: list[list[list[int]]] | None, length: int = 3) -> RolloutRow:
    return RolloutRow(
        tokens=[1] * length, response_length=1, rollout_routed_experts=routes, index=index, group_index=index // 4
    )


def routed(pair: list[int], tokens: int = 2) -> list[list[list[int]]]:
    """Return routes of so many tokens, a dense layer's rubbish first, then the same two experts in all three layers."""
    return [[[-1, -1], pair, pair, pair] for _ in range(tokens)]


def test_routed_layers_are_counted_with_the_final_row_that_nobody_recorded(tmp_path: Path) -> None:
    routes = [[[-1, 99], [0, 1], [2, 3], [3, 1]], [[7, 7], [1, 2], [3, 2], [0, 3]]]
    counts = count_rows(make_config(tmp_path, ROUTED), [row(0, routes)])
    assert counts is not None
    assert (counts.layers, counts.routed_layers, counts.places) == ((1, 2, 3), 3, 4)
    # Each layer: two recorded tokens of two choices, then experts 0 and 1 for the last token.
    assert counts.of(0).tolist() == [2, 3, 1, 0, 1, 1, 2, 2, 2, 2, 0, 2]


def test_a_layer_stride_counts_some_layers_and_looks_at_no_other(tmp_path: Path) -> None:
    routes = [[[-1, -1], [0, 1], [44, 44], [3, 2]]] * 2
    counts = count_rows(make_config(tmp_path, ROUTED, core__expert_balance_layer_stride=2), [row(0, routes)])
    assert counts is not None
    assert (counts.layers, counts.routed_layers, counts.subset) == ((1, 3), 3, True)
    assert counts.of(0).tolist() == [3, 3, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (None, "sample 7 (position 1) has no routes"),
        (routed([0, 1], tokens=1), "sample 7 (position 1) has routes of 1 rows but needs 2"),
        (
            [*routed([0, 1], tokens=1), [[-1, -1], [0, 1], [0, 4], [0, 1]]],
            "sample 7 (position 1): row 1 of layer 2 is routed to expert 4 but experts are 0 to 3",
        ),
        (
            [*routed([0, 1], tokens=1), [[-1, -1], [0, 1], [0, 1], [0]]],
            "sample 7 (position 1) has 1 ids at row 1 of layer 3 but needs 2",
        ),
        ([[[0, 1]] * 3] * 2, "sample 7 (position 1) has 3 layers at row 0 but needs 4"),
    ],
)
def test_routes_that_do_not_fit_name_sample_row_and_layer(tmp_path: Path, routes: Any, words: str) -> None:
    with pytest.raises(RoutingError) as caught:
        count_rows(make_config(tmp_path, ROUTED), [row(3, routed([0, 1])), row(7, routes)])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"miles__use_rollout_routing_replay": False, "core__expert_balanced_packing": False},
        {"core__expert_parallel_size": 1, "core__expert_balanced_packing": False},
        {"core__expert_parallel_size": 4, "core__expert_balanced_packing": False},
    ],
    ids=["replay off", "one owner", "one replica"],
)
def test_nothing_is_counted_where_no_load_can_be_evened_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert count_rows(make_config(tmp_path, ROUTED, **changes), [row(0, routed([0, 1]))]) is None


def test_missing_routes_are_an_error_only_where_the_order_follows_them(tmp_path: Path) -> None:
    assert count_rows(make_config(tmp_path, ROUTED, core__expert_balanced_packing=False), [row(0, None)]) is None


def test_a_model_that_the_configuration_does_not_describe_is_counted_by_its_own_sizes(tmp_path: Path) -> None:
    sizes = {key: None for key in ROUTED if key.startswith("model.")}
    other = ROUTED | sizes | {"model.format": "olmo_core", "model.source": "model.json"}
    config = make_config(tmp_path, other)
    rows = [row(0, [[[-1, 99], [0, 1], [2, 3], [3, 1]], [[7, 7], [1, 2], [3, 2], [0, 3]]])]
    assert count_rows(config, rows) is None
    counts = count_rows(config, rows, Geometry(4, 12, moe_layers=(1, 2, 3), experts=4, top_k=2))
    assert counts is not None
    assert counts.layers == (1, 2, 3)
    assert counts.of(0).tolist() == [2, 3, 1, 0, 1, 1, 2, 2, 2, 2, 0, 2]


def collection() -> list[RolloutRow]:
    """Two optimizer steps of eight samples; in each, the first four go to one owner and the others to the other."""
    return [row(n, routed([0, 1] if n % 8 < 4 else [2, 3], tokens=5), length=6) for n in range(16)]


#: Two samples a pack, so two packs a rank.
TIGHT = {"core__packing_max_tokens": 12, "core__max_sequence_length": 12, "miles__rollout_max_response_len": 1}


def prepared(folder: Path, **changes: Any) -> Config:
    return make_config(folder, ROUTED, **TIGHT | changes)


def test_a_collection_is_planned_with_its_loads_before_and_after(tmp_path: Path) -> None:
    ticks = count(100.0, 0.01)
    plan, loads, event = plan_collection(prepared(tmp_path), collection(), lambda: next(ticks), step=4, rollout_id=2)
    assert (event.step, event.rollout_id, event.record["digest"]) == (4, 2, plan.digest)
    assert event.counting_seconds == pytest.approx(0.01)
    assert event.planning_seconds >= 0.01
    # Eight samples fill one pack of two on every rank. By stride, each replica gets two samples of either kind: 5
    # tokens of 2 choices each and the final row's 2 for owner 0, in each of three layers: nothing to even out.
    (packs,) = {step.packs_per_rank for step in plan.steps}
    assert packs == 1
    choices = 3 * (2 * 10 + 4 * 2), 3 * (2 * 10)
    assert event.loads_before == [[[list(choices)], [list(choices)]]] * 2
    assert event.loads_after == event.loads_before
    assert loads is not None
    assert over_layers(loads) == event.loads_after


def test_the_published_example_is_planned_to_its_bound(tmp_path: Path) -> None:
    # Sixteen samples of six tokens, half of them routed to either owner, two by two: by stride, the first replica
    # takes all of the first kind. Figures as published for the trainer these options come from.
    one_layer = {"model__num_hidden_layers": 1, "model__dense_layers_indices": [], "miles__global_batch_size": 16}
    rows = [row(n, [[[0, 1]] if n % 4 < 2 else [[2, 3]]] * 5, length=6) for n in range(16)]
    plan, _, event = plan_collection(prepared(tmp_path, **one_layer), rows, lambda: 0.0, step=0, rollout_id=0)
    (before,), (after,), (bounds,) = plan.arrival, plan.work, plan.bounds
    assert (before.packs_per_rank, before.critical_work_proxy, before.max_slot_assignments) == (2, 96, 48)
    assert (before.skew_mean, after.skew_mean) == (pytest.approx(11 / 6), pytest.approx(7 / 6))
    assert (after.packs_per_rank, after.critical_work_proxy, after.max_slot_assignments) == (2, 56, 28)
    assert bounds.critical_work_proxy == 56
    assert (after.attention_token_work, after.attention_pair_work) == (24, 144)
    # A sample of the first kind sends 12 choices to owner 0; of the other 2, and 10 to owner 1.
    assert event.loads_before == [[[[48, 0], [48, 0]], [[8, 40], [8, 40]]]]
    assert event.loads_after == [[[[28, 20], [28, 20]], [[28, 20], [28, 20]]]]


def test_without_the_option_no_route_is_counted_and_no_load_told(tmp_path: Path) -> None:
    config = prepared(tmp_path, core__expert_balanced_packing=False, core__pack_order="balanced")
    plan, loads, event = plan_collection(config, collection(), lambda: 0.0, step=0, rollout_id=0)
    assert (loads, event.loads_before, event.loads_after, plan.layers) == (None, None, None, ())
    assert plan.pack_order == "balanced"


def test_counts_steer_only_expert_balanced_packing_and_are_reported_in_arrival_order(tmp_path: Path) -> None:
    rows = collection()
    samples = [Sample(one.index, len(one.tokens)) for one in rows if one.index is not None]
    config = prepared(tmp_path)
    counts = count_rows(config, rows)
    assert counts is not None
    arrival = plan_samples(in_arrival(config), samples, counts)
    assert arrival.order == tuple(range(16))
    assert arrival.work[0].critical_work_proxy == 3 * 28
    assert loads_of(arrival, counts)[0][0][0][0] == [28, 20]
    lengths = prepared(tmp_path, core__expert_balanced_packing=False, core__pack_order="balanced")
    assert plan_samples(lengths, samples, counts).layers == ()
    assert plan_samples(config, samples, counts).layers == (1, 2, 3)


def test_the_search_is_the_one_the_options_ask_for(tmp_path: Path) -> None:
    asked = prepared(
        tmp_path,
        core__expert_balance_search_proposals=3,
        core__expert_balance_search_seconds=1.5,
        core__expert_balance_method="reference",
        core__expert_balance_guard="reference",
        core__expert_balance_max_slot_assignments=77,
    )
    rows = collection()
    plan, _, event = plan_collection(asked, rows, lambda: 0.0, step=0, rollout_id=0)
    assert event.record["search"] == {
        "proposals": 3,
        "seconds": 1.5,
        "method": "reference",
        "guard": "reference",
        "max_slot_assignments": 77,
        "kernels": None,
    }
    assert {trace.method for trace in plan.traces} == {"reference"}


def test_a_recorded_plan_is_rebuilt_with_and_without_its_counts(tmp_path: Path) -> None:
    config, rows = prepared(tmp_path), collection()
    plan, _, event = plan_collection(config, rows, lambda: 0.0, step=0, rollout_id=0)
    samples = pack_core.samples_of(event.record)
    assert pack_core.rebuild(event.record, samples) == plan
    assert pack_core.rebuild(event.record, samples, count_rows(config, rows)) == plan


def test_figures_of_an_update_come_from_what_was_executed_alone() -> None:
    # Two replicas, one pack, layers 1 and 3: [first owner, second owner].
    executed = [[[[3, 5], [4, 4]]], [[[6, 0], [1, 9]]]]
    plan: Any = SimpleNamespace(layers=(1, 3), routed_layers=4, digest="d")
    told = balance_event(executed, plan, [3], step=2, rollout_id=1)
    assert (told.packs_per_rank, told.dispatches, told.max_slot_assignments) == (1, 2, 9)
    assert told.critical_work_proxy == 6 + 9
    # Replica 0: (5 + 4) over a mean of 8; replica 1: (6 + 9) over a mean of 8.
    assert told.skew_max == 15 / 8
    assert told.skew_mean == (9 / 8 + 15 / 8) / 2
    assert (told.layers, told.routed_layers, told.mismatched_layers, told.plan_digest) == ([1, 3], 4, [3], "d")


def test_differences_are_told_layer_by_layer_the_first_first() -> None:
    planned = [[[[3, 5], [4, 4]]], [[[6, 0], [1, 9]]]]
    executed = [[[[3, 5], [5, 3]]], [[[5, 1], [1, 9]]]]
    assert [layer for layer, _ in differences(planned, executed, (1, 3))] == [1, 3]
    assert list(differences(planned, planned, (1, 3))) == []


def test_planning_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import pack_miles.planning"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_order_in_arrival_differs_in_nothing_else(tmp_path: Path) -> None:
    config = prepared(tmp_path)
    plain = in_arrival(config)
    assert plain.pack_order == "arrival"
    core = attrs.evolve(plain.core, expert_balanced_packing=True)
    assert attrs.evolve(plain, core=core) == config


def test_validation_says_in_which_order_samples_are_packed_when_not_in_arrival(tmp_path: Path) -> None:
    lengths = {"core__expert_balanced_packing": False, "core__pack_order": "balanced"}
    assert "order" not in dict(areas(make_config(tmp_path)))
    assert dict(areas(prepared(tmp_path, **lengths)))["order"] == (
        "samples balanced inside each optimizer step by lengths, at most 1,024 proposals a step and 0.25 s a collection"
    )
    strided = prepared(tmp_path, core__expert_balance_layer_stride=3)
    assert "by expert load (1 in 3 routed layers) and lengths" in dict(areas(strided))["order"]
