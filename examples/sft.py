"""Supervised fine-tuning on Python's documentation: two ranks, packed on the fly, interrupted, resumed, verified.

    python examples/sft.py [--steps 6]

Two processes train for half of the steps and end. Two new ones resume from what was saved, model and data alike. Then
the whole run is made again without packing and without interruption, every document in a row of its own, its loss
written out. In float64 both give the same loss at every step, and in the end the same weights, to 1e-9 * max(1, |x|);
the script fails if not.
"""

import torch
from pack_torch import Pack, PackCollator, PackedBatch, PackedIterable, Sft, SmallModel, sft_loss
from ranks import compare, documentation
from torch import Tensor
from torch.nn.functional import cross_entropy


def packs(rank: int, ranks: int) -> PackedIterable:
    """Return this rank's packs: the name of a function is the prompt, what is said of it the answer."""
    documents = []
    for name, text in documentation():
        prompt = list(f"{name}\n".encode())
        documents.append({"input_ids": prompt + list(text.encode()), "prompt_length": len(prompt)})
    return PackedIterable(
        documents,
        format=Sft(label_mode="tokens"),
        strategy="best_fit",
        capacity=512,
        window=32,
        overlong="truncate",
        epochs=None,
        rank=rank,
        world=ranks,
    )


def packed(model: SmallModel, first: SmallModel, pack: Pack) -> tuple[Tensor, int]:
    """Return the summed loss of a pack, all of it in one row, and the tokens it is of."""
    batch = PackCollator(mask="varlen")([pack])
    loss = sft_loss(model.logits(model(**batch.model_inputs("pack_torch")).hidden), batch)
    return loss.numerator, loss.active_tokens


def plain(model: SmallModel, first: SmallModel, pack: Pack) -> tuple[Tensor, int]:
    """Return the same, written out: each document by itself, the prompt not learned."""
    losses = []
    for row in pack.documents():
        tokens, prompt = torch.tensor(row["input_ids"]), row["prompt_length"]
        logits = model.logits(model(PackedBatch(tokens, (len(tokens),))).hidden)
        losses.append(cross_entropy(logits[prompt - 1 : -1], tokens[prompt:], reduction="none"))
    return torch.cat(losses).sum(), sum(map(len, losses))


if __name__ == "__main__":
    compare(packs, packed, plain)
