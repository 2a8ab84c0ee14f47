"""A progress bar on a terminal, and silence elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """A context that shows collections done, the newest mean reward and the time left."""

    def __init__(self, total: int, shown: bool) -> None:
        """Prepare a bar of `total` collections; it stays away unless `shown` and standard error is a terminal."""
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("mean reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=total, reward="-")

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it last was."""
        self._bar.stop()

    def advance(self, done: int, reward: float) -> None:
        """Show that `done` collections are trained, the newest with this mean reward."""
        self._bar.update(self._task, completed=done, reward=f"{reward:.3f}")

    def begin(self, done: int) -> None:
        """Show that `done` collections were trained before, and count the time from here."""
        self._bar.reset(self._task, completed=done, reward="-")
