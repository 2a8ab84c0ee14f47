"""Recorded expert choices of several rollouts, laid out along one packed row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pack_torch.rollout import Rollout


def pack_routes(rollouts: Sequence[Rollout]) -> Tensor:
    """Return the recorded routes of `rollouts`, one row per token, documents in the order given.

    A rollout of n tokens brings n-1 rows. Each document gets its own final row, interior documents too: that token
    was sampled but never run, so experts 0..top_k-1 stand in for it. It is never the next document's first row, and
    no loss ever reads it.

    Args:
        rollouts: each with `routes` `[T-1, layers, top_k]`; the widths may differ, the last two axes may not.

    Returns:
        `[T, layers, top_k]` integer ids, T the tokens of all rollouts together.

    Raises:
        ValueError: a rollout has no routes, or another number of layers or choices; names the sample.

    >>> first = Rollout("a", [1, 2], 1, routes=torch.tensor([[[3, 2]]]))
    >>> second = Rollout("b", [1, 2, 3], 1, routes=torch.tensor([[[1, 3]], [[2, 1]]]))
    >>> pack_routes([first, second])[:, 0].tolist()
    [[3, 2], [0, 1], [1, 3], [2, 1], [0, 1]]
    """
    if not rollouts:
        raise ValueError("no rollouts to pack routes of; give at least one")
    rows: list[Tensor] = []
    expected: tuple[int, int] | None = None
    for rollout in rollouts:
        routes = rollout.routes
        if routes is None:
            raise ValueError(
                f"sample {rollout.id!r} has no routes but replay is on; record them during rollout or turn replay off"
            )
        expected = expected or (int(routes.shape[1]), int(routes.shape[2]))
        if tuple(routes.shape[1:]) != expected:
            raise ValueError(
                f"sample {rollout.id!r}: routes have {routes.shape[1]} layers and top_k {routes.shape[2]} but "
                f"{expected[0]} layers and top_k {expected[1]} are expected; record every decoder layer, dense ones too"
            )
        final = torch.arange(expected[1], dtype=routes.dtype, device=routes.device)
        rows += [routes, final.expand(1, *expected)]
    return torch.cat(rows)


def check_routes(
    routes: Tensor,
    experts: int,
    moe_layers: Sequence[int],
    *,
    doc_lens: Sequence[int] | None = None,
    names: Sequence[str | int] | None = None,
) -> None:
    """Raise unless every expert id of the routed layers exists; other layers' columns may hold anything.

    Args:
        routes: `[T, layers, top_k]`.
        experts: routed experts of a layer; ids are 0..experts-1.
        moe_layers: the layers that route.
        doc_lens: token counts of the documents of the row, to say which one is wrong; None takes it as one document.
        names: sample ids of the documents.

    Raises:
        ValueError: names the sample, its row, the layer and the id.

    >>> check_routes(torch.tensor([[[-1, -1], [0, 3]]]), experts=4, moe_layers=[1])
    >>> check_routes(torch.tensor([[[0, 4]]]), experts=4, moe_layers=[0], names=["q1"])
    Traceback (most recent call last):
    ValueError: sample 'q1': row 0 of layer 0 is routed to expert 4 but experts are 0 to 3; were these routes ...
    """
    layers = torch.as_tensor(list(moe_layers), dtype=torch.int64, device=routes.device)
    chosen = routes.index_select(1, layers)
    wrong = (chosen < 0) | (chosen >= experts)
    if not bool(wrong.any()):
        return
    row, column, choice = (int(value) for value in wrong.nonzero()[0])
    document, local = _locate(row, doc_lens or [int(routes.shape[0])])
    where = f"sample {names[document]!r}" if names else f"document {document}"
    raise ValueError(
        f"{where}: row {local:,} of layer {moe_layers[column]} is routed to expert {int(chosen[row, column, choice])} "
        f"but experts are 0 to {experts - 1}; were these routes recorded with another model, or left unfilled?"
    )


def _locate(row: int, doc_lens: Sequence[int]) -> tuple[int, int]:
    for document, length in enumerate(doc_lens):
        if row < length:
            return document, row
        row -= length
    raise ValueError(f"row {row:,} lies past the last document; doc_lens must sum to the rows of the routes")
