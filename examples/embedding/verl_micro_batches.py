"""verl's `rearrange_micro_batches` by pack-core: same arguments and return, no micro-batch over the limit.

Micro-batches are the ranks of a step with one pack each, all with the same work, and no more than first-fit decreasing
needs. With a data-parallel group the ranks try one number after the other together, so all of them end with the same.
"""

from pack_core import PackError, schedule


def rearrange_micro_batches(
    batch,
    max_token_len,
    dp_group=None,
    num_batches_divided_by=None,
    same_micro_num_in_dp=True,
    min_num_micro_batch=None,
    use_dynamic_bsz_balance=True,
    force_group_size=1,
):
    """Return the micro-batches, and of each the rows of `batch` that it holds."""
    ids = batch["input_ids"]
    rows = ids.offsets().diff() if getattr(ids, "is_nested", False) else batch["attention_mask"].sum(1)
    lengths = [int(length) for length in rows.tolist()]
    size, step = force_group_size, num_batches_divided_by or 1
    groups = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
    group = dp_group if same_micro_num_in_dp else None  # what one rank refuses all must, or the others wait for it
    if _largest(len(lengths) % size or max(groups) > max_token_len, group):
        raise ValueError(f"{len(lengths)} rows in groups of {size}, the longest of {max(groups)} tokens, do not fit")
    count = max(-(-sum(groups) // max_token_len), min_num_micro_batch or 1)
    count = -(-_largest(count, group) // step) * step
    held = _packed(groups, count, max_token_len)
    while _largest(held is None, group):
        count += step
        if count > _largest(len(groups), group):
            raise ValueError(f"no number of micro-batches that divides by {step} holds the rows of every rank")
        held = _packed(groups, count, max_token_len)
    if use_dynamic_bsz_balance:  # small ones at both ends, where a pipeline warms up and cools down
        held = sorted(held, key=lambda one: -sum(24_576 * groups[g] + groups[g] ** 2 for g in one))
        held = held[::2][::-1] + held[1::2]
    places = [[row for g in one for row in range(g * size, (g + 1) * size)] for one in held]
    return [batch[one] for one in places], places


def _packed(groups, count, capacity):
    try:
        packs = schedule(groups, count, capacity).packs
    except PackError:
        return None
    return [list(packs[0]) for packs in packs] if len(packs[0]) == 1 else None


def _largest(value, group):
    if group is None:
        return value
    from torch import distributed, tensor

    found = tensor([int(value)], device="cuda" if distributed.get_backend(group) == "nccl" else "cpu")
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=group)
    return int(found)
