"""From the hook through MILES' stride to the packed rows of every rank: what was predicted is what runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pack_miles.contract.log import read_log
from pack_miles.miles.steps import Row, packed_steps, replay_tables
from pack_miles.producer import reorder_and_normalize
from pack_miles.training.collectives import World
from pack_miles.training.column import ColumnOptions
from support.miles_collections import HandMade, collection, expert_arguments, stride_columns, write_checkpoint

RANKS, STEP, CAPACITY = 4, 16, 40


class Together(World):
    """A rank among others that have packed already: it knows how many rows each step has on the fullest of them."""

    def __init__(self, rank: int, rows: list[int]) -> None:
        super().__init__(rank=rank, size=RANKS)
        object.__setattr__(self, "rows", rows)

    def largest(self, values: Any) -> list[int]:
        return [int(one) for one in values] if isinstance(values[0], bool) else self.rows


def data_of(samples: list[HandMade]) -> dict[str, Any]:
    return {
        "tokens": [torch.tensor(one.tokens) for one in samples],
        "total_lengths": [len(one.tokens) for one in samples],
        "response_lengths": [one.response_length for one in samples],
        "loss_masks": [torch.tensor(one.loss_mask) for one in samples],
        "sample_indices": [one.index for one in samples],
        "rollout_routed_experts": [one.rollout_routed_experts for one in samples],
    }


def rows_of_all_ranks(samples: list[HandMade], equalize: str) -> list[list[list[Row]]]:
    """Return by rank and step the rows that its actor runs."""
    options = ColumnOptions(step_samples=STEP // RANKS, capacity=CAPACITY, equalize=equalize, max_documents=None)
    columns = [
        data_of([samples[at] for step in steps for at in step]) for steps in stride_columns(len(samples), RANKS, STEP)
    ]
    alone = [packed_steps(column, options, World(rank=0, size=1), max_length=CAPACITY) for column in columns]
    most = [max(len(steps[step]) for steps in alone) for step in range(len(alone[0]))]
    return [
        packed_steps(column, options, Together(rank, most), max_length=CAPACITY) for rank, column in enumerate(columns)
    ]


def executed_work(ranks: list[list[list[Row]]], step: int) -> tuple[int, int]:
    """Expert and token work of a step, counted from the tables that routers replay; experts 0, 1 | 2, 3."""
    experts = tokens = 0
    for rows in zip(*(steps[step] for steps in ranks), strict=True):
        tables = [replay_tables(row, experts=4, moe_layers=[1])[1].flatten() for row in rows]
        pairs = [torch.cat(tables[:2]), torch.cat(tables[2:])]
        experts += max(int((pair // 2 == slot).sum()) for pair in pairs for slot in (0, 1))
        tokens += max(row["tokens"].shape[1] for row in rows)
    return experts, tokens


@pytest.mark.parametrize("equalize", ["tokens", "samples", "balanced"])
def test_every_rank_runs_what_the_event_predicted(tmp_path: Path, equalize: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    samples = collection([6 + (11 * n) % 23 for n in range(36)], experts=4)
    args = expert_arguments(
        checkpoint,
        packing_max_tokens=CAPACITY,
        max_sequence_length=CAPACITY,
        packing_equalize=equalize,
        save=str(tmp_path / "run"),
    )
    before = rows_of_all_ranks(samples, equalize)
    reorder_and_normalize(args, samples)
    after = rows_of_all_ranks(samples, equalize)
    (event,) = read_log(tmp_path / "run" / "expert_schedule.jsonl").events
    for block in event.blocks:
        for ranks, told in ((before, block.before), (after, block.after)):
            assert executed_work(ranks, block.block) == (told["critical_work_proxy"], told["attention_token_work"])
            assert {len(steps[block.block]) for steps in ranks} == {told["packs_per_rank"]}
        assert block.after["critical_work_proxy"] < block.before["critical_work_proxy"]
