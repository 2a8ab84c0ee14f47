"""The next blocks, made by a thread while the last one is in use."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from pack_torch.iterable.blocks import Block

_WAIT_S = 0.1


class Ahead:
    """What `make` returns, in order, made up to `size` calls ahead; None and errors end it.

    >>> made = iter([1, 2, None])
    >>> ahead = Ahead(lambda: next(made), 2)
    >>> ahead(), ahead(), ahead()
    (1, 2, None)
    """

    def __init__(self, make: Callable[[], Block | None], size: int) -> None:
        """Start the thread; it ends with the blocks, or when this object goes."""
        self._ready: queue.Queue[tuple[Block | None, BaseException | None]] = queue.Queue(size)
        stop = threading.Event()
        self.close = weakref.finalize(self, stop.set)
        threading.Thread(target=_fill, args=(make, self._ready, stop), daemon=True, name="pack-ahead").start()

    def __call__(self) -> Block | None:
        """Return the next block, or raise what making it raised."""
        block, error = self._ready.get()
        if error is not None:
            raise error
        return block


def _fill(
    make: Callable[[], Block | None],
    ready: queue.Queue[tuple[Block | None, BaseException | None]],
    stop: threading.Event,
) -> None:
    over = False
    while not over and not stop.is_set():
        try:
            made: tuple[Block | None, BaseException | None] = (make(), None)
        except BaseException as error:  # whatever it is, it is raised where the block is asked for
            made = (None, error)
        over = made[0] is None
        while not stop.is_set():
            try:
                ready.put(made, timeout=_WAIT_S)
                break
            except queue.Full:
                continue
