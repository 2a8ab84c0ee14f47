"""Packing on the fly through torchdata's loader: saved and gone on with at every batch, whatever the workers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pack_core import RecordError
from pack_torch import Batch, EvenPacks, PackCollator, PackedIterable, mix, shuffle
from support.iterable_cases import TOKENS, Stateful, Undeclared, held, rows_of_lengths, some_rows
from torchdata.stateful_dataloader import StatefulDataLoader

COLLATE = PackCollator(mask="dense")

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]


def loader(workers: int, kind: str = "list", count: int = 60, **options: Any) -> StatefulDataLoader:
    one, two = some_rows(count, seed=1), rows_of_lengths([3] * 12, first=1000)
    source = {
        "list": lambda: one,
        "mixed": lambda: mix([shuffle(one, 7), two], [3, 1], stop="drain"),
        "stateful": lambda: Stateful(one),
    }[kind]()
    dataset = PackedIterable(source, format=TOKENS, capacity=10, window=3, block=8, **options)
    return StatefulDataLoader(dataset, batch_size=2, collate_fn=COLLATE, num_workers=workers)


def tokens_of(batches: Any) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in batches]


@pytest.mark.parametrize("kind", ["list", "mixed", "stateful"])
def test_it_goes_on_exactly_after_every_batch(kind: str) -> None:
    straight = tokens_of(loader(0, kind))
    assert len(straight) > 10
    for stop in range(len(straight) + 1):
        begun = loader(0, kind)
        batches = iter(begun)
        assert tokens_of(next(batches) for _ in range(stop)) == straight[:stop]
        other = loader(0, kind)
        other.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert tokens_of(other) == straight[stop:]
        assert tokens_of(other) == straight


@pytest.mark.parametrize(("workers", "stops"), [(1, (0, 3)), (4, (2, 5))])
def test_it_goes_on_exactly_with_workers_and_twice_in_a_row(workers: int, stops: tuple[int, int]) -> None:
    straight = tokens_of(loader(workers, "mixed"))
    begun = loader(workers, "mixed")
    at = 0
    for stop in stops:
        batches = iter(begun)
        assert tokens_of(next(batches) for _ in range(stop)) == straight[at : at + stop]
        at += stop
        state = json.loads(json.dumps(begun.state_dict()))
        begun = loader(workers, "mixed")
        begun.load_state_dict(state)
    assert tokens_of(begun) == straight[at:]
    assert tokens_of(begun) == straight


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_at_the_end_of_its_epoch_begins_the_next(workers: int) -> None:
    begun = loader(workers)
    straight = tokens_of(begun)
    other = loader(workers)
    other.load_state_dict(begun.state_dict())
    assert tokens_of(other) == straight
    assert tokens_of(other) == straight


def test_workers_together_read_every_document_once() -> None:
    for workers in (0, 1, 4):
        found = [row["input_ids"][0] for batch in loader(workers, "mixed", count=30) for row in documents(batch)]
        assert sorted(found) == [*range(30), *range(1000, 1012)]


def documents(batch: Batch) -> list[dict[str, list[int]]]:
    """The rows of a batch, from its tensors alone."""
    found = []
    for tokens, ids in zip(batch["input_ids"].tolist(), batch.document_ids.tolist(), strict=True):
        found += [
            {"input_ids": [token for token, own in zip(tokens, ids, strict=True) if own == one]}
            for one in range(max(ids) + 1)
        ]
    return found


def test_another_number_of_workers_or_an_undeclared_dataset_is_refused() -> None:
    begun = loader(1)
    next(iter(begun))
    other = loader(2)
    other.load_state_dict(begun.state_dict())
    with pytest.raises(RecordError, match=r"saved by rank 0 of 1, worker 0 of 1, and this is .* worker 0 of 2"):
        iter(other)
    state = begun.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    with pytest.raises(RecordError, match="saved by rank 0 of 1, worker 0 of 1, and this is rank 0 of 2"):
        loader(0, world=2).dataset.load_state_dict(state)
    dataset = PackedIterable(Undeclared(), format=TOKENS, capacity=10)
    with pytest.raises(ValueError, match="say source_shards='workers' if it does"):
        next(iter(StatefulDataLoader(dataset, batch_size=None, num_workers=2)))


def test_a_state_written_to_a_file_is_gone_on_with_in_another_process(tmp_path: Path) -> None:
    straight = tokens_of(loader(1, "mixed"))
    begun = loader(1, "mixed")
    batches = iter(begun)
    assert tokens_of(next(batches) for _ in range(4)) == straight[:4]
    torch.save(begun.state_dict(), tmp_path / "state.pt")
    text = (
        "import json, sys, torch; sys.path[:0] = sys.argv[1:3]\n"
        "from test_iterable_loader import loader, tokens_of\n"
        "other = loader(1, 'mixed'); other.load_state_dict(torch.load(sys.argv[3]))\n"
        "print(json.dumps(tokens_of(other)))"
    )
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(tmp_path / "state.pt")]
    done = subprocess.run([sys.executable, "-c", text, *paths], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == straight[4:]


def test_even_packs_come_from_a_loader_of_single_packs_and_go_on_exactly() -> None:
    def even() -> EvenPacks:
        dataset = PackedIterable(some_rows(40), format=TOKENS, capacity=10, window=3, block=8, prefetch=1)
        packs = StatefulDataLoader(dataset, batch_size=None, num_workers=1)
        return EvenPacks(packs, lambda mine: [mine, 5], policy="drop", every=5)

    straight = [held(pack) for pack in even()]
    assert len(straight) > 12
    begun = even()
    packs = iter(begun)
    assert [held(next(packs)) for _ in range(7)] == straight[:7]
    other = even()
    other.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert [held(pack) for pack in other] == straight[7:]
