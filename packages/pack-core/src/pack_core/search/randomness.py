"""Random numbers that are the same in every process, on every machine, under every version of Python."""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

_MASK = 2**64 - 1


class Randomness:
    """SplitMix64 (Steele, Lea and Flood, 2014): one 64-bit word of state, plain integers.

    >>> numbers = Randomness(0)
    >>> hex(numbers.word()), numbers.below(6)
    ('0xe220a8397b1dcdaf', 2)
    """

    def __init__(self, seed: int) -> None:
        """Start from the lowest 64 bits of the seed."""
        self._state = seed & _MASK

    def word(self) -> int:
        """Return the next 64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, limit: int) -> int:
        """Return a whole number from 0 to `limit - 1`; the bias is under `limit / 2**64`."""
        return (self.word() * limit) >> 64

    def distinct(self, count: int, limit: int) -> list[int]:
        """Return `count` different numbers below `limit`, in the order drawn."""
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            drawn[self.below(limit)] = None
        return list(drawn)

    def shuffled(self, limit: int) -> list[int]:
        """Return the numbers below `limit` in an order drawn at random (Fisher and Yates)."""
        numbers = list(range(limit))
        for last in range(limit - 1, 0, -1):
            other = self.below(last + 1)
            numbers[last], numbers[other] = numbers[other], numbers[last]
        return numbers


def seed_of(ids: Sequence[str | int]) -> int:
    """Return the seed of the samples: 8 bytes of BLAKE2b over the JSON text of their ids, little end first.

    >>> seed_of(["q0/0", "q0/1"]) == seed_of(("q0/0", "q0/1")) != seed_of(["q0/1", "q0/0"])
    True
    """
    return int.from_bytes(blake2b(msgspec.json.encode(list(ids)), digest_size=8).digest(), "little")
