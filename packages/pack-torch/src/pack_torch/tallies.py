"""Counts that travel with batches, added up over batches and ranks, and what they say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Of these the largest is taken; all others add up.
MAXIMA = frozenset({"longest_document", "epochs", "waiting"})


def add_metrics(many: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the counts of several batches, or of several ranks, as those of one.

    Ranks may have different names, such as a reason that one alone met. To reduce over ranks, gather whole mappings,
    as `torch.distributed.all_gather_object` does.

    >>> add_metrics([{"tokens": 7, "longest_document": 5}, {"tokens": 4, "longest_document": 3, "packs": 1}])
    {'tokens': 11, 'longest_document': 5, 'packs': 1}
    """
    total: dict[str, int] = {}
    for metrics in many:
        for name, value in metrics.items():
            if name in MAXIMA:
                total[name] = max(total.get(name, value), value)
            else:
                total[name] = total.get(name, 0) + value
    return total


def summarize(metrics: Mapping[str, int], percentiles: Iterable[int] = (50, 90, 99)) -> dict[str, float]:
    """Return what added counts say: shares, means, and percentiles of the lengths of all documents read.

    `fill` is the share of the packs' capacity that holds tokens, `padding_share` that of what the model computes that
    holds none: rows of several packs end to end have no padding, however empty the packs are. A percentile is the upper
    end of a class of lengths, four to an octave: up to 19 % too high, never too low.

    >>> summary = summarize({"packs": 2, "rows": 5, "tokens": 15, "capacity": 20, "lengths/4": 3, "lengths/12": 1})
    >>> summary["fill"], summary["rows_per_pack"], summary["length_p50"], summary["length_p90"]
    (0.75, 2.5, 2.0, 8.0)
    """
    found: dict[str, float] = {}
    tokens, padding = metrics.get("tokens", 0), metrics.get("padding", 0)
    if metrics.get("capacity"):
        found["fill"] = tokens / metrics["capacity"]
    if tokens + padding:
        found["padding_share"] = padding / (tokens + padding)
    if metrics.get("packs"):
        found["rows_per_pack"] = metrics["rows"] / metrics["packs"]
    classes = sorted((int(name.split("/")[1]), some) for name, some in metrics.items() if name.startswith("lengths/"))
    total = sum(some for _, some in classes)
    for percent in percentiles if total else ():
        below = 0
        for place, some in classes:
            below += some
            if below * 100 >= percent * total:
                found[f"length_p{percent}"] = 2 ** (place / 4)
                break
    return found


def progress_line(metrics: Mapping[str, int], seconds: float) -> str:
    """Return one line on how far a run is whose end nobody knows.

    >>> progress_line({"packs": 2, "documents": 5, "tokens": 1500, "capacity": 2000, "epochs": 1}, 0.5)
    'epoch 1: 2 packs, 5 documents, 1,500 tokens, 75.0 % full, 3,000 tokens/s'
    """
    epoch = f"epoch {metrics['epochs']}: " if "epochs" in metrics else ""
    tokens = metrics.get("tokens", 0)
    full = 100 * tokens / max(metrics.get("capacity", 0), 1)
    counts = f"{metrics.get('packs', 0):,} packs, {metrics.get('documents', 0):,} documents, {tokens:,} tokens"
    return f"{epoch}{counts}, {full:.1f} % full, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
