"""One row of the table of refusals, and how the rows that apply are told together."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import attrs

from pack_miles.errors import input_error
from pack_miles.settings.config import Config
from pack_miles.settings.sections import OPTIONS

#: The name of an option, or a quoted value, in which a name is none.
NAMES = re.compile(
    r"""(?<!\w)(?:'[^']*'|"[^"]*")|(?<![\w.])(""" + "|".join(re.escape(one.name) for one in OPTIONS) + r")(?![\w.]*\w)"
)


@attrs.frozen
class Refusal:
    """One row: `applies` to a configuration, the `reason` in words with the values, the `remedy`.

    Both name options canonically; `text` puts the names the user wrote in their place.

    Scope `config` needs nothing but the configuration; scope `machine` looks at where the run would start.
    """

    code: str
    applies: Callable[[Config], bool]
    reason: Callable[[Config], str]
    remedy: Callable[[Config], str]
    scope: Literal["config", "machine"] = "config"

    def text(self, config: Config) -> str:
        """Return reason and remedy as one sentence, options named as they were written."""
        places = {name: where.removeprefix("--").partition(" ")[0] for name, where in config.written.items()}
        return f"{_rename(self.reason(config), config.written)}; {_rename(self.remedy(config), places)}"


def _rename(words: str, written: Mapping[str, str]) -> str:
    return NAMES.sub(lambda found: written.get(found[1], found[0]), words)


def refuse_all(config: Config, rows: Iterable[Refusal]) -> None:
    """Raise every row that applies, together.

    Raises:
        InputError: naming the run file, each reason and each remedy.
    """
    problems = [row.text(config) for row in rows if row.applies(config)]
    if problems:
        raise input_error(config.file, problems)
