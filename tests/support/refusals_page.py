"""The page that shows the whole table of refusals: for every row what runs into it and what is told.

`PYTHONPATH=tests python -m support.refusals_page` writes it, from the table itself and the cases of the tests.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pack_miles.miles.collected import DATA, Collected
from pack_miles.miles.hosted import HOSTED
from pack_miles.miles.options import read_settings
from pack_miles.miles.refusals import RUN
from pack_miles.settings.combinations import COMBINATIONS
from pack_miles.settings.machine import Machine
from pack_miles.settings.options import spell
from pack_miles.settings.refusals import machine_refusals, refused
from support.machine_cases import MACHINE_CASES, leave_runs
from support.miles_collections import arguments, as_filter, collection, expert_arguments, in_groups, write_checkpoint
from support.miles_config import make_config, without_lines
from support.refusal_cases import ARGUMENT_CASES, RUN_FILE_CASES, write_checkpoints
from support.sample_faults import FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "refusals.md"

HEAD = """# What is refused, and what to do

Every row of the one table (`pack_miles.settings.refusals.table`), with an example that runs into it and what is told
then. This page is written from the table and the cases of its tests by `PYTHONPATH=tests python -m
support.refusals_page`.
"""

SECTIONS = {
    "config": """## Run files

`pack-miles validate`, `plan` and `train` tell all of these together, before any process starts; no torch, no GPU.""",
    "arguments": """## Run files, and MILES' arguments

A run file is asked these through the MILES arguments it makes. The producer hook asks them of the arguments MILES was
started with, before anything moves, and only where it reorders. Those from `positional-rewards` on matter only where
MILES hosts the run.""",
    "machine": """## The machine

`pack-miles validate --here` and `train` tell these, before any process starts.""",
    "data": """## Samples

No configuration shows these: the producer hook asks them of every collection, and moves nothing where one applies.""",
}


def page() -> str:
    """Return the text of the page."""
    before = Path.cwd()
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.chdir(folder)
        try:
            write_checkpoints(folder)
            leave_runs(folder)
            (folder / "model.json").write_text("{}")
            rows = {scope: list(lines(folder)) for scope, lines in LINES.items()}
        finally:
            os.chdir(before)
    parts = [HEAD]
    for scope, text in SECTIONS.items():
        parts.append(f"{text}\n\n| row | example | what is told |\n|---|---|---|\n" + "\n".join(rows[scope]) + "\n")
    return "\n".join(parts).replace(f"{folder}/", "").replace(str(folder), ".")


def _line(code: str, example: str, told: str) -> str:
    told = re.sub(r"\b[0-9a-f]{32}\b", "(a digest)", without_lines(told))
    return f"| `{code}` | {example} | {told} |".replace("\n", " ")


def _given(options: dict[str, Any]) -> str:
    return ", ".join(f"`{name} = {spell(value)}`" for name, value in options.items()) or "as it is"


def _run_file(folder: Path, code: str) -> str:
    base, bad, _, _ = RUN_FILE_CASES[code]
    return dict(refused(make_config(folder, base | bad)))[code]


def _config(folder: Path) -> Iterator[str]:
    for row in COMBINATIONS:
        yield _line(row.code, _given(RUN_FILE_CASES[row.code][1]), _run_file(folder, row.code))


def _arguments(folder: Path) -> Iterator[str]:
    for row in (*RUN, *HOSTED):
        if row.code in RUN_FILE_CASES:
            yield _line(row.code, _given(RUN_FILE_CASES[row.code][1]), _run_file(folder, row.code))
            continue
        given, seam = ARGUMENT_CASES[row.code][0], "groups" if row.code == "positional-rewards" else "rewards"
        args = arguments(**given)
        settings = read_settings(as_filter(args) if seam == "groups" else args, seam)  # type: ignore[arg-type]
        yield _line(row.code, _given(given), row.text(settings))


def _machine(folder: Path) -> Iterator[str]:
    for code in [row.code for row in machine_refusals(Machine())]:
        base, bad, machine, *_ = MACHINE_CASES[code]
        config = make_config(folder, base | bad)
        row = next(row for row in machine_refusals(machine) if row.code == code)
        yield _line(code, _given(bad), row.text(config))


def _data(folder: Path) -> Iterator[str]:
    settings = read_settings(expert_arguments(write_checkpoint(folder / "model"), packing_max_tokens=24), "groups")
    for row in DATA:
        fault = next(fault for fault, (code, _) in FAULTS.items() if code == row.code)
        samples = collection([5 + (7 * place) % 8 for place in range(36)], experts=4)
        fault(samples)
        yield _line(
            row.code,
            fault.__name__.replace("_", " "),
            row.text(Collected(settings, samples, in_groups(samples, [4] * 9))),
        )


LINES = {"config": _config, "arguments": _arguments, "machine": _machine, "data": _data}

if __name__ == "__main__":
    PAGE.write_text(page())
