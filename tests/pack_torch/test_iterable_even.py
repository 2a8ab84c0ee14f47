"""As many packs on every rank: ranks run in threads that meet at a barrier, so that to disagree is to be found out."""

import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_core import PackError, RecordError
from pack_torch import EvenPacks, Pack, PackCollator, PackedIterable, Preference, Sft, build_pack, even_packs, sft_loss
from pack_torch.iterable.even import weightless
from support.iterable_cases import TOKENS, held, rows_of_lengths
from support.iterable_work import read_together
from support.ranks import Run


class Meeting:
    """All ranks give a number and get those of all; whoever does not come breaks it."""

    def __init__(self, ranks: int) -> None:
        self.numbers = [0] * ranks
        self.barrier = threading.Barrier(ranks, timeout=5)
        self.meetings = 0

    def of(self, rank: int) -> Callable[[int], list[int]]:
        def gather(mine: int) -> list[int]:
            self.numbers[rank] = mine
            self.barrier.wait()
            found = list(self.numbers)
            self.barrier.wait()
            self.meetings += rank == 0
            return found

        return gather


def packs_of(lengths: list[int], rank: int) -> PackedIterable:
    rows = rows_of_lengths(lengths, first=100 * rank)
    return PackedIterable(rows, format=TOKENS, capacity=4, window=1, strategy="next_fit", block=3)


def together(work: list[Callable[[], Any]]) -> list[Any]:
    found: list[Any] = [None] * len(work)

    def run(rank: int) -> None:
        try:
            found[rank] = work[rank]()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def ranks_of(sizes: list[list[int]], policy: str, every: int) -> list[EvenPacks]:
    meeting = Meeting(len(sizes))
    return [
        EvenPacks(packs_of(lengths, rank), meeting.of(rank), policy=policy, every=every)
        for rank, lengths in enumerate(sizes)
    ]


def real(packs: list[Pack]) -> list[int]:
    """Numbers of the rows that count."""
    return [row["input_ids"][0] for pack in packs if not pack.encoded.weightless for row in pack.documents()]


def test_the_rule_by_hand() -> None:
    # Two ranks, four packs at a time: 4 and 4, then 4 and 1.
    rounds = {policy: even_packs([4, 1], policy, 4) for policy in ("split", "pad", "carry", "drop")}
    assert {policy: (one.give, one.over) for policy, one in rounds.items()} == {
        "split": (4, False),
        "pad": (4, False),
        "carry": (1, True),
        "drop": (1, True),
    }


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        ("drop", [[0], [1], [2]], [[100], [101], [102, 103]]),
        ("pad", [[0], [1], [2], [3], [4]], [[100], [101], [102, 103], "weightless", "weightless"]),
        ("split", [[0], [1], [2], [3], [4]], [[100], [101], [102], [103], "weightless"]),
    ],
)
def test_the_shorter_rank_by_hand(policy: str, first: list[Any], second: list[Any]) -> None:
    ranks = ranks_of([[4] * 5, [4, 4, 2, 2]], policy, every=8)
    found = together([lambda rank=rank: list(rank) for rank in ranks])
    told = [["weightless" if pack.encoded.weightless else real([pack]) for pack in packs] for packs in found]
    assert told == [first, second]
    assert [rank.dropped for rank in ranks] == [2 * (policy == "drop"), 0]
    assert [rank.padded for rank in ranks] == [0, {"drop": 0, "pad": 2, "split": 1}[policy]]


@given(
    sizes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=14), min_size=2, max_size=3),
    policy=st.sampled_from(["split", "pad", "carry", "drop"]),
    every=st.integers(1, 5),
)
@settings(max_examples=30, deadline=None)
def test_ranks_always_give_as_many_and_lose_nothing_but_what_is_dropped(
    sizes: list[list[int]], policy: str, every: int
) -> None:
    ranks = ranks_of(sizes, policy, every)
    alone = [list(packs_of(lengths, rank)) for rank, lengths in enumerate(sizes)]
    epochs = [together([lambda rank=rank: list(rank) for rank in ranks]) for _ in range(2)]
    for found in epochs:
        assert len({len(packs) for packs in found}) == 1
    for rank, found in enumerate(epochs[0]):
        rows, all_rows = real(found), real(alone[rank])
        if policy in ("split", "pad"):
            assert rows == all_rows
        else:
            assert rows == all_rows[: len(rows)]
            assert len(found) == min(map(len, alone))
    if policy == "carry":
        for rank, (one, two) in enumerate(zip(*epochs, strict=True)):
            both = real(one) + real(two)
            assert both == (real(alone[rank]) * 2)[: len(both)]


