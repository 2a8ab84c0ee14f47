"""Preference tuning (DPO) with shared prompts: two ranks, packed on the fly, interrupted, resumed, verified.

    python examples/dpo.py [--steps 6]

A pair is a prompt with two answers behind it as branches of one row, so the prompt is computed once for both. Two
processes train for half of the steps and end; two new ones resume. Then the whole run is made again without packing:
every answer after its prompt in a row of its own, the loss written out. In float64 both give the same loss at every
step, and in the end the same weights, to 1e-9 * max(1, |x|); the script fails if not.
"""

import torch
from pack_torch import Pack, PackCollator, PackedBatch, PackedIterable, Preference, SmallModel, dpo_loss
from ranks import compare, documentation
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

BETA = 0.1


def packs(rank: int, ranks: int) -> PackedIterable:
    """Return this rank's packs: of two first lines, the one on the function asked for is preferred to another's."""
    few = documentation()[:48]  # so that six steps see each of them twice
    named = [(list(name.encode()), list(f"\n{text.splitlines()[0]}".encode())) for name, text in few]
    pairs = [
        {"prompt_ids": name, "chosen_ids": line, "rejected_ids": named[number - 1][1]}
        for number, (name, line) in enumerate(named)
    ]
    return PackedIterable(
        pairs,
        format=Preference(shared=True),
        strategy="best_fit",
        capacity=512,
        window=32,
        overlong="drop",
        epochs=None,
        rank=rank,
        world=ranks,
    )


def packed(model: SmallModel, first: SmallModel, pack: Pack) -> tuple[Tensor, int]:
    """Return the summed loss of the pairs of a pack, all of it in one row, and how many they are."""
    batch = PackCollator(mask="varlen")([pack])
    told = batch.model_inputs("pack_torch")
    with torch.no_grad():
        reference = first.logits(first(**told).hidden)
    loss = dpo_loss(model.logits(model(**told).hidden), batch, beta=BETA, ref_log_probs=reference)
    return loss.numerator, loss.pairs


def plain(model: SmallModel, first: SmallModel, pack: Pack) -> tuple[Tensor, int]:
    """Return the same, written out: each answer after its prompt in a row of its own."""
    losses = []
    for row in pack.documents():
        good, bad = (
            score(model, row["prompt_ids"], row[side]) - score(first, row["prompt_ids"], row[side]).detach()
            for side in ("chosen_ids", "rejected_ids")
        )
        losses.append(-logsigmoid(BETA * (good - bad)))
    return torch.stack(losses).sum(), len(losses)


def score(model: SmallModel, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the log-probability of an answer."""
    tokens = torch.tensor(prompt + answer)
    logits = model.logits(model(PackedBatch(tokens, (len(tokens),))).hidden)
    return -cross_entropy(logits[len(prompt) - 1 : -1], tokens[len(prompt) :], reduction="sum")


if __name__ == "__main__":
    compare(packs, packed, plain)
