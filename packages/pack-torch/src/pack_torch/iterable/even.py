"""As many packs on every rank, so that none waits for another that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, get_args

import attrs
import numpy as np
from pack_core.errors import PackError, RecordError

from pack_torch.pack import Pack

Policy = Literal["split", "pad", "carry", "drop"]


@attrs.frozen
class Round:
    """How many packs every rank gives now, and whether these are the last."""

    give: int
    over: bool


def even_packs(counts: Sequence[int], policy: Policy, every: int) -> Round:
    """Return what all ranks do, from how many packs each has of the next `every`.

    >>> even_packs([16, 16], "drop", 16), even_packs([16, 3], "drop", 16)
    (Round(give=16, over=False), Round(give=3, over=True))
    >>> even_packs([16, 3], "pad", 16), even_packs([2, 0], "pad", 16)
    (Round(give=16, over=False), Round(give=2, over=True))
    """
    if policy in ("drop", "carry"):
        return Round(min(counts), min(counts) < every)
    return Round(max(counts), max(counts) < every)


def weightless(pack: Pack) -> Pack:
    """Return a pack of the same shape that no loss and no metric counts: without labels, scored tokens or samples.

    >>> from pack_torch import Sft, build_pack
    >>> weightless(build_pack([{"input_ids": [5, 6]}], format=Sft(label_mode="tokens")))["labels"].tolist()
    [-100, -100]
    """
    encoded, format = pack.encoded, pack.format
    columns = dict(encoded.columns)
    names = [getattr(getattr(format, "text", format), name, "") for name in ("labels", "mask")]
    for name in names:
        if name in columns:
            columns[name] = np.full_like(columns[name], format.fields[name].pad)
    return attrs.evolve(pack, encoded=attrs.evolve(encoded, columns=columns, weightless=True), info={})


def _split(packs: list[Pack], count: int) -> list[Pack]:
    """Return the same rows in `count` packs, or in as many as there are rows."""
    made = list(packs)
    while len(made) < count:
        place = max(range(len(made)), key=lambda at: made[at].encoded.rows, default=None)
        if place is None or made[place].encoded.rows < 2:
            break
        pack = made[place]
        rows = pack.documents()
        half = len(rows) // 2
        parts = [attrs.evolve(pack, encoded=pack.format.encode(part)) for part in (rows[:half], rows[half:])]
        made[place : place + 1] = [parts[0], attrs.evolve(parts[1], info={})]
    return made


class EvenPacks:
    """Packs of a dataset, or of a loader of single packs, as many on every rank.

    Ranks agree before every `every` packs, all at the same step, and then do the same number of steps.

    Args:
        packs: a `PackedIterable`, or a loader of it with `batch_size=None`.
        gather: takes this rank's number and returns those of all ranks: a collective, such as an `all_gather`.
        policy: what becomes of ranks that have fewer. `split`: their last packs are taken apart into more, without
            loss, and filled up as by `pad` where rows do not suffice. `pad`: they are given packs that count nothing,
            until all have ended. `carry`: all stop, and what is left comes first in the next iteration. `drop`: all
            stop, and what is left is dropped, though counted in `dropped`, as far as it was read.
        every: packs between agreements, which are held in memory.

    Raises:
        PackError: no such policy; or, on all ranks, that one of them has no documents at all.

    >>> from pack_torch import PackedIterable, Sft
    >>> packs = PackedIterable([{"input_ids": [1] * 7}], format=Sft(label_mode="tokens"), capacity=10)
    >>> even = EvenPacks(packs, lambda mine: [mine, 2], policy="pad")
    >>> [pack.encoded.weightless for pack in even], even.padded
    ([False, True], 1)
    """

    def __init__(
        self, packs: Iterable[Pack], gather: Callable[[int], Sequence[int]], *, policy: Policy, every: int = 16
    ) -> None:
        """Read nothing yet."""
        if policy not in get_args(Policy) or not isinstance(every, int) or every < 1:
            allowed = ", ".join(map(repr, get_args(Policy)))
            raise PackError(f"policy is {policy!r} and every {every!r}; they must be one of {allowed}, and at least 1")
        self._packs, self._gather, self._policy, self._every = packs, gather, policy, every
        self.padded = self.dropped = 0
        self._source: Iterator[Pack] | None = None
        self._begin(None)
        self._pending = False

    def _begin(self, state: Any) -> None:
        self._before, self._skip, self._given = state, 0, 0
        self._mine: list[Pack] = []
        self._laid: list[Pack] = []
        self._round: Round | None = None
        self._last: Pack | None = None
        self._ended = False  # and nothing is carried over
        self._shape: Any = None  # where the last pack can be read again, once there are no more

    def __iter__(self) -> Iterator[Pack]:
        """Return an iterator over this rank's packs of an epoch."""
        if self._pending:
            self._pending = False
        elif self._policy != "carry" or not self._mine[self._given :]:
            self._source = iter(self._packs)
            self._begin(self._inner_state())
        return self._packs_left()

    def _packs_left(self) -> Iterator[Pack]:
        while True:
            while self._given == len(self._laid):
                if self._round is not None and self._round.over:
                    self._end()
                    return
                self._agree()
            self._given += 1
            yield self._laid[self._given - 1]

    def _end(self) -> None:
        left = self._mine[self._given :]
        if self._policy == "carry":
            # What was given of the round is passed over when its packs are read again.
            self._skip, self._mine, self._laid, self._given, self._round = self._skip + self._given, left, [], 0, None
            self._ended = not left
        else:
            self.dropped += len(left)
            self._given = len(self._laid)

    def _agree(self) -> None:
        if not (self._policy == "carry" and self._mine and self._round is None):
            self._before, self._skip, self._mine = self._inner_state(), 0, []
        source = iter(()) if self._source is None else self._source
        mine = [*self._mine, *islice(source, self._every - len(self._mine))]
        counts = list(self._gather(len(mine)))
        if self._last is None and not all(counts):
            raise PackError(
                f"ranks {[rank for rank, count in enumerate(counts) if not count]} of {len(counts)} have no packs at "
                "all, so there is nothing to give them; use more documents or fewer ranks"
            )
        self._lay(mine, even_packs(counts, self._policy, self._every))

    def _lay(self, mine: list[Pack], round: Round) -> None:
        self._round, self._mine, self._given = round, mine, 0
        if mine:
            self._last, self._shape = mine[-1], [self._before, self._skip + len(mine)]
        laid = _split(mine, round.give) if self._policy == "split" else mine[: round.give]
        missing = round.give - len(laid)
        self.padded += missing
        self._laid = [*laid, *[weightless(self._last) for _ in range(missing) if self._last is not None]]

    def _from(self, state: Any) -> Iterator[Pack]:
        self._packs.load_state_dict(state)  # type: ignore[attr-defined]  # what had a state takes it
        return iter(self._packs)

    def _inner_state(self) -> Any:
        own = getattr(self._packs, "state_dict", None)
        return own() if callable(own) else None

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on after the last pack that was given.

        Raises:
            RecordError: the dataset or loader has no state.
        """
        if not callable(getattr(self._packs, "state_dict", None)):
            raise RecordError(f"{type(self._packs).__name__} has no state_dict; use a dataset or loader that has")
        before = self._before
        if self._ended:
            before = None  # the next iteration starts over
        elif self._source is None:
            before = self._inner_state()
        own = {"packs": before, "skip": self._skip, "given": self._given, "policy": [self._policy, self._every]}
        agreed = None if self._round is None else [self._round.give, self._round.over]
        own["shape"] = self._shape if not self._mine else None
        return own | {"round": agreed, "held": len(self._mine), "padded": self.padded, "dropped": self.dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read the packs of the round again, and go on after those that were given; ranks need not agree for it.

        Raises:
            RecordError: the state is of another policy.
        """
        if list(state["policy"]) != [self._policy, self._every]:
            raise RecordError(f"the state has policy and every {state['policy']}, not {[self._policy, self._every]}")
        self._begin(state["packs"])
        self.padded, self.dropped = state["padded"], state["dropped"]
        if state["packs"] is None:
            self._source, self._ended = None, True
            return
        if state["shape"] is not None:
            self._shape = state["shape"]
            self._last = list(islice(self._from(self._shape[0]), self._shape[1]))[-1]
        self._source = self._from(state["packs"])
        self._skip = state["skip"]
        skipped = list(islice(self._source, self._skip))
        self._last = skipped[-1] if skipped else self._last
        mine = list(islice(self._source, state["held"]))
        if state["round"] is None:
            self._mine = mine
        else:
            self._lay(mine, Round(*state["round"]))
            self._given = state["given"]
        self.padded, self.dropped, self._pending = state["padded"], state["dropped"], True
