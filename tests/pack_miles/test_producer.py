"""The producer hook: what order it leaves, what that means for ranks, and that nothing moves when it refuses."""

import json
import logging
from argparse import Namespace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pack_core import Search, Topology, dispatch_counts, owners, plan
from pack_miles.contract.events import Event, ExpertSchedule
from pack_miles.contract.log import read_log
from pack_miles.miles.collected import DATA, Collected
from pack_miles.miles.options import read_settings
from pack_miles.miles.rewards import grouped_rewards
from pack_miles.miles.samples import to_sample
from pack_miles.producer import reorder_and_normalize, reorder_samples
from support.miles_collections import (
    HandMade,
    arguments,
    as_filter,
    collection,
    expert_arguments,
    in_groups,
    stride_columns,
    write_checkpoint,
)
from support.sample_faults import FAULTS, IN_GROUPS

THIRTY_SIX = [5 + (7 * i) % 8 for i in range(36)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MILES that normalizes by group_index."""
    monkeypatch.setattr("pack_miles.miles.hosted.installed_rule", lambda: grouped_rewards)


def indices(samples: list[HandMade]) -> list[int]:
    return [sample.index for sample in samples]


def test_four_samples_by_hand() -> None:
    # Ranks take turns: rank 0 gets 10 then 1, rank 1 gets 1 then 10, and the slower rank sets the time of each row:
    # 10 + 10. Side by side, the long ones take 10 and the short ones 1.
    samples = collection([10, 1, 1, 10], group=2)
    for sample in samples:
        sample.response_length, sample.loss_mask, sample.rollout_log_probs = 0, [], []
    reorder_and_normalize(arguments(actor_num_gpus_per_node=2, global_batch_size=4), samples)
    rows = [[len(sample.tokens) for sample in samples[at : at + 2]] for at in (0, 2)]
    assert sorted(rows) == [[1, 1], [10, 10]]


def expert_work(samples: list[HandMade], packs: list[list[list[int]]]) -> int:
    """Expert work of one step over two pairs of ranks, from the routes themselves; experts 0, 1 | 2, 3."""
    total = 0
    for number in range(len(packs[0])):
        loads = []
        for pair in ((0, 1), (2, 3)):
            load = [0, 0]
            for rank in pair:
                for place in packs[rank][number]:
                    for row in samples[place].rollout_routed_experts[:, 1]:
                        for expert in row:
                            load[expert // 2] += 1
                    load[0] += 2  # the last token of each document, which goes to experts 0 and 1
            loads += load
        total += max(loads)
    return total


def test_complementary_routes_share_a_dispatch(checkpoint: Path) -> None:
    # Sixteen samples of six tokens, eight like experts 0 and 1 alone (12 choices there), eight 2 and 3 (2 and 10).
    # In arrival order a pair of ranks holds four alike: 48 choices at one destination in each of two packs, 96 in
    # all. The bound is 8 * 12 + 8 * 2 = 112 choices at destination 0, over two sets: 56.
    samples = collection([6] * 16, experts=4)
    before = list(samples)
    arrival = [[[rank, rank + 4], [rank + 8, rank + 12]] for rank in range(4)]
    assert expert_work(before, arrival) == 96
    reorder_and_normalize(expert_arguments(checkpoint), samples)
    assert sorted(indices(samples)) == list(range(16))
    assert expert_work(samples, arrival) == 56


@pytest.mark.parametrize("experts", [False, True])
def test_the_stride_partition_gives_every_rank_its_planned_column(checkpoint: Path, experts: bool) -> None:
    samples = collection(THIRTY_SIX, experts=4)
    arrival = list(samples)
    args = expert_arguments(checkpoint, packing_max_tokens=24) if experts else arguments()
    reorder_and_normalize(args, samples)
    counts = dispatch_counts(
        [sample.rollout_routed_experts for sample in arrival[:32]],
        [len(sample.tokens) for sample in arrival[:32]],
        layers=2,
        experts=4,
        top_k=2,
        dense_layers=[0],
        owners=owners(4, 2),
    )
    planned = plan(
        [to_sample(sample) for sample in arrival[:32]],
        topology=Topology(4, 2 if experts else 1),
        capacity=24 if experts else max(THIRTY_SIX),
        step_samples=16,
        max_documents=None if experts else 1,
        pack_order="balanced",
        counts=counts if experts else None,
        search=Search(proposals=200, seconds=None),
    )
    assert list(planned.order) != list(range(32))
    for rank, steps in enumerate(stride_columns(len(samples), ranks=4, step=16)):
        for step, positions in zip(planned.steps, steps, strict=True):
            assert [samples[at].index for at in positions] == [place for one in step.packs[rank] for place in one]


def trained(samples: list[HandMade], rewards: list[float]) -> dict[int, tuple[Any, ...]]:
    """What every sample trains with: its step, reward, mask, versions, tokens."""
    rows = {}
    for steps in stride_columns(len(samples), ranks=4, step=16):
        for number, positions in enumerate(steps):
            for at in positions:
                one = samples[at]
                rows[one.index] = (number, rewards[at], one.reward, one.loss_mask, one.weight_versions, one.tokens)
    return rows


@pytest.mark.parametrize("seam", ["groups", "rewards"])
def test_every_sample_trains_with_what_it_would_have_had(checkpoint: Path, seam: str, by_group: None) -> None:
    samples = collection(THIRTY_SIX, experts=4)
    arrival = list(samples)
    args = expert_arguments(checkpoint, packing_max_tokens=24)
    unplanned = trained(arrival, grouped_rewards(args, arrival)[1])
    if seam == "groups":
        groups = in_groups(samples, [4] * 9)
        reorder_samples(as_filter(args), groups)
        samples = [sample for group in groups for sample in group]
        rewards = grouped_rewards(args, samples)[1]
    else:
        raw, rewards = reorder_and_normalize(args, samples)
        assert raw == [sample.reward for sample in samples]
    assert indices(samples) != list(range(36))
    assert set(indices(samples[:16])) == set(range(16))
    assert set(indices(samples[16:32])) == set(range(16, 32))
    assert all(samples[place] is arrival[place] for place in range(32, 36))
    planned = trained(samples, rewards)
    assert planned.keys() == unplanned.keys() == set(range(32))
    for index, (step, reward, *rest) in planned.items():
        was, before, *same = unplanned[index]
        assert (step, *rest) == (was, *same)
        assert reward == pytest.approx(before, abs=1e-6) if seam == "groups" else reward == before


def test_groups_keep_their_sizes_and_lists(by_group: None) -> None:
    samples = collection(THIRTY_SIX[:18])
    for sample, group in zip(samples, [0] * 3 + [1] * 8 + [2] * 1 + [3] * 6, strict=True):
        sample.group_index = group
    groups = in_groups(samples, [3, 8, 1, 6])
    lists = list(groups)
    reorder_samples(as_filter(arguments()), groups)
    assert all(now is then for now, then in zip(groups, lists, strict=True))
    assert [len(group) for group in groups] == [3, 8, 1, 6]
    flat = [sample for group in groups for sample in group]
    assert sorted(indices(flat)) == list(range(18))
    assert indices(flat) != list(range(18))
    assert indices(flat[16:]) == [16, 17]


def test_a_collection_smaller_than_one_step_is_all_tail(tmp_path: Path) -> None:
    samples = collection([4, 9, 2])
    raw, _ = reorder_and_normalize(arguments(save=str(tmp_path)), samples)
    assert indices(samples) == [0, 1, 2]
    assert raw == [sample.reward for sample in samples]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seam", "fault"),
    [(seam, fault) for seam in ("groups", "rewards") for fault in FAULTS if seam == "groups" or fault not in IN_GROUPS],
)
def test_a_sample_that_cannot_be_planned_is_named_and_nothing_moves(
    checkpoint: Path, tmp_path: Path, seam: str, fault: Any, by_group: None
) -> None:
    samples = collection(THIRTY_SIX, experts=4)
    fault(samples)
    args = expert_arguments(checkpoint, packing_max_tokens=24, save=str(tmp_path / "run"))
    groups = in_groups(samples, [4] * 9)
    before, grouped = list(samples), [list(group) for group in groups]
    hook, given = (reorder_samples, groups) if seam == "groups" else (reorder_and_normalize, samples)
    code, words = FAULTS[fault]
    with pytest.raises(ValueError, match=words):
        hook(as_filter(args) if seam == "groups" else args, given)
    settings = read_settings(as_filter(args) if seam == "groups" else args, seam)
    row = next(row for row in DATA if row.applies(Collected(settings, samples, groups if seam == "groups" else None)))
    assert (row.code, row.scope) == (code, "data")
    assert all(now is then for now, then in zip(samples, before, strict=True))
    assert all(
        now is then for one, two in zip(groups, grouped, strict=True) for now, then in zip(one, two, strict=True)
    )
    assert not (tmp_path / "run").exists()


def test_a_group_is_asked_for_even_where_rewards_are_not_normalized_by_it() -> None:
    samples = collection(THIRTY_SIX)
    samples[35].group_index = None
    with pytest.raises(ValueError, match="sample 35 has no group_index"):
        reorder_and_normalize(arguments(advantage_estimator="ppo"), samples)


def test_unequal_prompts_in_a_group_are_refused(by_group: None) -> None:
    samples = collection(THIRTY_SIX)
    samples[2].group_index = 8
    with pytest.raises(ValueError, match=r"group 0 holds samples of group_index \['0', '8'\]"):
        reorder_samples(as_filter(arguments()), in_groups(samples, [4] * 9))


@pytest.mark.parametrize("nested", [[[1]], "text", None, [1]])
def test_what_is_no_list_of_lists_is_refused(nested: Any, by_group: None) -> None:
    with pytest.raises(ValueError, match=r"list of lists|several samples"):
        reorder_samples(as_filter(arguments()), [nested] if nested == [[1]] else nested)


def test_rollouts_of_several_samples_are_refused_at_either_seam(by_group: None) -> None:
    samples = collection(THIRTY_SIX)
    with pytest.raises(ValueError, match="compact or multi-turn"):
        reorder_and_normalize(arguments(), [*samples[:4], samples[4:8]])
    with pytest.raises(ValueError, match="compact or multi-turn"):
        reorder_samples(as_filter(arguments()), [[samples[:4]]])


@pytest.mark.parametrize("reward", [{"right": 1.0}, None, "1"])
def test_a_reward_that_cannot_be_normalized_leaves_the_order_alone(reward: Any) -> None:
    samples = collection(THIRTY_SIX)
    samples[7].reward = reward
    with pytest.raises(ValueError, match="sample 7 has reward"):
        reorder_and_normalize(arguments(), samples)
    assert indices(samples) == list(range(36))


def test_a_log_that_cannot_be_written_leaves_the_order_alone(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory")
    samples = collection(THIRTY_SIX)
    with pytest.raises(OSError):
        reorder_and_normalize(arguments(save=str(tmp_path / "run")), samples)
    assert indices(samples) == list(range(36))


def events_of(folder: Path) -> list[Event]:
    return list(read_log(folder / "expert_schedule.jsonl").events)


def test_the_event_tells_what_was_done(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, by_group: None
) -> None:
    caplog.set_level(logging.INFO, "pack_miles.producer")
    args = expert_arguments(checkpoint, packing_max_tokens=24, save=str(tmp_path / "run"))
    samples = collection(THIRTY_SIX, experts=4, start=100)
    groups = in_groups(collection(THIRTY_SIX, experts=4, start=136), [4] * 9)
    reorder_and_normalize(args, samples)
    reorder_samples(as_filter(args), groups)
    first, second = events_of(tmp_path / "run")
    assert isinstance(first, ExpertSchedule)
    assert (first.step, second.step) == (0, 1)
    assert (first.seam, second.seam) == ("rewards", "groups")
    assert (first.world, first.ep_degree, first.layers, first.routed_layers) == (4, 2, [1], 1)
    assert first.untouched_tail_samples == 4
    assert 0 < first.counting_seconds < first.planning_seconds < 60
    for number, block in enumerate(first.blocks):
        assert block.block == number
        assert block.indices == list(range(100 + 16 * number, 116 + 16 * number))
        order = [block.indices[place] for place in block.search["order"]]
        assert order == indices(samples[16 * number : 16 * number + 16])
        text = "[" + ",".join(map(str, block.indices)) + "]"
        assert block.search["seed"] == int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        assert block.after["critical_work_proxy"] < block.before["critical_work_proxy"]
        assert block.search["lower_bound"][0] <= block.after["critical_work_proxy"] == block.search["search_work"][0]
        assert block.search["search_objective"] < 3.0
        assert block.search["stop"] in ("lower_bound", "stagnation", "proposal_budget", "no_candidates")
        assert block.reordered
        assert set(block.headroom["critical_work_proxy"]) == {"removable", "removed"}
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.startswith("expert_schedule {") for line in lines)
    told = [msgspec.json.decode(line.removeprefix("expert_schedule "), type=Event) for line in lines]
    assert told == [first, second]


def test_without_a_directory_the_log_line_stands_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pack_miles.producer")
    reorder_and_normalize(arguments(), collection(THIRTY_SIX))
    (record,) = caplog.records
    told = json.loads(record.getMessage().removeprefix("expert_schedule "))
    assert told["layers"] == []
    assert told["blocks"][0]["before"]["critical_work_proxy"] is None
    assert told["blocks"][0]["after"]["attention_token_work"] < told["blocks"][0]["before"]["attention_token_work"]


def test_without_packing_every_sample_is_a_row_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    # One of 20 tokens and fifteen of 4: packed into rows of 20, four ranks would need two each; unpacked, four.
    caplog.set_level(logging.INFO, "pack_miles.producer")
    reorder_and_normalize(arguments(), collection([20] + [4] * 15))
    (record,) = caplog.records
    (block,) = json.loads(record.getMessage().removeprefix("expert_schedule "))["blocks"]
    assert block["before"]["packs_per_rank"] == block["after"]["packs_per_rank"] == 4


def test_the_same_collection_gets_the_same_order(checkpoint: Path) -> None:
    args = expert_arguments(checkpoint, packing_max_tokens=24)
    orders = []
    for _ in range(2):
        samples = collection(THIRTY_SIX, experts=4)
        reorder_and_normalize(args, samples)
        orders.append(indices(samples))
    assert orders[0] == orders[1]


def test_off_the_filter_looks_at_nothing() -> None:
    groups: list[Any] = [[object()], "untouched"]
    before = list(groups)
    reorder_samples(Namespace(expert_balanced_packing=False, pack_order="arrival"), groups)
    assert groups == before


def test_off_the_callback_returns_what_miles_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pack_miles.miles.rewards.installed_rule", lambda: lambda args, samples: (samples, args))
    samples = collection(THIRTY_SIX)
    args = arguments(pack_order=None)
    assert reorder_and_normalize(args, samples) == (samples, args)
    assert indices(samples) == list(range(36))


def test_rewards_of_one_group_by_hand() -> None:
    # Rewards 1, 0, 0, 1: mean 0.5, unbiased deviation sqrt(4 * 0.25 / 3) = 0.57735.
    samples = collection([4] * 16)
    for place, sample in enumerate(samples):
        sample.reward = float(place % 4 in (0, 3))
    _, rewards = reorder_and_normalize(arguments(actor_num_gpus_per_node=2), samples)
    want = {0: 0.5 / 0.5773513, 1: -0.5 / 0.5773513}
    for sample, reward in zip(samples, rewards, strict=True):
        assert reward == pytest.approx(want[0 if sample.reward else 1], rel=1e-6)
        assert torch.tensor(reward, dtype=torch.float32).item() == reward
