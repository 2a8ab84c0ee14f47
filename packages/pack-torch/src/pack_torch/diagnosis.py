"""Why a packed row and its documents one at a time disagree: where it begins, and the fault experiments point to."""

from __future__ import annotations

import attrs
import torch
from torch import nn

from pack_torch.batch import PackedBatch
from pack_torch.experiment import Experiment
from pack_torch.probe import ModelFunction, alone, differs, recording, score


@attrs.frozen
class Finding:
    """Where a packed row first differs from its documents one at a time, and what most likely makes it so.

    Args:
        what: the quantity that differs.
        document: its place in the row.
        sample: the id of its rollout.
        token: response token of the sample, from 0.
        packed: the value in the packed row.
        single: the value alone.
        size: the largest difference anywhere in the document.
        layer: the first submodule whose output differs, when a module was there to look into.
        cause: the fault by name, or that none fits.
        evidence: the experiment that says so.

    >>> print(Finding("log-probability", 1, "q7", 3, -2.5, -2.25, 0.5, None, "mask ignored", "it sees the one before."))
    sample 'q7' (document 1 of its row): log-probability of response token 3 is -2.5 packed and -2.25 alone; the \
largest difference in the document is 0.5. Likely cause: mask ignored: it sees the one before.
    """

    what: str
    document: int
    sample: str | int
    token: int
    packed: float
    single: float
    size: float
    layer: str | None
    cause: str
    evidence: str

    def __str__(self) -> str:
        """Return all of it as a paragraph."""
        where = "" if self.layer is None else f" The first output to differ is that of {self.layer}."
        return (
            f"sample {self.sample!r} (document {self.document} of its row): {self.what} of response token {self.token} "
            f"is {self.packed:.9g} packed and {self.single:.9g} alone; the largest difference in the document is "
            f"{self.size:.3g}.{where} Likely cause: {self.cause}: {self.evidence}"
        )


def explain(
    model_fn: ModelFunction, batch: PackedBatch, *, tolerance: float = 1e-9, module: nn.Module | None = None
) -> Finding | None:
    """Return where the packed row first differs from its documents one at a time and why, or None where it does not.

    The cause comes from experiments: the row run twice, with all routes alike, and then short documents made of the
    batch's tokens, put behind others, before others, behind shorter ones, in another order, or joined into one. They
    find one fault; mend it and ask again. Nothing needs a gradient and no weight is changed.

    Args:
        model_fn: takes a `PackedBatch` and returns `[S]` log-probabilities, or has `logits` and returns `hidden`.
        batch: built from rollouts.
        tolerance: numbers differ when they are further apart than tolerance * max(1, |x|).
        module: where to look for the first layer that differs; None takes `model_fn` where it is a module. With it the
            experiments watch that layer alone, and tell more faults from each other.

    >>> from pack_torch import Rollout, build_batch
    >>> def counting(batch):  # a "model" whose log-probabilities depend on the place in the row
    ...     from pack_torch import scored_rows
    ...     return -scored_rows(batch.doc_lens, batch.response_lens).double()
    >>> batch = build_batch([Rollout("a", [1, 2, 3], 2), Rollout("b", [4, 5], 1)], [0, 1])
    >>> explain(counting, batch).cause
    'positions not reset'
    """
    watched = module if module is not None else model_fn if isinstance(model_fn, nn.Module) else None
    with torch.no_grad():
        packed = batch.split(score(model_fn, batch))
        for document, found in enumerate(packed):
            single = score(model_fn, alone(batch, document))
            wrong = differs(found, single, tolerance)
            if not bool(wrong.any()):
                continue
            token = int(wrong.nonzero()[0])
            layer = None if watched is None else _first_layer(model_fn, watched, batch, document, tolerance)
            experiment = Experiment(model_fn, batch, tolerance, watched if layer is not None else None, layer)
            cause, evidence = experiment.conclude()
            return Finding(
                what="log-probability",
                document=document,
                sample=batch.rollouts[document].id,
                token=token,
                packed=float(found[token]),
                single=float(single[token]),
                size=float((found - single).abs().max()),
                layer=_called(watched, layer),
                cause=cause,
                evidence=evidence,
            )
    return None


def _called(module: nn.Module | None, layer: str | None) -> str | None:
    if module is None or layer is None:
        return None
    return f"{layer or 'the whole model'} ({type(module.get_submodule(layer)).__name__})"


def _first_layer(
    model_fn: ModelFunction, module: nn.Module, batch: PackedBatch, document: int, tolerance: float
) -> str | None:
    one = alone(batch, document)
    start = sum(batch.doc_lens[:document])
    with recording(module, batch.tokens) as packed:
        score(model_fn, batch)
    with recording(module, one.tokens) as single:
        score(model_fn, one)
    for name, rows in packed.items():
        if name in single and bool(differs(rows[start : start + one.tokens], single[name], tolerance).any()):
            return name
    return None
