"""How a rank ends, and how it and the process that watches speak to a person."""

import sys

from rich.console import Console

#: The exit status of a mistake the user can mend.
USER_MISTAKE = 2


def say(text: str) -> None:
    """Say something on standard error, on a line of its own even where a progress bar was cut off."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.show_cursor()
        sys.stderr.write("\n")
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
