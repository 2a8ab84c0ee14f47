"""The one error of a user's mistake: wrong configuration, wrong rollouts file, wrong machine."""

from collections.abc import Sequence

#: A message stays on one screen; what is left out is counted.
SHOWN = 12


class InputError(ValueError):
    """A mistake the user can mend: told in words, without a traceback, exit status 2.

    `problems` holds the single messages when several were found together.

    >>> str(InputError("run.toml: no such file"))
    'run.toml: no such file'
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        """Keep the message and, where several mistakes were found together, each of them."""
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, in the plural unless there is one.

    >>> counted(1, "sample"), counted(1200, "optimizer step")
    ('1 sample', '1,200 optimizer steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def input_error(where: str, problems: Sequence[str]) -> InputError:
    """Return one error telling every problem found at one place, at most a screenful of them.

    >>> print(input_error("run.toml", ["name is missing", "output.root is missing"]))
    run.toml: 2 problems
      - name is missing
      - output.root is missing
    """
    if len(problems) == 1:
        return InputError(f"{where}: {problems[0]}" if where else problems[0])
    lines = [f"{where or 'configuration'}: {len(problems)} problems"]
    lines += ["  - " + problem.replace("\n", "\n    ") for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"  ... and {len(problems) - SHOWN} more")
    return InputError("\n".join(lines), problems)
