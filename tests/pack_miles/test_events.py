import subprocess
import sys

import msgspec
import pytest
from pack_miles.contract import events
from pack_miles.contract.events import Event

#: The contract, event by event, written down independently of the structs.
FIELDS = {
    "run_started": "configuration_digest name world_size expert_parallel_size resumed completed_steps versions "
    "configuration time",
    "rollout": "rollout_id samples reward_mean reward_std reward_min reward_max response_tokens model_tokens seconds",
    "rollout_groups": "rollout_id groups counts trainer_wait_seconds",
    "plan": "rollout_id record counting_seconds planning_seconds loads_before loads_after",
    "expert_balance": "rollout_id plan_digest layers routed_layers packs_per_rank dispatches skew_mean skew_max "
    "max_slot_assignments critical_work_proxy mismatched_layers",
    "packing": "rollout_id pass plan_digest samples packs model_tokens max_pack_tokens token_budget fill_fraction "
    "samples_per_pack",
    "score_timing": "rollout_id seconds model_tokens",
    "scores": "rollout_id source active_tokens max_abs p50_upper p95_upper p99_upper histogram_upper_edges "
    "histogram_counts groups",
    "scoring_check": "rollout_id active_tokens mean_abs max_abs tokens_above_edge edge tolerance max_tolerance",
    "optimizer": "rollout_id normalization reduction scoring_pass local_policy_objective clip_fraction "
    "tis_clip_fraction gradient_norm local_behavior_versions local_microbatches lr_used lr_next optimizer_skipped "
    "elapsed_seconds",
    "optimizer_rejected": "rollout_id gradient_norm reason",
    "memory": "rollout_id peak_allocated_bytes peak_resident_bytes",
    "checkpoint": "path seconds",
    "run_failed": "error",
    "run_finished": "completed_steps rollouts seconds",
    "expert_schedule": "world ep_degree layers routed_layers seam plan_digest blocks untouched_tail_samples "
    "counting_seconds planning_seconds",
}

PACKING = (
    b'{"event":"packing","fill_fraction":0.75,"max_pack_tokens":80,"model_tokens":150,"packs":2,"pass":"training",'
    b'"plan_digest":"d","rank":1,"rollout_id":0,"samples":5,"samples_per_pack":2.5,"schema_version":1,"step":3,'
    b'"token_budget":100}'
)


def written_fields(kind: type) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def test_every_event_has_exactly_the_fields_of_the_contract() -> None:
    kinds = {kind.__struct_config__.tag: kind for kind in Event.__args__}
    assert set(kinds) == set(FIELDS)
    for name, kind in kinds.items():
        assert written_fields(kind) == {*FIELDS[name].split(), "rank", "step", "schema_version"}, name


def test_a_hand_written_line_is_read_as_its_event() -> None:
    event = msgspec.json.decode(PACKING, type=Event)
    assert event == events.Packing(
        rank=1,
        step=3,
        rollout_id=0,
        pass_="training",
        plan_digest="d",
        samples=5,
        packs=2,
        model_tokens=150,
        max_pack_tokens=80,
        token_budget=100,
        fill_fraction=0.75,
        samples_per_pack=2.5,
    )
    assert msgspec.json.encode(event, order="sorted") == PACKING


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"packs":2', b'"packs":2,"bins":2', "bins"),
        (b'"packs":2', b'"packs":-1', "packs"),
        (b'"packs":2', b'"packs":true', "packs"),
        (b'"packs":2', b'"packs":2.5', "packs"),
        (b'"pass":"training"', b'"pass":"replay"', "replay"),
        (b'"schema_version":1', b'"schema_version":2', "schema_version"),
        (b'"event":"packing"', b'"event":"packings"', "packings"),
        (b'"step":3,', b"", "step"),
    ],
)
def test_a_line_outside_the_contract_is_refused_by_field(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(PACKING.replace(old, new), type=Event)


def test_update_resolves_what_step_counts() -> None:
    check = events.ScoringCheck(
        rank=0,
        step=4,
        rollout_id=2,
        active_tokens=1,
        mean_abs=0,
        max_abs=0,
        tokens_above_edge=0,
        edge=1e-3,
        tolerance=1e-3,
        max_tolerance=None,
    )
    assert check.update == 5
    assert events.Plan(rank=0, step=4, rollout_id=2, record={}).update == 5
    assert events.Checkpoint(rank=0, step=4, path="p", seconds=0).update == 4
    assert msgspec.json.decode(PACKING, type=Event).update == 3


def test_reading_and_auditing_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['matplotlib'] = None; "
        "from pack_miles.contract import audit, events, log, sink; from pack_miles.reporting import report"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_need_no_torch_and_leave_pyplot_alone() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['matplotlib.pyplot'] = None; "
        "import pack_miles.reporting.page, pack_miles.reporting.figures"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
