from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pack_miles.contract import events
from pack_miles.contract.audit import audit, endings
from pack_miles.contract.events import Event
from pack_miles.contract.log import Log, read_logs
from pack_miles.contract.sink import contract_path
from support.log_runs import STEPS, as_logs, make_run, write_run

Run = dict[int, list[Event]]


def change(run: Run, kind: Any, *, rank: int | None = None, step: int | None = None, **fields: Any) -> Run:
    """Return the run with fields of the matching events replaced; `pass_` picks packing events by their pass."""
    wanted = fields.pop("only", None)
    found = 0

    def changed(event: Any) -> Any:
        nonlocal found
        fits = isinstance(event, kind) and rank in (None, event.rank) and step in (None, event.step)
        if not fits or (wanted is not None and event.pass_ != wanted):
            return event
        found += 1
        values = {name: value(event) if callable(value) else value for name, value in fields.items()}
        return msgspec.structs.replace(event, **values)

    result = {own: [changed(event) for event in log] for own, log in run.items()}
    assert found, "nothing was changed"
    return result


def without(run: Run, kind: Any, *, rank: int | None = None, step: int | None = None, only: str | None = None) -> Run:
    def fits(event: Any) -> bool:
        return (
            isinstance(event, kind)
            and rank in (None, event.rank)
            and step in (None, event.step)
            and (only is None or event.pass_ == only)
        )

    result = {own: [event for event in log if not fits(event)] for own, log in run.items()}
    assert sum(map(len, result.values())) < sum(map(len, run.values())), "nothing was removed"
    return result


def normalized(**fields: Any) -> Callable[[events.Optimizer], events.Normalization]:
    return lambda event: msgspec.structs.replace(event.normalization, **fields)


def hand_made(training_tokens: int = 14, budget: int = 10, packs: int = 2, microbatches: int = 2) -> list[Log]:
    """One rank, one update, three samples of 4, 5 and 5 tokens; packing on; nothing here comes from the planner."""
    common: dict[str, Any] = {"rank": 0, "rollout_id": 0}
    packing = events.Packing(
        **common,
        step=1,
        pass_="training",
        plan_digest="d",
        samples=3,
        packs=packs,
        model_tokens=training_tokens,
        max_pack_tokens=9,
        token_budget=budget,
        fill_fraction=training_tokens / (packs * budget),
        samples_per_pack=3 / packs,
    )
    optimizer = events.Optimizer(
        **common,
        step=1,
        normalization=events.Normalization(
            samples=3, active_tokens=6, token_denominator=6, model_tokens=14, world_size=1
        ),
        reduction="token",
        scoring_pass="standalone",
        local_policy_objective=0.0,
        clip_fraction=0.0,
        gradient_norm=1.0,
        local_behavior_versions=("0",),
        local_microbatches=microbatches,
        lr_used=1e-3,
        lr_next=1e-3,
        elapsed_seconds=1.0,
    )
    start = events.RunStarted(
        rank=0,
        step=0,
        configuration_digest="c",
        name="hand",
        world_size=1,
        expert_parallel_size=1,
        resumed=False,
        completed_steps=0,
        versions={},
        configuration={},
        time=0.0,
    )
    scoring = msgspec.structs.replace(packing, pass_="scoring")
    check = events.ScoringCheck(
        **common,
        step=0,
        active_tokens=6,
        mean_abs=0.0,
        max_abs=0.0,
        tokens_above_edge=0,
        edge=1e-3,
        tolerance=1e-3,
        max_tolerance=None,
    )
    return [Log(contract_path(Path("run"), 0), (start, scoring, packing, check, optimizer))]


NO_PLAN = "update 1, rank 0: no plan is recorded for collection 0"


def test_a_hand_made_update_is_judged_by_its_numbers() -> None:
    assert audit(hand_made()) == [NO_PLAN]
    # 19 tokens do not fit two packs of at most 9, and the normalization counts 14.
    assert audit(hand_made(training_tokens=19)) == [
        "update 1, rank 0, training: 19 model tokens do not fit 2 packs of at most 9",
        "update 1, rank 0, scoring: 19 model tokens do not fit 2 packs of at most 9",
        "update 1: the ranks packed 19 model tokens, normalization counts 14",
        NO_PLAN,
    ]
    assert audit(hand_made(budget=8))[:2] == [
        "update 1, rank 0, training: the largest pack has 9 tokens, the budget is 8",
        "update 1, rank 0, scoring: the largest pack has 9 tokens, the budget is 8",
    ]
    assert audit(hand_made(packs=3, microbatches=3)) == [
        "packing is on, but in no update did a rank run fewer packs than it had samples",
        NO_PLAN,
    ]
    assert audit(hand_made(microbatches=1)) == [
        "update 1, rank 0: 2 packs, but the optimizer counts 1 microbatch",
        NO_PLAN,
    ]
    assert audit(hand_made(packs=4, microbatches=4))[0] == "update 1, rank 0, training: 4 packs of 3 samples"


