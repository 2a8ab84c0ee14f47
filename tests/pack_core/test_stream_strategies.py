"""Weights, likeness and strategies that users write."""

import ast
import importlib.util
import random
from itertools import pairwise
from pathlib import Path
from statistics import pvariance

import pytest
from pack_core import PackError
from pack_core.stream import Choice, Documents, StreamOptions, Tally, finish, open_stream, packs_of, push_many

ROOT = Path(__file__).parents[2]


def test_long_documents_are_mixed_in_by_weight() -> None:
    """Nine of ten are short; half of those taken shall be long, and short ones over that are discarded and counted."""
    draw = random.Random(1)
    lengths = [draw.randint(60, 90) if draw.random() < 0.1 else draw.randint(1, 20) for _ in range(6_000)]
    options = StreamOptions(
        strategy="binned",
        capacity=200,
        window=32,
        strategy_options={"weights": (0.5, 0.5), "edges": (50,), "surplus": "discard"},
    )
    state, packs = push_many(options, open_stream(options), Documents(range(len(lengths)), lengths))
    taken = [lengths[key] for pack in packs for key in pack.keys]
    long = sum(length >= 50 for length in taken)
    assert 0.45 < long / len(taken) < 0.55
    assert state.counts.lost["surplus"].documents > 3_000


def test_a_curriculum_takes_what_has_weight_first_and_loses_nothing() -> None:
    kinds = [key % 2 for key in range(200)]
    options = StreamOptions(
        strategy="binned", capacity=10, window=100, strategy_options={"weights": (1, 0)}, max_wait=500
    )
    state, packs = push_many(options, open_stream(options), Documents(range(200), [5] * 200, kinds=kinds))
    assert {kinds[key] for pack in packs[:40] for key in pack.keys} == {0}
    _, rest = finish(options, state)
    assert sorted(key for pack in [*packs, *rest] for key in pack.keys) == list(range(200))


def test_draws_follow_the_seed_and_the_weights() -> None:
    lengths, kinds = [1] * 3_000, [key % 3 for key in range(3_000)]

    def first(seed):
        options = StreamOptions(
            strategy="binned", capacity=100, window=2_500, seed=seed, strategy_options={"weights": (1, 2, 5)}
        )
        _, packs = push_many(options, open_stream(options), Documents(range(3_000), lengths, kinds=kinds))
        return [kinds[key] for pack in packs for key in pack.keys]

    drawn = first(0)
    assert drawn == first(0) != first(1)
    shares = [drawn.count(kind) / len(drawn) for kind in range(3)]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.06)


def test_a_kind_without_a_weight_is_named() -> None:
    options = StreamOptions(strategy="binned", capacity=10, window=1, strategy_options={"weights": (1, 1)})
    with pytest.raises(PackError, match="document 7 is of kind 2, but weights are of 2 kinds"):
        push_many(options, open_stream(options), Documents([7], [3], kinds=[2]))


def test_like_lengths_lie_together_at_hardly_more_packs() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(10, 200) for _ in range(2_000)]

    def inside(strategy):
        """The part of the variance of lengths that is within packs, and how many packs there are."""
        packs = list(packs_of(lengths, strategy=strategy, capacity=1_000, window=64))
        within = sum(len(pack) * pvariance(pack.lengths) for pack in packs)
        return within / len(lengths) / pvariance(lengths), len(packs)

    like, any_order = inside("length_grouped"), inside("first_fit")
    assert like[0] < 1 / 3 < 2 / 3 < any_order[0]
    assert like[1] <= any_order[1] * 1.01


def test_the_example_of_a_strategy_is_ten_lines_and_packs_by_hand() -> None:
    path = ROOT / "examples" / "strategy.py"
    (kind,) = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    lines = [line for line in path.read_text().splitlines()[kind.lineno - 1 : kind.end_lineno] if line.strip()]
    assert len([line for line in lines if '"""' not in line]) <= 10
    spec = importlib.util.spec_from_file_location("example_strategy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = StreamOptions(strategy=module.ShortestFirst(), capacity=256, window=4, overlong="drop")
    assert options.to_json()["strategy"] == {"name": "example_strategy.ShortestFirst", "options": {}}
    # 300 and 500 are over the capacity. 20 70 110 90 wait: 20 70 90 are taken, and the 110 does not fit.
    state, packs = push_many(options, open_stream(options), Documents(range(6), [300, 20, 500, 70, 110, 90]))
    state, rest = finish(options, state)
    assert [pack.keys for pack in [*packs, *rest]] == [(1, 3, 5), (4,)]
    # 201 is more than ten times 20, so it goes into no pack, and is counted by that name.
    options = StreamOptions(strategy=module.ShortestFirst(), capacity=256, window=2)
    state, packs = push_many(options, open_stream(options), Documents(range(3), [20, 201, 30]))
    state, rest = finish(options, state)
    assert [pack.keys for pack in rest] == [(0, 2)]
    assert state.counts.lost == {"far too long": Tally(1, 201)}


class Scripted:
    """Gives the answers it was made with, one after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def choose(self, waiting, room, memory):
        return self.answers.pop(0)


def pushed(*answers, window=3, **options):
    chosen = StreamOptions(strategy=Scripted(*answers), capacity=10, window=window, **options)
    return push_many(chosen, open_stream(chosen), Documents(range(3), [6, 5, 3]))


def test_a_strategy_may_give_a_whole_pack_close_it_and_remember() -> None:
    state, (pack,) = pushed(Choice(take=(2, 0), close=True, memory={"packs": 1}))
    assert (pack.keys, pack.reason) == ((2, 0), "closed")
    assert (state.memory, [unit.key for unit in state.waiting]) == ({"packs": 1}, [1])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Choice(), "put nothing into an empty pack and discarded nothing, with 3 documents waiting"),
        (Choice(close=True), "put nothing into an empty pack"),
        (Choice(take=(0, 1)), r"Scripted chose document 1 \(5 tokens.* room for 4 tokens"),
        (Choice(take=(3,)), r"places \[3\] of 3 that wait"),
        (Choice(take=(-1,)), r"places \[-1\] of 3"),
        (Choice(take=(0,), discard=((0, "twice"),)), r"places \[0, 0\]"),
    ],
)
def test_a_strategy_that_breaks_the_rules_is_stopped_and_named(answer, message) -> None:
    with pytest.raises(PackError, match=message):
        pushed(answer)


def test_a_strategy_that_discards_for_ever_is_stopped() -> None:
    discard = Choice(discard=((0, "dislike"),))
    with pytest.raises(PackError, match=r"3 documents were lost .*\(by dislike\)"):
        pushed(discard, discard, discard, window=1, max_idle=3)


def test_no_document_is_passed_over_for_longer_than_one_pack_by_best_fit() -> None:
    """The oldest opens the next pack, so that lengths are not favoured for ever."""
    lengths = [key * 7_919 % 400 + 1 for key in range(3_000)]
    packs = list(packs_of(lengths, strategy="best_fit", capacity=1_000, window=32))
    taken: set[int] = set()
    for pack, following in pairwise(packs):
        taken |= {*pack.keys}
        oldest = next(key for key in range(len(lengths)) if key not in taken)
        assert following.keys[0] == oldest
