"""Which attention backend runs here, and which is best."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from pack_torch.attention import BACKENDS, AttentionBackend, get_attention
from pack_torch.hardware import Hardware, hardware_of
from pack_torch.masks import check_window

#: Best first. Kernels written for a GPU's own generation, then those of the one before, then what skips blocks of a
#: mask, then torch's ragged tensors, then one call per document length, which asks for nothing.
PREFERENCE = ("flash_4", "flash_3", "flash_2", "varlen", "flex", "nested", "segment")

#: On Hopper, flash-attention 4 comes after the kernels that were written for it or have run on it longest.
HOPPER = ("flash_3", "flash_2", "varlen", "flash_4", "flex", "nested", "segment")


@attrs.frozen
class Availability:
    """Whether a backend can run, true or false as it stands, and why."""

    usable: bool
    why: str

    def __bool__(self) -> bool:
        """Return whether it can."""
        return self.usable


def available(name: str, device: Hardware | torch.device | str | None = None) -> Availability:
    """Return whether the backend's function is here, and with a device whether it runs on that.

    The very function is looked for: a package of the right name can be empty, or of another generation.

    Args:
        name: a backend.
        device: where it is to run; None asks for the software alone.

    Raises:
        ValueError: no such backend.

    >>> bool(available("segment")), available("varlen", "cpu").why
    (True, 'varlen runs on cuda, not on cpu')
    """
    backend = get_attention(name)
    if device is None:
        missing = backend.missing()
        return Availability(not missing, f"{name} {f'is not available: {missing}' if missing else 'is installed'}")
    hardware = hardware_of(device)
    lack = backend.lack(hardware)
    return Availability(not lack, f"{name} {lack or f'runs on {hardware}'}")


def choose_attention(
    device: Hardware | torch.device | str,
    backward: bool = True,
    window: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    dropout: float = 0.0,
    backends: Mapping[str, AttentionBackend] = BACKENDS,
) -> tuple[AttentionBackend, str]:
    """Return the best backend for packed rows on a device, and why it and none before it.

    There always is one: `segment` runs everywhere, with gradients and windows. `torch` is never chosen, for it mixes
    documents, nor `dense`, whose mask grows with the square of the row.

    Args:
        device: where the rows lie.
        backward: gradients are needed.
        window: tokens of a sliding window, None for none.
        dtype: of query, key and value; None leaves it open, and the kernels of GPUs take half precision only.
        dropout: share of attention weights to drop.
        backends: what to choose from, by name.

    Raises:
        ValueError: a window under 1.

    >>> backend, why = choose_attention("cpu")
    >>> backend.name, why.split(";")[0]
    ('segment', 'segment on cpu, verified there')
    """
    check_window(window)
    hardware = hardware_of(device)
    hopper = hardware.capability is not None and hardware.capability[0] == 9
    passed: list[str] = []
    for name in HOPPER if hopper else PREFERENCE:
        backend = backends[name]
        lack = backend.lack(hardware, backward=backward, window=window is not None, dropout=dropout > 0, dtype=dtype)
        if not lack:
            break
        passed.append(f"{name} ({lack})")
    proof = "verified there" if hardware.kind in backend.verified else "not verified there"
    halves = f", for {' or '.join(map(str, backend.dtypes))} only" if backend.dtypes and dtype is None else ""
    over = f"; passed over: {', '.join(passed)}" if passed else ""
    return backend, f"{name} on {hardware}, {proof}{halves}{over}"
