"""Counts of tensors: those of the core, on whatever device, and what a forward executed against what was recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pack_core.routing as core
import pack_torch.routing as routing
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pack_core.errors import RoutingError
from pack_torch import ModelConfig, Rollout, SmallModel, build_batch
from pack_torch.routing import batch_counts, dispatch_counts, document_counts, observed_counts, read_counts

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
LAYOUT: dict[str, Any] = {"layers": 3, "experts": 4, "top_k": 2, "dense_layers": [0]}


@pytest.fixture(params=["where NumPy reads it", "where it lies"])
def away(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test on both paths: that of CPU tensors, and that of tensors on a device, here with a CPU as the device."""
    if request.param == "where it lies":
        monkeypatch.setattr(routing, "_lies_on_cpu", lambda routes: False)


def recorded(length: int, seed: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    routes = torch.randint(4, (length - 1, 3, 2), generator=torch.Generator().manual_seed(seed))
    routes[:, 0] = 77
    return routes.to(dtype)


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize("device", DEVICES)
def test_sixteen_samples_fold_to_the_two_known_histograms(device: str) -> None:
    pair = [torch.tensor([[[0, 1]]] * 5, device=device), torch.tensor([[[2, 3]]] * 5, device=device)]
    routes = [pair[sample % 4 >= 2] for sample in range(16)]

    counts = dispatch_counts(routes, [6] * 16, layers=1, experts=4, top_k=2, owners=[0, 0, 1, 1])

    assert [list(counts.of(sample)) for sample in range(4)] == [[12, 0], [12, 0], [2, 10], [2, 10]]


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("owners", [None, [0, 0, 1, 1], [2, 0, 0, 2]])
def test_tensors_count_as_lists_do(device: str, dtype: torch.dtype, owners: list[int] | None) -> None:
    lengths = [5, 1, 2, 9]
    routes = [recorded(length, seed, dtype) for seed, length in enumerate(lengths)]

    counts = dispatch_counts([one.to(device) for one in routes], lengths, owners=owners, layer_stride=2, **LAYOUT)

    listed = [one.tolist() for one in routes]
    assert counts == core.dispatch_counts(listed, lengths, owners=owners, layer_stride=2, kernels="python", **LAYOUT)
    assert counts.layers == (1,)


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "sample 'b' .* has no routes"),
        (torch.zeros(3, 3, 2), "sample 'b' .* has routes of torch.float32"),
        (torch.zeros(3, 3, 2, dtype=torch.bool), "sample 'b' .* has routes of torch.bool"),
        (torch.zeros(2, 3, 2, dtype=torch.int32), "sample 'b' .* has routes of 2 rows but needs 3"),
        (torch.zeros(3, 2, 2, dtype=torch.int32), r"sample 'b' .* of shape \[3, 2, 2\] but needs \[3, 3, 2\]"),
        (torch.full((3, 3, 2), 4), "sample 'b' .*: row 0 of layer 1 is routed to expert 4 but experts are 0 to 3"),
        (torch.full((3, 3, 2), -1), "sample 'b' .*: row 0 is missing: all 4 ids"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_as_lists_are(routes: torch.Tensor | None, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        dispatch_counts([recorded(3, 0), routes], [3, 4], ids=["a", "b"], **LAYOUT)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 99))
def test_documents_of_a_row_count_as_their_samples_do(lengths: list[int], seed: int) -> None:
    rollouts = [Rollout(place, [1] * n, 0, routes=recorded(n, seed + place)) for place, n in enumerate(lengths)]
    batch = build_batch(rollouts, range(len(rollouts)), replay=True)

    counts = batch_counts(batch, experts=4, layers=[1, 2])

    expected = core.dispatch_counts([rollout.routes.tolist() for rollout in rollouts], lengths, **LAYOUT)
    assert counts.dtype == torch.int64
    assert counts.flatten().tolist() == list(expected.counts)
    assert batch.routes is not None
    assert torch.equal(observed_counts(batch.routes, experts=4, layers=[1, 2]), counts.sum(0))


def test_what_a_forward_executes_is_what_its_samples_predict() -> None:
    config = ModelConfig(
        64,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        moe_intermediate_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )
    routes = [recorded(length, seed) for seed, length in enumerate((4, 6))]
    batch = build_batch(
        [Rollout(i, [1] * (len(r) + 1), 1, routes=r) for i, r in enumerate(routes)], [1, 0], replay=True
    )
    layers = list(config.moe_layers)

    executed = SmallModel(config, seed=0)(batch).routes

    observed = read_counts(observed_counts(executed, experts=4, layers=layers), layers)
    dense = [layer for layer in range(3) if layer not in layers]
    for one in routes:
        one[:, dense] = -1
    predicted = core.dispatch_counts([r.tolist() for r in routes], [4, 6], **{**LAYOUT, "dense_layers": dense})
    sums = [a + b for a, b in zip(predicted.of(0), predicted.of(1), strict=True)]
    assert [count for of_layer in observed for count in of_layer] == sums


def test_an_unknown_expert_cannot_hide_in_a_sum_of_forwards() -> None:
    good = torch.zeros(50, 2, 2, dtype=torch.int32)
    bad = good.clone()
    bad[3, 1, 0] = 9

    total = sum(observed_counts(routes, experts=4, layers=[0, 1]) for routes in (good, bad, good))

    assert isinstance(total, torch.Tensor)
    assert total[0].tolist() == [300, 0, 0, 0]
    with pytest.raises(RoutingError, match="layer 1 was routed to an expert that does not exist"):
        read_counts(total, [0, 1])


def test_rows_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(RoutingError, match=r"the row has routes of torch\.float32"):
        observed_counts(torch.zeros(2, 3, 2), experts=4, layers=[0])
    with pytest.raises(RoutingError, match=r"shape \[2, 3, 2\] and layers \[3\]"):
        observed_counts(torch.zeros(2, 3, 2).int(), experts=4, layers=[3])
    with pytest.raises(RoutingError, match="replay=True"):
        batch_counts(build_batch([Rollout("a", [1], 0)], [0]), experts=4, layers=[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a CUDA device can be waited for")
def test_counting_on_a_device_does_not_wait_for_it() -> None:
    routes = recorded(500, 0).to("cuda")
    documents = torch.zeros(499, dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        observed_counts(routes, experts=4, layers=[1, 2])
        document_counts(routes, documents, 1, experts=4, layers=[1, 2])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernels", ["python", "numpy"])
def test_numpy_arrays_of_any_layout_and_byte_order_count_alike(kernels: str) -> None:
    routes = recorded(200, 3).numpy()
    expected = core.dispatch_counts([routes.tolist()], [200], kernels="python", **LAYOUT)

    for array in (
        routes,
        routes.reshape(-1),
        routes.astype(">i4"),
        routes.astype("<u2"),
        np.asfortranarray(routes),
        np.repeat(routes, 2, axis=0)[::2],
    ):
        assert core.dispatch_counts([array], [200], kernels=kernels, **LAYOUT) == expected


def test_numpy_arrays_of_no_integers_are_refused() -> None:
    for array, kind in ((np.zeros(4), "floats"), (np.zeros(4, bool), "booleans")):
        with pytest.raises(RoutingError, match=f"routes that are {kind}"):
            core.dispatch_counts([array], [3], layers=1, experts=4, top_k=2)
