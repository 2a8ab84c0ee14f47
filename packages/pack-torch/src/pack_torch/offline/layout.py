"""From lengths to packed rows: which tokens of which documents lie in each row, and what is in none."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray
from pack_core import Certificate, Packing, certify, pack

from pack_torch.offline.errors import DatasetError, NothingToPack, counted

Row: TypeAlias = NDArray[Any]

#: The spellings of TRL's `pack_dataset` -> our strategy, and what they mean for documents over the capacity.
TRL = {
    "bfd": ("best_fit_decreasing", "truncate"),
    "bfd_split": ("best_fit_decreasing", "split"),
    "wrapped": ("concat_split", "split"),
}


@attrs.frozen
class Recipe:
    """How documents are packed: the arguments of `pack_core.pack`, which says what each means.

    Raises:
        PackError: one of them cannot be.

    >>> Recipe.of(4096, "bfd_split").strategy
    'best_fit_decreasing'
    """

    capacity: int
    strategy: str = "best_fit_decreasing"
    overlong: str = "error"
    max_documents: int | None = None
    align: int = 1
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse what `pack` refuses of any documents: one token has room wherever a document can have any."""
        pack([1], **attrs.asdict(self))

    @property
    def room(self) -> int:
        """Most tokens of one document that fit into a row, whose room is taken in steps of `align`.

        >>> Recipe(10, align=6).room
        6
        """
        return self.capacity // self.align * self.align

    @classmethod
    def of(cls, capacity: int, strategy: str, overlong: str | None = None, **others: Any) -> "Recipe":
        """Return the recipe of a strategy in our spelling or TRL's; of ours, `overlong` is an error unless named.

        Raises:
            DatasetError: a spelling of TRL's is given together with a policy it does not have.
        """
        ours, meant = TRL.get(strategy, (strategy, overlong or "error"))
        if overlong not in (None, meant):
            raise DatasetError(
                f"strategy {strategy!r} means overlong {meant!r}, but {overlong!r} was given; leave overlong out, or "
                f"write strategy={ours!r}"
            )
        return cls(capacity, ours, meant, **others)


@attrs.frozen(eq=False)
class Rows:
    """Packed rows in compressed form: row p holds the places `offsets[p]` to `offsets[p + 1]`.

    Attributes:
        documents: whose tokens lie at each place, `[places]`, int64.
        starts: the first of them in the document, `[places]`; None where all are 0.
        sizes: how many, `[places]`, int64.
        offsets: `[rows + 1]`, int64, from 0.
    """

    documents: Row
    starts: Row | None
    sizes: Row
    offsets: Row

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offsets) - 1

    def part(self, first: int, last: int) -> "Rows":
        """Return rows `first` up to `last`, views of the same memory.

        >>> rows = Rows(np.array([4, 5, 6]), None, np.array([1, 2, 3]), np.array([0, 2, 3]))
        >>> rows.part(1, 2).documents
        array([6])
        """
        begin, end = int(self.offsets[first]), int(self.offsets[last])
        return Rows(
            self.documents[begin:end],
            None if self.starts is None else self.starts[begin:end],
            self.sizes[begin:end],
            self.offsets[first : last + 1] - begin,
        )

    def totals(self) -> Row:
        """Return the tokens of each row."""
        return np.add.reduceat(self.sizes, self.offsets[:-1]) if len(self) else np.zeros(0, np.int64)


