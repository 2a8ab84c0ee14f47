"""Mixers with a memory: the recurrences by hand, against loops over numbers, and empty at every document."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pack_torch import gated_delta_rule, kimi_delta_attention, short_convolution
from torch import Tensor

DOC_LENS = (3, 1, 7, 2)
TOKENS = sum(DOC_LENS)
HEADS, KEY, VALUE, CHANNELS, TAPS = 2, 3, 4, 5, 4

Mixer = Callable[..., Tensor]


def delta_inputs(kind: str, *, tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    decay = (tokens, HEADS, KEY) if kind == "kimi" else (tokens, HEADS)
    made = {
        "q": normal(tokens, HEADS, KEY),
        "k": normal(tokens, HEADS, KEY),
        "v": normal(tokens, HEADS, VALUE),
        "g": -normal(*decay).abs(),
        "beta": torch.sigmoid(normal(tokens, HEADS)),
    }
    return {name: values.to(dtype).requires_grad_() for name, values in made.items()}


def convolution_inputs(*, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(6)
    shapes = {"x": (TOKENS, CHANNELS), "weight": (CHANNELS, TAPS), "bias": (CHANNELS,)}
    return {
        name: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


#: name -> (function, its inputs, which of them have one row per token, further arguments)
CASES: dict[str, tuple[Mixer, Callable[..., dict[str, Tensor]], tuple[str, ...], dict[str, Any]]] = {
    "convolution": (short_convolution, convolution_inputs, ("x",), {"activation": "silu"}),
    "gated": (gated_delta_rule, lambda **k: delta_inputs("gated", **k), ("q", "k", "v", "g", "beta"), {}),
    "kimi": (
        kimi_delta_attention,
        lambda **k: delta_inputs("kimi", **k),
        ("q", "k", "v", "g", "beta"),
        {"l2norm": True},
    ),
}


def document_slices(doc_lens: tuple[int, ...] = DOC_LENS) -> list[slice]:
    ends = [sum(doc_lens[: place + 1]) for place in range(len(doc_lens))]
    return [slice(end - length, end) for end, length in zip(ends, doc_lens, strict=True)]


def number_by_number(inputs: dict[str, Tensor], doc_lens: tuple[int, ...], scale: float, l2norm: bool) -> list[Any]:
    """The delta rules with Python numbers alone, one entry of the memory at a time."""
    q, k, v, g, beta = (inputs[name].tolist() for name in ("q", "k", "v", "g", "beta"))
    out: list[Any] = []
    for rows in document_slices(doc_lens):
        memory = [[[0.0] * VALUE for _ in range(KEY)] for _ in range(HEADS)]
        for t in range(rows.start, rows.stop):
            heads = []
            for h in range(HEADS):
                query, key = q[t][h], k[t][h]
                if l2norm:
                    query = [one / math.sqrt(sum(x * x for x in q[t][h]) + 1e-6) for one in query]
                    key = [one / math.sqrt(sum(x * x for x in k[t][h]) + 1e-6) for one in key]
                s = memory[h]
                for i in range(KEY):
                    decay = g[t][h][i] if isinstance(g[t][h], list) else g[t][h]
                    for j in range(VALUE):
                        s[i][j] *= math.exp(decay)
                known = [sum(key[i] * s[i][j] for i in range(KEY)) for j in range(VALUE)]
                for i in range(KEY):
                    for j in range(VALUE):
                        s[i][j] += key[i] * beta[t][h] * (v[t][h][j] - known[j])
                heads.append([scale * sum(query[i] * s[i][j] for i in range(KEY)) for j in range(VALUE)])
            out.append(heads)
    return out


def test_two_tokens_by_hand() -> None:
    # One head, keys of 2, values of 1. Token 0 writes 0.5 * 4 = 2 under key (1, 0). Token 1 first keeps half of it
    # (1 under (1, 0)), knows (1, 1) . (1, 0) = 1, and writes 0.25 * (9 - 1) = 2 under both keys: (3, 2).
    q = torch.tensor([[[1.0, 0.0]], [[1.0, 10.0]]])
    k = torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]])
    v = torch.tensor([[[4.0]], [[9.0]]])
    g = torch.tensor([[0.0], [math.log(0.5)]])
    beta = torch.tensor([[0.5], [0.25]])

    together = gated_delta_rule(q, k, v, g, beta, (2,), scale=1.0)
    apart = gated_delta_rule(q, k, v, g, beta, (1, 1), scale=1.0)

    assert together.flatten().tolist() == [2.0, 3.0 + 20.0]
    # Alone, token 1 knows nothing: 0.25 * 9 = 2.25 under both keys.
    assert apart.flatten().tolist() == [2.0, 2.25 + 22.5]


def test_two_tokens_by_hand_with_a_decay_of_each_channel() -> None:
    # Token 0 writes 2 under both channels; token 1 keeps half of the first and a quarter of the second: (1, 0.5).
    # It knows 1.5 and writes 0.5 * (5.5 - 1.5) = 2: (3, 2.5).
    ones = torch.ones(2, 1, 2)
    v = torch.tensor([[[2.0]], [[5.5]]])
    g = torch.tensor([[[0.0, 0.0]], [[math.log(0.5), math.log(0.25)]]])
    beta = torch.tensor([[1.0], [0.5]])

    read = kimi_delta_attention(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), ones, v, g, beta, (2,), scale=1.0)

    assert read.flatten().tolist() == pytest.approx([2.0, 2.5])


def test_a_convolution_by_hand() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    taps = torch.tensor([[100.0, 10.0, 1.0]])

    assert short_convolution(x, taps, (4,)).flatten().tolist() == [1.0, 12.0, 123.0, 234.0]
    assert short_convolution(x, taps, (1, 3)).flatten().tolist() == [1.0, 2.0, 23.0, 234.0]
    assert short_convolution(x, taps, (4,), bias=torch.tensor([0.5])).flatten().tolist() == [1.5, 12.5, 123.5, 234.5]


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("kind", ["gated", "kimi"])
def test_delta_rules_are_what_a_loop_over_numbers_gives(kind: str, l2norm: bool) -> None:
    inputs = delta_inputs(kind)
    function = CASES[kind][0]

    default = function(**inputs, doc_lens=DOC_LENS, l2norm=l2norm)
    scaled = function(**inputs, doc_lens=DOC_LENS, l2norm=l2norm, scale=0.3)

    for found, scale in ((default, KEY**-0.5), (scaled, 0.3)):
        expected = torch.tensor(number_by_number(inputs, DOC_LENS, scale, l2norm), dtype=torch.float64)
        torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_convolution_is_torchs_own_over_each_padded_document(activation: str | None) -> None:
    inputs = convolution_inputs()

    found = short_convolution(**inputs, doc_lens=DOC_LENS, activation=activation)

    for rows in document_slices():
        padded = torch.nn.functional.pad(inputs["x"][rows].T.unsqueeze(0), (TAPS - 1, 0))
        plain = torch.nn.functional.conv1d(padded, inputs["weight"].unsqueeze(1), inputs["bias"], groups=CHANNELS)
        expected = plain if activation is None else plain * torch.sigmoid(plain)
        torch.testing.assert_close(found[rows], expected.squeeze(0).T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(CASES))
def test_a_packed_row_is_its_documents_one_at_a_time_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    function, make, by_token, further = CASES[name]
    inputs = make(dtype=dtype)
    packed = function(**inputs, doc_lens=DOC_LENS, **further)
    pull = torch.randn(packed.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    gradients = dict(zip(inputs, torch.autograd.grad((packed * pull).sum(), list(inputs.values())), strict=True))
    assert packed.dtype == dtype

    for rows in document_slices():
        alone = {n: (t[rows] if n in by_token else t).detach().clone().requires_grad_() for n, t in inputs.items()}
        single = function(**alone, doc_lens=(rows.stop - rows.start,), **further)
        (single * pull[rows]).sum().backward()

        assert torch.equal(packed[rows], single)
        for part in by_token:
            assert torch.equal(gradients[part][rows], alone[part].grad)


@pytest.mark.parametrize("name", list(CASES))
def test_a_changed_document_moves_no_other_not_even_with_nan(name: str) -> None:
    function, make, by_token, further = CASES[name]
    inputs = make()
    before = function(**inputs, doc_lens=DOC_LENS, **further)

    for document, rows in enumerate(document_slices()):
        for filling in ("other", "nan"):
            changed = {part: values.detach().clone() for part, values in inputs.items()}
            for part in by_token:
                changed[part][rows] = math.nan if filling == "nan" else changed[part][rows] * 0.5 - 0.25
            for values in changed.values():
                values.requires_grad_()
            after = function(**changed, doc_lens=DOC_LENS, **further)

            assert not torch.equal(after[rows], before[rows])
            for other, place in enumerate(document_slices()):
                if other == document:
                    continue
                assert torch.equal(after[place], before[place])
                wanted = torch.autograd.grad(before[place].sum(), list(inputs.values()), retain_graph=True)
                found = torch.autograd.grad(after[place].sum(), list(changed.values()), retain_graph=True)
                for part, one, two in zip(inputs, wanted, found, strict=True):
                    if part not in by_token:
                        continue
                    assert torch.equal(two[place], one[place]), part
                    outside = torch.ones(TOKENS, dtype=torch.bool)
                    outside[place] = False
                    assert float(one[outside].abs().max()) == 0.0


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    function, make, _, further = CASES[name]
    inputs = make()

    def run(*values: Tensor) -> Tensor:
        return function(**dict(zip(inputs, values, strict=True)), doc_lens=DOC_LENS, **further)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


def test_kimi_with_one_decay_for_all_channels_is_the_gated_delta_rule() -> None:
    inputs = delta_inputs("gated")
    spread = inputs | {"g": inputs["g"].unsqueeze(2).expand(-1, -1, KEY)}

    torch.testing.assert_close(
        kimi_delta_attention(**spread, doc_lens=DOC_LENS),
        gated_delta_rule(**inputs, doc_lens=DOC_LENS),
        rtol=1e-13,
        atol=1e-14,
    )


def test_strong_decay_keeps_gradients_finite() -> None:
    inputs = delta_inputs("kimi")
    strong = {name: (values.detach() - 800 if name == "g" else values.detach()) for name, values in inputs.items()}
    for values in strong.values():
        values.requires_grad_()

    kimi_delta_attention(**strong, doc_lens=DOC_LENS).square().sum().backward()

    assert all(bool(torch.isfinite(values.grad).all()) for values in strong.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"doc_lens": (3, 4)}, "sum to 7 but q has 13"),
        ({"doc_lens": (13, 0)}, "at least one token"),
        ({"k": torch.zeros(TOKENS, HEADS, KEY + 1)}, "k has shape"),
        ({"v": torch.zeros(TOKENS, 2 * HEADS, VALUE)}, "repeat q and k"),
        ({"g": torch.zeros(TOKENS, HEADS)}, "g has shape"),
        ({"beta": torch.zeros(TOKENS)}, "beta has shape"),
        ({"q": torch.zeros(1, TOKENS, HEADS, KEY)}, "needs 3 axes"),
        ({"backend": "flash"}, "not one of auto, torch, fla"),
        ({"backend": "fla"}, "run on a GPU and the tensors are on cpu"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kimi_delta_attention(**(delta_inputs("kimi") | {"doc_lens": DOC_LENS} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(CHANNELS + 1, TAPS)}, "weight has shape"),
        ({"weight": torch.zeros(CHANNELS, 0)}, "0 taps"),
        ({"bias": torch.zeros(1)}, "bias has shape"),
        ({"activation": "gelu"}, "not one of None, 'silu'"),
        ({"doc_lens": ()}, "at least one document"),
    ],
)
def test_a_convolution_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        short_convolution(**(convolution_inputs() | {"doc_lens": DOC_LENS} | change))
