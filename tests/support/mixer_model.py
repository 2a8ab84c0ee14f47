"""A small model of every mixer, with one deliberate fault on request."""

from __future__ import annotations

from typing import Any

import torch
from pack_torch import PackedBatch, gated_delta_rule, kimi_delta_attention, short_convolution
from torch import Tensor, nn

VOCAB, WIDTH, TAPS, WINDOW = 23, 8, 4, 3


class Positions(nn.Module):
    """Learned absolute positions; `positions` counts on over the row."""

    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.table = nn.Parameter(torch.randn(64, WIDTH, dtype=torch.float64))

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        places = torch.arange(batch.tokens) if self.fault == "positions" else batch.position_ids
        return self.table[places]


class Convolution(nn.Module):
    """`convolution` takes the row for one document."""

    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.taps = nn.Parameter(torch.randn(WIDTH, TAPS, dtype=torch.float64))

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        lengths = (batch.tokens,) if self.fault == "convolution" else batch.doc_lens
        return short_convolution(hidden, self.taps, lengths, activation="silu")


class Attention(nn.Module):
    """One head with an explicit mask, and every way to get it wrong."""

    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.float64)

    def mask(self, batch: PackedBatch) -> Tensor:
        rows = torch.arange(batch.tokens)
        ids = batch.document_ids
        if self.fault == "mask starts late":  # a document's first token counts to the one before it
            ids = torch.cat((ids[:1], ids[:-1]))
        if self.fault == "mask starts early":  # the last token of the document before counts to it
            ids = torch.cat((ids[1:], ids[-1:]))
        same = ids.unsqueeze(1) == ids
        if self.fault == "mask starts early":  # but that token itself still sees its own document
            same |= batch.document_ids.unsqueeze(1) == batch.document_ids
        distance = rows.unsqueeze(1) - rows
        if self.fault == "look ahead":
            return torch.ones_like(same)
        if self.fault == "mask":
            return distance >= 0
        if self.fault == "window":
            return (distance >= 0) & (distance < WINDOW)
        return same & (distance >= 0)

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        scores = (query @ key.T / WIDTH**0.5).masked_fill(~self.mask(batch), -torch.inf)
        return torch.softmax(scores, dim=-1) @ value


class Delta(nn.Module):
    """`state` takes the row for one document; kind is `gated` or `kimi`."""

    def __init__(self, fault: str | None, kind: str) -> None:
        super().__init__()
        self.fault, self.kind = fault, kind
        self.qkvg = nn.Linear(WIDTH, 4 * WIDTH, bias=False, dtype=torch.float64)
        self.beta = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        lengths = (batch.tokens,) if self.fault == "state" else batch.doc_lens
        q, k, v, g = (part.reshape(batch.tokens, 2, WIDTH // 2) for part in self.qkvg(hidden).chunk(4, dim=-1))
        decay, beta = torch.nn.functional.logsigmoid(g + 3), self.beta(hidden).sigmoid()
        if self.kind == "gated":
            return gated_delta_rule(q, k, v, decay[..., 0], beta, lengths, l2norm=True).flatten(1)
        return kimi_delta_attention(q, k, v, decay, beta, lengths, l2norm=True).flatten(1)


class MixerModel(nn.Module):
    """Embedding, the mixers asked for one after another, and a head."""

    def __init__(self, fault: str | None = None, mixers: str = "positions convolution attention gated kimi") -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds: dict[str, Any] = {"positions": Positions, "convolution": Convolution, "attention": Attention}
        self.embedding = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.mixers = nn.ModuleDict(
            {name: kinds[name](fault) if name in kinds else Delta(fault, name) for name in mixers.split()}
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, batch: PackedBatch) -> Any:
        hidden = self.embedding(batch.input_ids)
        for mixer in self.mixers.values():
            hidden = hidden + mixer(hidden, batch)
        return Output(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Output:
    """What a forward gives."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
