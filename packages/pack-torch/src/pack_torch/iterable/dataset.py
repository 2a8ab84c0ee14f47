"""The dataset: documents of any source in, packs out, and a state at every pack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs
import torch
from pack_core.errors import PackError, RecordError
from pack_core.lengths import as_integer
from pack_core.stream import Counts, StreamOptions, Tally
from torch.utils.data import IterableDataset

from pack_torch.formats.encoded import Encoded
from pack_torch.formats.format import Format
from pack_torch.iterable.ahead import Ahead
from pack_torch.iterable.blocks import Block, Blocks
from pack_torch.iterable.mark import warn_of_discarded
from pack_torch.iterable.order import Repeated, open_reader
from pack_torch.iterable.setup import check_format, described, source_described
from pack_torch.iterable.shard import Shard, find_shard
from pack_torch.pack import Pack
from pack_torch.tallies import add_metrics

_VERSION = 1
_RESUMES = ("exact", "cursor", "discard")
_DEALS = (None, "nothing", "workers")


class PackedIterable(IterableDataset[Pack]):
    """Packs of the documents of a source, made while they are read.

    In this order: rows are dealt out to ranks and workers, shuffled (`shuffle`), mixed (`mix`), and packed. The packs
    depend on the number of ranks and workers, so a state is only good for the same. Every iteration starts over;
    `set_epoch` gives it another order.

    Args:
        source: rows as the format takes them: a list or what else has a length and an index, a Hugging Face streaming
            dataset or what else has `state_dict` and `load_state_dict`, any iterable, `shuffle(...)`, `mix(...)`.
        format: what a row is.
        capacity: most tokens of a pack.
        group: field of the rows; those of the same group, one after another, come into one pack, and are dealt out
            together, for which every reader goes through all rows. None in it: no group. Not with `shuffle` and `mix`,
            which move rows one by one.
        epochs: how often the source is gone through in one iteration; None: for ever. Packs may span epochs.
        rank: this process's, of `world`.
        world: how many processes share the source.
        distributed: ask torch.distributed for both, when iteration begins.
        source_shards: `"workers"`: the source deals its rows out to a loader's workers itself. `"nothing"`: every
            worker sees all its rows. None: a Hugging Face dataset does, others do not, and an `IterableDataset` must
            say.
        block: documents read in one go, beside the `window` that wait; more are faster, and a resume reads them again.
            Their rows are held until they are packed: take fewer where rows are large, as with images.
        prefetch: blocks that a thread makes ahead. The packs are the same, and so is every state.
        resume: `"exact"`: go on with the next pack, and read a source without index or state from the start again,
            with a warning. `"cursor"`: refuse such a source. `"discard"`: go on behind the block; all that waited is
            lost, and a warning says how much.
        options: those of `pack_core.stream.StreamOptions`: `strategy`, `window`, `overlong`, `last`, `zero_length`,
            `max_documents`, `max_cost`, `max_wait`, `max_idle`, `seed`, `strategy_options`.

    Counts travel with the packs, each block's with its first. What is lost behind the last pack travels with that one
    where the source has a length, so that one can look; else it is in `counts` alone.

    To go on exactly, the rows of all that waits are read again, from the block with the oldest of them on. A strategy
    that lets some documents wait for very long should be given a `max_wait`.

    Packs of `Sft` lie in arrays that up to 16 neighbours share, of 2^15 tokens at most; clone what you keep for long.

    Raises:
        PackError: an option is not among what is allowed.

    >>> from pack_torch import Sft
    >>> rows = [{"input_ids": [number] * length} for number, length in enumerate([6, 5, 4, 3])]
    >>> dataset = PackedIterable(rows, format=Sft(label_mode="tokens"), capacity=10, window=2)
    >>> packs = iter(dataset)
    >>> next(packs)["input_ids"].tolist()
    [0, 0, 0, 0, 0, 0, 2, 2, 2, 2]
    >>> state = dataset.state_dict()
    >>> dataset.load_state_dict(state)
    >>> [pack["input_ids"].tolist() for pack in dataset]
    [[1, 1, 1, 1, 1, 3, 3, 3]]
    """

    def __init__(
        self,
        source: Any,
        *,
        format: Format,
        capacity: int,
        group: str | None = None,
        epochs: int | None = 1,
        rank: int = 0,
        world: int = 1,
        distributed: bool = False,
        source_shards: Literal["nothing", "workers"] | None = None,
        block: int = 2_048,
        prefetch: int = 0,
        resume: Literal["exact", "cursor", "discard"] = "exact",
        **options: Any,
    ) -> None:
        """Read nothing yet."""
        super().__init__()
        self.source, self.format, self.options = source, format, StreamOptions(capacity=capacity, **options)
        check_format(format, self.options)
        self._described = described(format)
        if resume not in _RESUMES or source_shards not in _DEALS:
            raise PackError(
                f"resume is {resume!r} and source_shards {source_shards!r}; they must be of {_RESUMES} and {_DEALS}"
            )
        self._group, self._epochs = group, None if epochs is None else as_integer(epochs, "epochs")
        self._block, self._prefetch = as_integer(block, "block"), as_integer(prefetch, "prefetch", least=0)
        self._ranks, self._deals, self._resume = (rank, world, distributed), source_shards, resume
        if not distributed:
            Shard(rank, world)
        self._epoch = _shared(torch.zeros((), dtype=torch.int64))
        self._first: dict[int, Any] = {}
        self._pending: Mapping[str, Any] | None = None
        self._running: _Iteration | None = None

    def set_epoch(self, epoch: int) -> None:
        """Give the iterations from now on the order of an epoch, in a loader's workers too; a loaded state has its own.

        Raises:
            PackError: the epoch is no whole number of at least 0.
        """
        self._epoch.fill_(as_integer(epoch, "epoch", least=0))

    @property
    def counts(self) -> Counts:
        """What became of all documents up to the block in use, of the latest iteration."""
        return Counts() if self._running is None else self._running.counts

    def __iter__(self) -> Iterator[Pack]:
        """Return an iterator over all packs, or over those after the state that was loaded."""
        if self._running is not None:
            self._running.close()
        state, self._pending = self._pending, None
        self._running = _Iteration(
            self._blocks(state), state, self._prefetch, self.format, self.options.capacity, self._begun()
        )
        return self._running

    def _blocks(self, state: Mapping[str, Any] | None) -> Blocks:
        inner = open_reader(self.source, find_shard(*self._ranks), self._deals, self._first, self._group)
        if inner.replays and self._resume == "cursor" and state is not None:
            raise RecordError(
                "resume='cursor', but a source has neither an index nor a state of its own, and would have to be read "
                "from the start again; allow that with resume='exact'"
            )
        reader = Repeated(inner, self._epochs)
        blocks = Blocks(reader, self.options, self.format, block=self._block, group=self._group)
        if state is None or state["block"] == [None]:
            reader.start(int(self._epoch) if state is None else state["epoch"])
        else:
            blocks.load(state["block"][0])
        return blocks

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on after the last pack that was given, as what JSON holds."""
        if self._pending is not None:
            return dict(self._pending)
        if self._running is not None:
            return self._running.state(self._resume == "discard")
        return self._begun() | {"block": [None], "given": 0, "ended": False}

    def _begun(self) -> dict[str, Any]:
        return {"version": _VERSION, "setup": [self._setup()], "epoch": int(self._epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from there; after the state of a finished one it has no packs.

        Raises:
            RecordError: the state is of another dataset, or of other ranks and workers; says what differs.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION:
            raise RecordError(f"the state is of version {version!r}; this dataset reads {_VERSION}")
        if missing := [name for name in ("setup", "epoch", "block", "given", "ended") if name not in state]:
            raise RecordError(f"the state has no {', '.join(missing)}; give what state_dict returned, all of it")
        (was,), now = state["setup"], self._setup()
        if was["shard"] != now["shard"]:
            raise RecordError(
                f"the state was saved by {Shard(*was['shard'])}, and this is {Shard(*now['shard'])}; documents are "
                "dealt out by these numbers, so go on with the same ranks and workers"
            )
        other = [f"{name} was {was.get(name)} and is {now[name]}" for name in now if was.get(name) != now[name]]
        if other:
            raise RecordError(f"the state is of another configuration: {'; '.join(other)}; make the dataset as it was")
        lost = state.get("discarded")
        if lost is not None:
            warn_of_discarded(Tally(*lost))
        self._pending = dict(state)

    def _setup(self) -> dict[str, Any]:
        return self.options.to_json() | {
            "format": self._described,
            "source": source_described(self.source),
            "group": self._group,
            "epochs": self._epochs,
            "block": self._block,
            "shard": list(attrs.astuple(find_shard(*self._ranks))),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process makes the dataset of: no iteration goes along, but what was loaded does."""
        return self.__dict__ | {"_running": None, "_first": {}}

    def __setstate__(self, held: Mapping[str, Any]) -> None:
        """Take it; workers of this copy are told its epochs, too."""
        self.__dict__.update(held)
        self._epoch = _shared(self._epoch)

    def __copy__(self) -> PackedIterable:
        """Return a copy with an epoch of its own."""
        copied = object.__new__(type(self))
        copied.__setstate__(self.__getstate__() | {"_epoch": self._epoch.clone()})
        return copied


def _shared(number: torch.Tensor) -> torch.Tensor:
    """Return a number that a loader's workers see change, however long they live."""
    return number if number.is_shared() else number.share_memory_()  # type: ignore[no-untyped-call]


class _Iteration(Iterator[Pack]):
    """Packs of blocks; between any two of them it is known how to get there again."""

    def __init__(
        self,
        blocks: Blocks,
        state: Mapping[str, Any] | None,
        prefetch: int,
        format: Format,
        capacity: int,
        begun: Mapping[str, Any],
    ) -> None:
        self._mark = blocks.mark()
        self._ended = bool(state and state["ended"])
        self._skip = state["given"] if state else 0
        self._sized, self._alone = blocks.sized, blocks.alone
        self._next: Callable[[], Block | None] = Ahead(blocks.next, prefetch) if prefetch else blocks.next
        self._format, self._capacity, self._begun = format, capacity, begun
        self._block: Block | None = None
        self._given = 0
        #: Packs of this block that were laid out at once, by their number in it.
        self._laid: dict[int, Encoded] = {}
        #: Once it was looked for: the next block that has packs, and the last one before it.
        self._looked: tuple[Block, Block | None] | None = None
        self._error: BaseException | None = None
        self._json: tuple[object, dict[str, Any]] | None = None

    @property
    def counts(self) -> Counts:
        return (self._mark if self._block is None else self._block.after).stream.counts

    def __next__(self) -> Pack:
        while self._block is None or self._given == len(self._block.packs):
            self._laid, self._json = {}, None  # else they keep what the block before is made of
            if self._looked:
                (self._block, made), self._looked = self._looked, None
                self._given = len(self._block.packs)
            else:
                made = None if self._ended else self._made()
            if made is None:
                self._ended = True
                raise StopIteration
            if self._skip > len(made.packs):
                raise RecordError(
                    f"the state was saved after {self._skip:,} packs of a block that has {len(made.packs):,} now; the "
                    "source is not what it was, so it cannot be gone on with exactly"
                )
            self._block, self._given, self._skip = made, self._skip, 0
        given = self._given
        if given not in self._laid:
            self._laid = dict(enumerate(self._block.encoded(self._format, given), given))
        encoded = self._laid[given]
        info = {} if given else self._block.info
        if self._sized and given == len(self._block.packs) - 1 and (rest := self._look_on(self._block)):
            info = add_metrics([info, rest])
        pack = Pack(encoded, self._format, self._capacity, info)
        self._given = given + 1  # last of all, so that an interrupt loses no pack
        return pack

    def _look_on(self, block: Block) -> Mapping[str, int]:
        """Make the next block that has packs; where there is none, return what is left to be told by the last pack."""
        if self._looked is None:
            last = block
            try:
                made = self._made()
                while made is not None and not made.packs:
                    last, made = made, self._made()
            except Exception:
                return {}  # it is raised where the next pack is asked for
            self._looked = (last, made)
        last, made = self._looked
        return last.info if made is None and last is not block else {}

    def close(self) -> None:
        """Read no further ahead, and no further at all where that would take rows from the next iteration."""
        if isinstance(self._next, Ahead):
            self._next.close()
        if self._alone and self._error is None and not self._ended:
            self._error = PackError(
                "the dataset was begun anew, and its source keeps its own place, so this iteration cannot be gone on "
                "with; use one at a time, or a dataset for each"
            )

    def _made(self) -> Block | None:
        if self._error is not None:
            raise self._error  # the source has been read on, so whoever asks again must not be given what follows
        try:
            return self._next()
        except BaseException as error:
            self._error = error
            raise

    def state(self, discard: bool) -> dict[str, Any]:
        if discard and self._block is not None:
            mark, lost = self._block.after.discarding(self._block.packs[self._given :])
            own = {"discarded": [lost.documents, lost.tokens]}
            return {
                **self._begun,
                **own,
                "block": [mark.to_json()],
                "given": 0,
                "ended": self._ended or mark.stream.finished,
            }
        block = self._block
        if block is None:
            mark, given = self._mark, self._skip
        elif self._ended:
            mark, given = block.after, 0
        else:
            mark, given = block.mark, self._given
        if self._json is None or self._json[0] is not mark:
            self._json = (mark, {**self._begun, "block": [mark.to_json()], "given": given, "ended": self._ended})
        state = self._json[1].copy()  # states of a block are all but alike, and a copy is the soonest made
        state["given"], state["ended"] = given, self._ended
        return state
