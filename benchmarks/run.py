"""Measure, write `results/report.md` with pictures and `results/report.json`, and print the tables.

    python benchmarks/run.py [NAME ...] [--quick] [--readme README.md]

Every result is checked before it is timed. Figures are medians of one run on one machine, with the least and the most;
no benchmark fails on an absolute time. With `--readme` the short table between its two markers is written anew.
"""

import argparse
import json
import sys
from pathlib import Path

import attrs
from measure import Benchmark, Row, machine
from registry import REGISTRY
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

#: Rows of the README's table: what is said, benchmark, work, who else does it, and which of ours.
PACKERS = ("lightbinpack obfd", "lightbinpack obfdp", "seqpacker obfd", "seqpacker obfdp")
STREAMS = ("grain first-fit, arrays", "torchtune next-fit, lists", "trl bfd in batches")
NUMPY, PYTHON = "best_fit_decreasing, numpy", "best_fit_decreasing, python"
SHORT = (
    ("functions packed to 4,096, NumPy", "packing", "functions, 4096", PACKERS, NUMPY),
    ("the same, plain Python", "packing", "functions, 4096", PACKERS, PYTHON),
    ("1M lognormal lengths to 4,096, NumPy", "packing", "1M lognormal, 4096", PACKERS, NUMPY),
    ("the same, plain Python", "packing", "1M lognormal, 4096", PACKERS, PYTHON),
    ("10M lognormal lengths to 4,096, NumPy", "packing", "10M lognormal, 4096", PACKERS, NUMPY),
    ("20,000 documents streamed, window 8", "streaming", "20,000 documents, window 8", STREAMS, "best_fit, arrays"),
    ("the same, window 64", "streaming", "20,000 documents, window 64", STREAMS, "best_fit, arrays"),
    ("the same, window 256", "streaming", "20,000 documents, window 256", STREAMS, "best_fit, arrays"),
    (
        "a data set of functions planned",
        "offline",
        "functions to 4096, planning alone",
        ("TRL, 1,000 at a time", "TRL, all at once"),
        "pack_dataset, all at once",
    ),
    (
        "the same planned and written as Arrow",
        "offline",
        "functions to 4096, end to end",
        ("TRL to Arrow, 1,000 at a time", "TRL to Arrow, all at once"),
        "pack_dataset to Arrow",
    ),
    ("512 rollouts for 8 ranks", "scheduling", "512 rollouts, 8 ranks, 32768", ("verl",), "schedule"),
    ("4,096 rollouts for 8 ranks", "scheduling", "4,096 rollouts, 8 ranks, 32768", (), "schedule"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in REGISTRY]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all when none is given")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer runs")
    parser.add_argument("--readme", type=Path, help="write the short table into this page")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if options.readme and not {BEGIN, END} <= set(options.readme.read_text().splitlines()):
        parser.error(f"{options.readme} has no lines {BEGIN} and {END} to write the table between")
    chosen = [each for each in REGISTRY if not options.names or each.name in options.names]
    RESULTS.mkdir(exist_ok=True)
    measured: dict[str, list[Row]] = {}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        for each in progress.track(chosen, description="measuring"):
            measured[each.name] = each.measure(options.quick)
            Console(width=140).print(_table(each, measured[each.name]))
    where = machine() | {"runs": "quick" if options.quick else "full"}
    (RESULTS / "report.md").write_text(_report(chosen, measured, where))
    told = {"machine": where, "rows": {name: [attrs.asdict(row) for row in each] for name, each in measured.items()}}
    (RESULTS / "report.json").write_text(json.dumps(told, indent=1) + "\n")
    if options.readme:
        _write_short(options.readme, measured, where)
    sys.stdout.write(f"report: {RESULTS / 'report.md'}\n")


def _table(benchmark: Benchmark, rows: list[Row]) -> Table:
    table = Table("work", "who", "ms: median (least to most)", "result", title=benchmark.says, title_justify="left")
    last = None
    for row in rows:
        if last not in (None, row.work):
            table.add_section()
        table.add_row("" if row.work == last else row.work, row.who, row.milliseconds, _result(row))
        last = row.work
    return table


def _result(row: Row) -> str:
    megabytes = row.figures.get("peak MB above input")
    return ", ".join(filter(None, [row.result, f"{megabytes:,.0f} MB" if megabytes is not None else ""]))


def _report(chosen: list[Benchmark], measured: dict[str, list[Row]], where: dict[str, str]) -> str:
    lines = ["# Benchmarks", "", ", ".join(f"{name} {value}" for name, value in where.items()) + ".", ""]
    lines += ["Milliseconds: median, and least to most of the runs. Every result was checked before it was timed.", ""]
    for each in chosen:
        lines += [f"## {each.says}", ""]
        if each.draw:
            lines += [*each.draw(measured[each.name], RESULTS), ""]
        lines += ["| work | who | ms | result |", "|---|---|---|---|"]
        lines += [f"| {row.work} | {row.who} | {row.milliseconds} | {_result(row)} |" for row in measured[each.name]]
        lines.append("")
    return "\n".join(lines)


def _write_short(page: Path, measured: dict[str, list[Row]], where: dict[str, str]) -> None:
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    lines = [f"Medians, measured {where['date']} on {where['machine']}, Python {where['python']}:", ""]
    lines += ["| work | fastest peer | its ms | our ms | |", "|---|---|---|---|---|"]
    for said, name, work, peers, own in SHORT:
        rows = {row.who: row for row in measured.get(name, []) if row.work == work}
        if own not in rows:
            continue
        ours, others = rows[own].median, [rows[peer] for peer in peers if peer in rows]
        cells = ["none does it", "", _short(1e3 * ours), ""]
        if others:
            peer = min(others, key=lambda row: row.median)
            cells = [peer.who, _short(1e3 * peer.median), cells[2], f"{_short(peer.median / ours)} times as fast"]
        lines.append(f"| {said} | {' | '.join(cells)} |")
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.1f}"


if __name__ == "__main__":
    main()
