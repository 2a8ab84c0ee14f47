"""Packed training in a plain PyTorch loop: pack-core says which documents share a row, torch does the rest."""

import torch
from pack_core import pack
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    """One attention layer of a language model; any model does that takes positions and a mask."""

    def __init__(self, vocabulary=64, width=32, longest=512):
        """Start from random weights."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, vocabulary)

    def forward(self, ids, positions, mask):
        """Return logits `[tokens, vocabulary]` of one row."""
        hidden = self.tokens(ids) + self.places(positions)
        query, key, value = self.mix(hidden).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(query[None, None], key[None, None], value[None, None], mask)
        return self.out(hidden + attended[0, 0])


def row_of(documents):
    """Return ids, positions, mask and targets of one row; no document sees another, or is asked for its first token."""
    lengths = torch.tensor([len(document) for document in documents])
    ids = torch.tensor([token for document in documents for token in document])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    mask = (owner[:, None] == owner) & (positions[:, None] >= positions)
    targets = torch.where(torch.roll(owner, -1) == owner, torch.roll(ids, -1), -100)
    targets[torch.cumsum(lengths, 0) - 1] = -100
    return ids, positions, mask, targets


def step(model, optimizer, documents, capacity):
    """Train one step on all documents, one packed row after the other; return the mean loss of a target."""
    packing = pack([len(document) for document in documents], capacity=capacity, strategy="best_fit_decreasing")
    # Of the step, not of a row: rows differ. Documents of one token have no target: their loss is 0 / 1, never 0 / 0.
    trained = max(1, sum(len(document) - 1 for document in documents))
    optimizer.zero_grad()
    total = 0.0
    for places in packing:
        ids, positions, mask, targets = row_of([documents[place] for place in places])
        loss = functional.cross_entropy(model(ids, positions, mask), targets, reduction="sum") / trained
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total
