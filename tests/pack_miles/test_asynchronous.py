"""Sampling while training, without Ray: importance weights, the dealer's decisions, the audit, the report."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from pack_miles.asynchronous.dealing import Dealer
from pack_miles.asynchronous.post import Delivery, Post
from pack_miles.contract import events
from pack_miles.contract.audit import audit
from pack_miles.contract.groups import GroupOrigin, RolloutCounts, RolloutGroups
from pack_miles.reporting.page import render_page
from pack_miles.reporting.report import summarize
from pack_miles.reporting.waiting import waiting_told
from pack_miles.samples import RolloutRow
from pack_miles.settings.arguments import miles_options
from pack_miles.settings.overview import areas
from pack_miles.training.objective import row_loss
from pack_torch import Rollout, build_batch
from support.asynchronous_cases import ASYNC
from support.log_runs import ANSWERS, PROMPTS, STEPS, as_logs, make_run
from support.miles_config import SMALL, make_config

LOG2 = math.log(2.0)


# ---------------------------------------------------------------- importance weights


def two_rollouts(scored: bool) -> list[Rollout]:
    """Two samples of three response tokens; the trainer finds them e^0.7 and e^-0.7 times as likely, or as likely."""
    made = []
    for name, gain, apart in (("a", 1.0, LOG2), ("b", -1.0, -LOG2)):
        trainer = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
        made.append(
            Rollout(
                name,
                [1, 2, 3, 4],
                response_length=3,
                loss_mask=[True, name == "a", True],
                advantages=torch.full((3,), gain, dtype=torch.float64),
                old_log_probs=trainer if scored else None,
                rollout_log_probs=trainer - apart * torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64),
            )
        )
    return made


@pytest.mark.parametrize("scored", [True, False])
def test_importance_weights_scale_the_loss_and_are_counted_where_limited(tmp_path: Path, scored: bool) -> None:
    """Weights 4, 2, 1 for a and 1/4, (masked), 1 for b; within [0.5, 1.5] they are 1.5, 1.5, 1 and 0.5, 1."""
    config = make_config(tmp_path, miles__use_tis=True, miles__tis_clip=1.5, miles__tis_clip_low=0.5)
    batch = build_batch(two_rollouts(scored), [0, 1])
    log_probs = torch.tensor([-1.0, -2.0, -3.0] * 2, dtype=torch.float64, requires_grad=True)
    loss = row_loss(config, log_probs, batch, scored=scored)
    assert float(loss.numerator.detach()) == pytest.approx(-(1.5 + 1.5 + 1.0) + (0.5 + 1.0), abs=1e-12)
    assert (loss.truncated, loss.clipped) == (3, 0)
    loss.numerator.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.5, -1.5, -1.0, 0.5, 0.0, 1.0], abs=1e-12)


def test_without_importance_weights_and_with_the_rollout_as_anchor(tmp_path: Path) -> None:
    batch = build_batch(two_rollouts(True), [0, 1])
    log_probs = torch.tensor([-1.0, -2.0, -3.0] * 2, dtype=torch.float64)
    plain = row_loss(make_config(tmp_path), log_probs, batch, scored=True)
    assert (float(plain.numerator), plain.truncated) == (pytest.approx(-1.0, abs=1e-12), 0)
    # The ratio is the weight itself then: a's 4, 2, 1 held at 1.28 where it gains, b's 1/4 at 0.8.
    anchored = row_loss(make_config(tmp_path, miles__use_rollout_logprobs=True), log_probs, batch, scored=True)
    assert float(anchored.numerator) == pytest.approx(-(1.28 + 1.28 + 1.0) + (0.8 + 1.0), abs=1e-12)
    assert (anchored.clipped, anchored.truncated) == (3, 0)


def test_a_sample_without_recorded_log_probabilities_is_named(tmp_path: Path) -> None:
    bare = [Rollout("q/3", [1, 2, 3], 2, loss_mask=[True, True], advantages=torch.ones(2))]
    with pytest.raises(ValueError, match="sample 'q/3' has no rollout_log_probs"):
        row_loss(make_config(tmp_path, miles__use_tis=True), torch.zeros(2), build_batch(bare, [0]), scored=False)


# ---------------------------------------------------------------- settings


def test_the_limits_reach_miles_only_with_what_they_limit(tmp_path: Path) -> None:
    on = miles_options(make_config(tmp_path, ASYNC))
    assert (on["use_tis"], on["tis_clip"], on["tis_clip_low"], on["fully_async"]) == (True, 2.0, 0.0, True)
    off = miles_options(make_config(tmp_path, SMALL))
    assert (off["use_tis"], off["fully_async"]) == (False, False)
    assert not {"tis_clip", "tis_clip_low"} & set(off)


def test_validation_says_how_far_workers_may_run_ahead(tmp_path: Path) -> None:
    told = dict(areas(make_config(tmp_path, ASYNC)))
    # Two steps a collection and a lag of three: the last step of the next collection is three steps on.
    assert told["rollouts"] == "sampled while training by 2 workers, from weights of up to 1 collection before"
    assert told["loss"].endswith("importance weights in [0, 2]")
    assert "rollouts" not in dict(areas(make_config(tmp_path, SMALL)))


# ---------------------------------------------------------------- the dealer


class RayError(Exception):
    """Something of Ray's."""


