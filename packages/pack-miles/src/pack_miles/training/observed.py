"""What the routers of a training step executed: counted on each rank, gathered on rank 0, held against the plan."""

import math
from collections.abc import Iterator, Sequence

import attrs
import torch
from pack_core import Plan
from pack_torch import ModelOutput, PackedBatch
from pack_torch.routing import observed_counts, read_counts
from pack_torch.slicing import ScoringModel
from torch import Tensor

from pack_miles.contract import events
from pack_miles.planning import Loads


@attrs.frozen
class Planned:
    """One optimizer step of a plan, and on rank 0 the loads that the plan's counts make of it; None elsewhere."""

    plan: Plan
    step: int
    loads: Loads | None = None


@attrs.define(eq=False)
class Watched:
    """A model that counts, forward by forward, the experts its routers executed; nothing waits for the device."""

    model: ScoringModel
    experts: int
    layers: tuple[int, ...]
    counts: list[Tensor] = attrs.field(factory=list)

    def __call__(self, batch: PackedBatch) -> ModelOutput:
        """Return what the model gives for the row."""
        output: ModelOutput = self.model(batch)
        self.counts.append(observed_counts(output.routes, experts=self.experts, layers=self.layers))
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the model's logits for rows of hidden states."""
        return self.model.logits(hidden)

    def read(self, destinations: int) -> Tensor:
        """Return the counts of all forwards so far, int64 `[forwards, layers, destinations]` on the CPU.

        Destination d owns the d-th equal share of the experts. This is where the device is waited for, once.
        """
        counts = torch.stack(self.counts)
        return counts.view(*counts.shape[:2], destinations, -1).sum(dim=-1).cpu()


def executed(gathered: Sequence[Tensor], layers: tuple[int, ...], destinations: int) -> Loads:
    """Return what all ranks executed in a step, the ranks of a replica added up.

    Args:
        gathered: by rank, `Watched.read` of as many forwards each.
        layers: numbers of the layers, for the error.
        destinations: ranks of a replica.

    Raises:
        RoutingError: a router chose what is no expert; names the layer.

    >>> executed([torch.tensor([[[2, 1]]]), torch.tensor([[[1, 4]]])], (1,), 2)
    [[[[3, 5]]]]
    """
    each = torch.stack(list(gathered))
    loads = each.view(-1, destinations, *each.shape[1:]).sum(dim=1)
    replicas, packs, depth = loads.shape[:3]
    rows = iter(read_counts(loads.flatten(0, 2), layers * (replicas * packs)))
    return [[[next(rows) for _ in range(depth)] for _ in range(packs)] for _ in range(replicas)]


def differences(planned: Loads, observed: Loads, layers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield layer and description of every dispatch of a layer that was not executed as planned, layers ascending.

    >>> next(differences([[[[3, 5]]]], [[[[4, 4]]]], [1]))
    (1, 'layer 1, pack 0 of replica 0: the plan says [3, 5] expert choices by destination, executed were [4, 4]')
    """
    for place, layer in enumerate(layers):
        for replica, (packs, executed) in enumerate(zip(planned, observed, strict=True)):
            for pack, (said, done) in enumerate(zip(packs, executed, strict=True)):
                if said[place] != done[place]:
                    yield (
                        layer,
                        f"layer {layer}, pack {pack} of replica {replica}: the plan says {said[place]} expert choices "
                        f"by destination, executed were {done[place]}",
                    )


def balance_event(
    observed: Loads, plan: Plan, mismatched: Sequence[int], *, step: int, rollout_id: int
) -> events.ExpertBalance:
    """Return the figures of an update, from what was executed alone; names are those of `pack_core.Work`."""
    dispatches = [dispatch for packs in observed for dispatch in packs]
    skews = []
    for dispatch in dispatches:
        total = sum(map(sum, dispatch))
        mean = total / len(dispatch[0])
        skews.append(sum(map(max, dispatch)) / mean if total else 1.0)
    packs = range(len(observed[0]))
    critical = 0
    for pack in packs:
        for place in range(len(plan.layers)):
            critical += max(max(replica[pack][place]) for replica in observed)
    return events.ExpertBalance(
        rank=0,
        step=step,
        rollout_id=rollout_id,
        plan_digest=plan.digest,
        layers=list(plan.layers),
        routed_layers=plan.routed_layers,
        packs_per_rank=len(packs),
        dispatches=len(dispatches),
        skew_mean=math.fsum(skews) / len(skews),
        skew_max=max(skews),
        max_slot_assignments=max(max(map(max, dispatch)) for dispatch in dispatches),
        critical_work_proxy=critical,
        mismatched_layers=list(mismatched),
    )
