"""Experiments that tell one way of joining documents from another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import attrs
import torch
from torch import Tensor, nn

from pack_torch.batch import PackedBatch
from pack_torch.probe import (
    ModelFunction,
    alone,
    differs,
    editing,
    join,
    other_tokens,
    recording,
    score,
    with_constant_routes,
)
from pack_torch.rollout import Rollout

#: Tokens of each document the experiments are made with: longer than any usual convolution reaches.
PROBE_TOKENS = 12

#: The part of an experiment's document that is cut away to move the one after it.
SHORTER_BY = 5


@attrs.frozen(eq=False)
class Experiment:
    """Short documents of the batch's own tokens, and what becomes of one when its neighbours change.

    Args:
        model_fn: the model.
        batch: the row that went wrong.
        tolerance: as for `explain`.
        module: holds `layer`; None watches the log-probabilities.
        layer: the submodule to watch.
    """

    model_fn: ModelFunction
    batch: PackedBatch
    tolerance: float
    module: nn.Module | None = None
    layer: str | None = None

    def conclude(self) -> tuple[str, str]:
        """Return the fault's name and the evidence for it."""
        try:
            return self._repeat() or self._level() or self._later() or self._earlier()
        except Exception as error:  # the model is not ours; what was found must be told even where it stops
            return "not found", f"an experiment could not run ({type(error).__name__}: {error})."

    def _repeat(self) -> tuple[str, str] | None:
        first, second = (score(self.model_fn, self.batch) for _ in range(2))
        if not self._differ(first, second):
            return None
        return "not deterministic", "two runs of one row differ; turn dropout off (model.eval()) and fix the seeds."

    def _level(self) -> tuple[str, str] | None:
        if self.batch.routes is None and all(rollout.routes is None for rollout in self.batch.rollouts):
            return None
        level = with_constant_routes(self.batch)
        packed = level.split(score(self.model_fn, level))
        single = [score(self.model_fn, alone(level, document)) for document in range(level.documents)]
        if any(self._differ(one, two) for one, two in zip(packed, single, strict=True)):
            return None
        return (
            "replay row misaligned",
            "with all recorded routes alike the difference is gone, so tokens replay rows of others: every document "
            "needs a final row of its own, never the first of the next document.",
        )

    def _differ(self, first: Tensor, second: Tensor) -> bool:
        return first.shape != second.shape or bool(differs(first, second, self.tolerance).any())

    def _document(self, number: int, length: int = PROBE_TOKENS) -> Tensor:
        known: Tensor = torch.unique(self.batch.input_ids)
        draw = torch.Generator().manual_seed(number)
        return known[torch.randint(known.numel(), (length,), generator=draw).to(known.device)]

    def _changed(self, tokens: Tensor) -> Tensor:
        return other_tokens(tokens, self.batch.input_ids)

    def _row(self, documents: Sequence[Tensor]) -> PackedBatch:
        shape = next((r.routes.shape[1:] for r in self.batch.rollouts if r.routes is not None), None)
        rollouts = []
        for place, tokens in enumerate(documents):
            recorded = None if shape is None else torch.zeros(tokens.numel() - 1, *shape, dtype=torch.int64)
            rollouts.append(Rollout(f"experiment-{place}", tokens, tokens.numel() - 1, routes=recorded))
        routes = self.batch.routes
        filler = None if routes is None else routes.new_zeros(sum(map(len, documents)), *routes.shape[1:])
        return with_constant_routes(join(rollouts, filler))

    def _rows(self, documents: Sequence[Tensor], which: int, edit: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return `[rows, ...]` what the watched layer, or the scoring, gives for one of the documents of a row.

        `edit` changes the layer's inputs `[T, ...]`.
        """
        row = self._row(documents)
        if self.module is None or self.layer is None:
            return row.split(score(self.model_fn, row))[which]
        layer = self.module.get_submodule(self.layer)
        with recording(self.module, row.tokens) as found, editing(layer, row.tokens, edit) if edit else nullcontext():
            score(self.model_fn, row)
        return torch.split_with_sizes(found[self.layer], list(row.doc_lens))[which]

    def _has_inputs(self) -> bool:
        """Return whether the watched layer gets one row per token, so that one token's can be changed alone."""
        if self.module is None or self.layer is None:
            return False
        row = self._row([self._document(0)])
        with editing(self.module.get_submodule(self.layer), row.tokens, lambda rows: rows) as edited:
            score(self.model_fn, row)
        return bool(edited)

    def _later(self) -> tuple[str, str] | None:
        before, after = self._document(0), self._document(1)
        wrong = differs(
            self._rows([before, self._changed(after)], 0), self._rows([before, after], 0), self.tolerance
        ).nonzero()
        if not wrong.numel():
            return None
        rows = sorted({int(place[0]) for place in wrong})
        # Scoring has one row fewer than the document has tokens: the last of them predicts the last token.
        if self.layer is None and rows == [PROBE_TOKENS - 2]:
            return (
                "label shifted",
                "only the last response token moves when the next document changes, so its label is a token of that "
                "document: a document's last row predicts nothing.",
            )
        return "mask ignored", "a document moves when a later one changes, so rows look ahead across the boundary."

    def _earlier(self) -> tuple[str, str]:
        before, after = self._document(0), self._document(1)
        usual = self._rows([before, after], 1)
        if self._differ(self._rows([self._changed(before), after], 1), usual):
            return self._leak(before, after, usual)
        if self._differ(self._rows([before[SHORTER_BY:], after], 1), usual):
            return (
                "positions not reset",
                "a document moves when the one before it is shorter, and not when that one has other tokens: positions "
                "must start at 0 in every document.",
            )
        return "not found", "short documents behind and before others come out as they do alone."

    def _leak(self, before: Tensor, after: Tensor, usual: Tensor) -> tuple[str, str]:
        # Changing one input of the layer, not one token: sound layers below spread a token over its document.
        inner = self._has_inputs()
        hits = self._hits(before, after, usual, inner)
        if inner and not hits:
            inner, hits = False, self._hits(before, after, usual, False)
        reach = 1 + max((distance for distance, _ in hits), default=0)
        depth = 1 + max((row for _, row in hits), default=0)
        if reach < PROBE_TOKENS and (depth == 1 or reach > 1) and all(sum(hit) < reach for hit in hits):
            return (
                "convolution not reset, or attention window not cut",
                f"the last {reach} tokens of the document before move the first {depth} rows and no others, as "
                f"{reach + 1} taps, or a window of {reach + 1}, do that run over the boundary.",
            )
        if reach == 1:
            return "mask off by one", "the last token of the document before is seen, and no token further back."
        if depth == 1:
            return "mask off by one", "a document's first row sees the document before, and no other row does."
        if reach < PROBE_TOKENS:
            return (
                "convolution not reset, or attention window not cut",
                f"the last {reach} tokens of the document before are seen, and none further back.",
            )
        return self._order(before, after, inner)

    def _hits(self, before: Tensor, after: Tensor, usual: Tensor, inner: bool) -> list[tuple[int, int]]:
        """Return the pairs (distance of a changed token from the boundary, row behind it that moves)."""
        changed, hits = self._changed(before), []
        for distance in range(PROBE_TOKENS):
            place = PROBE_TOKENS - 1 - distance
            here = torch.arange(PROBE_TOKENS, device=before.device) == place
            if inner:
                found = self._rows([before, after], 1, partial(_bend, place))
            else:
                found = self._rows([torch.where(here, changed, before), after], 1)
            wrong = differs(found, usual, self.tolerance).reshape(usual.shape[0], -1).any(dim=1)
            hits += [(distance, int(row)) for row in wrong.nonzero().flatten()]
        return hits

    def _order(self, before: Tensor, after: Tensor, inner: bool) -> tuple[str, str]:
        extra = self._document(2)
        usual = self._rows([before, extra, after], 2)
        other = self._rows([before, extra, after], 2, _swap) if inner else self._rows([extra, before, after], 2)
        if not self._differ(other, usual):
            return "mask ignored", "all of the earlier documents are seen, in whatever order they come: attention."
        if inner:
            return (
                "state leaked, or mask ignored and positions not reset",
                "all of the earlier documents are felt, and their order matters: start a recurrent state empty at each "
                "document, and give attention the documents' lengths.",
            )
        merged = self._rows([torch.cat((before, extra, after))], 0)[-usual.shape[0] :]
        if not self._differ(merged, usual):
            return (
                "state leaked, or mask ignored and positions not reset",
                "the row gives what one document of all its tokens gives: the documents' lengths are not used.",
            )
        return "mask ignored, or state leaked", "all of the document before is seen; give `module` to learn where."


def _bend(place: int, rows: Tensor) -> Tensor:
    bent = rows.clone()
    bent[place] = 0.25 - 0.5 * rows[place]
    return bent


def _swap(rows: Tensor) -> Tensor:
    return torch.cat((rows[PROBE_TOKENS : 2 * PROBE_TOKENS], rows[:PROBE_TOKENS], rows[2 * PROBE_TOKENS :]))