@pytest.mark.parametrize("policy", ["split", "pad", "carry", "drop"])
def test_every_rank_goes_on_exactly_after_every_pack(policy: str) -> None:
    sizes = [[4] * 7, [4, 4, 2, 2, 1, 1, 1]]

    def run(stop: int) -> list[tuple[list[list[int]], list[list[int]], int]]:
        """Two epochs, of which the first is left after `stop` packs, for a new object that loads the state."""
        first, second = ranks_of(sizes, policy, 3), ranks_of(sizes, policy, 3)

        def work(rank: int) -> tuple[list[list[int]], list[list[int]], int]:
            packs = iter(first[rank])
            begun = [held(next(packs)) for _ in range(stop)]
            second[rank].load_state_dict(json.loads(json.dumps(first[rank].state_dict())))
            rest = [held(pack) for pack in second[rank]]
            return begun + rest, [held(pack) for pack in second[rank]], second[rank].padded

        return together([lambda rank=rank: work(rank) for rank in range(2)])

    straight = run(0)
    assert straight[0][0]
    for stop in range(1, len(straight[0][0]) + 1):
        assert run(stop) == straight


@pytest.mark.parametrize("policy", ["split", "pad", "carry", "drop"])
def test_every_rank_goes_on_exactly_in_the_second_iteration_and_at_its_end(policy: str) -> None:
    sizes = [[4] * 3, [4] * 5]

    def run(even: EvenPacks) -> tuple[list[list[int]], list[list[int]], list[str]]:
        """The second and third iteration, and the states before every pack of the second, and at its end."""
        second, states = [], []
        list(even)
        packs = iter(even)
        while True:
            states.append(json.dumps(even.state_dict()))
            pack = next(packs, None)
            if pack is None:
                break
            second.append(held(pack))
        states.append(json.dumps(even.state_dict()))
        return second, [held(pack) for pack in even], states

    whole = together([partial(run, even) for even in ranks_of(sizes, policy, 2)])
    count = len(whole[0][2])
    assert [len(states) for _, _, states in whole] == [count, count]
    for step in range(count):
        ended = step == count - 1 and policy == "carry"  # what it has left is of the next iteration

        def resumed(even: EvenPacks, state: str, times: int) -> list[list[list[int]]]:
            even.load_state_dict(json.loads(state))
            return [[held(pack) for pack in even] for _ in range(times)]

        others = ranks_of(sizes, policy, 2)
        work = [partial(resumed, even, whole[rank][2][step], 2 - ended) for rank, even in enumerate(others)]
        for found, (second, third, _) in zip(together(work), whole, strict=True):
            assert found == ([third] if ended else [second[step:], third])


def test_an_iterator_of_even_packs_is_not_begun_again_by_going_on_with_it() -> None:
    (even,) = ranks_of([[4] * 4], "pad", 2)
    packs = iter(even)
    first = held(next(packs))
    assert [first, *map(held, packs)] == [[number] * 4 for number in range(4)]


def test_a_rank_without_documents_is_an_error_on_every_rank() -> None:
    ranks = ranks_of([[4, 4], []], "pad", 2)
    found = together([lambda rank=rank: list(rank) for rank in ranks])
    assert [type(error) for error in found] == [PackError, PackError]
    assert all("ranks [1] of 2 have no packs at all" in str(error) for error in found)
    with pytest.raises(PackError, match="policy is 'wait'"):
        EvenPacks([], list, policy="wait")
    with pytest.raises(RecordError, match="list has no state_dict"):
        EvenPacks([], list, policy="pad").state_dict()


def test_a_weightless_pack_adds_nothing_to_loss_gradient_or_counts() -> None:
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [1, 2]}]
    pack = build_pack(rows, format=Sft(label_mode="tokens"), capacity=6)
    collate = PackCollator(mask="dense")
    alone, both = collate([pack]), collate([pack, weightless(pack)])
    logits = torch.randn(12, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    one = sft_loss(logits[:6], alone)
    two = sft_loss(logits, both)
    assert torch.equal(one.numerator, two.numerator)
    assert one.active_tokens == two.active_tokens == 3
    (gradient,) = torch.autograd.grad(two.numerator, logits)
    assert gradient[:6].abs().sum() > 0
    assert gradient[6:].abs().sum() == 0
    changed = both.metrics | {"padding": both.metrics["padding"] - 6}
    assert changed == alone.metrics
    nothing = collate([weightless(pack)])
    assert (len(nothing.rollouts), nothing.metrics["tokens"]) == (0, 0)
    assert set(nothing.labels.flatten().tolist()) == {-100}


def test_a_weightless_pair_is_no_sample() -> None:
    row = {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4], "chosen_mask": [1, 1], "rejected_mask": [1]}
    pack = build_pack([row], format=Preference())
    batch = PackCollator()([pack, weightless(pack)])
    assert [sample.response_length for sample in batch.rollouts] == [2, 1]
    assert len(batch.score_map()[0]) == 3


def test_two_real_ranks_take_as_many_steps_and_reduce_their_counts(run_on_ranks: Run) -> None:
    # Rank 0 reads the fours and needs seven packs, rank 1 the ones: two packs, and five that count nothing.
    found = run_on_ranks(2, read_together, [4, 1] * 7, "pad")
    (one, steps, metrics), (two, others, same) = found
    assert (steps, others) == (7, 7)
    assert sorted(one + two) == list(range(14))
    assert metrics == same
    read = {name: metrics[name] for name in ("consumed_documents/0", "consumed_tokens/0", "packs", "tokens", "padding")}
    assert read == {
        "consumed_documents/0": 14,
        "consumed_tokens/0": 35,
        "packs": 9,
        "tokens": 35,
        "padding": 14 * 4 - 35,
    }
