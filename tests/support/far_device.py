"""A device that is not there: tensors say they lie on it, compute on the CPU, and refuse to meet tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

#: A name that torch knows without a driver. Nothing of torch's own meaning of it is used.
FAR = torch.device("meta")

#: Operations that may see both sides: copies, and indices, which may lie on the CPU.
CROSSING = {"aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}


class FarTensor(Tensor):
    """Holds a CPU tensor and says it lies on `FAR`."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        made: FarTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=FAR
        )
        made.near = near
        return made

    def __getitem__(self, index: Any) -> Any:
        # torch would put a list on this tensor's device by itself, past every hook.
        listed = tuple(torch.tensor(i) if isinstance(i, list) else i for i in index) if type(index) is tuple else index
        return super().__getitem__(listed)

    def tolist(self) -> Any:
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


class _Everywhere(TorchDispatchMode):
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


def _run(operation: Any, args: Any, kwargs: Any) -> Any:
    seen = {True: 0, False: 0}

    def unwrap(value: Any) -> Any:
        if isinstance(value, Tensor) and (isinstance(value, FarTensor) or value.dim()):
            seen[isinstance(value, FarTensor)] += 1  # a CPU tensor without axes is a number, and may meet anything
        return value.near if isinstance(value, FarTensor) else value

    args_near, kwargs_near = tree_map(unwrap, (args, kwargs))
    name = operation._schema.name
    if seen[True] and seen[False] and name not in CROSSING:
        raise RuntimeError(f"{name} was given tensors of two devices")
    device = kwargs_near.get("device")
    far = bool(seen[True]) if device is None else torch.device(device).type == FAR.type
    if device is not None:
        kwargs_near = {**kwargs_near, "device": "cpu"}
    made = operation(*args_near, **kwargs_near)
    if name.endswith("_") and not name.endswith("__"):
        return args[0]
    if name == "aten::_local_scalar_dense" or not far:
        return made
    return tree_map(lambda value: FarTensor(value) if isinstance(value, Tensor) else value, made)


@contextmanager
def far_device() -> Iterator[torch.device]:
    """Give the device for the length of the block; outside of it nothing can be made there."""

    def moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            near = make(data, *args, **kwargs)
            return near if device is None else near.to(device)

        return made

    # torch fills these on the device by itself, past every hook.
    with patch("torch.tensor", moved(torch.tensor)), patch("torch.as_tensor", moved(torch.as_tensor)), _Everywhere():
        yield FAR
