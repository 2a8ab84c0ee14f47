"""One row of the table of refusals, and how the rows that apply are told together."""

from collections.abc import Callable, Iterable
from typing import Literal

import attrs

from pack_miles.config import Config
from pack_miles.errors import input_error


@attrs.frozen
class Refusal:
    """One row: `applies` to a configuration, the `reason` in words with the values, the `remedy`.

    Scope `config` needs nothing but the configuration; scope `machine` looks at where the run would start.
    """

    code: str
    applies: Callable[[Config], bool]
    reason: Callable[[Config], str]
    remedy: Callable[[Config], str]
    scope: Literal["config", "machine"] = "config"

    def text(self, config: Config) -> str:
        """Return reason and remedy as one sentence."""
        return f"{self.reason(config)}; {self.remedy(config)}"


def refuse_all(config: Config, rows: Iterable[Refusal]) -> None:
    """Raise every row that applies, together.

    Raises:
        InputError: naming the run file, each reason and each remedy.
    """
    problems = [row.text(config) for row in rows if row.applies(config)]
    if problems:
        raise input_error(config.file, problems)
