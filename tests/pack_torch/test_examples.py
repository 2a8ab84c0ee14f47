"""The examples that train: each compares itself with the unpacked, uninterrupted run, and must end well."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "first_loss", "within"),
    [("sft.py", math.log(256), 0.05), ("dpo.py", math.log(2), 1e-6)],  # weights as drawn know next to nothing
)
def test_a_packed_and_resumed_run_of_two_ranks_is_the_plain_run(script: str, first_loss: float, within: float) -> None:
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / script), "--steps", "2"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert ended.returncode == 0, ended.stderr
    steps = re.findall(r"step (\d): packed (\S+), plain (\S+)", ended.stdout)
    assert [number for number, _, _ in steps] == ["0", "1"]
    for _, packed, plain in steps:
        assert float(packed) == pytest.approx(float(plain), abs=2e-9)  # nine places are printed
    assert float(steps[0][2]) == pytest.approx(first_loss, abs=within)
    assert float(steps[1][2]) != float(steps[0][2])
    assert re.search(r"differ by \d\.\de-\d\d at most; resumed after 1 steps", ended.stdout)
