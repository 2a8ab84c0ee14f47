"""Checks for your own model: that packing changes nothing, and that documents of one row do not know each other.

Any callable will do that takes a `PackedBatch` and returns one log-probability per response token, or an object with
`hidden` if the callable has `logits` (see `response_log_probs`). Use float64 where you can: the tolerances are made for
it. Dropout must be off. For a model on a GPU give rollouts whose tokens and routes lie there. Rotary positions alone
are relative: counting them on over the row changes nothing, and is no fault that could be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pack_torch.batch import PackedBatch, build_batch
from pack_torch.denominator import blame_loss
from pack_torch.diagnosis import Finding, explain
from pack_torch.probe import ModelFunction, differs, other_tokens, reveal, score, with_tokens
from pack_torch.rehearsal import Joining, LossFunction, Rehearsal, Update, named_parameters, rehearse, usual_loss
from pack_torch.rollout import Rollout

__all__ = ["Finding", "assert_documents_isolated", "assert_packing_equivalent", "explain"]


def assert_packing_equivalent(
    model_fn: ModelFunction,
    rollouts: Sequence[Rollout],
    *,
    packs: Sequence[Sequence[int]] | None = None,
    loss: LossFunction | None = None,
    joining: Joining = "sum",
    parameters: nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | None = None,
    replay: bool | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Check that training on packed rows is training on one rollout a row, number by number.

    Compared are every rollout's log-probabilities, the loss and every gradient of two Adam updates, and the parameters
    and both of Adam's moments after them. The first update's forward must also give what a scoring pass over the same
    rows gave just before, as a trainer that skips later scoring passes relies on. Parameters and gradients are put back
    as they were.

    Args:
        model_fn: takes a `PackedBatch` and returns `[S]` log-probabilities, or has `logits` and returns `hidden`.
        rollouts: at least two, of different lengths.
        packs: indices into `rollouts`, each exactly once; None makes two rows of every second one, or one of up to 3.
        loss: `(log_probs [S], batch)` to the scalar that pack adds to the step's loss, divided by what is the same for
            every cut into packs; None is the clipped policy loss over the step's active tokens, or the negative
            log-likelihood for rollouts without advantages.
        joining: how your trainer joins the packs' losses: `sum`, or `mean` over the packs.
        parameters: a module, a mapping or a list; None takes the model's own where it is a module. A module is also
            looked into for the layer that is at fault.
        replay: lay recorded routes along the rows; None does where every rollout has them.
        tolerance: numbers differ when they are further apart than tolerance * max(1, |x|).

    Raises:
        AssertionError: something differs; says what, in which document, from which token on, by how much, and the
            likely cause.
        ValueError: packs that do not hold every rollout once.

    >>> from pack_torch import ModelConfig, SmallModel
    >>> config = ModelConfig(16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
    ...                      moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2)
    >>> rollouts = [Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5, 6, 7], 2), Rollout("c", [8, 9], 1)]
    >>> assert_packing_equivalent(SmallModel(config, seed=0, dtype=torch.float64), rollouts)
    """
    cut = _packs(len(rollouts), packs)
    named = named_parameters(model_fn, parameters)
    recorded = all(rollout.routes is not None for rollout in rollouts) if replay is None else replay
    used = usual_loss(rollouts) if loss is None else loss
    batches = [build_batch(rollouts, pack, replay=recorded) for pack in cut]
    singles = [build_batch(rollouts, [index], replay=recorded) for index in range(len(rollouts))]
    order = [index for pack in cut for index in pack]
    _check_forward(model_fn, batches, parameters, tolerance)
    packed = rehearse(model_fn, batches, order, used, joining, named)
    single = rehearse(model_fn, singles, range(len(rollouts)), used, joining, named)
    _check_substance(single)
    _check_scoring(packed.updates[0], rollouts, tolerance)
    for number, (found, expected) in enumerate(zip(packed.updates, single.updates, strict=True), start=1):
        _check_update(f"in update {number}", found, expected, rollouts, cut, joining, tolerance)
    _check_state(packed, single, tolerance)


