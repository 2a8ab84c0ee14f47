"""How far a run is, where nobody knows its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator

from pack_torch.rows import Batch
from pack_torch.tallies import add_metrics, progress_line


def _print_line(line: str) -> None:
    sys.stderr.write(f"\r{line}")
    sys.stderr.flush()


def follow(
    batches: Iterable[Batch],
    show: Callable[[str], object] = _print_line,
    *,
    every: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Batch]:
    """Yield the batches, and show a line on all of them so far, at most once in `every` seconds and at the end.

    >>> from pack_torch import PackCollator, PackedIterable, Sft
    >>> rows = [{"input_ids": [1] * length} for length in (6, 5, 4, 3)]
    >>> packs = PackedIterable(rows, format=Sft(label_mode="tokens"), capacity=10)
    >>> lines, seconds = [], iter([0.0, 2.0, 4.0, 6.0])
    >>> batches = map(PackCollator("dense"), ([pack] for pack in packs))
    >>> for batch in follow(batches, lines.append, clock=lambda: next(seconds)):
    ...     pass
    >>> lines[-1]
    'epoch 1: 2 packs, 4 documents, 18 tokens, 90.0 % full, 3 tokens/s'
    """
    begun = shown = clock()
    total: dict[str, int] = {}
    for batch in batches:
        total = add_metrics([total, batch.metrics])
        yield batch
        now = clock()
        if now - shown >= every:
            shown = now
            show(progress_line(total, now - begun))
    show(progress_line(total, clock() - begun))
