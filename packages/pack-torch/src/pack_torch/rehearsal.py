"""A few optimizer updates over given packs, every number kept, and the weights put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import attrs
import torch
from torch import Tensor, nn

from pack_torch.batch import PackedBatch
from pack_torch.loss import normalization, policy_loss
from pack_torch.probe import ModelFunction, score
from pack_torch.rollout import Rollout

#: Log-probabilities `[S]` of a pack and the pack, to the scalar it adds to the step's loss.
LossFunction = Callable[[Tensor, PackedBatch], Tensor]

#: How the packs' losses become the step's: added up, or averaged over the packs.
Joining = Literal["sum", "mean"]

LEARNING_RATE = 1e-3
UPDATES = 2


@attrs.frozen(eq=False)
class Update:
    """What one optimizer update saw.

    Args:
        log_probs: per rollout, in the order of the rollouts.
        scored: the same from a scoring pass over the same packs before it; empty where none was made.
        parts: per pack, what the loss gave.
        loss: of the step.
        gradients: by parameter name; a missing one is zeros.
    """

    log_probs: list[Tensor]
    scored: list[Tensor]
    parts: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


@attrs.frozen(eq=False)
class Rehearsal:
    """All updates, and what they leave: parameters and Adam's two moments, by name."""

    updates: list[Update]
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]


def named_parameters(
    model_fn: ModelFunction, parameters: nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | None
) -> dict[str, Tensor]:
    """Return the parameters to compare, by name.

    Raises:
        TypeError: none were given and the model is no module to ask.
    """
    if parameters is None:
        if not isinstance(model_fn, nn.Module):
            raise TypeError(
                "give `parameters`: a module, a mapping or a list; the model is a function and cannot be asked for "
                "them (an empty list compares log-probabilities and loss alone)"
            )
        parameters = model_fn
    if isinstance(parameters, nn.Module):
        found: dict[str, Tensor] = dict(parameters.named_parameters())
    elif isinstance(parameters, Mapping):
        found = dict(parameters)
    else:
        found = {f"parameter {place}": parameter for place, parameter in enumerate(parameters)}
    return {name: parameter for name, parameter in found.items() if parameter.requires_grad}


def usual_loss(rollouts: Sequence[Rollout]) -> LossFunction:
    """Return the loss that is compared when none is given, divided by the active tokens of all rollouts.

    The clipped policy loss where every rollout has advantages and old log-probabilities, else the negative
    log-likelihood of the tokens that train.

    >>> loss = usual_loss([Rollout("a", [1, 2, 3], 2)])
    >>> loss(torch.tensor([-1.0, -3.0]), PackedBatch(torch.tensor([1, 2, 3]), (3,), (Rollout("a", [1, 2, 3], 2),)))
    tensor(2.)
    """
    tokens = normalization(rollouts).denominator("token")
    if all(rollout.advantages is not None and rollout.old_log_probs is not None for rollout in rollouts):
        return lambda log_probs, batch: policy_loss(log_probs, batch).numerator / tokens
    return lambda log_probs, batch: -log_probs[batch.concat("loss_mask")].sum() / tokens


def rehearse(
    model_fn: ModelFunction,
    batches: Sequence[PackedBatch],
    order: Sequence[int],
    loss: LossFunction,
    joining: Joining,
    parameters: Mapping[str, Tensor],
) -> Rehearsal:
    """Return what two Adam updates over these packs see and leave; the parameters are as before when it returns.

    As in a trainer, the first update is preceded by a scoring pass, to be compared with its own forward; the second is
    not.

    Args:
        model_fn: the model.
        batches: the packs of each update.
        order: index of the rollout of every document, pack after pack.
        loss: what one pack adds.
        joining: `mean` divides the sum by the number of packs.
        parameters: by name, leaves of the graph.
    """
    with _put_back(parameters):
        optimizer = torch.optim.Adam(list(parameters.values()), lr=LEARNING_RATE) if parameters else None
        updates = []
        for number in range(UPDATES if optimizer else 1):
            scored = [] if number else _scored(model_fn, batches, order)
            updates.append(_update(model_fn, batches, order, loss, joining, parameters, scored))
            if optimizer:
                optimizer.step()
        final = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        moments = {
            f"{moment} of {name}": optimizer.state[parameter][moment].clone()
            for name, parameter in parameters.items()
            for moment in ("exp_avg", "exp_avg_sq")
            if optimizer
        }
    return Rehearsal(updates, final, moments)


def _update(
    model_fn: ModelFunction,
    batches: Sequence[PackedBatch],
    order: Sequence[int],
    loss: LossFunction,
    joining: Joining,
    parameters: Mapping[str, Tensor],
    scored: list[Tensor],
) -> Update:
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    scores: list[Tensor] = []
    parts: list[Tensor] = []
    for batch in batches:
        log_probs = score(model_fn, batch)
        part = loss(log_probs, batch)
        if part.requires_grad and parameters:
            (part / len(batches) if joining == "mean" else part).backward()  # type: ignore[no-untyped-call]
        scores += [values.detach().clone() for values in batch.split(log_probs)]
        parts.append(part.detach().clone())
    total = torch.stack(parts).sum()
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    return Update(
        _by_rollout(order, scores),
        scored,
        parts,
        total / len(batches) if joining == "mean" else total,
        gradients,
    )


def _scored(model_fn: ModelFunction, batches: Sequence[PackedBatch], order: Sequence[int]) -> list[Tensor]:
    with torch.no_grad():
        return _by_rollout(order, [values for batch in batches for values in batch.split(score(model_fn, batch))])


def _by_rollout(order: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
    by_rollout = dict(zip(order, values, strict=True))
    return [by_rollout[index] for index in sorted(by_rollout)]


@contextmanager
def _put_back(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    kept = {name: (parameter.detach().clone(), parameter.grad) for name, parameter in parameters.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, (values, gradient) in kept.items():
                parameters[name].copy_(values)
                parameters[name].grad = gradient