@pytest.mark.parametrize("ranks", [1, 2, 4, 32])
def test_a_sound_run_has_no_violation(ranks: int) -> None:
    assert audit(as_logs(make_run(2, ranks=ranks))) == []


def test_a_sound_run_without_packing_has_no_violation() -> None:
    assert audit(as_logs(make_run(2, packing=False))) == []


def test_no_log_is_no_proof() -> None:
    assert len(audit([])) == 1


BROKEN: dict[str, tuple[Callable[[Run], Run], str]] = {
    "a pack over its budget": (
        lambda run: change(run, events.Packing, rank=1, step=2, max_pack_tokens=513),
        "update 2, rank 1, training: the largest pack has 513 tokens, the budget is 512",
    ),
    "no pack": (
        lambda run: change(run, events.Packing, rank=1, step=2, packs=0),
        "update 2, rank 1, training: 0 packs",
    ),
    "another number of samples": (
        lambda run: change(run, events.Packing, rank=1, step=2, samples=9),
        "update 2, rank 1, training: 9 samples, but 32 over 4 ranks are 8 each",
    ),
    "packs unequal over ranks": (
        lambda run: change(run, events.Packing, rank=3, step=1, packs=7),
        "update 1: packs differs between ranks: rank 0 has",
    ),
    "packs against microbatches": (
        lambda run: change(run, events.Optimizer, rank=3, step=1, local_microbatches=8),
        "packs, but the optimizer counts 8 microbatches",
    ),
    "tokens against normalization": (
        lambda run: change(run, events.Optimizer, step=1, normalization=normalized(model_tokens=40_000)),
        "model tokens, normalization counts 40,000",
    ),
    "normalization unequal over ranks": (
        lambda run: change(run, events.Optimizer, rank=2, step=1, normalization=normalized(active_tokens=5)),
        "update 1: normalization differs between ranks",
    ),
    "another global batch": (
        lambda run: change(run, events.Optimizer, step=1, normalization=normalized(samples=64)),
        "update 1: 64 samples, but the configuration has 32 an update",
    ),
    "more active than model tokens": (
        lambda run: change(run, events.Optimizer, step=1, normalization=normalized(active_tokens=10**6)),
        "1,000,000 active tokens of only",
    ),
    "a fill that its counts do not give": (
        lambda run: change(run, events.Packing, rank=0, step=1, fill_fraction=0.99),
        "update 1, rank 0, training: fill_fraction is 0.99, its counts give",
    ),
    "a packing event lost": (
        lambda run: without(run, events.Packing, rank=0, step=1, only="training"),
        "update 1, rank 0: 0 training packing events where 1 belongs",
    ),
    "a packing event too many": (
        lambda run: {**run, 0: [*run[0], *(e for e in run[0] if isinstance(e, events.Packing) and e.step == 1)]},
        "update 1, rank 0: 2 training packing events where 1 belongs",
    ),
    "a scoring event lost": (
        lambda run: without(run, events.Packing, rank=0, step=2, only="scoring"),
        "update 2, rank 0: 0 scoring packing events where 1 belongs",
    ),
    "scoring over other packs": (
        lambda run: change(run, events.Packing, rank=2, step=2, only="scoring", plan_digest="other"),
        "update 2, rank 2: plan_digest is other in scoring and",
    ),
    "scoring over other tokens": (
        lambda run: change(run, events.Packing, rank=2, step=2, only="scoring", model_tokens=1),
        "update 2, rank 2: model_tokens is 1 in scoring and",
    ),
    "scoring that should not have run": (
        lambda run: change(run, events.Optimizer, step=2, scoring_pass="skipped"),
        "update 2, rank 0: 1 scoring packing event where 0 belongs",
    ),
    "a plan never recorded": (
        lambda run: without(run, events.Plan, step=2),
        "update 3, rank 0: no plan is recorded for collection 1",
    ),
    "a plan of other samples": (
        lambda run: change(run, events.Plan, step=2, record=lambda e: {**e.record, "capacity": 400}),
        "plan of collection 1 cannot be rebuilt from its record",
    ),
    "a plan that is no record": (
        lambda run: change(run, events.Plan, step=2, record={"plan": 1}),
        "plan of collection 1 cannot be rebuilt from its record",
    ),
    "packs that are not the plan's": (
        lambda run: change(run, events.Packing, rank=1, step=3, max_pack_tokens=511),
        "update 3, rank 1: max_pack_tokens is 511, the plan says",
    ),
    "the digest of another plan": (
        lambda run: change(run, events.Packing, step=3, plan_digest="other"),
        "update 3, rank 0: plan_digest other, but the recorded plan has",
    ),
    "steps that do not follow": (
        lambda run: without(run, events.Optimizer, step=2),
        "rank 0: optimizer step 3 stands where 2 should follow",
    ),
    "a step lost on one rank": (
        lambda run: without(run, events.Optimizer, rank=2, step=4),
        "update 4: no optimizer event on rank 2",
    ),
    "an end that comes too early": (
        lambda run: change(run, events.RunFinished, completed_steps=5),
        "run_finished counts 5 completed steps, the log holds 4",
    ),
    "a rank that never ends": (
        lambda run: without(run, events.RunFinished, rank=3),
        "rank 3: no run_finished, which other ranks have",
    ),
    "configurations unequal over ranks": (
        lambda run: change(run, events.RunStarted, rank=2, configuration_digest="other"),
        "run_started: configuration_digest differs between ranks",
    ),
    "a rank without a log": (
        lambda run: {rank: own for rank, own in run.items() if rank != 1},
        "the run has 4 ranks, but there is no log of rank 1",
    ),
    "a rank that does not belong": (
        lambda run: {**run, 4: [msgspec.structs.replace(event, rank=4) for event in run[3]]},
        "the run has 4 ranks, but there is a log of rank 4",
    ),
    "another rank's events": (
        lambda run: {**run, 1: run[2]},
        "training_contract_rank1.jsonl holds events of rank 2",
    ),
    "no start": (
        lambda run: without(run, events.RunStarted),
        "no run_started was recorded",
    ),
    "no check of the first update": (
        lambda run: without(change(run, events.Optimizer, step=1, scoring_pass="checked"), events.ScoringCheck, step=0),
        "update 1 was checked, but no scoring_check of it is recorded",
    ),
    "a first update without scoring": (
        lambda run: change(run, events.Optimizer, step=1, scoring_pass="skipped"),
        "rank 0: update 1 is the first of its process, but scoring was skipped",
    ),
    "a first update scored and not compared": (
        lambda run: without(run, events.ScoringCheck, step=0),
        "rank 0: update 1 is the first of its process and was scored, but no scoring_check of it is recorded",
    ),
    "a check over its tolerance": (
        lambda run: change(run, events.ScoringCheck, step=2, mean_abs=2e-3),
        "rank 0: scoring check of update 3 differs by 0.002 on average, the tolerance is 0.001",
    ),
    "a check over its limit": (
        lambda run: change(run, events.ScoringCheck, step=2, max_abs=0.5, max_tolerance=0.25),
        "rank 0: scoring check of update 3 differs by up to 0.5, the limit is 0.25",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_broken_rule_is_found(case: str) -> None:
    damage, violation = BROKEN[case]
    found = audit(as_logs(damage(make_run(2))))
    assert any(violation in line for line in found), found


def test_packing_that_never_packs_is_found_only_when_packing_is_on() -> None:
    run = make_run(1, packing=False)
    said = "packing is on, but in no update"
    assert not any(said in line for line in audit(as_logs(run)))
    on = change(run, events.RunStarted, configuration={"core": {"sequence_packing": True}})
    assert any(said in line for line in audit(as_logs(on)))


def resumed_run(killed: int, first: int, total: int) -> Run:
    """A run killed after `killed` collections, resumed after `first`, finished after `total`."""
    before, after = make_run(killed, finish=False), make_run(total, first=first)
    return {rank: [*before[rank], *after[rank]] for rank in before}


def test_a_run_killed_between_checkpoints_and_resumed_is_sound() -> None:
    run = resumed_run(3, 2, 4)
    late = {
        rank: [e for e in own if not (isinstance(e, events.Checkpoint) and e.step == 6)] for rank, own in run.items()
    }
    assert audit(as_logs(late)) == []


def test_ranks_killed_in_different_updates_and_resumed_are_sound() -> None:
    before, after = make_run(3, finish=False), make_run(4, first=2)
    run = {}
    for rank, own in before.items():
        cut = next(i for i, e in enumerate(own) if isinstance(e, events.Optimizer) and e.step == 2 * STEPS + 1)
        run[rank] = [*own[: cut + (rank != 2)], *after[rank]]
    assert audit(as_logs(run)) == []


def test_the_trailing_update_of_an_interrupted_run_is_not_judged() -> None:
    run = make_run(2, finish=False)
    cut = next(i for i, e in enumerate(run[2]) if isinstance(e, events.Optimizer) and e.step == 2 * STEPS)
    assert audit(as_logs({**run, 2: run[2][:cut]})) == []


def test_updates_that_were_scored_and_not_reached_are_not_judged() -> None:
    def unreached(event: Event) -> bool:
        return isinstance(event, events.Optimizer | events.Checkpoint) and event.step > STEPS

    run = {rank: [e for e in own if not unreached(e)] for rank, own in make_run(2, finish=False).items()}
    scored = {e.step for e in run[0] if isinstance(e, events.Packing)}
    assert {STEPS + 1, STEPS + 2} <= scored
    assert audit(as_logs(run)) == []
    ended = {rank: [*own, *make_run(2)[rank][-1:]] for rank, own in run.items()}
    assert any(f"update {STEPS + 2}: no optimizer event on rank 0, 1, 2, 3" in line for line in audit(as_logs(ended)))


def test_a_run_of_one_rank_is_told_in_the_singular() -> None:
    run = {0: make_run(1, ranks=1)[0], 1: make_run(1, ranks=2)[1]}
    assert any("the run has 1 rank, but there is a log of rank 1" in line for line in audit(as_logs(run)))


def test_a_resume_that_repeats_what_a_checkpoint_holds_is_found() -> None:
    found = audit(as_logs(resumed_run(3, 1, 4)))
    assert "rank 0: run_started resumes after update 2 although a checkpoint of update 6 was saved" in found[0]


def test_a_resume_that_leaves_updates_out_is_found() -> None:
    found = audit(as_logs(resumed_run(1, 2, 3)))
    assert "rank 0: run_started resumes after update 4, but only 2 are recorded" in found


def test_the_first_update_after_a_resume_must_be_checked() -> None:
    run = change(resumed_run(2, 2, 3), events.Optimizer, step=2 * STEPS + 1, scoring_pass="skipped")
    assert any("update 5 is the first of its process" in line for line in audit(as_logs(run)))


def test_a_resume_under_another_configuration_is_found() -> None:
    run = resumed_run(2, 2, 3)
    for own in run.values():
        starts = [i for i, event in enumerate(own) if isinstance(event, events.RunStarted)]
        own[starts[1]] = msgspec.structs.replace(own[starts[1]], configuration_digest="other")
    assert any("resumes with configuration_digest other, but the run had" in line for line in audit(as_logs(run)))


def test_a_process_that_failed_to_start_leaves_no_violation() -> None:
    run = {rank: [events.RunFailed(rank=rank, step=0, error="busy"), *own] for rank, own in make_run(1).items()}
    assert audit(as_logs(run)) == []


def before_the_first_update(run: Run, ending: str | None) -> Run:
    """Return a run that came no further than its first scoring pass, and failed there on every rank if it did."""
    short = {rank: [event for event in own if isinstance(event, events.RunStarted)] for rank, own in run.items()}
    if ending is None:
        return short
    return {rank: [*own, events.RunFailed(rank=rank, step=0, error=ending)] for rank, own in short.items()}


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("ValueError: sample 'q3/1' is broken", "failed on rank 0, 1, 2, 3: ValueError: sample 'q3/1' is broken"),
        (None, "not finished"),
    ],
)
def test_a_run_that_ended_before_its_first_update_proves_nothing(ending: str | None, words: str) -> None:
    logs = as_logs(before_the_first_update(make_run(2), ending))
    assert audit(logs) == [f"no update is complete on every rank, so nothing was proven; the run: {words}"]
    assert endings(logs) == [f"{words}; 0 complete updates audited"]


