"""A pack drawn in characters."""

from __future__ import annotations

import numpy as np

from pack_torch.formats.encoded import Encoded

#: Documents in turn; a prompt that several branches share is drawn in the upper line and they below.
MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def draw(encoded: Encoded, kind: str, capacity: int, width: int) -> str:
    """Return a headline and the row, a character for every `capacity / width` tokens; `.` is padding.

    Where prompts are shared a second line says which branch: `=` a prompt, letters from `a` its branches.

    >>> print(draw(Encoded({}, (2, 3, 2, 1), (3, 1), (-1, 0, 0, -1)), "SharedPrompt", 10, 40))
    SharedPrompt pack: 8 of 10 tokens (80.0 %), 2 documents of 1 to 7
    |00000000000000000000000000001111........|
    |========aaaaaaaaaaaabbbbbbbb====........|
    """
    lens, tokens = encoded.doc_lens, encoded.tokens
    head = (
        f"{kind} pack: {tokens:,} of {capacity:,} tokens ({tokens / capacity:.1%}), "
        f"{len(lens):,} documents of {min(lens):,} to {max(lens):,}"
    ).replace("%)", " %)")
    room = max(width, 1)
    # The token in the middle of what a character stands for.
    middle = ((np.arange(room) + 0.5) * capacity / room).astype(np.int64)
    lines = [_line(encoded.document_ids, middle, MARKS)]
    if encoded.shares_prompts:
        lines.append(_line(np.repeat(_branches(encoded), encoded.segment_lens), middle, "=" + MARKS[10:]))
    return "\n".join([head, *(f"|{line}|" for line in lines)])


def _line(numbers: np.ndarray, middle: np.ndarray, marks: str) -> str:
    return "".join(marks[int(numbers[one]) % len(marks)] if one < len(numbers) else "." for one in middle)


def _branches(encoded: Encoded) -> list[int]:
    """Return 0 for a prompt, else which of its branches, from 1."""
    found: list[int] = []
    for parent in encoded.parents or ():
        found.append(0 if parent < 0 else found[-1] + 1)
    return found