def _packs(count: int, packs: Sequence[Sequence[int]] | None) -> list[list[int]]:
    if count < 2:
        raise ValueError(f"there are {count} rollouts; give at least two, or there is nothing to pack")
    if packs is None:
        indices = list(range(count))
        return [indices[::2], indices[1::2]] if count > 3 else [indices]
    cut = [list(pack) for pack in packs]
    if sorted(index for pack in cut for index in pack) != list(range(count)):
        raise ValueError(f"packs {cut} do not hold each of the {count} rollouts exactly once")
    return cut


def _check_forward(
    model_fn: ModelFunction, batches: Sequence[PackedBatch], parameters: object, tolerance: float
) -> None:
    module = parameters if isinstance(parameters, nn.Module) else None
    for number, batch in enumerate(batches):
        finding = explain(model_fn, batch, tolerance=tolerance, module=module)
        if finding is not None:
            raise AssertionError(f"pack {number}: {finding}")


def _check_substance(single: Rehearsal) -> None:
    # Two NaN, and two times nothing, agree in everything; that must not pass for a proof.
    first = single.updates[0]
    if not bool(torch.isfinite(first.loss)):
        raise AssertionError(f"the loss is {float(first.loss)} one at a time too, so there is nothing to compare")
    if first.gradients and not any(bool(gradient.any()) for gradient in first.gradients.values()):
        raise AssertionError("every gradient is zero, so nothing was compared; are these the model's parameters?")


def _check_scoring(first: Update, rollouts: Sequence[Rollout], tolerance: float) -> None:
    for rollout, trained, scored in zip(rollouts, first.log_probs, first.scored, strict=True):
        what = _furthest(trained, scored, tolerance)
        if what:
            what = what.replace("packed", "in the training forward").replace("one at a time", "in the scoring pass")
            raise AssertionError(
                f"sample {rollout.id!r}: a log-probability {what}, though weights and rows are the same. Likely cause: "
                "dropout, or a forward that does something else where gradients are on"
            )


def _furthest(found: Tensor, expected: Tensor, tolerance: float) -> str | None:
    wrong = differs(found, expected, tolerance)
    if not bool(wrong.any()):
        return None
    off = (found - expected).abs().nan_to_num(nan=torch.inf)
    place = tuple(int(index) for index in torch.unravel_index(off.argmax(), off.shape))
    return (
        f"is {float(found[place]):.9g} packed and {float(expected[place]):.9g} one at a time"
        + (f" at {list(place)}" if place else "")
        + f", off by {float(off[place]):.3g}; {int(wrong.sum()):,} of {wrong.numel():,} numbers differ"
    )


def _check_update(
    when: str,
    found: Update,
    expected: Update,
    rollouts: Sequence[Rollout],
    cut: Sequence[Sequence[int]],
    joining: Joining,
    tolerance: float,
) -> None:
    for rollout, one, two in zip(rollouts, found.log_probs, expected.log_probs, strict=True):
        what = _furthest(one, two, tolerance)
        if what:
            raise AssertionError(
                f"sample {rollout.id!r}: a log-probability {when} {what}. The row was right before the first update, "
                "so look at what the update changed: gradients, or a model that keeps something between calls"
            )
    what = _furthest(found.loss, expected.loss, tolerance)
    if what:
        cause = blame_loss(found.parts, expected.parts, rollouts, cut, joining, tolerance)
        raise AssertionError(f"the loss {when} {what}, yet all log-probabilities agree. Likely cause: {cause}")
    for name, gradient in expected.gradients.items():
        what = _furthest(found.gradients[name], gradient, tolerance)
        if what:
            raise AssertionError(
                f"the gradient of {name} {when} {what}, yet log-probabilities and loss agree. Likely cause: the "
                "backward crosses a document's boundary, or leaves packs out: look at custom backwards and at what "
                "is detached"
            )


def _check_state(packed: Rehearsal, single: Rehearsal, tolerance: float) -> None:
    for values, expected in ((packed.parameters, single.parameters), (packed.moments, single.moments)):
        for name, wanted in expected.items():
            what = _furthest(values[name], wanted, tolerance)
            if what:
                raise AssertionError(f"after two updates {name} {what}, yet every gradient agrees within {tolerance}")