def test_a_run_that_failed_later_is_told_beside_the_updates_that_hold() -> None:
    run = {
        rank: [*own, events.RunFailed(rank=rank, step=4, error="disk full")]
        for rank, own in make_run(2, finish=False).items()
    }
    assert audit(as_logs(run)) == []
    assert endings(as_logs(run)) == ["failed on rank 0, 1, 2, 3: disk full; 4 complete updates audited"]
    assert endings(as_logs(make_run(2))) == []


def test_a_corrupt_line_is_a_violation_and_a_torn_one_is_not(tmp_path: Path) -> None:
    write_run(tmp_path, make_run(1, finish=False))
    path = contract_path(tmp_path, 1)
    path.write_bytes(path.read_bytes() + b'{"event":"run_fini')
    assert audit(read_logs([tmp_path])) == []
    path.write_bytes(b"damaged\n" + path.read_bytes())
    assert [line for line in audit(read_logs([tmp_path])) if "corrupt" in line] == audit(read_logs([tmp_path]))


def test_several_runs_are_judged_apart_and_named() -> None:
    good, bad = make_run(1), without(make_run(1), events.Plan)
    found = audit([*as_logs(good, Path("a")), *as_logs(bad, Path("b"))])
    assert found
    assert all(line.startswith("b: ") for line in found)
