"""The one place that knows flash-linear-attention: whether its kernels can run, and how they are called.

fla's functions swallow keyword arguments they do not know, so a misspelt `cu_seqlens` would silently join all documents
into one. Every call here goes through `call_exactly`, which refuses those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

#: What each public function uses: module and function of fla-core.
KERNELS = MappingProxyType(
    {
        "short_convolution": ("fla.modules.convolution", "causal_conv1d"),
        "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        "kimi_delta_attention": ("fla.ops.kda", "chunk_kda"),
    }
)

#: The kernels hold one key of a head in one tile.
MAX_KEY_SIZE = 256


def choose_kernel(name: str, backend: str, *inputs: Tensor) -> str:
    """Return `fla` or `torch`: what is to compute `name` for these inputs.

    Args:
        name: a key of `KERNELS`.
        backend: `auto` takes fla where it can run, `torch` never does, `fla` insists.
        inputs: the tensors; of a delta rule the queries first.

    Raises:
        ValueError: an unknown backend, or `fla` where it cannot run; says what is missing.

    >>> choose_kernel("gated_delta_rule", "auto", torch.zeros(1, 1, 1))
    'torch'
    """
    if backend not in ("auto", "torch", "fla"):
        raise ValueError(f"backend {backend!r} is not one of auto, torch, fla")
    if backend == "torch":
        return "torch"
    obstacle = _obstacle(name, inputs)
    if obstacle is None:
        return "fla"
    if backend == "fla":
        raise ValueError(f"{name} cannot use fla's kernels: {obstacle}; use backend='auto' or 'torch'")
    return "torch"


def _obstacle(name: str, inputs: Sequence[Tensor]) -> str | None:
    for tensor in inputs:
        if not tensor.is_cuda:
            return f"they run on a GPU and the tensors are on {tensor.device}"
        if tensor.dtype == torch.float64:
            return "they do not compute in float64"
    if name != "short_convolution" and inputs[0].shape[-1] > MAX_KEY_SIZE:
        return f"the key size is {inputs[0].shape[-1]} and they hold at most {MAX_KEY_SIZE}"
    return missing_for_fla(name)


def missing_for_fla(name: str) -> str | None:
    """Return what keeps fla's kernel of `name` from being imported, or None; looks for the function, not the package.

    >>> missing_for_fla("no_such_mixer")
    Traceback (most recent call last):
    ValueError: 'no_such_mixer' is not one of short_convolution, gated_delta_rule, kimi_delta_attention
    """
    if name not in KERNELS:
        raise ValueError(f"{name!r} is not one of {', '.join(KERNELS)}")
    if find_spec("triton") is None:
        return "triton is not installed"
    module, function = KERNELS[name]
    try:
        found = getattr(import_module(module), function, None)
    except ImportError as error:
        return f"{module} cannot be imported ({error}); install fla-core"
    return None if callable(found) else f"{module} has no function {function}; install another fla-core"


def call_exactly(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return `function(**arguments)` once sure that every argument is one it names.

    Raises:
        TypeError: an argument that only `**kwargs` would take, and so forget; lists the names there are.

    >>> def forgetful(x, **kwargs): return x
    >>> call_exactly(forgetful, x=1)
    1
    >>> call_exactly(forgetful, x=1, cu_seqlen=[0, 1])
    Traceback (most recent call last):
    TypeError: forgetful does not know cu_seqlen; it names x
    """
    named = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    unknown = sorted(set(arguments) - set(named))
    if unknown:
        called = getattr(function, "__name__", repr(function))
        raise TypeError(f"{called} does not know {', '.join(unknown)}; it names {', '.join(named)}")
    return function(**arguments)


def _kernel(name: str) -> Callable[..., Any]:
    module, function = KERNELS[name]
    kernel: Callable[..., Any] = getattr(import_module(module), function)
    return kernel


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device)  # int64 [documents + 1]


def convolve_with_fla(
    x: Tensor, weight: Tensor, lengths: Sequence[int], bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return `[T, D]` as `short_convolution` documents it, by fla's kernel."""
    convolved, _ = call_exactly(
        _kernel("short_convolution"),
        x=x.unsqueeze(0),
        weight=weight,
        bias=bias,
        activation=activation,
        cu_seqlens=_boundaries(lengths, x.device),
    )
    rows: Tensor = convolved.squeeze(0)
    return rows


def delta_rule_with_fla(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
    scale: float,
    l2norm: bool,
) -> Tensor:
    """Return `[T, H, V]` as `gated_delta_rule` and `kimi_delta_attention` document it, by fla's kernel.

    The kernel takes one row a call, `[1, T, ...]`; more would be read against the wrong boundaries.
    """
    read, _ = call_exactly(
        _kernel(name),
        q=q.unsqueeze(0),
        k=k.unsqueeze(0),
        v=v.unsqueeze(0),
        g=g.unsqueeze(0),
        beta=beta.unsqueeze(0),
        scale=scale,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=_boundaries(lengths, q.device),
    )
    rows: Tensor = read.squeeze(0)
    return rows.to(v.dtype)