class RayTaskError(RayError):
    """An actor's own error."""


class Actor:
    """Notes what it is asked; the answer is whatever the test says it is."""

    def __init__(self, name: str, calls: list[tuple[str, str, tuple[Any, ...]]]) -> None:
        self.name, self.calls = name, calls

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls.append((self.name, method, arguments))
            ref = f"{self.name}.{method}{len(self.calls)}"
            return (ref, f"{ref}.weights") if method == "published" else ref

        return SimpleNamespace(remote=remote, options=lambda num_returns: SimpleNamespace(remote=remote))


class Table:
    """A dealer, two ranks, and workers that come, answer and die as the test says."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.results: dict[str, Any] = {}
        self.killed: list[str] = []
        self.seats = 0
        ray: Any = SimpleNamespace(
            get=self.get,
            put=lambda value: value,
            kill=lambda actor, no_restart: self.killed.append(actor.name),
            exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError),
        )
        config = make_config(folder, ASYNC | {"miles.num_rollout": 3, "core.max_policy_lag": 1})
        self.dealer = Dealer(ray, config, self.seat, [Actor("rank0", self.calls), Actor("rank1", self.calls)])

    def seat(self, slot: int) -> Any:
        self.seats += 1
        return Actor(f"worker{self.seats - 1}", self.calls)

    def get(self, ref: str) -> Any:
        result = self.results[ref]
        if isinstance(result, Exception):
            raise result
        return result

    def hear(self, name: str, result: Any) -> None:
        """Let the oldest call of a method of an actor, `worker0.sample`, have its result."""
        ref = next(ref for ref in self.dealer.refs if ref.startswith(name))
        self.results[ref] = result
        self.dealer.heard(ref)

    def asked(self, method: str) -> list[tuple[str, Any]]:
        return [(name, arguments[0]) for name, called, arguments in self.calls if called == method]


def rows_of(group: int) -> Any:
    row = RolloutRow(tokens=[1, 2], response_length=1, index=group, group_index=group)
    return SimpleNamespace(rows=[row], seconds=0.5, waited_seconds=0.25)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A table at which both workers have come and the first weights are published: groups 0 and 1 are out."""
    made = Table(tmp_path)
    made.hear("worker0.place", "here")
    made.hear("worker1.place", "there")
    assert made.asked("sample") == [], "there are no weights yet"
    made.hear("rank0.published", (0, 0))
    assert made.asked("sample") == [("worker0", 0), ("worker1", 1)]
    return made


