"""One row of the table of refusals, and how the rows that apply are told together."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Literal, Protocol, TypeVar

import attrs

from pack_miles.errors import input_error
from pack_miles.settings.sections import OPTIONS

#: The name of an option, or a quoted value, in which a name is none.
NAMES = re.compile(
    r"""(?<!\w)(?:'[^']*'|"[^"]*")|(?<![\w.])(""" + "|".join(re.escape(one.name) for one in OPTIONS) + r")(?![\w.]*\w)"
)

#: What a row looks at: the run file; MILES' arguments, which a run file also makes; where a run would start; samples.
Scope = Literal["config", "arguments", "machine", "data"]


class Written(Protocol):
    """What a row looks at: it says where each option was written, by its canonical name."""

    @property
    def written(self) -> Mapping[str, str]:
        """`core.lr` -> `optimizer.lr (line 7)` or `--optimizer.lr`."""


Subject = TypeVar("Subject", bound=Written)


@attrs.frozen
class Refusal(Generic[Subject]):
    """One row: `applies` to a subject, the `reason` in words with the values, the `remedy`.

    Both name options canonically; `text` puts the names the user wrote in their place. What the subject is, the scope
    says: a `Config` for `config` (nothing else is needed) and `machine` (where the run would start is looked at), the
    producer hook's `Settings` for `arguments`, a `Collection` of samples for `data`.
    """

    code: str
    applies: Callable[[Subject], bool]
    reason: Callable[[Subject], str]
    remedy: Callable[[Subject], str]
    scope: Scope = "config"

    def text(self, subject: Subject) -> str:
        """Return reason and remedy as one sentence, options named as they were written."""
        places = {name: _place(where) for name, where in subject.written.items()}
        return f"{_rename(self.reason(subject), subject.written)}; {_rename(self.remedy(subject), places)}"


def _place(where: str) -> str:
    """Return a place without its line, and without the dashes of a flag that is a dotted name."""
    place = where.partition(" (line")[0]
    return place.removeprefix("--") if "." in place else place


def _rename(words: str, written: Mapping[str, str]) -> str:
    return NAMES.sub(lambda found: written.get(found[1], found[0]), words)


def told(rows: Iterable[Refusal[Subject]], subject: Subject) -> list[tuple[str, str]]:
    """Return code and text of every row that applies, in the order of the rows."""
    return [(row.code, row.text(subject)) for row in rows if row.applies(subject)]


def refuse_all(where: str, found: Iterable[tuple[str, str]]) -> None:
    """Raise everything that was told, together.

    Raises:
        InputError: naming the place, each reason and each remedy.
    """
    if problems := [text for _, text in found]:
        raise input_error(where, problems)
