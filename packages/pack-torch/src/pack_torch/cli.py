"""The command line of offline packing: `python -m pack_torch pack IN OUT` and `advise IN`."""

import os
import sys
import traceback
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pack_core import PackError

if TYPE_CHECKING:
    from pack_torch.offline import Files, Recipe

_COLUMNS = "NAME[,NAME...]"


class _Parser(ArgumentParser):
    """A parser whose mistakes are told as every other one is."""

    def error(self, message: str) -> NoReturn:
        raise PackError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 a mistake of the user, 130 stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        given = build_parser().parse_args(arguments)
        given.command(given)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough; nothing may be flushed into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PackError, ModuleNotFoundError, OSError) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        sys.stderr.write(f"error: {_told(error)}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command again writes what is missing\n")
        return 130
    except SystemExit as ending:  # --help and its like
        return ending.code if isinstance(ending.code, int) else 0
    return 0


def build_parser() -> ArgumentParser:
    """Return the parser of the whole command line."""
    about = "Pack files of tokenized documents into rows. A document is a line, or a row of a table, with its tokens."
    parser = _Parser(prog="python -m pack_torch", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pack-torch {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    pack = _add(commands, "pack", _pack, "pack documents into rows, and write and report them")
    pack.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        help="a new folder for the rows; its suffix says their format: .parquet (or none), .arrow, .jsonl, .jsonl.gz",
    )
    pack.add_argument("--capacity", metavar="TOKENS", type=_whole, help="most tokens of a row; `advise` proposes one")
    pack.add_argument(
        "--strategy",
        default="best_fit_decreasing",
        help="one of pack_core.pack, or TRL's bfd, bfd_split, wrapped (default: best_fit_decreasing)",
    )
    pack.add_argument("--overlong", help="a document over the capacity: error (default), drop, truncate or split")
    pack.add_argument("--max-documents", metavar="N", type=_whole, help="most documents a row may hold")
    pack.add_argument("--align", metavar="N", type=_whole, default=1, help="round each document's room up (default: 1)")
    pack.add_argument("--seed", metavar="N", type=int, default=0, help="for the strategy fewest (default: 0)")
    pack.add_argument("--per-document", metavar=_COLUMNS, type=_names, default=(), help="carried one value a document")
    pack.add_argument(
        "--add",
        metavar=_COLUMNS,
        type=_names,
        help="what rows say beside (default: seq_lengths,documents,starts; there is also position_ids)",
    )
    pack.add_argument("--processes", metavar="N", type=_whole, default=1, help="how many write at once (default: 1)")
    pack.add_argument("--dry-run", action="store_true", help="only plan, report and advise; OUT is not written")
    advise = _add(commands, "advise", _advise, "say which capacity suits documents, from their lengths alone")
    advise.add_argument("--capacities", metavar="N[,N...]", type=_wholes, help="those to try (default: a sweep)")
    return parser


def _add(commands: Any, name: str, command: Any, words: str) -> ArgumentParser:
    parser: ArgumentParser = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
    parser.set_defaults(command=command)
    parser.add_argument(
        "documents", metavar="IN", type=Path, help="a file, or a folder of files: JSON lines, Parquet, Arrow"
    )
    parser.add_argument(
        "--columns", metavar=_COLUMNS, type=_names, help="those that hold tokens (default: all there are)"
    )
    parser.add_argument("--picture", metavar="FILE", type=Path, help="also draw to a .png or .svg (needs matplotlib)")
    parser.add_argument("--debug", action="store_true", default=SUPPRESS, help="show the traceback of an error")
    return parser


def _pack(given: Namespace) -> None:
    from pack_torch.offline import Recipe, find_files, lay_out
    from pack_torch.offline.columns import choose_added
    from pack_torch.offline.drawing import show_layout
    from pack_torch.offline.packed import TRACED

    if given.capacity is None:
        raise PackError(
            "--capacity is missing: the most tokens a row may hold, such as --capacity 4096; "
            f"`python -m pack_torch advise {given.documents}` proposes one"
        )
    recipe = Recipe.of(
        given.capacity,
        given.strategy,
        given.overlong,
        max_documents=given.max_documents,
        align=given.align,
        seed=given.seed,
    )
    add = TRACED if given.add is None else choose_added(given.add)
    _check_picture(given)
    files = find_files(given.documents, given.columns, given.per_document)
    if given.dry_run:
        layout = lay_out(files.lengths(), recipe)
    else:
        layout, told = _write(given, files, recipe, add)
    if files.left_out:
        sys.stdout.write(f"left out    column {', '.join(files.left_out)}\n")
    sys.stdout.write(show_layout(layout))
    if given.dry_run:
        from pack_torch.offline.advice import advise

        sys.stdout.write(f"advice      {advise(layout.lengths).sentence}\nwritten     nothing: a dry run\n")
    else:
        sys.stdout.write(told)
    if given.picture is not None:
        from pack_torch.offline.picture import draw_layout

        draw_layout(layout, given.picture)


def _write(given: Namespace, files: "Files", recipe: "Recipe", add: Sequence[str]) -> tuple[Any, str]:
    from pack_torch.offline import pack_source, write_rows
    from pack_torch.offline.errors import counted
    from pack_torch.offline.writing import refuse_other

    source, new = files.source(given.out), not given.out.exists()
    refuse_other(given.out, source, recipe, files.columns, files.per_document, add)
    try:
        files.stage(given.out)
        packed = pack_source(source, recipe, columns=files.columns, per_document=files.per_document, add=add)
        with _bar(len(packed)) as advance:
            written = write_rows(packed, given.out, processes=given.processes, progress=advance)
    except Exception:  # after a kill the same command goes on from the copy; after an error it may never come
        with suppress(OSError):
            files.unstage(given.out)
            if new:
                given.out.rmdir()  # which it does where nothing is in it
        raise
    for staged in given.out.glob(".staged-*"):
        staged.unlink(missing_ok=True)
    found = f", {written.found} of them by an earlier run" if written.found else ""
    return packed.layout, f"written     {counted(len(written.paths), 'file')} in {given.out}{found}\n"


def _advise(given: Namespace) -> None:
    from pack_torch.offline import advise, find_files
    from pack_torch.offline.drawing import show_advice

    _check_picture(given)
    lengths = find_files(given.documents, given.columns).lengths()
    advice = advise(lengths, given.capacities)
    sys.stdout.write(show_advice(advice, lengths))
    if given.picture is not None:
        from pack_torch.offline.picture import draw_advice

        draw_advice(advice, given.picture)


def _check_picture(given: Namespace) -> None:
    from pack_torch.offline.picture import check_picture

    if given.picture is not None:
        check_picture(given.picture)


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """Give a function that shows the rows written on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("writing rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("writing", total=total)
        yield lambda done, _: bar.update(task, completed=done)


def _told(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        module = str(error.name).partition(".")[0]
        extra = "plot" if module == "matplotlib" else "offline"
        return f"this needs {module}; install it with: pip install 'pack-torch[{extra}]'"
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}; mend that, and give the same command again"
    return str(error)


def _whole(text: str) -> int:
    if not text.replace("_", "").isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _wholes(text: str) -> list[int]:
    return [_whole(part) for part in text.split(",")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _version() -> str:
    try:
        return version("pack-torch")
    except PackageNotFoundError:
        return "(not installed)"
