"""The actor: scores and trains this rank's samples on packed rows, one optimizer step after another.

All ranks run the same collectives in the same order, whatever their samples look like: equal pack counts are agreed
before the first forward, and what can fail on one rank alone fails on all (`World.agreed`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import attrs
import torch
from pack_core import Plan
from pack_torch import (
    Groups,
    Normalization,
    PackedBatch,
    Rollout,
    build_batch,
    clip_gradients,
    normalization,
    reduce_gradients,
    response_log_probs,
)
from pack_torch.slicing import ScoringModel
from torch import Tensor

from pack_miles.contract import events
from pack_miles.contract.sink import ContractSink
from pack_miles.planning import Loads
from pack_miles.scoring_pass import ScoringPass
from pack_miles.settings.config import Config
from pack_miles.training import column, scoring
from pack_miles.training.collectives import RankError, World
from pack_miles.training.column import ColumnOptions, pack_column, packs_of
from pack_miles.training.objective import Learned, row_loss
from pack_miles.training.observed import Planned, Watched, balance_event, differences, executed
from pack_miles.training.policy import Policy, training_model

Mode = Literal["standalone", "checked", "skipped"]


@attrs.define(eq=False)
class Actor:
    """One rank of the trainer, whatever its model is: everything it uses of one is in `Policy`.

    `reference` is the frozen model for KL in the advantages, None without. `completed_steps` counts optimizer
    updates, never packs. `last_check` is this process's own: a new process checks its first update.
    """

    config: Config
    model: Policy
    reference: Policy | None
    optimizer: torch.optim.Optimizer
    groups: Groups
    world: World
    sink: ContractSink
    clock: Callable[[], float]
    scoring_pass: ScoringPass
    device: torch.device
    completed_steps: int = 0
    last_check: int | None = None

    def train(
        self, rollout_id: int, rollouts: Sequence[Rollout], plan: Plan, loads: Sequence[Loads] | None = None
    ) -> None:
        """Score this rank's samples of one collection if need be, then take its optimizer steps.

        Args:
            rollout_id: the collection's number.
            rollouts: this rank's column of the collection, in the plan's order, with their advantages.
            plan: the collection's plan; the packs this rank agrees on with the others must be the plan's.
            loads: on rank 0, what the plan's counts make of each step; every update is held against them where
                `core.expert_balanced_packing` is on.

        Raises:
            RankError: on every rank, for what went wrong on any.
            DisagreementError: on every rank, when log-probabilities that must agree do not.
        """
        self.world.same({"samples": len(rollouts), "step": self.completed_steps, "configuration": self.config.digest})
        steps = self._rows(rollouts, plan)
        due = scoring.check_due(self.completed_steps, self.last_check, self.config.core.scoring_check_interval)
        standalone = self.scoring_pass.standalone
        if standalone or due:
            steps = self._score(rollout_id, steps, plan.digest)
        for number, batches in enumerate(steps):
            # Only the first update of a collection runs at the weights that were scored.
            check = due and number == 0 and not (standalone and self.model.stochastic())
            mode: Mode = "standalone" if standalone else "checked" if check else "skipped"
            self._update(rollout_id, batches, mode, check, Planned(plan, number, loads[number] if loads else None))

    def _rows(self, rollouts: Sequence[Rollout], plan: Plan) -> list[list[PackedBatch]]:
        """Return the packed rows of every optimizer step, all checked on all ranks before the first forward of any."""
        options = ColumnOptions(
            step_samples=self.config.step_samples // self.world.size,
            capacity=self.config.capacity,
            equalize=self.config.core.packing_equalize,
            max_documents=self.config.max_documents,
        )
        steps = pack_column([r.id for r in rollouts], [r.length for r in rollouts], options, self.world)
        replay = self.config.miles.use_rollout_routing_replay

        def build() -> list[list[PackedBatch]]:
            planned = packs_of(plan, self.world)
            if steps != planned:
                raise ValueError(f"this rank packs its samples as {steps}, but the plan says {planned}")
            built = [[build_batch(rollouts, pack, replay=replay).to(self.device) for pack in packs] for packs in steps]
            for batch in [batch for batches in built for batch in batches]:
                self.model.check(batch)
            return built

        return self.world.agreed(build)

    def _score(
        self, rollout_id: int, steps: Sequence[Sequence[PackedBatch]], plan_digest: str
    ) -> list[list[PackedBatch]]:
        """Return the rows with the log-probabilities of the weights as they are, over the packs of training."""
        begin, scored = self.clock(), []
        for number, batches in enumerate(steps):
            self._tell_packing(rollout_id, batches, "scoring", self.completed_steps + number + 1, plan_digest)
            scored.append([self._score_row(batch) for batch in batches])
        self.sink.write(
            events.ScoreTiming(
                rank=self.world.rank,
                step=self.completed_steps,
                rollout_id=rollout_id,
                seconds=self.clock() - begin,
                model_tokens=sum(batch.tokens for batches in steps for batch in batches),
            )
        )
        return scored

    def _score_row(self, batch: PackedBatch) -> PackedBatch:
        log_probs = batch.split(self._forward(self.model, batch))
        # The reference routes for itself: the recorded choices are the policy's.
        plain = attrs.evolve(batch, routes=None)
        reference = batch.split(self._forward(self.reference, plain)) if self.reference else log_probs
        return attrs.evolve(batch, rollouts=tuple(map(self._scored, batch.rollouts, log_probs, reference)))

    def _scored(self, rollout: Rollout, log_probs: Tensor, ref_log_probs: Tensor) -> Rollout:
        if self.reference is None:
            return attrs.evolve(rollout, old_log_probs=log_probs)
        if rollout.advantages is None:
            raise ValueError(f"sample {rollout.id!r} has no advantages to take the KL penalty off")
        # KL in the advantages: k1, the log-ratio of policy to reference, taken off token by token.
        penalty = self.config.miles.kl_coef * (log_probs - ref_log_probs)
        return attrs.evolve(
            rollout,
            old_log_probs=log_probs,
            ref_log_probs=ref_log_probs,
            advantages=rollout.advantages - penalty.to(rollout.advantages.dtype),
        )

    @torch.no_grad()
    def _forward(self, model: Policy, batch: PackedBatch) -> Tensor:
        model.eval()
        return response_log_probs(model, batch, temperature=self.config.miles.rollout_temperature).cpu()

    def _update(
        self, rollout_id: int, batches: Sequence[PackedBatch], mode: Mode, check: bool, planned: Planned
    ) -> None:
        """Take one optimizer step over all packs of the step, on all ranks."""
        begin = self.clock()
        own = [rollout for batch in batches for rollout in batch.rollouts]
        versions = self.world.agreed(lambda: self._admit(own))
        self._tell_packing(rollout_id, batches, "training", self.completed_steps + 1, planned.plan.digest)
        counts = self._normalization(own)
        through = training_model(self.model, counts)
        layers, experts = planned.plan.layers, self.model.geometry.experts
        watched = Watched(through, experts, layers) if self.config.core.expert_balanced_packing else None
        learned = self._backward(watched or through, batches, counts, mode)
        gathered = self.world.gather_counts(watched.read(self.config.core.expert_parallel_size)) if watched else []
        self.world.agreed(lambda: self._refuse(rollout_id, learned.objective, gathered, planned))
        self._agree_with_rollout(rollout_id, own, learned.captured if mode == "skipped" else _scores(own), mode)
        if check:
            self._check(rollout_id, own, learned.captured)
        reduce_gradients(self.model, self.groups)
        norm = clip_gradients(self.model, self.config.miles.clip_grad, self.groups)
        self._refuse_non_finite(rollout_id, norm)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.completed_steps += 1
        clipped, truncated = self.world.total([learned.clipped, learned.truncated])
        self.sink.write(
            events.Optimizer(
                rank=self.world.rank,
                step=self.completed_steps,
                rollout_id=rollout_id,
                normalization=events.Normalization(
                    samples=counts.samples,
                    active_tokens=counts.active_tokens,
                    token_denominator=counts.active_tokens,
                    model_tokens=counts.model_tokens,
                    world_size=self.world.size,
                ),
                reduction=self.config.reduction,
                scoring_pass=mode,
                local_policy_objective=learned.objective,
                clip_fraction=clipped / counts.active_tokens,
                tis_clip_fraction=truncated / counts.active_tokens if self.config.miles.use_tis else None,
                gradient_norm=norm,
                local_behavior_versions=tuple(versions),
                local_microbatches=len(batches),
                lr_used=rate,
                lr_next=float(self.optimizer.param_groups[0]["lr"]),
                elapsed_seconds=self.clock() - begin,
            )
        )

    def _admit(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Return the policy versions of the samples; each sample is fresh enough, and whole where it trains."""
        lag = self.config.core.max_policy_lag
        for rollout in rollouts:
            rollout.check_finite()
            if not rollout.weight_versions:
                raise ValueError(f"sample {rollout.id!r} names no policy version")
            age = self.completed_steps - min(int(version) for version in rollout.weight_versions)
            if not 0 <= age <= lag:
                raise ValueError(
                    f"sample {rollout.id!r} is {age} updates old, but max_policy_lag is {lag}; raise it or sample anew"
                )
        return sorted({version for rollout in rollouts for version in rollout.weight_versions}, key=int)

    def _normalization(self, own: Sequence[Rollout]) -> Normalization:
        """Return the step's counts over all ranks and packs, the denominators of its loss."""
        local = normalization(own)
        totals = self.world.total([local.samples, local.active_tokens, local.model_tokens])
        counts = Normalization(*(int(total) for total in totals))
        # A step without one active token is an error on every rank: they all hold the same counts.
        self.world.agreed(lambda: counts.denominator(self.config.reduction))
        return counts

    def _backward(
        self, model: ScoringModel, batches: Sequence[PackedBatch], counts: Normalization, mode: Mode
    ) -> Learned:
        """Run forward and backward over the packs of a step."""
        self.model.train()
        if self.model.stochastic():
            torch.manual_seed(self.config.run.seed + 1_000_003 * self.completed_steps + self.world.rank)
        self.optimizer.zero_grad(set_to_none=True)
        objective, clipped, truncated, captured = 0.0, 0, 0, []
        for batch in batches:
            log_probs = response_log_probs(model, batch, temperature=self.config.miles.rollout_temperature)
            loss = row_loss(self.config, log_probs, batch, scored=mode != "skipped")
            scaled = loss.numerator / counts.denominator(self.config.reduction)
            scaled.backward()  # type: ignore[no-untyped-call]
            objective += float(scaled.detach())
            clipped, truncated = clipped + loss.clipped, truncated + loss.truncated
            captured.extend(batch.split(log_probs.detach().cpu()))
        return Learned(objective, clipped, truncated, captured)

    def _refuse(self, rollout_id: int, objective: float, gathered: Sequence[Tensor], planned: Planned) -> None:
        """Stop before the step where the loss is not finite or, on rank 0, routers did not execute what was planned."""
        if not math.isfinite(objective):
            raise ValueError(f"the loss is {objective}; no rank has stepped")
        if not gathered:
            return
        if planned.loads is None:
            raise ValueError(f"no loads of update {self.completed_steps + 1} were foreseen; give rank 0 the plan's")
        layers, step = planned.plan.layers, self.completed_steps + 1
        loads = executed(gathered, layers, self.config.core.expert_parallel_size)
        found = list(differences(planned.loads, loads, layers))
        mismatched = sorted({layer for layer, _ in found})
        self.sink.write(balance_event(loads, planned.plan, mismatched, step=step, rollout_id=rollout_id))
        if found:
            raise ValueError(
                f"update {step} did not execute what its plan counted: {found[0][1]} ({len(found)} in all); check that "
                "the plan was counted from the routes that are replayed; no rank has stepped"
            )

    def _agree_with_rollout(
        self, rollout_id: int, own: Sequence[Rollout], trainer: Sequence[Tensor], mode: Mode
    ) -> None:
        """Report, and gate if asked, how far the trainer's log-probabilities are from the rollout's."""
        limit = self.config.core.max_train_rollout_logprob_abs_diff
        missing = [rollout.id for rollout in own if rollout.rollout_log_probs is None]

        def gated() -> None:
            if missing and limit is not None:
                raise ValueError(
                    f"sample {missing[0]!r} has no rollout_log_probs, but max_train_rollout_logprob_abs_diff is "
                    f"{limit:g}; record them in the rollout, or leave the limit out"
                )

        if self.world.largest([len(missing)])[0]:
            self.world.agreed(gated)
            return  # rollouts of elsewhere may bring none, and then there is nothing to compare
        sampled = [rollout.rollout_log_probs for rollout in own if rollout.rollout_log_probs is not None]
        found = scoring.profile(trainer, sampled, [rollout.loss_mask for rollout in own], self.world)
        source: Literal["training_forward", "standalone"] = "training_forward" if mode == "skipped" else "standalone"
        self.sink.write(found.event(self.world.rank, self.completed_steps + 1, rollout_id, source))
        if limit is not None and found.mean_abs > limit:
            raise scoring.DisagreementError(
                f"trainer and rollout log-probabilities differ by {found.mean_abs:.3g} on average, "
                f"but max_train_rollout_logprob_abs_diff is {limit:g}"
            )

    def _check(self, rollout_id: int, own: Sequence[Rollout], captured: Sequence[Tensor]) -> None:
        """Compare the scoring pass with the training forward, and stop all ranks where they differ."""
        core = self.config.core
        found = scoring.compare(_scores(own), captured, [rollout.loss_mask for rollout in own], self.world)
        self.sink.write(found.event(self.world.rank, self.completed_steps, rollout_id, core))
        scoring.gate(found, core.scoring_check_tolerance, core.scoring_check_max_tolerance)
        self.last_check = self.completed_steps

    def _refuse_non_finite(self, rollout_id: int, norm: float) -> None:
        if math.isfinite(norm):
            return
        # The norm is global, so every rank is here, and no rank has stepped.
        reason = f"the gradient of update {self.completed_steps + 1} is not finite; no rank has stepped"
        self.sink.write(
            events.OptimizerRejected(
                rank=self.world.rank,
                step=self.completed_steps,
                rollout_id=rollout_id,
                gradient_norm=None,
                reason=reason,
            )
        )
        raise RankError(reason)

    def _tell_packing(
        self,
        rollout_id: int,
        batches: Sequence[PackedBatch],
        pass_: Literal["scoring", "training"],
        step: int,
        plan_digest: str,
    ) -> None:
        about = column.describe(batches, self.config.capacity)
        about |= {"rank": self.world.rank, "step": step, "rollout_id": rollout_id}
        self.sink.write(events.Packing(pass_=pass_, plan_digest=plan_digest, **about))


def _scores(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Return the scoring pass's log-probabilities, which every sample has by now."""
    return [rollout.old_log_probs for rollout in rollouts if rollout.old_log_probs is not None]
