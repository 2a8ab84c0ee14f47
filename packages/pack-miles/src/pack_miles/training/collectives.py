"""The few things ranks tell each other, each with an answer for a single process.

A rank that fails alone leaves the others waiting in the next collective for ever. So what can fail on one rank runs
inside `World.agreed`, which raises the same error on all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class RankError(RuntimeError):
    """What went wrong on some rank, raised alike on every rank."""


@attrs.frozen
class World:
    """This process among the ranks of a run; `size` 1 needs no process group.

    >>> World(rank=0, size=1).largest([3, 5])
    [3, 5]
    """

    rank: int
    size: int

    def agreed(self, action: Callable[[], T]) -> T:
        """Run an action that uses no collective and return its result, or raise on every rank if it failed on any.

        Raises:
            RankError: naming each failed rank and its error.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            if self.size == 1:
                raise
        if self.largest([error is not None])[0]:
            raise RankError(_tell(self.gather(error)))
        return result  # type: ignore[return-value]  # no rank failed, so this one has a result

    def same(self, facts: Mapping[str, int | str]) -> None:
        """Check that every rank brings the same facts, or raise the same error on every rank.

        Fixed-size numbers are compared first, so ranks that differ cannot hang in a collective of differing shapes.

        Raises:
            RankError: naming each fact that differs and every rank's value.
        """
        numbers = torch.tensor([_fingerprint(f"{name}={value}") for name, value in sorted(facts.items())])
        if self.size == 1:
            return
        everyone = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(everyone, numbers)
        # Any difference is seen by every rank: it differs from one of the two that differ.
        if all(torch.equal(other, numbers) for other in everyone):
            return
        values = self.gather(dict(facts))
        told = [
            f"{name} differs between ranks: " + ", ".join(f"rank {rank} has {v[name]}" for rank, v in enumerate(values))
            for name in sorted(facts)
            if len({str(v[name]) for v in values}) > 1
        ]
        raise RankError("\n".join(told) + "\nevery rank must get the same number of samples, step and configuration")

    def largest(self, values: Sequence[float]) -> list[int]:
        """Return the largest of each value over all ranks, as ints."""
        return [int(value) for value in self.reduce(values, dist.ReduceOp.MAX)]

    def total(self, values: Sequence[float]) -> list[float]:
        """Return each value summed over all ranks, in float64."""
        return self.reduce(values, dist.ReduceOp.SUM)

    def reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        """Return each value reduced over all ranks in one collective, in float64."""
        tensor = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(tensor, op=operation)
        reduced: list[float] = tensor.tolist()
        return reduced

    def from_first(self, action: Callable[[], T]) -> T:
        """Run an action that uses no collective on rank 0 alone and return its result on every rank.

        Raises:
            RankError: on every rank, naming the error of rank 0.
        """
        result = self.agreed(lambda: action() if self.rank == 0 else None)
        if self.size == 1:
            return result  # type: ignore[return-value]  # this is rank 0
        values = [result]
        dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]  # rank 0's

    def gather_counts(self, counts: Tensor) -> list[Tensor]:
        """Return every rank's int64 counts, by rank, on rank 0, and nothing elsewhere; all must have one shape."""
        if self.size == 1:
            return [counts]
        if self.rank:
            dist.gather(counts, dst=0)
            return []
        everyone = [torch.empty_like(counts) for _ in range(self.size)]
        dist.gather(counts, everyone, dst=0)
        return everyone

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values


def _tell(errors: Sequence[str | None]) -> str:
    if len(set(errors)) == 1:
        return f"all ranks: {errors[0]}"
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)


def _fingerprint(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
