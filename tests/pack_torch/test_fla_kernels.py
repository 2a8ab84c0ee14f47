"""How fla's kernels are called, shown with stand-ins that have fla-core 0.6's signatures and forget as it does."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from pack_torch import fla_kernels, gated_delta_rule, kimi_delta_attention, short_convolution
from torch import Tensor

DOC_LENS = (3, 1, 4)


def rows(*shape: int) -> Tensor:
    return torch.randn(sum(DOC_LENS), *shape, generator=torch.Generator().manual_seed(len(shape)))


INPUTS = {"q": rows(2, 3), "k": rows(2, 3) + 1, "v": rows(2, 4), "beta": rows(2).sigmoid()}


def lengths_of(cu_seqlens: Tensor | None, tokens: int) -> list[int]:
    return [tokens] if cu_seqlens is None else cu_seqlens.diff().tolist()


def delta(
    function: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any, l2: bool, cu: Any
) -> Any:
    assert q.shape[0] == 1
    lengths = lengths_of(cu, q.shape[1])
    arguments = [part.squeeze(0) for part in (q, k, v, g, beta)]
    return function(*arguments, lengths, scale=scale, l2norm=l2, backend="torch").unsqueeze(0), None


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    return delta(kimi_delta_attention, q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    return delta(gated_delta_rule, q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens)


def causal_conv1d(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, activation: str | None = None,
    backend: str | None = "triton", cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    assert x.shape[0] == 1
    lengths = lengths_of(cu_seqlens, x.shape[1])
    assert weight is not None
    return short_convolution(x[0], weight, lengths, bias, activation, backend="torch").unsqueeze(0), None


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins where fla's modules would be, a triton to find, and every tensor taken for one on a GPU."""
    found = {
        "fla": {}, "fla.ops": {}, "fla.modules": {}, "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.ops.kda": {"chunk_kda": chunk_kda},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }  # fmt: skip
    for name, contents in found.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla_kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(Tensor, "is_cuda", True)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize(("function", "g"), [(kimi_delta_attention, rows(2, 3)), (gated_delta_rule, rows(2))])
def test_delta_kernels_get_the_documents_the_scale_and_the_norm(
    fla: None, function: Any, g: Tensor, l2norm: bool
) -> None:
    decay = -g.abs()
    for scale in (None, 0.3):
        by_kernel = function(**INPUTS, g=decay, doc_lens=DOC_LENS, scale=scale, l2norm=l2norm, backend="fla")
        by_loop = function(**INPUTS, g=decay, doc_lens=DOC_LENS, scale=scale, l2norm=l2norm, backend="torch")
        one = function(**INPUTS, g=decay, doc_lens=(8,), scale=scale, l2norm=l2norm, backend="torch")

        assert torch.equal(by_kernel, by_loop)
        assert not torch.equal(by_loop, one)


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -1.0, 2.0])])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_convolution_kernel_gets_the_documents_bias_and_activation(
    fla: None, bias: Tensor | None, activation: str | None
) -> None:
    x, weight = rows(3), rows(4)[:3]
    by_kernel = short_convolution(x, weight, DOC_LENS, bias, activation, backend="fla")

    assert torch.equal(by_kernel, short_convolution(x, weight, DOC_LENS, bias, activation, backend="torch"))
    assert not torch.equal(by_kernel, short_convolution(x, weight, (8,), bias, activation, backend="torch"))


def test_auto_takes_the_kernel_only_where_it_can_run(fla: None) -> None:
    one = torch.zeros(1, 1, 1)
    assert fla_kernels.choose_kernel("gated_delta_rule", "auto", one) == "fla"
    assert fla_kernels.choose_kernel("gated_delta_rule", "torch", one) == "torch"
    assert fla_kernels.choose_kernel("gated_delta_rule", "auto", one.double()) == "torch"
    assert fla_kernels.choose_kernel("kimi_delta_attention", "auto", torch.zeros(1, 1, 257)) == "torch"
    assert fla_kernels.choose_kernel("kimi_delta_attention", "auto", torch.zeros(1, 1, 256)) == "fla"
    with pytest.raises(ValueError, match="do not compute in float64"):
        fla_kernels.choose_kernel("gated_delta_rule", "fla", one.double())
    with pytest.raises(ValueError, match="the key size is 257 and they hold at most 256"):
        fla_kernels.choose_kernel("gated_delta_rule", "fla", torch.zeros(1, 1, 257))


def test_the_function_is_looked_for_and_not_the_package(fla: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fla_kernels.missing_for_fla("kimi_delta_attention") is None
    monkeypatch.delattr(sys.modules["fla.ops.kda"], "chunk_kda")
    assert fla_kernels.missing_for_fla("kimi_delta_attention") == (
        "fla.ops.kda has no function chunk_kda; install another fla-core"
    )
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    assert "fla.ops.kda cannot be imported" in str(fla_kernels.missing_for_fla("kimi_delta_attention"))
    monkeypatch.setattr(fla_kernels, "find_spec", lambda name: None)
    assert fla_kernels.missing_for_fla("kimi_delta_attention") == "triton is not installed"


@pytest.mark.parametrize("function", [chunk_kda, chunk_gated_delta_rule, causal_conv1d])
def test_an_argument_the_kernel_would_swallow_is_an_error(function: Any) -> None:
    with pytest.raises(TypeError, match=r"does not know cu_seqlen; it names .*cu_seqlens"):
        fla_kernels.call_exactly(function, cu_seqlen=torch.tensor([0, 8]))
