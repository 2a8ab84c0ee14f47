"""The embedded task: what it asks, and what an answer earns."""

from random import Random

import pytest
from pack_miles.tasks import ASK, END, TASKS

SORT = TASKS["sort"]


@pytest.mark.parametrize(
    ("response", "earned"),
    [
        ([0, 2, 4, END], 1.0),
        ([0, 2, 4], 3 / 4),  # never stopped
        ([0, 2, 4, END, END], 4 / 5),  # one token too many
        ([4, 2, 0, END], 2 / 4),  # the middle and the stop are right
        ([END], 0.0),
        ([], 0.0),
    ],
)
def test_reward_is_the_share_of_places_that_are_right(response: list[int], earned: float) -> None:
    assert SORT.reward([4, 0, 2, ASK], response) == pytest.approx(earned)


def test_prompts_are_the_same_for_the_same_seed_and_within_their_limits() -> None:
    prompts = [SORT.prompt(Random(seed)) for seed in range(300)]
    assert prompts == [SORT.prompt(Random(seed)) for seed in range(300)]
    lengths = {len(prompt) for prompt in prompts}
    assert max(lengths) == SORT.max_prompt_len
    assert min(lengths) == 3
    assert all(0 <= token < SORT.vocabulary for prompt in prompts for token in prompt)
    assert all(SORT.reward(prompt, SORT.answer(prompt)) == 1.0 for prompt in prompts)
