"""The contract events: every line of a `training_contract_rank*.jsonl` file is one of these values.

Names and meanings of `step` follow the trainer this contract comes from: some events count updates completed before
they were written, some the update they belong to. `update` of every event resolves that difference.
"""

from typing import Any, Literal

import msgspec

from pack_miles.contract.groups import RolloutGroups
from pack_miles.contract.line import Amount, Count, Line, Positive


class RunStarted(Line, frozen=True, kw_only=True):
    """A process begins or resumes training; `step` equals `completed_steps`, `time` is in Unix seconds."""

    configuration_digest: str
    name: str
    world_size: Positive
    expert_parallel_size: Positive
    resumed: bool
    completed_steps: Count
    versions: dict[str, str]
    configuration: dict[str, Any]
    time: float


class Rollout(Line, frozen=True, kw_only=True):
    """A collection of all ranks' samples has been generated and rewarded; `step` = updates completed before it."""

    rollout_id: Count
    samples: Positive
    reward_mean: float
    reward_std: Amount
    reward_min: float
    reward_max: float
    response_tokens: Count
    model_tokens: Count
    seconds: Amount

    @property
    def update(self) -> int:
        """The first update that learns from this collection."""
        return self.step + 1


class Plan(Line, frozen=True, kw_only=True):
    """The plan of one collection with all its inputs, as `pack_core.record` gives it; `step` as in `Rollout`.

    Loads are expert choices, summed over the counted layers, for each update of the collection:
    `[updates][replicas][packs][destinations]`; None where routes are not known. Counts are not seconds.
    """

    rollout_id: Count
    record: dict[str, Any]
    counting_seconds: Amount = 0.0
    planning_seconds: Amount = 0.0
    loads_before: list[list[list[list[Count]]]] | None = None
    loads_after: list[list[list[list[Count]]]] | None = None

    @property
    def update(self) -> int:
        """The first update this plan is for."""
        return self.step + 1


class Packing(Line, frozen=True, kw_only=True):
    """What one rank runs in one pass of one update; `step` is that update. All counts are this rank's own.

    `pass_` is written as `pass`. `fill_fraction` is `model_tokens / (packs * token_budget)`.
    """

    rollout_id: Count
    pass_: Literal["scoring", "training"] = msgspec.field(name="pass")
    plan_digest: str
    samples: Count
    packs: Count
    model_tokens: Count
    max_pack_tokens: Count
    token_budget: Positive
    fill_fraction: Amount
    samples_per_pack: Amount


class ExpertBalance(Line, frozen=True, kw_only=True):
    """What the routers of one update executed, counted by the trainer itself and gathered on rank 0.

    `step` is that update. Names and meanings are those of `pack_core.Work`. `mismatched_layers` are the counted layers
    whose loads differ from the plan's in any dispatch: none, with replayed routes.
    """

    rollout_id: Count
    plan_digest: str
    layers: list[Count]
    routed_layers: Count
    packs_per_rank: Positive
    dispatches: Positive
    skew_mean: Amount
    skew_max: Amount
    max_slot_assignments: Count
    critical_work_proxy: Count
    mismatched_layers: list[Count]


class ScoreTiming(Line, frozen=True, kw_only=True):
    """A scoring pass ran on this rank, over `model_tokens` of its tokens; `step` = updates completed before it."""

    rollout_id: Count
    seconds: Amount
    model_tokens: Count

    @property
    def update(self) -> int:
        """The first update that uses these scores."""
        return self.step + 1


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mean absolute log-probability difference (nats) of one group of tokens; None where it holds no token."""

    tokens: Count
    mean_abs: Amount | None


class Scores(Line, frozen=True, kw_only=True):
    """How the trainer's log-probabilities differ from the rollout's, over all ranks; `step` is the update they anchor.

    Quantiles are upper edges of histogram classes; None stands for the open last class.
    """

    rollout_id: Count
    source: Literal["standalone", "training_forward"]
    active_tokens: Count
    max_abs: Amount
    p50_upper: float | None
    p95_upper: float | None
    p99_upper: float | None
    histogram_upper_edges: tuple[float | None, ...]
    histogram_counts: tuple[Count, ...]
    groups: dict[str, Agreement]


class ScoringCheck(Line, frozen=True, kw_only=True):
    """Scoring pass against training forward, over all ranks; `step` = updates completed before the checked one."""

    rollout_id: Count
    active_tokens: Count
    mean_abs: Amount
    max_abs: Amount
    tokens_above_edge: Count
    edge: Amount
    tolerance: Amount
    max_tolerance: Amount | None

    @property
    def update(self) -> int:
        """The update whose training forward was compared."""
        return self.step + 1


class Normalization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The global denominators of one update: the same on every rank."""

    samples: Positive
    active_tokens: Count
    token_denominator: Count
    model_tokens: Count
    world_size: Positive


