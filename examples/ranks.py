"""What `sft.py` and `dpo.py` share: a training loop over two ranks that can end and go on, and the comparison."""

import argparse
import importlib
import inspect
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pack_core import Topology
from pack_torch import ModelConfig, Pack, PackedIterable, SmallModel, build_groups, reduce_gradients
from torch import Tensor

RANKS, PACKS, SECONDS = 2, 2, 120  # processes, packs a rank and step, and how long anything may take
MODULES = "argparse ast collections csv datetime email functools heapq inspect itertools json logging pathlib random re"
CONFIG = ModelConfig(
    256,  # a token is a byte
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    dense_layers_indices=(0, 1),
    moe_intermediate_size=1,
    n_routed_experts=1,
    num_experts_per_tok=1,
)
#: Takes the model, the model as it was at first, and a pack; returns a summed loss and how many the sum is of.
Loss = Callable[[SmallModel, SmallModel, Pack], tuple[Tensor, int]]


def documentation() -> list[tuple[str, str]]:
    """Return what the standard library says of its functions and classes, each by name."""
    found = []
    for module in MODULES.split():
        for name, thing in sorted(vars(importlib.import_module(module)).items()):
            text = inspect.getdoc(thing) if inspect.isroutine(thing) or inspect.isclass(thing) else None
            if text:
                found.append((f"{module}.{name}", text))
    return found


def train(rank: int, data: PackedIterable, loss: Loss, stop: int, file: Path) -> None:
    """Train up to step `stop`, from where the file says if there is one; then save model, optimizer and data there."""
    groups = build_groups(Topology(ranks=RANKS), timedelta(seconds=SECONDS))
    model, first = (SmallModel(CONFIG, seed=0, dtype=torch.float64, attention="dense") for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])
        losses = saved["losses"]
    packs = iter(data)
    while len(losses) < stop:
        sums, counts = zip(*(loss(model, first, next(packs)) for _ in range(PACKS)), strict=True)
        loss_sum = torch.stack(sums).sum()
        total = torch.tensor([float(loss_sum.detach()), sum(counts)]).double()
        dist.all_reduce(total)  # numerators and denominators of all packs and ranks, before one is divided by the other
        (loss_sum / total[1]).backward()
        reduce_gradients(model, groups)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total[0] / total[1]))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
    torch.save(state | {"losses": losses}, file)


def world(rank: int, folder: str, name: str, jobs: list[tuple]) -> None:
    """Be one of the ranks, and do the jobs: which data, which loss, up to which step, saved under which name."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", f"file://{folder}/{name}", limit, rank=rank, world_size=RANKS)
    for data_of, loss, stop, saved in jobs:
        train(rank, data_of(rank, RANKS), loss, stop, Path(folder, f"{saved}{rank}.pt"))
    dist.destroy_process_group()


def start(folder: str, name: str, jobs: list[tuple]) -> None:
    """Run the ranks in processes of their own, to their end."""
    ranks = torch.multiprocessing.start_processes(world, (folder, name, jobs), RANKS, join=False)
    end = time.monotonic() + SECONDS
    while not ranks.join(timeout=1):  # raises what a rank raised, and ends the others
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"the ranks did not end within {SECONDS} seconds")


def numbers(saved: dict) -> Tensor:
    """Return all losses and weights of a run."""
    return torch.cat([torch.tensor(saved["losses"]).double(), *map(torch.flatten, saved["model"].values())])


def compare(data_of: Callable[[int, int], PackedIterable], packed: Loss, plain: Loss) -> None:
    """Make the packed run in two halves, the plain one in one go, and fail unless all their numbers agree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        start(folder, "before", [(data_of, packed, steps // 2, "packed")])  # and then these processes are gone
        start(folder, "after", [(data_of, packed, steps, "packed"), (data_of, plain, steps, "plain")])
        found, expected = (torch.load(Path(folder, f"{name}0.pt")) for name in ("packed", "plain"))
    for step, pair in enumerate(zip(found["losses"], expected["losses"], strict=True)):
        print(f"step {step}: packed {pair[0]:.9f}, plain {pair[1]:.9f}")  # noqa: T201
    one, two = numbers(found), numbers(expected)
    error = float(((one - two).abs() / two.abs().clamp(min=1)).max())
    print(f"losses and weights differ by {error:.1e} at most; resumed after {steps // 2} steps")  # noqa: T201
    if not error <= 1e-9:
        raise SystemExit("packing or resuming changed the run")
