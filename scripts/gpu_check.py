"""Check on a GPU that packing changes nothing but the speed, and measure the speed.

    python scripts/gpu_check.py [--json FILE] [--seconds 270] [--device cuda]

One table: every attention backend and every flash-linear-attention kernel against plain formulas; a small model of
linear attention (KDA), full attention and latent experts on packed rows against one sample a row, over two optimizer
updates; what the documents of a row know of each other; two expert-parallel ranks where there are two GPUs; step time
and peak memory of packed, padded and one-sample rows. A row that did not run says so, and why.

`--device cpu` rehearses the same checks on a CPU, which verifies no GPU kernel. Needs pack-torch; fla-core and the
flash-attn packages are used where they are. Exit status: 0, all that ran passed; 1, a check failed; 2, no GPU.
"""

import argparse
import json
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import gpu_rows
import gpu_training
import torch
from gpu_bench import BF16, FP32, LIMITS_IN_WORDS, Bench, NotRun

#: After `varlen`: those that need no kernel, then those that do; `flex` compiles, and so comes late.
BACKENDS = ("segment", "dense", "flash_2", "flash_3", "flash_4", "flex", "nested")
NO_GPU = "no GPU: nothing was verified"
PACKAGES = ("torch", "triton", "fla-core", "flash-attn", "flash-attn-4", "pack-torch")


@attrs.frozen
class Check:
    """A row of the table: what is checked, of what, in which numbers, and the function that measures it or raises."""

    what: str
    of: str
    dtype: str
    measure: Callable[[Bench], str]


@attrs.frozen
class Outcome:
    """A row after its turn: `passed`, `FAILED`, `measured` or `not run`, and the figures or the reason."""

    what: str
    of: str
    dtype: str
    result: str
    why: str
    seconds: float


def checks() -> list[Check]:
    """Return every row, in the order they run."""
    rows = _of_backend("varlen")
    rows += [
        Check("kernel", f"fla {name}", "bfloat16", partial(gpu_rows.kernel, name)) for name in gpu_rows.FLA_KERNELS
    ]
    rows += [
        Check("a joined row is caught", "the limits", "bfloat16", gpu_rows.sensitivity),
        Check("the public oracle", "small model", "float64", gpu_rows.oracle),
        Check("with router losses", "best backend", "bfloat16", gpu_training.combined),
        Check("two ranks share experts", "best backend", "bfloat16", gpu_training.expert_parallel),
        *(Check("step", way, "bfloat16", partial(gpu_rows.timing, way)) for way in gpu_rows.WAYS),
    ]
    return rows + [row for name in BACKENDS for row in _of_backend(name)]


def _of_backend(name: str) -> list[Check]:
    dtypes = [BF16, FP32] if name in ("flex", "segment", "dense") else [BF16]
    rows = [("attention", gpu_rows.attention), ("packed = alone", gpu_training.packed_alone)]
    rows.append(("documents apart", gpu_rows.isolation))
    words = {BF16: "bfloat16", FP32: "float32"}
    return [Check(what, name, words[dtype], partial(test, name, dtype)) for what, test in rows for dtype in dtypes]


def run(check: Check, bench: Bench | None, left: float) -> Outcome:
    """Return the row's outcome; nothing runs without a bench, or once no time is left."""
    begin = time.perf_counter()
    row = (check.what, check.of, check.dtype)
    if bench is None:
        return Outcome(*row, "not run", "no GPU", 0.0)
    if left <= 0:
        return Outcome(*row, "not run", "the time given by --seconds was over", 0.0)
    try:
        result, why = "measured" if check.what == "step" else "passed", check.measure(bench)
    except NotRun as reason:
        result, why = "not run", str(reason)
    except Exception as error:  # whatever goes wrong in a row is that row's result, and the others still run
        result, why = "FAILED", str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return Outcome(*row, result, why, time.perf_counter() - begin)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes in columns, reasons wrapped under themselves."""
    heads = ("check", "of", "numbers", "result")
    cells = [(one.what, one.of, one.dtype, one.result) for one in outcomes]
    widths = [max(len(row[column]) for row in [heads, *cells]) for column in range(4)]
    indent = " " * (sum(widths) + 8)
    lines = []
    for row, why in [(heads, "figures, or why not"), *zip(cells, (one.why for one in outcomes), strict=True)]:
        start = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + "  "
        lines += textwrap.wrap(" ".join(why.split()), 150, initial_indent=start, subsequent_indent=indent)
    return "\n".join(lines)


def about(device: torch.device | None) -> dict[str, Any]:
    """Return date, device and versions: what a verified row is worth nothing without."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    name = "none" if device is None else platform.processor() or "cpu"
    if device is not None and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    return {"date": datetime.now(UTC).date().isoformat(), "device": name, "versions": found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses, and verifies no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--seconds", type=float, default=270.0, help="rows that would begin later do not run")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a rehearsal in seconds")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows that have TEXT in `check` or `of`")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    there = options.device == "cpu" or torch.cuda.is_available()
    device = torch.device("cpu" if options.device == "cpu" else "cuda:0") if there else None
    told = about(device)
    bench = None if device is None else Bench.build(device, options.tiny)
    print(f"{told['date']}, device {told['device']}; " + ", ".join(f"{k} {v}" for k, v in told["versions"].items()))
    if options.device == "cpu":
        print("rehearsal on a CPU: no GPU kernel is verified by it")
    print(LIMITS_IN_WORDS)
    outcomes = []
    for check in checks():
        if options.only in f"{check.what} {check.of}":
            outcomes.append(run(check, bench, options.seconds - (time.perf_counter() - begin)))
            if bench is not None:
                print(f"{outcomes[-1].result}: {check.what}, {check.of}", file=sys.stderr)
    print(table(outcomes))
    counts = {result: sum(one.result == result for one in outcomes) for result in ("passed", "FAILED", "not run")}
    seconds = time.perf_counter() - begin
    print(f"{counts['passed']} passed, {counts['FAILED']} failed, {counts['not run']} not run, in {seconds:.0f} s")
    if device is None:
        print(NO_GPU)
    if options.json is not None:
        report = {"rehearsal": options.device == "cpu", "rows": [attrs.asdict(one) for one in outcomes]}
        options.json.write_text(json.dumps(told | report, indent=2) + "\n")
    return 2 if device is None else int(counts["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