class Optimizer(Line, frozen=True, kw_only=True):
    """An update has been applied; `step` = updates completed after it. `elapsed_seconds` excludes the scoring pass.

    `tis_clip_fraction` is the share of active tokens whose importance weight was beyond its limits, None without
    weights.

    Fields of the reference trainer that are absent in this release: `auxiliary_*`, `local_auxiliary_objective` and
    `router_objective`, for the routers' losses enter gradients inside each forward and nobody collects them;
    `local_pre_optimizer_gradients` and `sampled_model_updates`, for there are no diagnostic steps; `published_step`,
    for weights are published to the sampler once per collection; and `row_specialization` of `score_timing`.
    `packing` is written when packing is off as well, as packs of one.
    """

    rollout_id: Count
    normalization: Normalization
    reduction: Literal["token", "response"]
    scoring_pass: Literal["standalone", "checked", "skipped"]
    local_policy_objective: float
    clip_fraction: float
    tis_clip_fraction: float | None = None
    gradient_norm: Amount
    local_behavior_versions: tuple[str, ...]
    local_microbatches: Count
    lr_used: float
    lr_next: float
    optimizer_skipped: Literal[False] = False
    elapsed_seconds: Amount


class OptimizerRejected(Line, frozen=True, kw_only=True):
    """An update was refused and nothing changed; `step` = updates completed. A gradient norm of None was not finite."""

    rollout_id: Count
    gradient_norm: float | None
    reason: str

    @property
    def update(self) -> int:
        """The update that was refused."""
        return self.step + 1


class Memory(Line, frozen=True, kw_only=True):
    """What this rank's process has needed at most so far; `step` = updates completed.

    `peak_allocated_bytes` is what torch allocated on the rank's GPU, None on a CPU; `peak_resident_bytes` what the
    process held of the machine's memory.
    """

    rollout_id: Count
    peak_allocated_bytes: Count | None
    peak_resident_bytes: Count


class Checkpoint(Line, frozen=True, kw_only=True):
    """The state after `step` updates has been saved."""

    path: str
    seconds: Amount


class RunFailed(Line, frozen=True, kw_only=True):
    """The run ends with an error; `step` = updates completed."""

    error: str

    @property
    def update(self) -> int:
        """The update that was not completed."""
        return self.step + 1


class RunFinished(Line, frozen=True, kw_only=True):
    """The run ends as configured; `seconds` are this process's."""

    completed_steps: Count
    rollouts: Count
    seconds: Amount


class ScheduledStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One complete optimizer batch that the producer ordered.

    `block` counts from 0; `indices` are the samples' own, in arrival order, and `search.order` the places chosen, so
    that `[indices[place] for place in search["order"]]` is what the trainer got. `before` and `after` are named as in
    `pack_core.Work`. `headroom` holds by work how many percent of arrival's lay over the bound (`removable`) and how
    many percent of those are gone (`removed`).
    """

    block: Count
    indices: list[int]
    before: dict[str, float | None]
    after: dict[str, float | None]
    headroom: dict[str, dict[str, float | None]]
    reordered: bool
    search: dict[str, Any]


class ExpertSchedule(Line, frozen=True, kw_only=True):
    """The producer ordered a collection before MILES dealt it to ranks; `step` counts the lines of its file before.

    It knows neither rollout ids nor updates: the samples' indices say which collection it is. `layers` are those
    counted, none where lengths alone were evened out. `planning_seconds` is all it took, counting and telling included.
    """

    world: Positive
    ep_degree: Positive
    layers: list[Count]
    routed_layers: Count
    seam: Literal["groups", "rewards"]
    plan_digest: str
    blocks: list[ScheduledStep]
    untouched_tail_samples: Count
    counting_seconds: Amount
    planning_seconds: Amount


Event = (
    RunStarted
    | Rollout
    | RolloutGroups
    | Plan
    | Packing
    | ExpertBalance
    | ScoreTiming
    | Scores
    | ScoringCheck
    | Optimizer
    | OptimizerRejected
    | Memory
    | Checkpoint
    | RunFailed
    | RunFinished
    | ExpertSchedule
)


def name_of(event: Event) -> str:
    """Return the event's name in the log.

    >>> name_of(RunFinished(rank=0, step=4, completed_steps=4, rollouts=2, seconds=1.5))
    'run_finished'
    """
    return str(event.__struct_config__.tag)
