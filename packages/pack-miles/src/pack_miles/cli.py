"""The `pack-miles` command: check a run file, plan it, train it, and read what a run wrote."""

import json
import os
import sys
import traceback
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from pack_miles.errors import InputError, counted
from pack_miles.settings.config import Config, load_config, suggest
from pack_miles.settings.sections import OPTIONS, PLACES

OPTIONS_HINT = (
    "Every option of the run file is also a flag of its dotted name, like --core.packing_max_tokens 6144.\n"
    "Flags win over the file, the last one last; the value none unsets an option that may be left out.\n"
    "`pack-miles --help-options` lists them all."
)


class _Parser(ArgumentParser):
    """A parser whose mistakes are InputErrors, told as every other one is."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


class _Override(Action):
    """Collects the flags of options in the order given, whatever place each is written under."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        given = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, [*given, (str(option_string).removeprefix("--"), values)])


class _ListOptions(Action):
    """Prints the option table and ends."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        from rich.console import Console

        from pack_miles.reporting.show import show_options

        show_options(Console(), OPTIONS)
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed or violations found, 2 a mistake of the user."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        given, unknown = build_parser().parse_known_args(arguments)
        if unknown:
            raise InputError(_unknown(unknown))
        status: int = given.command(given)
        sys.stdout.flush()
    except InputError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough; nothing may be flushed into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as ending:  # --help and its like
        return ending.code if isinstance(ending.code, int) else 0
    return status


def build_parser() -> ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="pack-miles",
        description="Sequence packing for RL training: check a run file, plan it, train it, read what it wrote.",
        epilog=OPTIONS_HINT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pack-miles {_version()}")
    parser.add_argument(
        "--help-options", action=_ListOptions, nargs=0, help="list every option of the run file, and exit"
    )
    _add_debug(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    validate = _add(commands, "validate", _validate, "check a run file; needs no hardware and no torch")
    _add_config(validate)
    validate.add_argument("--here", action="store_true", help="also check that this machine can run it")
    plan = _add(commands, "plan", _plan, "show what a run file comes to, and forecast a rollouts file")
    _add_config(plan)
    plan.add_argument(
        "--rollouts", metavar="FILE", help="rollouts as JSON lines (gzip too), to forecast packs and work"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    train = _add(commands, "train", _train, "train the run on this machine, or as a rank of a launcher like torchrun")
    _add_config(train)
    report = _add(commands, "report", _report, "show what runs did, from their contract files")
    _add_logs(report)
    report.add_argument(
        "--warmup",
        metavar="N",
        type=_whole,
        default=5,
        help="of several runs: updates after every start that are told apart as cold (default: 5)",
    )
    report.add_argument("--html", metavar="FILE", type=Path, help="also write a page with pictures, in one file")
    audit = _add(commands, "audit", _audit, "check the contract files of runs against the rules they must keep")
    _add_logs(audit)
    return parser


def _add(commands: Any, name: str, command: Any, words: str) -> ArgumentParser:
    parser: ArgumentParser = commands.add_parser(
        name, help=words, description=words, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=command)
    _add_debug(parser)
    return parser


def _add_debug(parser: ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", default=SUPPRESS, help="show the traceback of an error")


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the TOML run file")
    parser.epilog = OPTIONS_HINT
    for place in ("name", *PLACES):
        parser.add_argument(f"--{place}", dest="overrides", action=_Override, help=SUPPRESS)


def _add_logs(parser: ArgumentParser) -> None:
    parser.add_argument("logs", metavar="LOG", nargs="+", type=Path, help="a contract file, or a run's output folder")


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a whole number of updates, 0 or more; got {text!r}")
    return int(text)


def _unknown(arguments: Sequence[str]) -> str:
    for argument in arguments:
        if argument.startswith("--"):
            place = argument.removeprefix("--").partition("=")[0]
            return f"--{place}: unknown option{suggest(place, PLACES)}"
    return f"{arguments[0]!r} is one argument too many; see pack-miles --help"


def _version() -> str:
    try:
        return version("pack-miles")
    except PackageNotFoundError:
        return "(not installed)"


def _config(given: Namespace) -> Config:
    from pack_miles.settings.refusals import refuse

    config = load_config(given.config, given.overrides or ())
    refuse(config)
    return config


def _validate(given: Namespace) -> int:
    from rich.console import Console

    from pack_miles.reporting.show import show_areas
    from pack_miles.settings.refusals import refuse_machine

    config = _config(given)
    if given.here:
        refuse_machine(config)
    show_areas(Console(), config, given.here)
    return 0


def _plan(given: Namespace) -> int:
    from rich.console import Console

    from pack_miles.reporting.forecast import forecast_file
    from pack_miles.reporting.show import show_plan
    from pack_miles.settings.overview import overview

    config = _config(given)
    rollouts = None if given.rollouts is None else forecast_file(config, given.rollouts)
    if given.json:
        sys.stdout.write(json.dumps(overview(config, rollouts), indent=2) + "\n")
    else:
        show_plan(Console(), config, rollouts)
    return 0


def _train(given: Namespace) -> int:
    from pack_miles.settings.refusals import refuse_machine

    config = _config(given)
    refuse_machine(config)
    from pack_miles.training.launch import launch

    return launch(config, debug=getattr(given, "debug", False))


def _report(given: Namespace) -> int:
    from rich.console import Console

    from pack_miles.contract.log import read_logs, runs_of
    from pack_miles.reporting.compare import compare
    from pack_miles.reporting.report import labels, print_comparison, print_report, summarize

    logs = read_logs(given.logs)
    report = summarize(logs)
    print_report(report, Console())
    if len(report.runs) > 1:
        print_comparison(compare(runs_of(logs), report.runs, labels(report), given.warmup), Console())
    if given.html is not None:
        from pack_miles.reporting.page import write_page

        try:
            write_page(report, given.html)
        except OSError as error:
            raise InputError(f"--html {given.html} cannot be written: {error.strerror}; name another file") from None
        sys.stdout.write(f"page: {given.html.resolve()}\n")
    return 0


def _audit(given: Namespace) -> int:
    from pack_miles.contract.audit import audit, endings
    from pack_miles.contract.log import read_logs

    logs = read_logs(given.logs)
    violations = audit(logs)
    for problem in [problem for log in logs for problem in log.problems if problem not in log.corrupt]:
        sys.stdout.write(f"note: {problem}\n")  # a line an interrupted process tore; the rest is read
    for ending in endings(logs):
        sys.stdout.write(f"note: {ending}\n")
    for violation in violations:
        sys.stdout.write(f"{violation}\n")
    count = counted(len(violations), "violation") if violations else "no violations"
    sys.stdout.write(f"audit: {counted(len(logs), 'contract file')}, {count}\n")
    return 1 if violations else 0
