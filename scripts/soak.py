"""Stream millions of lengths through a packer, and measure how the process grows after the first million.

    python scripts/soak.py --documents 10000000

Needs a Linux /proc. Nothing but pack_core is imported, so that what grows is the stream's.
"""

import argparse
import gc
import os
import random
import time
from pathlib import Path

from pack_core.stream import Documents, StreamOptions, finish, open_stream, push_many

_BLOCK = 2_000
_FIRST = 1_000_000


def resident() -> int:
    """Return the bytes of memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(documents: int, first: int = _FIRST, **options: object) -> tuple[int, int]:
    """Return by how many bytes memory grew at most after the first documents, and the tokens that went astray.

    >>> growth, astray = soak(4_000, first=2_000, strategy="best_fit", capacity=2048, window=64)
    >>> astray
    0
    """
    chosen = StreamOptions(**options)  # type: ignore[arg-type]
    state, draw = open_stream(chosen), random.Random(0).lognormvariate
    base = highest = given = taken = 0
    for start in range(0, documents, _BLOCK):
        count = min(_BLOCK, documents - start)
        lengths = [max(1, int(draw(5.2, 0.5))) for _ in range(count)]
        state, packs = push_many(chosen, state, Documents(range(start, start + count), lengths))
        given += sum(lengths)
        taken += sum(pack.tokens for pack in packs)
        if start + count == first:
            gc.collect()
            base = highest = resident()
        elif start + count > first and not start % 100_000:
            highest = max(highest, resident())
    state, packs = finish(chosen, state)
    taken += sum(pack.tokens for pack in packs) + state.counts.lost_tokens
    return max(highest, resident()) - base, given - taken


def main() -> None:
    """Soak every strategy that is asked for, and fail where memory grew by 10 MB or tokens went astray."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--strategies", nargs="+", default=["best_fit", "concat_split"])
    arguments = parser.parse_args()
    for strategy in arguments.strategies:
        begun = time.perf_counter()
        growth, astray = soak(
            arguments.documents, strategy=strategy, capacity=2048, window=256, max_wait=2_000, overlong="drop"
        )
        seconds = time.perf_counter() - begun
        print(f"{strategy}: {arguments.documents:,} documents in {seconds:.0f} s, memory +{growth / 1e6:.2f} MB")
        if growth >= 10_000_000 or astray:
            raise SystemExit(f"{strategy}: memory grew by {growth:,} bytes and {astray:,} tokens went astray")


if __name__ == "__main__":
    main()
