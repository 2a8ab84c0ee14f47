"""The next blocks, made by a thread while the last one is in use."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from pack_torch.iterable.blocks import Block

#: A block or an error; None: from here on nothing is made ahead.
_Ready = queue.SimpleQueue[tuple[Block | None, BaseException | None] | None]


class Ahead:
    """What `make` returns, in order, made up to `size` calls ahead; None and errors end it.

    >>> made = iter([1, 2, None])
    >>> ahead = Ahead(lambda: next(made), 2)
    >>> ahead(), ahead(), ahead()
    (1, 2, None)
    """

    def __init__(self, make: Callable[[], Block | None], size: int) -> None:
        """Start the thread; it ends with the blocks, or when this object goes."""
        self._make, self._ready, self._alone = make, _Ready(), False
        self._room, self._over = threading.Semaphore(size), threading.Event()
        self._thread = threading.Thread(
            target=_fill, args=(make, self._ready, self._room, self._over), daemon=True, name="pack-ahead"
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._room, self._over)

    def close(self) -> None:
        """Return once nothing more is made ahead, however long `make` is at the last: its source may be read elsewhere.

        Calls go on, and make what was not made ahead one by one.
        """
        self._end()
        self._thread.join()

    def __call__(self) -> Block | None:
        """Return the next block, or raise what making it raised."""
        made = None if self._alone else self._ready.get()
        if made is None:
            self._alone = True
            return self._make()
        self._room.release()
        block, error = made
        self._alone = block is None
        if error is not None:
            raise error
        return block


def _end(room: threading.Semaphore, over: threading.Event) -> None:
    over.set()
    room.release()


def _fill(make: Callable[[], Block | None], ready: _Ready, room: threading.Semaphore, over: threading.Event) -> None:
    while True:
        room.acquire()
        if over.is_set():
            ready.put(None)
            return
        try:
            made: tuple[Block | None, BaseException | None] = (make(), None)
        except BaseException as error:  # whatever it is, it is raised where the block is asked for
            made = (None, error)
        ready.put(made)
        if made[0] is None:
            return
