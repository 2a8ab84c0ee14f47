"""One optimizer step laid out: every rank's column of samples, cut into packs, with its token and pair work.

A layout is what an order means to the trainer: position p goes to rank `p % ranks`, every rank packs its column by
next-fit and splits it up to the largest count. It is the mutable state of the search; swaps are weighed without
touching it and applied once chosen.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import attrs

from pack_core.packing import fill, split

#: A pack whose members a swap changes: rank, pack, samples that leave, samples that come.
Change = tuple[int, int, Sequence[int], Sequence[int]]


@attrs.frozen
class Rules:
    """What every order of a step is laid out by."""

    ranks: int
    capacity: int
    equalize: str
    max_documents: int | None


@attrs.frozen
class Cut:
    """A column and where its packs start; `needed` packs before it was split up to the count of all ranks."""

    column: list[int]
    offsets: list[int]
    needed: int


@attrs.define  # not frozen, which would take a third of the time of weighing one
class Swap:
    """Two samples that would change places, and what attention work would be.

    `path` says how far the change reaches: `"fixed"` leaves all pack boundaries where they are, `"columns"` cuts the
    columns of the two samples anew, `"global"` needs fewer packs on all ranks and lays everything out anew.
    """

    first: int
    second: int
    path: str
    token_work: int
    pair_work: int
    changes: Sequence[Change] = ()
    cuts: dict[int, Cut] | None = None
    layout: "Layout | None" = None


class Layout:
    """The columns and packs of one order.

    Attributes:
        packs: packs of every rank.
        tokens, squares: `[pack][rank]`, tokens and summed squared lengths.
        token_work, pair_work: over packs, the sum of the largest rank's.
        rank_of, pack_of: where each sample lies.
    """

    def __init__(self, order: Sequence[int], lengths: Sequence[int], rules: Rules) -> None:
        """Lay out an order of the samples whose lengths are given."""
        self.lengths, self.rules = lengths, rules
        self._most = len(lengths) if rules.max_documents is None else rules.max_documents
        columns = [list(order[rank :: rules.ranks]) for rank in range(rules.ranks)]
        cuts = [self._cut(column) for column in columns]
        self.packs = max(cut.needed for cut in cuts)
        self._cuts = [self._level(cut, self.packs) for cut in cuts]
        self.tokens = [[0] * rules.ranks for _ in range(self.packs)]
        self.squares = [[0] * rules.ranks for _ in range(self.packs)]
        self.rank_of, self.pack_of, self._place_of = [0] * len(lengths), [0] * len(lengths), [0] * len(lengths)
        for rank in range(rules.ranks):
            self._settle(rank)
            for p in range(self.packs):
                held = [lengths[index] for index in self.members(rank, p)]
                self.tokens[p][rank] = sum(held)
                self.squares[p][rank] = sum([length * length for length in held])
        self._top_tokens = [_three_largest(row) for row in self.tokens]
        self._top_squares = [_three_largest(row) for row in self.squares]
        self.token_work = sum(top[0][0] for top in self._top_tokens)
        self.pair_work = sum(top[0][0] for top in self._top_squares)

    def order(self) -> tuple[int, ...]:
        """Return the order laid out."""
        columns = [cut.column for cut in self._cuts]
        return tuple(column[place] for place in range(len(columns[0])) for column in columns)

    def members(self, rank: int, pack: int) -> list[int]:
        """Return the samples of one pack."""
        cut = self._cuts[rank]
        return cut.column[cut.offsets[pack] : cut.offsets[pack + 1]]

    def weigh(self, first: int, second: int) -> Swap | str:
        """Return what swapping two samples of different packs would do, or why it is not worth scoring.

        `"same_pack"`: nothing would change. `"packs_per_rank"`: the ranks would need more packs.
        """
        a, b = self.rank_of[first], self.rank_of[second]
        if a == b and self.pack_of[first] == self.pack_of[second]:
            return "same_pack"
        if a != b and self._holds(a, first, second) and self._holds(b, second, first):
            token_work, pair_work = self._attention(first, second)
            changes = (
                (a, self.pack_of[first], (first,), (second,)),
                (b, self.pack_of[second], (second,), (first,)),
            )
            return Swap(first, second, "fixed", token_work, pair_work, changes)
        return self._recut(first, second)

    def apply(self, swap: Swap) -> None:
        """Carry out a swap that is not global."""
        for rank, cut in (swap.cuts or self._swapped_cuts(swap)).items():
            self._cuts[rank] = cut
            self._settle(rank)
        for p, (tokens, squares) in self.rows_after(swap.changes).items():
            self.tokens[p], self.squares[p] = tokens, squares
            self._top_tokens[p], self._top_squares[p] = _three_largest(tokens), _three_largest(squares)
        self.token_work, self.pair_work = swap.token_work, swap.pair_work

    def rows_after(self, changes: Sequence[Change]) -> dict[int, tuple[list[int], list[int]]]:
        """Return, for each pack that changes, every rank's tokens and squares as they would be."""
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for rank, p, removed, added in changes:
            tokens, squares = rows.setdefault(p, (list(self.tokens[p]), list(self.squares[p])))
            out, come = [self.lengths[index] for index in removed], [self.lengths[index] for index in added]
            tokens[rank] += sum(come) - sum(out)
            squares[rank] += sum([length * length for length in come]) - sum([length * length for length in out])
        return rows

    def largest_without(self, squares: bool) -> list[list[int]]:
        """Return `[pack][rank]`: the largest tokens (or squares) of a pack over all other ranks."""
        tops = self._top_squares if squares else self._top_tokens
        return [[_largest(top, rank, rank) for rank in range(self.rules.ranks)] for top in tops]

    def _cut(self, column: list[int]) -> Cut:
        totals = [0, *accumulate([self.lengths[index] for index in column])]
        offsets = fill(totals, self.rules.capacity, self._most)
        return Cut(column, offsets, len(offsets) - 1)

    def _level(self, cut: Cut, packs: int) -> Cut:
        if cut.needed == packs and self.rules.equalize != "balanced":
            return cut
        totals = [0, *accumulate([self.lengths[index] for index in cut.column])]
        offsets = split(cut.offsets, totals, packs, self.rules.equalize, self.rules.max_documents)
        return Cut(cut.column, offsets, cut.needed)

    def _settle(self, rank: int) -> None:
        """Note where the samples of a rank lie."""
        cut = self._cuts[rank]
        for place, index in enumerate(cut.column):
            self.rank_of[index], self._place_of[index] = rank, place
        for p, (start, stop) in enumerate(pairwise(cut.offsets)):
            for index in cut.column[start:stop]:
                self.pack_of[index] = p

    def _holds(self, rank: int, old: int, new: int) -> bool:
        """Whether next-fit cuts the column at the same places when `new` stands where `old` does."""
        cut, lengths, p, capacity = self._cuts[rank], self.lengths, self.pack_of[old], self.rules.capacity
        if cut.needed != self.packs or self.rules.equalize == "balanced":
            return False  # an equalized column is split by its tokens: look closely
        tokens = self.tokens[p][rank] - lengths[old] + lengths[new]
        if tokens > capacity:
            return False
        offsets, column, most = cut.offsets, cut.column, self._most
        start, stop = offsets[p], offsets[p + 1]
        if p + 1 < self.packs and tokens + lengths[column[stop]] <= capacity and stop - start < most:
            return False
        return not (
            p
            and self._place_of[old] == start
            and self.tokens[p - 1][rank] + lengths[new] <= capacity
            and start - offsets[p - 1] < most
        )

    def _attention(self, first: int, second: int) -> tuple[int, int]:
        """Token and pair work after a swap between two ranks that moves no boundary."""
        a, b, p, q = self.rank_of[first], self.rank_of[second], self.pack_of[first], self.pack_of[second]
        old, new = self.lengths[first], self.lengths[second]
        more, squared = new - old, new * new - old * old
        tokens, tokens_there = self.tokens[p][a] + more, self.tokens[q][b] - more
        squares, squares_there = self.squares[p][a] + squared, self.squares[q][b] - squared
        top, top_squares = self._top_tokens[p], self._top_squares[p]
        token_work, pair_work = self.token_work - top[0][0], self.pair_work - top_squares[0][0]
        if p == q:
            token_work += max(_largest(top, a, b), tokens, tokens_there)
            pair_work += max(_largest(top_squares, a, b), squares, squares_there)
            return token_work, pair_work
        there, there_squares = self._top_tokens[q], self._top_squares[q]
        token_work += max(_largest(top, a, a), tokens) + max(_largest(there, b, b), tokens_there) - there[0][0]
        pair_work += max(_largest(top_squares, a, a), squares) - there_squares[0][0]
        return token_work, pair_work + max(_largest(there_squares, b, b), squares_there)

    def _recut(self, first: int, second: int) -> Swap | str:
        cuts = {rank: self._cut(column) for rank, column in self._swapped_columns(first, second).items()}
        packs = max(cuts.get(rank, cut).needed for rank, cut in enumerate(self._cuts))
        if packs > self.packs:
            return "packs_per_rank"
        if packs < self.packs:
            return self._relaid(first, second)
        cuts = {rank: self._level(cut, packs) for rank, cut in cuts.items()}
        changes = [
            (rank, p, removed, added)
            for rank, cut in cuts.items()
            for p, (start, stop) in enumerate(pairwise(cut.offsets))
            for removed, added in (_difference(self.members(rank, p), cut.column[start:stop]),)
            if removed or added
        ]
        fixed = all(cut.offsets == self._cuts[rank].offsets for rank, cut in cuts.items())
        token_work, pair_work = self._changed_attention(changes)
        return Swap(first, second, "fixed" if fixed else "columns", token_work, pair_work, changes, cuts)

    def _relaid(self, first: int, second: int) -> Swap:
        exchanged = {first: second, second: first}
        layout = Layout([exchanged.get(index, index) for index in self.order()], self.lengths, self.rules)
        return Swap(first, second, "global", layout.token_work, layout.pair_work, layout=layout)

    def _changed_attention(self, changes: Sequence[Change]) -> tuple[int, int]:
        token_work, pair_work = self.token_work, self.pair_work
        for p, (tokens, squares) in self.rows_after(changes).items():
            token_work += max(tokens) - self._top_tokens[p][0][0]
            pair_work += max(squares) - self._top_squares[p][0][0]
        return token_work, pair_work

    def _swapped_columns(self, first: int, second: int) -> dict[int, list[int]]:
        exchanged = {first: second, second: first}
        ranks = (self.rank_of[first], self.rank_of[second])
        return {rank: [exchanged.get(index, index) for index in self._cuts[rank].column] for rank in ranks}

    def _swapped_cuts(self, swap: Swap) -> dict[int, Cut]:
        columns = self._swapped_columns(swap.first, swap.second)
        return {rank: attrs.evolve(self._cuts[rank], column=column) for rank, column in columns.items()}


def _difference(before: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[int]]:
    """The samples that leave a pack and those that come."""
    old, new = set(before), set(after)
    return [index for index in before if index not in new], [index for index in after if index not in old]


Top = list[tuple[int, int]]


def _three_largest(row: Sequence[int]) -> Top:
    """The three largest values and their ranks: whichever two ranks change, the largest of the others is among them."""
    return sorted(((value, rank) for rank, value in enumerate(row)), reverse=True)[:3]


def _largest(top: Top, a: int, b: int) -> int:
    """The largest value of a rank that is neither, 0 if there is none."""
    for value, rank in top:
        if rank != a and rank != b:  # no tuple: a search asks this a million times
            return value
    return 0
