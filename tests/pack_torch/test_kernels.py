"""What outside kernels are told: stand-ins with the real signatures record it, and compute from it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from pack_torch import AttentionBackend, PackedBatch, available, get_attention
from pack_torch.attention import BACKENDS
from support.torch_naive import naive_attention
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention import varlen as torch_varlen

LENGTHS = (4, 1, 6, 4)
Record = dict[str, Any]


def row() -> PackedBatch:
    return PackedBatch(torch.zeros(sum(LENGTHS), dtype=torch.int64), LENGTHS)


def inputs(heads: int = 2, key_heads: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    counts = (heads, key_heads, key_heads)
    return [torch.randn(sum(LENGTHS), count, 4, generator=draw, dtype=torch.float64) for count in counts]


def by_hand(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, left: int | None) -> Tensor:
    """Causal attention in each stretch between boundaries; `left` is how far back it reaches, as kernels count it."""
    ends = boundaries.tolist()
    parts = []
    for first, end in pairwise(ends):
        window = None if left is None or left < 0 else left + 1
        parts.append(naive_attention(query[first:end], key[first:end], value[first:end], window))
    return torch.cat(parts)


def on_cpu(name: str) -> AttentionBackend:
    """The backend as it is, less the device check: the stand-ins run where the tests do."""
    return attrs.evolve(get_attention(name), devices=())


def stand_in(record: Record, arguments: str, pair: bool) -> Callable[..., Any]:
    """A flash-attention function with these arguments in this order."""

    def compute(given: Record) -> Any:
        record.update({name: value for name, value in given.items() if name not in ("q", "k", "v")})
        for side in ("q", "k"):
            lengths = given[f"cu_seqlens_{side}"].diff()
            assert given[f"cu_seqlens_{side}"].dtype == torch.int32
            assert type(given[f"max_seqlen_{side}"]) is int
            assert given[f"max_seqlen_{side}"] == int(lengths.max())
        assert given["causal"] is True
        out = by_hand(given["q"], given["k"], given["v"], given["cu_seqlens_q"], given["window_size"][0])
        return (out, torch.zeros(1)) if pair else out

    scope: Record = {"compute": compute}
    exec(f"def flash_attn_varlen_func({arguments}): return compute(locals())", scope)
    made: Callable[..., Any] = scope["flash_attn_varlen_func"]
    return made


#: Arguments in the order of flash-attn 2.8.3, of the Hopper interface, and of flash-attn-4 4.0.0b36.
SIGNATURES = {
    "flash_2": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None",
    "flash_3": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
    "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False",
    "flash_4": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
    "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False",
}
MODULES = {"flash_2": "flash_attn", "flash_3": "flash_attn_interface", "flash_4": "flash_attn.cute"}


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any] | None) -> None:
    """Put a module in the place of a flash-attention's, with the function or, as a namespace package, with nothing."""
    package = ModuleType("flash_attn")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    module = package if MODULES[name] == "flash_attn" else ModuleType(MODULES[name])
    monkeypatch.setitem(sys.modules, MODULES[name], module)
    if function is not None:
        module.flash_attn_varlen_func = function  # type: ignore[attr-defined]


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("name", list(SIGNATURES))
def test_flash_attention_is_told_the_boundaries_by_keyword_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, window: int | None, pair: bool
) -> None:
    record: Record = {}
    install(monkeypatch, name, stand_in(record, SIGNATURES[name], pair))
    batch, parts = row(), inputs()

    found = on_cpu(name)(*parts, batch, window=window)

    unlimited = (None, None) if name == "flash_4" else (-1, -1)
    assert record["window_size"] == (unlimited if window is None else (window - 1, 0))
    assert record["cu_seqlens_q"].tolist() == record["cu_seqlens_k"].tolist() == [0, 4, 5, 11, 15]
    assert record["max_seqlen_q"] == record["max_seqlen_k"] == 6
    assert record.get("qv") is None
    expected = by_hand(*parts, batch.cu_seqlens, None if window is None else window - 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, get_attention("segment")(*parts, batch, window=window), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_every_word_but_the_tensors_goes_by_keyword(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls: list[tuple[int, list[str]]] = []

    def function(*given: Any, **named: Any) -> Tensor:
        calls.append((len(given), sorted(named)))
        tensor: Tensor = given[0]
        return tensor

    function.__signature__ = signature(stand_in({}, SIGNATURES[name], False))  # type: ignore[attr-defined]
    install(monkeypatch, name, function)

    on_cpu(name)(*inputs(), row())

    words = ["causal", "cu_seqlens_k", "cu_seqlens_q", "max_seqlen_k", "max_seqlen_q", "window_size"]
    assert calls == [(3, sorted([*words, "dropout_p"]) if name == "flash_2" else words)]


def test_dropout_reaches_flash_attention_2_and_is_refused_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    record: Record = {}
    install(monkeypatch, "flash_2", stand_in(record, SIGNATURES["flash_2"], False))

    on_cpu("flash_2")(*inputs(), row(), dropout=0.25)

    assert record["dropout_p"] == 0.25
    for name in ("flash_3", "flash_4", "varlen", "nested"):
        with pytest.raises(ValueError, match=f"'{name}' has no dropout"):
            on_cpu(name)(*inputs(), row(), dropout=0.25)


def test_varlen_is_told_causality_as_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    real = signature(torch_varlen.varlen_attn)
    record: Record = {}

    def varlen_attn(*given: Any, **named: Any) -> Tensor:
        bound = real.bind(*given, **named)
        bound.apply_defaults()
        record.update(bound.arguments)
        assert record["cu_seq_q"].dtype == record["cu_seq_k"].dtype == torch.int32
        assert type(record["max_q"]) is type(record["max_k"]) is int
        left, right = record["window_size"]
        assert right == 0
        query, key, value = (record[name] for name in ("query", "key", "value"))
        if query.shape[1] != key.shape[1]:
            assert record["enable_gqa"]
            key, value = (side.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for side in (key, value))
        return by_hand(query, key, value, record["cu_seq_q"], left)

    varlen_attn.__signature__ = real  # type: ignore[attr-defined]
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    batch = row()
    for window, left in ((None, -1), (1, 0), (3, 2)):
        for key_heads in (2, 1):
            parts = inputs(2, key_heads)
            found = on_cpu("varlen")(*parts, batch, window=window)

            assert record["window_size"] == (left, 0)
            assert record["max_q"] == record["max_k"] == 6
            assert record["num_splits"] == 1
            assert record["enable_gqa"] is (key_heads == 1)
            expected = get_attention("segment")(*parts, batch, window=window)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_nested_hands_over_one_ragged_batch_with_its_longest_and_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        assert is_causal
        sides = [side.transpose(1, 2) for side in (query, key, value)]
        seen.append((sides[0]._get_min_seqlen(), sides[0]._get_max_seqlen()))  # type: ignore[attr-defined]
        parts = [naive_attention(*document) for document in zip(*(side.unbind() for side in sides), strict=True)]
        joined = torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets=sides[0].offsets())
        return joined.transpose(1, 2)

    monkeypatch.setattr("pack_torch.jagged.scaled_dot_product_attention", attend)
    batch, parts = row(), inputs()

    found = on_cpu("nested")(*parts, batch)

    assert seen == [(1, 6)]
    torch.testing.assert_close(found, get_attention("segment")(*parts, batch), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="'nested' needs as many key heads as query heads but got 1 and 2"):
        on_cpu("nested")(*inputs(2, 1), batch)
    with pytest.raises(ValueError, match="'nested' has no sliding window"):
        on_cpu("nested")(*parts, batch, window=2)


@pytest.mark.parametrize("name", ["varlen", "flash_2", "flash_3", "flash_4", "nested"])
def test_a_kernel_for_gpus_refuses_a_cpu_before_it_is_called(name: str) -> None:
    with pytest.raises(ValueError, match=f"attention backend '{name}' runs on cuda, not on cpu"):
        get_attention(name)(*inputs(), row())
    assert available(name, "cpu").why == f"{name} runs on cuda, not on cpu"


def test_an_empty_namespace_package_is_not_flash_attention_2(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_4", stand_in({}, SIGNATURES["flash_4"], True))

    import flash_attn  # what flash-attention 4 alone leaves: it imports, and holds nothing

    assert not hasattr(flash_attn, "flash_attn_varlen_func")
    assert available("flash_4")
    assert not available("flash_2")
    assert "flash_attn.flash_attn_varlen_func does not import here: cannot import name" in available("flash_2").why
    assert "pip install flash-attn --no-build-isolation" in available("flash_2").why


def test_the_old_copy_of_flash_attention_4_is_told_by_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    old = "q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False, window_size=(None, None)"
    install(monkeypatch, "flash_4", stand_in({}, old, True))

    assert not available("flash_4")
    assert "takes no max_seqlen_q, max_seqlen_k here, so it is another version" in available("flash_4").why
    with pytest.raises(ValueError, match=r"'flash_4' is not available: .* takes no max_seqlen_q"):
        on_cpu("flash_4")(*inputs(), row())


@pytest.mark.parametrize(("name", "said"), [("flash_2", "--no-build"), ("flash_3", "hopper/"), ("flash_4", "-4 --pre")])
def test_what_is_not_installed_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)

    found = available(name)

    assert not found
    assert f"{MODULES[name]}.flash_attn_varlen_func does not import here" in found.why
    assert said in found.why


def test_older_torch_is_told_by_what_its_varlen_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None: ...

    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    assert "takes no window_size, enable_gqa, num_splits here" in available("varlen").why

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert "varlen_attn does not import here" in available("varlen").why
    assert "install torch 2.13" in available("varlen").why


def test_torch_without_a_usable_flex_attention_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_kv_blocks(kv_num_blocks: Any, kv_indices: Any) -> None: ...

    monkeypatch.setattr(flex_attention.BlockMask, "from_kv_blocks", from_kv_blocks)
    assert "BlockMask.from_kv_blocks takes no seq_lengths here" in available("flex").why

    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)
    assert "torch.nn.attention.flex_attention does not import here" in available("flex").why


def test_every_backend_but_torch_keeps_documents_apart() -> None:
    assert [name for name, backend in BACKENDS.items() if not backend.keeps_documents_apart] == ["torch"]