@attrs.frozen
class Losses:
    """What is in no row, by reason: documents, and their tokens where they had any."""

    empty: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    truncated: int = 0
    truncated_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in no row."""
        return self.dropped_tokens + self.truncated_tokens

    def lines(self) -> list[str]:
        """Return a sentence a reason; none where nothing is lost.

        >>> Losses(empty=2, truncated=1, truncated_tokens=30).lines()
        ['2 documents without tokens are in no row', '1 document cut short at the capacity: 30 tokens lost']
        """
        told = []
        if self.empty:
            are = "is" if self.empty == 1 else "are"
            told.append(f"{counted(self.empty, 'document')} without tokens {are} in no row")
        if self.dropped:
            told.append(
                f"{counted(self.dropped, 'document')} over the capacity dropped: {self.dropped_tokens:,} tokens lost"
            )
        if self.truncated:
            told.append(
                f"{counted(self.truncated, 'document')} cut short at the capacity: "
                f"{self.truncated_tokens:,} tokens lost"
            )
        return told


@attrs.frozen(eq=False)
class Layout:
    """A plan of packed rows over documents, with what it was made from.

    Attributes:
        recipe: how.
        rows: what lies where.
        losses: what lies nowhere.
        packing: the packs, over the documents that have tokens.
        lengths: tokens of those, `[documents with tokens]`.
    """

    recipe: Recipe
    rows: Rows
    losses: Losses
    packing: Packing
    lengths: Row

    @property
    def split(self) -> int:
        """Documents that were cut into parts without losing any."""
        return len(self.packing.split)

    def certificate(self) -> Certificate:
        """Return how good the packing is, beside a lower bound, after checking every promise of it."""
        asked = attrs.asdict(self.recipe)
        return certify(
            self.packing, self.lengths, **{name: asked[name] for name in ("capacity", "max_documents", "align")}
        )

    def digest(self) -> str:
        """Return a short name for the rows, the same on every machine."""
        name = blake2b(digest_size=16)
        starts = np.zeros(0, np.int64) if self.rows.starts is None else self.rows.starts
        for row in (self.rows.documents, starts, self.rows.sizes, self.rows.offsets):
            name.update(len(row).to_bytes(8, "little"))
            name.update(np.ascontiguousarray(row, "<i8").data)
        return name.hexdigest()


def lay_out(lengths: Row, recipe: Recipe) -> Layout:
    """Return the packed rows of documents, given their tokens; documents without any are counted as empty.

    Raises:
        DatasetError: no document has a token, or one is over the capacity and the policy says `"error"`.

    >>> layout = lay_out(np.array([3, 0, 9, 4]), Recipe(capacity=8, overlong="split"))
    >>> layout.rows.documents.tolist(), layout.rows.sizes.tolist(), layout.rows.offsets.tolist()
    ([2, 3, 0, 2], [8, 4, 3, 1], [0, 1, 4])
    >>> layout.losses.empty, layout.split
    (1, 1)
    """
    kept = None if len(lengths) and lengths.min() > 0 else np.flatnonzero(lengths)
    held = lengths if kept is None else lengths[kept]
    if not len(held):
        raise NothingToPack(f"there is nothing to pack: {counted(len(lengths), 'document')}, none with a token")
    over = np.flatnonzero(held > recipe.room)
    if len(over) and recipe.overlong == "error":
        first = int(over[0] if kept is None else kept[over[0]])
        steps = "" if recipe.room == recipe.capacity else f" (in steps of {recipe.align:,}: {recipe.room:,})"
        least = -(-int(held.max()) // recipe.align) * recipe.align
        raise DatasetError(
            f"{counted(len(over), 'document')} of {len(lengths):,} over the capacity of {recipe.capacity:,}{steps}, "
            f"the first being document {first} with {lengths[first]:,} tokens; raise the capacity to {least:,} or "
            "more, or choose overlong='truncate', 'split' or 'drop'"
        )
    packing = pack(held, **attrs.asdict(recipe))
    order = np.frombuffer(packing.order, np.int64)
    sizes, starts = held[order], None
    parts = packing.parts
    if len(parts):
        places, begins = np.frombuffer(parts.places, np.int64), np.frombuffer(parts.starts, np.int64)
        sizes[places] = np.frombuffer(parts.stops, np.int64) - begins
        if begins.any():
            starts = np.zeros(len(order), np.int64)
            starts[places] = begins
    lost = packing.dropped, packing.truncated
    losses = Losses(len(lengths) - len(held), len(lost[0]), lost[0].total, len(lost[1]), lost[1].total)
    rows = Rows(order if kept is None else kept[order], starts, sizes, np.frombuffer(packing.offsets, np.int64))
    return Layout(recipe, rows, losses, packing, held)


def fingerprint(values: Mapping[str, Any]) -> str:
    """Return a short name for JSON-able values.

    >>> fingerprint({"a": 1}) == fingerprint({"a": 1}), len(fingerprint({}))
    (True, 32)
    """
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
