"""A short name for a plan that every process computes alike."""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from pack_core.types import Schedule


def digest(order: Sequence[int], steps: Sequence[Schedule]) -> str:
    """Return the hexadecimal 16-byte BLAKE2b of the compact JSON text `[order, [packs of each step]]`.

    It covers the order and the packs and nothing that differs between machines, processes or runs: no seconds, no
    hashes of Python, no byte order.

    >>> digest([0, 1], [Schedule((((0,),), ((1,),)))])
    '1804f107579a3551600b7148d1809784'
    """
    return blake2b(msgspec.json.encode([order, [step.packs for step in steps]]), digest_size=16).hexdigest()
