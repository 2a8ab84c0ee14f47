"""The examples for other frameworks that need torch: a plain loop, and micro-batches over ranks."""

from __future__ import annotations

import torch
from support.embedding import example, micro_batches_of
from support.ranks import Run
from torch.nn import functional

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12, 13, 14], [15], [16, 17, 18]]


def test_a_row_keeps_documents_apart() -> None:
    ids, positions, mask, targets = example("torch_loop").row_of([[5, 6], [7, 8, 9]])
    assert ids.tolist() == [5, 6, 7, 8, 9]
    assert positions.tolist() == [0, 1, 0, 1, 2]
    assert mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert targets.tolist() == [6, -100, 8, 9, -100]


def test_a_packed_step_is_the_step_of_one_document_after_the_other() -> None:
    loop = example("torch_loop")
    torch.manual_seed(0)
    model = loop.Model().double()
    trained = sum(len(document) - 1 for document in DOCUMENTS)
    alone = 0.0
    for document in DOCUMENTS:
        ids = torch.tensor(document)
        causal = torch.ones(len(ids), len(ids)).tril().bool()
        logits = model(ids, torch.arange(len(ids)), causal)
        loss = functional.cross_entropy(logits[:-1], ids[1:], reduction="sum") / trained
        loss.backward()
        alone += loss.item()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    assert abs(loop.step(model, still, DOCUMENTS, capacity=7) - alone) < 1e-12
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def test_documents_without_a_target_have_a_loss_of_zero_and_change_nothing() -> None:
    loop = example("torch_loop")
    torch.manual_seed(0)
    model = loop.Model()
    before = [parameter.clone() for parameter in model.parameters()]
    assert loop.step(model, torch.optim.SGD(model.parameters(), lr=1.0), [[1]], capacity=10) == 0.0
    assert loop.step(model, torch.optim.SGD(model.parameters(), lr=1.0), [[1], [2], [3]], capacity=2) == 0.0
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)


def test_the_packer_of_nemo_rl_takes_tensors_of_lengths() -> None:
    packer = example("nemo_rl_packer").Packer(10, collect_metrics=True)
    assert packer.pack(torch.tensor([5, 5, 3])) == [[0, 1], [2]]
    assert packer.metrics == {"packs": 2, "sequences": 3, "tokens": 13, "fill": 13 / 20}
    assert packer.pack(torch.tensor([], dtype=torch.int64)) == []
    assert packer.pack(list(torch.tensor([5, 5]))) == [[0, 1]]


def test_a_few_steps_learn_the_documents() -> None:
    loop = example("torch_loop")
    torch.manual_seed(0)
    model = loop.Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = [loop.step(model, optimizer, DOCUMENTS, capacity=8) for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]


def test_all_ranks_of_a_group_have_as_many_micro_batches(run_on_ranks: Run) -> None:
    # Rank 0 needs four packs of ten for its nines, rank 1 one for its twos: both have four.
    lengths = [[9, 9, 9, 9], [2, 2, 2, 2]]
    options = {"max_token_len": 10}
    assert [sorted(places) for places in run_on_ranks(2, micro_batches_of, lengths, options)] == [
        [[0], [1], [2], [3]],
        [[0], [1], [2], [3]],
    ]
    # Each for itself, rank 1 has one.
    options |= {"same_micro_num_in_dp": False}
    assert [len(places) for places in run_on_ranks(2, micro_batches_of, lengths, options)] == [4, 1]
