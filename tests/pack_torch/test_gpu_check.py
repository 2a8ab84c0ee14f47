"""The script that checks GPUs, rehearsed on a CPU, and what it says where there is no GPU or a check fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from pack_torch import PackedBatch, attention
from pack_torch.attention import BACKENDS
from pack_torch.sdpa import whole
from torch import Tensor

SCRIPTS = Path(__file__).parents[2] / "scripts"


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, from which any GPU is hidden."""
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_check.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


def test_a_rehearsal_on_a_cpu_runs_what_a_cpu_can_and_says_why_the_rest_did_not_run(tmp_path: Path) -> None:
    done = called("--device", "cpu", "--tiny", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rehearsal"] is True
    assert found["versions"]["torch"] == torch.__version__
    rows = {(row["what"], row["of"], row["dtype"]): row for row in found["rows"]}
    results = {key: row["result"] for key, row in rows.items()}
    for name in ("segment", "dense"):
        for what in ("attention", "packed = alone", "documents apart"):
            for dtype in ("bfloat16", "float32"):
                assert results[what, name, dtype] == "passed"
    for name in ("varlen", "flash_2", "flash_3", "flash_4", "nested"):
        assert rows["attention", name, "bfloat16"]["why"] == f"{name} runs on cuda, not on cpu"
    assert "flex runs forward only on cpu" in rows["packed = alone", "flex", "float32"]["why"]
    assert "they run on a GPU" in rows["kernel", "fla kimi_delta_attention", "bfloat16"]["why"]
    whole = ["the public oracle", "with router losses", "two ranks share experts", "a joined row is caught"]
    assert [result for (what, _, _), result in results.items() if what in whole] == ["passed"] * 4
    assert [result for (what, _, _), result in results.items() if what == "step"] == ["measured"] * 3
    assert set(results.values()) == {"passed", "measured", "not run"}
    lines = [line.split() for line in done.stdout.splitlines()]
    for (what, of, dtype), result in results.items():
        cells = [*what.split(), *of.split(), dtype, *result.split()]
        assert any(line[: len(cells)] == cells for line in lines), cells
    assert "rehearsal on a CPU: no GPU kernel is verified by it" in done.stdout
    assert "bfloat16: log-probabilities apart by 0.005 in the mean, 0.05 at most" in done.stdout


def test_without_a_gpu_every_row_is_not_run_and_the_status_is_its_own() -> None:
    done = called()

    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert lines[-1] == "no GPU: nothing was verified"
    assert lines[-2].startswith("0 passed, 0 failed, ")
    rows = lines[3:-2]
    assert len(rows) > 30
    assert all(row.endswith("not run  no GPU") for row in rows)


def test_every_backend_that_keeps_documents_apart_has_its_rows_varlen_and_fla_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    order = list(dict.fromkeys(check.of for check in gpu_check.checks()))
    assert order[:4] == ["varlen", "fla short_convolution", "fla gated_delta_rule", "fla kimi_delta_attention"]
    named = [name for name in order if name in BACKENDS]
    assert named == ["varlen", "segment", "dense", "flash_2", "flash_3", "flash_4", "flex", "nested"]
    assert set(named) == {name for name, backend in BACKENDS.items() if backend.keeps_documents_apart}


def test_a_backend_that_leaks_fails_its_rows_and_the_status_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    def leaking(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        return whole(query, key, value, PackedBatch(torch.zeros(len(query), dtype=torch.int64), (len(query),)))

    broken = attrs.evolve(BACKENDS["dense"], function=leaking)
    monkeypatch.setattr(attention, "BACKENDS", {**BACKENDS, "dense": broken})

    status = gpu_check.main(["--device", "cpu", "--tiny", "--only", "dense"])

    told = capsys.readouterr().out
    assert status == 1
    assert "0 passed, 6 failed, 0 not run" in told
    assert "over the limit" in told
    assert "moved when sample" in told
    assert "Likely cause: mask ignored" in told


def test_rows_past_the_time_do_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    assert gpu_check.main(["--device", "cpu", "--tiny", "--seconds", "0"]) == 0
    told = capsys.readouterr().out
    assert "the time given by --seconds was over" in told
    assert "0 passed, 0 failed" in told
