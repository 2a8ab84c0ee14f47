"""Which backend is chosen where, on devices that are only described, and whether the README says the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from pack_torch import AttentionBackend, Hardware, available, choose_attention
from pack_torch.attention import BACKENDS
from pack_torch.hardware import hardware_of

README = Path(__file__).parents[2] / "packages" / "pack-torch" / "README.md"
KERNELS = ("flash_2", "flash_3", "flash_4", "varlen", "flex", "nested")

AMPERE, HOPPER, BLACKWELL = (Hardware("cuda", capability) for capability in ((8, 0), (9, 0), (10, 0)))
TURING, GEFORCE = Hardware("cuda", (7, 5)), Hardware("cuda", (12, 0))
CPU, APPLE, AMD = Hardware("cpu"), Hardware("mps"), Hardware("rocm")


def installed(*names: str) -> Mapping[str, AttentionBackend]:
    """The registry as it would be with these kernels there and the others not."""
    return {
        name: attrs.evolve(backend, missing=lambda there=name in names or name not in KERNELS: "" if there else "gone")
        for name, backend in BACKENDS.items()
    }


@pytest.mark.parametrize(
    ("hardware", "there", "asked", "expected"),
    [
        (CPU, KERNELS, {}, "segment"),
        (CPU, KERNELS, {"backward": False}, "flex"),
        (CPU, (), {"backward": False}, "segment"),
        (CPU, KERNELS, {"backward": False, "dropout": 0.1}, "segment"),
        (APPLE, KERNELS, {}, "segment"),
        (AMD, KERNELS, {}, "segment"),
        (TURING, KERNELS, {}, "segment"),
        (AMPERE, KERNELS, {}, "flash_2"),
        (AMPERE, ("flash_3", "flash_4", "varlen"), {}, "varlen"),
        (AMPERE, ("flex", "nested"), {}, "flex"),
        (AMPERE, ("nested",), {}, "nested"),
        (AMPERE, ("nested",), {"window": 8}, "segment"),
        (AMPERE, ("flex", "nested"), {"window": 8}, "flex"),
        (HOPPER, KERNELS, {}, "flash_3"),
        (HOPPER, ("flash_4", "flash_2"), {}, "flash_2"),
        (HOPPER, ("flash_4", "varlen"), {}, "varlen"),
        (HOPPER, ("flash_4",), {}, "flash_4"),
        (HOPPER, KERNELS, {"window": 128}, "flash_3"),
        (HOPPER, KERNELS, {"dropout": 0.1}, "flash_2"),
        (HOPPER, KERNELS, {"dtype": torch.bfloat16}, "flash_3"),
        (HOPPER, KERNELS, {"dtype": torch.float32}, "flex"),
        (HOPPER, KERNELS, {"dtype": torch.float64}, "segment"),
        (HOPPER, (), {}, "segment"),
        (BLACKWELL, KERNELS, {}, "flash_4"),
        (BLACKWELL, ("flash_3", "flash_2"), {}, "flash_2"),
        (GEFORCE, KERNELS, {"window": 4}, "flash_4"),
    ],
)
def test_the_best_backend_of_each_device(
    hardware: Hardware, there: tuple[str, ...], asked: dict[str, Any], expected: str
) -> None:
    backend, why = choose_attention(hardware, **asked, backends=installed(*there))

    assert backend.name == expected
    assert why.startswith(f"{expected} on {hardware}")


def test_it_says_why_and_what_it_passed_over() -> None:
    _, why = choose_attention(HOPPER, window=8, backends=installed("nested", "flex"))

    assert why == (
        "flex on cuda 9.0, not verified there, for torch.float16 or torch.bfloat16 or torch.float32 only; passed over: "
        "flash_3 (is not available: gone), flash_2 (is not available: gone), varlen (is not available: gone), "
        "flash_4 (is not available: gone)"
    )


def test_each_reason_is_said() -> None:
    _, why = choose_attention(TURING, backends=installed(*KERNELS))
    assert "flash_3 (has kernels for compute capability 9.x, not for cuda 7.5)" in why
    assert "flash_4 (has kernels for compute capability 9.0 to 12.x, not for cuda 7.5)" in why
    assert "varlen (has kernels for compute capability 8.0 or later, not for cuda 7.5)" in why

    _, why = choose_attention(CPU)
    assert "flex (runs forward only on cpu" in why
    assert why.startswith("segment on cpu, verified there; ")

    _, why = choose_attention(AMPERE, window=4, dtype=torch.float32, backends=installed("nested", "flash_2"))
    assert "flash_2 (takes torch.float16 or torch.bfloat16 on cuda, not torch.float32)" in why
    assert "nested (has no sliding window)" in why


def test_a_window_under_one_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        choose_attention("cpu", window=0)


def test_an_unknown_backend_is_neither_there_nor_missing() -> None:
    with pytest.raises(ValueError, match="'flash_9' is not one of"):
        available("flash_9")


def test_a_described_device_is_held_to_what_a_backend_declares() -> None:
    assert available("flex", AMPERE).why == "flex runs on cuda 8.0"
    assert available("flash_3", BLACKWELL).why == "flash_3 has kernels for compute capability 9.x, not for cuda 10.0"
    assert available("segment", APPLE)


def test_a_cuda_device_is_asked_for_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 1 else (8, 6))
    assert hardware_of("cuda:1") == HOPPER
    assert hardware_of(torch.device("cuda", 0)) == Hardware("cuda", (8, 6))

    monkeypatch.setattr(torch, "version", SimpleNamespace(hip="6.4"))
    assert hardware_of("cuda:1") == AMD


def test_the_readme_tells_of_every_backend_what_the_registry_declares() -> None:
    lines = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    told = {cells[0].strip("`"): cells[1:] for cells in rows if cells[0].strip("`") in BACKENDS}

    def word(is_so: bool) -> str:
        return "yes" if is_so else "no"

    assert list(told) == list(BACKENDS)
    for name, backend in BACKENDS.items():
        apart, backward, window, dropout, device, cpu, gpu = told[name]
        assert apart == word(backend.keeps_documents_apart), name
        assert backward == ("on a GPU" if backend.forward_only == ("cpu",) else word(backend.backward)), name
        assert window == word(backend.window), name
        assert dropout == word(backend.dropout), name
        kinds = " and ".join(backend.devices) or "any"
        assert device == (f"{kinds}, {backend.capabilities}" if backend.capabilities else kinds), name
        assert cpu.startswith("verified 2026-11-29" if "cpu" in backend.verified else "unverified"), name
        assert gpu == "unverified: not run", name
        assert "cuda" not in backend.verified