def test_a_lost_group_goes_to_the_next_free_worker_and_the_collection_to_every_rank(table: Table) -> None:
    table.hear("worker0.sample", RayError("it died"))
    assert (table.killed, table.seats) == (["worker0"], 3)
    table.hear("worker1.sample", rows_of(1))
    assert table.asked("sample")[-1] == ("worker1", 0), "the lost group first"
    table.hear("worker2.place", "here again")
    assert table.asked("sample")[-1] == ("worker2", 2)
    table.hear("worker1.sample", rows_of(0))
    table.hear("worker2.sample", rows_of(2))
    assert table.asked("deliver") == []
    table.hear("worker1.sample", rows_of(3))
    (first, one), (second, other) = table.asked("deliver")
    assert (first, second) == ("rank0", "rank1")
    assert one is other
    assert isinstance(one, Delivery)
    assert [row.index for row in one.rows] == [0, 1, 2, 3]
    assert [(origin.group_index, origin.worker, origin.attempts) for origin in one.groups] == [
        (0, 1, 2),
        (1, 1, 1),
        (2, 2, 1),
        (3, 1, 1),
    ]
    assert one.counts == RolloutCounts(
        issued=5, completed=4, reissued=1, lost=1, discarded=0, out=0, workers=3, lost_workers=1
    )
    # Two steps a collection, a lag of one: nothing goes out until the next weights are there.
    assert len(table.asked("sample")) == 5
    table.hear("rank0.published", (1, 2))
    assert table.asked("sample")[-2:] == [("worker1", 4), ("worker2", 5)]
    assert [load for load in table.asked("load") if load[1] == 2] == [("worker1", 2), ("worker2", 2)]


def test_a_worker_that_fails_by_itself_ends_the_run_with_its_own_words(table: Table) -> None:
    table.hear("worker1.sample", RayTaskError("Traceback\n  somewhere\nValueError: no such token\n"))
    reason = "a rollout worker failed at prompt group 1: ValueError: no such token"
    assert table.asked("fail") == [("rank0", reason), ("rank1", reason)]
    assert table.dealer.refs == []


def test_workers_lost_in_a_row_end_the_run(table: Table) -> None:
    table.hear("worker0.sample", RayError("the node is out of memory"))
    table.hear("worker1.sample", RayError("the node is out of memory"))
    assert table.asked("fail") == []
    table.hear("worker2.place", RayError("the node is out of memory"))
    assert table.asked("fail")[0][1] == (
        "3 rollout workers were lost in a row, with no answer between: the node is out of memory"
    )


def test_a_rank_that_gets_no_collection_in_time_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"did not bring collection 4 within run\.timeout_seconds = 0\.01; raise it"):
        Post().wait(4, 0.01)


# ---------------------------------------------------------------- audit and report

Run = dict[int, list[events.Event]]

#: What the configuration of a run of `make_run` says when rollout workers made its collections.
SAID = {
    "core": {"sequence_packing": True, "max_policy_lag": 3},
    "miles": {
        "global_batch_size": PROMPTS * ANSWERS // STEPS,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": ANSWERS,
        "fully_async": True,
        "num_rollout": 3,
    },
}


def brought(rollout_id: int) -> RolloutGroups:
    """Collection c, its first group lost once with worker 0 if c is 1; sampled one collection ahead from then on."""
    version = STEPS * max(0, rollout_id - 1)
    lost = rollout_id >= 1
    groups = [
        GroupOrigin(
            group_index=rollout_id * PROMPTS + place,
            worker=2 if lost else place % 2,
            version=version,
            attempts=2 if rollout_id == 1 and place == 0 else 1,
            seconds=0.5,
            waited_seconds=0.25,
        )
        for place in range(PROMPTS)
    ]
    done = PROMPTS * (rollout_id + 1)
    counts = RolloutCounts(
        issued=done + lost,
        completed=done,
        reissued=int(lost),
        lost=int(lost),
        discarded=0,
        out=0,
        workers=2 + lost,
        lost_workers=int(lost),
    )
    return RolloutGroups(
        rank=0, step=rollout_id * STEPS, rollout_id=rollout_id, groups=groups, counts=counts, trainer_wait_seconds=0.5
    )


def asynchronous_run() -> Run:
    """Three collections of `STEPS` updates each, from workers one collection ahead."""
    run = make_run(3, start={"configuration": SAID})
    for own in run.values():
        for place, event in enumerate(own):
            if isinstance(event, events.Optimizer):
                versions = (str(STEPS * max(0, event.rollout_id - 1)),)
                own[place] = msgspec.structs.replace(event, local_behavior_versions=versions)
    first = [place for place, event in enumerate(run[0]) if isinstance(event, events.Plan)]
    for rollout_id, place in reversed(list(enumerate(first))):
        run[0].insert(place, brought(rollout_id))
    return run


