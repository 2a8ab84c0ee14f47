"""The kind of device a row lies on, as far as the choice of a kernel goes."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen
class Hardware:
    """A kind of device.

    Args:
        kind: `cpu`, `cuda`, `rocm`, `mps` or whatever else torch calls it.
        capability: CUDA compute capability, major and minor; None elsewhere.

    >>> str(Hardware("cuda", (9, 0))), str(Hardware("cpu"))
    ('cuda 9.0', 'cpu')
    """

    kind: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        """Return the kind, and the compute capability where there is one."""
        return self.kind if self.capability is None else f"{self.kind} {_dotted(self.capability)}"


@attrs.frozen
class Capabilities:
    """A range of CUDA compute capabilities, both ends in it.

    >>> (9, 0) in Capabilities((8, 0), (9, 99)), (10, 0) in Capabilities((8, 0), (9, 99))
    (True, False)
    """

    low: tuple[int, int]
    high: tuple[int, int] = (99, 99)

    def __contains__(self, capability: object) -> bool:
        """Return whether the capability is in the range."""
        return isinstance(capability, tuple) and self.low <= capability <= self.high

    def __str__(self) -> str:
        """Return the range in words."""
        if self.high[0] == 99:
            return f"{_dotted(self.low)} or later"
        return f"{self.low[0]}.x" if self.low[0] == self.high[0] else f"{_dotted(self.low)} to {self.high[0]}.x"


def hardware_of(device: Hardware | torch.device | str) -> Hardware:
    """Return what a device is; a CUDA device is asked for its compute capability.

    >>> hardware_of("cpu")
    Hardware(kind='cpu', capability=None)
    """
    if isinstance(device, Hardware):
        return device
    where = torch.device(device)
    if where.type != "cuda":
        return Hardware(where.type)
    if torch.version.hip is not None:
        return Hardware("rocm")  # torch says cuda there too, but these are other kernels
    return Hardware("cuda", torch.cuda.get_device_capability(where))


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
