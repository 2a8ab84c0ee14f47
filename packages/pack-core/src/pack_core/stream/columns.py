"""Documents by the column: read from arrays and lists, and admitted many at a time."""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from pack_core.errors import LengthError, PackError
from pack_core.lengths import as_identity, as_integer
from pack_core.stream.options import StreamOptions
from pack_core.types.stream import Document


@attrs.frozen(eq=False)
class Documents:
    """Many documents by the column, read at the speed of arrays: lists, ranges, NumPy arrays, torch tensors.

    Attributes:
        keys: of each document, `[documents]`.
        lengths: tokens, `[documents]`.
        groups: `[documents]`, None for documents of no group; or None for no groups at all.
        costs: `[documents]`; None for lengths squared.
        kinds: `[documents]`; None for 0.

    Raises:
        PackError: a column has another length than the keys, or holds something else.

    >>> Documents(keys=range(2), lengths=[120, 80]).lengths
    [120, 80]
    """

    keys: Sequence[int]
    lengths: Sequence[int]
    groups: Sequence[int | str | None] | None = None
    costs: Sequence[int | None] | None = None
    kinds: Sequence[int] | None = None

    def __attrs_post_init__(self) -> None:
        """Read the columns as plain lists, and refuse what is no document."""
        keys = _read(self.keys, "key")
        given: dict[str, list[Any]] = {"keys": keys, "lengths": _read(self.lengths, "length")}
        if self.kinds is not None:
            given["kinds"] = _read(self.kinds, "kind")
        if self.costs is not None:
            given["costs"] = [None if cost is None else as_integer(cost, "cost", least=0) for cost in self.costs]
        if self.groups is not None:
            given["groups"] = [None if group is None else as_identity(group, "group") for group in self.groups]
        for name, column in given.items():
            if len(column) != len(keys):
                raise PackError(f"{len(keys):,} keys but {len(column):,} {name} were given; there must be one each")
            object.__setattr__(self, name, column)
        if keys and min(self.lengths) < 0:
            place = next(place for place, length in enumerate(self.lengths) if length < 0)
            raise LengthError(f"document {keys[place]} has length {self.lengths[place]}; it must be 0 or more")

    @classmethod
    def of(cls, documents: "Iterable[Document] | Documents") -> "Documents":
        """Return the columns of documents."""
        if isinstance(documents, Documents):
            return documents
        rows = list(documents)
        groups, costs, kinds = ([getattr(row, name) for row in rows] for name in ("group", "cost", "kind"))
        return cls(
            [row.key for row in rows],
            [row.length for row in rows],
            groups=groups if any(group is not None for group in groups) else None,
            costs=costs if any(cost is not None for cost in costs) else None,
            kinds=kinds if any(kinds) else None,
        )

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.keys)

    def rows(self) -> Iterable[Document]:
        """Return them one by one."""
        nothing = [None] * len(self.keys)
        kinds = self.kinds or [0] * len(self.keys)
        return map(Document, self.keys, self.lengths, self.groups or nothing, self.costs or nothing, kinds)


@attrs.define
class Admitted:
    """Whole and cut documents that no limit keeps out of a pack, and what became of the others.

    Attributes:
        keys: `[admitted]`.
        starts: `[admitted]`.
        sizes: tokens, `[admitted]`.
        kinds: `[admitted]`.
        lost: `(reason, admitted before, tokens)` of each document that was dropped, in order.
        truncated: tokens that each truncated document lost.
        split: tokens of each document that was split.
    """

    keys: Sequence[int]
    starts: list[int]
    sizes: Sequence[int]
    kinds: Sequence[int]
    lost: list[tuple[str, int, int]] = attrs.field(factory=list)
    truncated: list[int] = attrs.field(factory=list)
    split: list[int] = attrs.field(factory=list)


def admit(options: StreamOptions, documents: Documents) -> Admitted:
    """Return what may wait of documents without groups or costs, whose policies are not `"error"`.

    >>> options = StreamOptions(capacity=10, overlong="split")
    >>> admit(options, Documents([7, 8], [4, 12])).sizes
    [4, 10, 2]
    """
    lengths, most = documents.lengths, options.capacity
    kinds = documents.kinds or [0] * len(lengths)
    if min(lengths) and (max(lengths) <= most or (options.cuts and options.overlong == "split")):
        return Admitted(documents.keys, [0] * len(lengths), lengths, kinds)
    keys: list[int] = []
    starts: list[int] = []
    sizes: list[int] = []
    sorts: list[int] = []
    admitted = Admitted(keys, starts, sizes, sorts)
    for key, length, kind in zip(documents.keys, lengths, kinds, strict=True):
        spans: Sequence[tuple[int, int]] = ((0, length),)
        if not length:
            admitted.lost.append(("zero_length", len(keys), 0))
            continue
        if length > most:
            if options.overlong == "drop":
                admitted.lost.append(("overlong", len(keys), length))
                continue
            if options.overlong == "split":
                if not options.cuts:
                    admitted.split.append(length)
                    spans = [(start, min(start + most, length)) for start in range(0, length, most)]
            else:
                admitted.truncated.append(length - most)
                spans = ((0, most),) if options.overlong == "truncate" else ((length - most, length),)
        for start, stop in spans:
            keys.append(key)
            starts.append(start)
            sizes.append(stop - start)
            sorts.append(kind)
    return admitted


def _read(column: Any, name: str) -> list[int]:
    tolist = getattr(column, "tolist", None)
    listed = tolist() if callable(tolist) else list(column)
    if not isinstance(listed, list):
        raise PackError(f"{name}s are one {type(column).__name__}; give a list or array with one {name} a document")
    if {*map(type, listed)} <= {int}:
        return listed
    try:
        return [as_integer(value, name, least=-(2**63)) for value in listed]
    except PackError as error:
        raise LengthError(f"among the {name}s of {len(listed):,} documents: {error}") from None