def changed(rollout_id: int, change: Callable[[RolloutGroups], RolloutGroups]) -> Run:
    run = asynchronous_run()
    run[0] = [
        change(event) if isinstance(event, RolloutGroups) and event.rollout_id == rollout_id else event
        for event in run[0]
    ]
    return run


def replaced(event: RolloutGroups, place: int, **fields: Any) -> RolloutGroups:
    groups = list(event.groups)
    groups[place] = msgspec.structs.replace(groups[place], **fields)
    return msgspec.structs.replace(event, groups=groups)


def counted(event: RolloutGroups, **fields: int) -> RolloutGroups:
    return msgspec.structs.replace(event, counts=msgspec.structs.replace(event.counts, **fields))


def test_an_asynchronous_run_passes_its_audit() -> None:
    assert audit(as_logs(asynchronous_run())) == []


@pytest.mark.parametrize(
    ("rollout_id", "change", "words"),
    [
        (1, lambda e: replaced(e, 3, group_index=8), "group 8 is named 2 where 1 belong"),
        (1, lambda e: replaced(e, 3, group_index=8), "group 11 is named 0 where 1 belong"),
        (1, lambda e: replaced(e, 3, group_index=3), "group 11 has samples planned: 8 where 0 belong"),
        (2, lambda e: counted(e, issued=30), "30 groups were handed out, but 25 came back, were lost or are out"),
        (0, lambda e: counted(e, issued=7, completed=7), "8 groups so far, but 7 answered"),
        (
            2,
            lambda e: counted(e, issued=26, completed=25),
            "the run delivered 24 groups in its last process, but 25 were answered",
        ),
        (
            2,
            lambda e: msgspec.structs.replace(e, groups=[msgspec.structs.replace(one, version=3) for one in e.groups]),
            "updates learned from versions ['2'], groups name ['3']",
        ),
        (2, lambda e: msgspec.structs.replace(e, rollout_id=1), "2 rollout_groups events where 1 belongs"),
    ],
)
def test_the_audit_tells_a_group_that_is_doubled_lost_or_not_what_was_trained(
    rollout_id: int, change: Callable[[RolloutGroups], RolloutGroups], words: str
) -> None:
    assert any(words in violation for violation in audit(as_logs(changed(rollout_id, change))))


def test_the_audit_tells_samples_that_are_too_old_or_of_weights_to_come() -> None:
    run = asynchronous_run()
    place = max(place for place, event in enumerate(run[2]) if isinstance(event, events.Optimizer))
    for version, words in (("1", "are 4 steps old, max_policy_lag is 3"), ("6", "are -1 steps old")):
        assert isinstance(run[2][place], events.Optimizer)
        run[2][place] = msgspec.structs.replace(run[2][place], local_behavior_versions=(version,))
        assert f"update 6, rank 2: samples of version {version} {words}" in " ".join(audit(as_logs(run)))


def test_a_synchronous_run_names_no_workers() -> None:
    run = make_run(3)
    run[0].insert(3, brought(0))
    assert "collection 0: rollout_groups is recorded, but fully_async is off" in audit(as_logs(run))


def test_the_report_tells_ages_and_who_waited_for_whom() -> None:
    report = summarize(as_logs(asynchronous_run()))
    waiting = report.runs[0].waiting
    assert waiting is not None
    # Collection 0 is fresh; 1 and 2 are two steps old when their first step is taken, three at their second.
    assert (waiting.groups_by_age, waiting.oldest) == ({0: 8, 2: 16}, 3)
    told = dict(waiting_told(waiting))
    assert told["age of prompt groups in optimizer steps"] == "0: 33%, 2: 67%; oldest sample at any update 3"
    assert told["waiting"] == "trainer for rollouts 1.5 s, workers for work 6.0 s (33% of their time)"
    assert told["prompt groups"] == (
        "24 trained, each once; 1 worker lost, 1 handed out again, 0 late answers discarded"
    )
    assert summarize(as_logs(make_run(2))).runs[0].waiting is None
    assert "<p>age of prompt groups in optimizer steps: 0: 33%, 2: 67%; oldest sample at any update 3</p>" in (
        render_page(report)
    )