def assert_documents_isolated(
    model_fn: ModelFunction,
    batch: PackedBatch,
    *,
    module: nn.Module | None = None,
    embedding: nn.Embedding | Tensor | None = None,
    tolerance: float = 0.0,
) -> None:
    """Check that no document of a row feels another: each in turn gets other tokens, and all others must not move.

    Every token but a document's first is looked at, whatever its rollout calls response. Routes of the batch stay as
    they are; for a mixture of experts give them, for a router that chooses anew changes the shapes of the experts'
    products and so the last bits.

    Args:
        model_fn: takes a `PackedBatch` and returns `[S]` log-probabilities, or has `logits` and returns `hidden`.
        batch: built from at least two rollouts.
        module: where to look for the layer at fault; None takes `model_fn` where it is a module.
        embedding: the table `[V, D]` of token embeddings, not shared with the output head. With it each document in
            turn also becomes NaN: a mask that multiplies by 0 lets NaN through. It is put back as it was.
        tolerance: 0 asks for the same bits.

    Raises:
        AssertionError: a document moved; says which, from which token on, by how much, and the likely cause.
        ValueError: one document only, or a row that uses every token of `embedding`.

    >>> from pack_torch import ModelConfig, SmallModel
    >>> config = ModelConfig(16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
    ...                      moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2)
    >>> model = SmallModel(config, seed=0)
    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5], 1)], [0, 1])
    >>> assert_documents_isolated(model, batch, embedding=model.embedding)
    """
    if batch.documents < 2:
        raise ValueError("the row has one document; give at least two, or nothing can leak")
    row = reveal(batch)
    with torch.no_grad():
        before = row.split(score(model_fn, row))
        for document in range(row.documents):
            tokens = row.input_ids.clone()
            own = row.document_ids == document
            tokens[own] = other_tokens(tokens[own], row.input_ids)
            after = row.split(score(model_fn, with_tokens(row, tokens)))
            _check_others(model_fn, row, document, "got other tokens", before, after, module, tolerance)
        if embedding is None:
            return
        table = embedding.weight if isinstance(embedding, nn.Embedding) else embedding
        for document in range(row.documents):
            after = _with_nan(model_fn, row, document, table)
            _check_others(model_fn, row, document, "became NaN", before, after, module, tolerance)


def _with_nan(model_fn: ModelFunction, row: PackedBatch, document: int, table: Tensor) -> list[Tensor]:
    used = set(row.input_ids.tolist())
    spare = next((token for token in range(table.shape[0]) if token not in used), None)
    if spare is None:
        raise ValueError(
            f"the row uses all {table.shape[0]:,} tokens of the embedding, and the NaN probe needs one that is free; "
            "give a shorter row"
        )
    tokens = torch.where(row.document_ids == document, spare, row.input_ids)
    kept = table[spare].clone()
    try:
        table[spare] = torch.nan
        return row.split(score(model_fn, with_tokens(row, tokens)))
    finally:
        table[spare] = kept


def _check_others(
    model_fn: ModelFunction,
    row: PackedBatch,
    changed: int,
    happened: str,
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    module: nn.Module | None,
    tolerance: float,
) -> None:
    for document, (one, two) in enumerate(zip(after, before, strict=True)):
        wrong = differs(one, two, tolerance)
        if document == changed or not bool(wrong.any()):
            continue
        token = int(wrong.nonzero()[0]) + 1
        size = float((one - two).abs().nan_to_num(nan=torch.inf).max())
        # Packed and alone, a document rounds differently: a test for exactness must not take that for the fault.
        finding = explain(model_fn, row, tolerance=max(tolerance, 1e-9), module=module)
        if finding is not None:
            cause = f"{finding.cause}: {finding.evidence}"
            cause += f" The first output to differ is that of {finding.layer}." if finding.layer else ""
        elif happened == "became NaN":
            cause = (
                "mask multiplies: 0 * NaN is NaN, so a mask over the whole row lets it through; finite values do not."
            )
        else:
            cause = "rounding alone: run in float64, with fixed routes, or give a tolerance."
        raise AssertionError(
            f"sample {row.rollouts[document].id!r} (document {document}) moved when sample "
            f"{row.rollouts[changed].id!r} (document {changed}) {happened}: its log-probabilities change from token "
            f"{token} of the document on, by up to {size:.3g}. Likely cause: {cause}"
        )
