"""For a fork's own Core actor: MILES' rollout data of a rank in, the packed rows of every optimizer step out.

Stock MILES cannot load another backend. A fork that has one hands the dictionary it gets from MILES to `packed_steps`,
runs each row with `doc_lens` and `max_doc_lens`, and hands the same row to MILES' loss, which finds in it what it finds
in a micro-batch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pack_torch import Rollout, check_routes, pack_routes
from torch import Tensor

from pack_miles.training.collectives import World
from pack_miles.training.column import ColumnOptions, pack_column

Row = dict[str, Any]

#: Lists over the whole rollout, of all ranks: never a rank's own, however long.
OF_THE_ROLLOUT = frozenset(
    {
        *("raw_reward", "prompt_group_sizes", "step_slots", "step_adapter_names"),
        *("num_microbatches", "micro_batch_indices", "num_rollouts"),
    }
)

#: Lists that have one entry for each of the rank's samples, wherever they are there at all.
OF_EACH_SAMPLE = frozenset(
    {
        *(
            "tokens",
            "multimodal_train_inputs",
            "prompt",
            "total_lengths",
            "response_lengths",
            "loss_masks",
            "truncated",
        ),
        *("sample_indices", "rollout_ids", "round_number", "seq_witness_ids", "weight_versions", "adapter_slots"),
        *("rewards", "advantages", "returns", "log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs"),
        *("opd_reverse_kl", "rollout_routed_experts", "rollout_indexer_topk"),
    }
)

#: Numbers of each sample that MILES holds in one tensor.
TENSORS = frozenset({"rollout_mask_sums"})

#: What belongs to the whole step and goes with every row.
OF_THE_STEP = ("dynamic_global_batch_size",)

NEEDED = ("tokens", "response_lengths", "total_lengths", "loss_masks")


def packed_steps(data: Mapping[str, Any], options: ColumnOptions, world: World, *, max_length: int) -> list[list[Row]]:
    """Return the packed rows of every optimizer step, in order: as many on every rank, none empty.

    Every rank packs its own samples in the order given, one collective finds the largest count of rows of each step,
    and every rank splits to it. Several rows are one optimizer step, which is the caller's to make.

    Args:
        data: what MILES gives an actor after it has split and indexed the rollout: lists over this rank's samples.
        options: how to pack; `step_samples` are this rank's own, `global_batch_size // ranks`.
        world: this process among the ranks.
        max_length: tokens of one sample at most.

    Raises:
        RankError: on every rank, when any rank's data cannot be packed; the error names the sample.

    >>> data = {"tokens": [torch.arange(5), torch.arange(8)], "total_lengths": [5, 8], "response_lengths": [3, 5],
    ...     "loss_masks": [torch.ones(3), torch.ones(5)]}
    >>> options = ColumnOptions(step_samples=2, capacity=16, equalize="tokens", max_documents=None)
    >>> ((row,),) = packed_steps(data, options, World(rank=0, size=1), max_length=8)
    >>> row["doc_lens"], row["max_doc_lens"], row["tokens"].shape
    (tensor([[5, 8]], dtype=torch.int32), [8], torch.Size([1, 13]))
    """
    rows = world.agreed(lambda: sample_rows(data, max_length=max_length))
    names = [_name(row) for row in rows]
    steps = pack_column(names, [row["total_lengths"][0] for row in rows], options, world)
    return world.agreed(lambda: [[combine([rows[place] for place in pack]) for pack in packs] for packs in steps])


def sample_rows(data: Mapping[str, Any], *, max_length: int) -> list[Row]:
    """Return one row for each sample of a rank: every list of the data with its own entry alone.

    Lists over the whole rollout, and what is no list, are left out.

    Args:
        data: as in `packed_steps`.
        max_length: tokens of one sample at most.

    Raises:
        ValueError: there are no samples, a list is missing or has another length, or a sample's own lengths, mask or
            tokens do not fit; names the sample and the field.
    """
    missing = [name for name in NEEDED if not isinstance(data.get(name), list)]
    if missing:
        raise ValueError(f"the rollout data has no list of {', '.join(missing)}; give what MILES' actor gets")
    count = len(data["tokens"])
    if not count:
        raise ValueError("the rollout data has no samples; every rank needs as many as the others")
    for name in sorted(OF_EACH_SAMPLE & data.keys()):
        if isinstance(data[name], list) and len(data[name]) != count:
            raise ValueError(
                f"the rollout data has {len(data[name])} of {name} but {count} samples; index it by the rank's own "
                "samples first"
            )
    own = [
        name
        for name, value in data.items()
        if name not in OF_THE_ROLLOUT and isinstance(value, list) and len(value) == count
    ]
    rows = []
    for place in range(count):
        row: Row = {name: [data[name][place]] for name in own}
        row.update({name: data[name][place : place + 1] for name in TENSORS & data.keys()})
        row.update({name: data[name] for name in OF_THE_STEP if name in data})
        row.setdefault("sample_indices", [place])
        _check(row, max_length)
        tokens = row["tokens"][0]
        row.update(tokens=tokens[None], unconcat_tokens=[tokens], max_seq_lens=[len(tokens)])
        rows.append(row)
    return rows


def combine(rows: Sequence[Row]) -> Row:
    """Return the rows of several samples as one: lists end to end, tokens `[1, T]`, the documents' lengths beside them.

    `doc_lens` `[1, documents]` is int32 on the tokens' device, `max_doc_lens` a list of one int; OLMo-core wants both
    or neither. There is no document of padding, for there is no padding.

    Raises:
        ValueError: there are no rows, or one has a field that another lacks; names the samples and the field.
    """
    if not rows:
        raise ValueError("there are no samples to combine; give at least one")
    first = rows[0]
    for other in rows[1:]:
        if different := sorted(first.keys() ^ other.keys()):
            has, lacks = (first, other) if different[0] in first else (other, first)
            raise ValueError(
                f"sample {_name(has)} has {different[0]} and sample {_name(lacks)} of the same pack has not; give all "
                "samples of a rank the same fields"
            )
    row: Row = {name: [one for each in rows for one in each[name]] for name in first if isinstance(first[name], list)}
    row.update({name: torch.cat([each[name] for each in rows]) for name in TENSORS & first.keys()})
    row.update({name: first[name] for name in OF_THE_STEP if name in first})
    lengths = [int(length) for length in row["total_lengths"]]
    tokens = torch.cat([each["tokens"] for each in rows], dim=1)
    row.update(
        tokens=tokens,
        max_seq_lens=None,
        doc_lens=torch.tensor([lengths], dtype=torch.int32, device=tokens.device),
        max_doc_lens=[max(lengths)],
    )
    return row


def replay_tables(row: Row, *, experts: int, moe_layers: Sequence[int]) -> dict[int, Tensor]:
    """Return the expert ids that every routed layer must choose for a packed row, by layer, `[1, T, top_k]` int64.

    Every document brings its recorded routes and a final row of its own, experts 0..top_k-1, for the token that was
    sampled but never run.

    Args:
        row: from `packed_steps`, with `rollout_routed_experts` `[tokens - 1, layers, top_k]` of each sample.
        experts: routed experts of a layer.
        moe_layers: the layers that route, counted over all decoder layers.

    Raises:
        ValueError: routes are missing, have another shape, or hold an id that is no expert; names the sample.
    """
    routes, lengths = row.get("rollout_routed_experts"), row["total_lengths"]
    if routes is None or len(routes) != len(lengths):
        have = "no routes" if routes is None else f"routes of {len(routes)} samples"
        raise ValueError(f"the row has {have} but {len(lengths)} documents; replay needs those of every sample")
    names = row["sample_indices"]
    rollouts = [
        Rollout(name, tokens, 0, routes=None if one is None else torch.as_tensor(one))
        for name, tokens, one in zip(names, row["unconcat_tokens"], routes, strict=True)
    ]
    packed = pack_routes(rollouts)
    if unknown := [layer for layer in moe_layers if not 0 <= layer < packed.shape[1]]:
        raise ValueError(
            f"layer {unknown[0]} routes but routes of {packed.shape[1]} layers were recorded; record every decoder "
            "layer"
        )
    check_routes(packed, experts, moe_layers, doc_lens=lengths, names=names)
    device = row["tokens"].device
    return {layer: packed[None, :, layer].to(device, torch.int64) for layer in moe_layers}


def _name(row: Row) -> int:
    return int(row["sample_indices"][0])


def _check(row: Row, max_length: int) -> None:
    tokens, mask = row["tokens"][0], torch.as_tensor(row["loss_masks"][0])
    total, response = int(row["total_lengths"][0]), int(row["response_lengths"][0])
    name = _name(row)
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or len(tokens) != total:
        have = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"sample {name} has tokens {have} but a total length of {total}; give one tensor of as many")
    if not 0 <= response < total <= max_length:
        raise ValueError(
            f"sample {name} has {response} response tokens of {total}, and at most {max_length} are allowed "
            "(max_length), with a prompt of one at least; leave it out or raise the limit"
        )
    if tuple(mask.shape) != (response,) or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"sample {name} has a loss mask of shape {list(mask.shape)}; give 0 or 1 for {response} tokens"
        )
