"""Small verifiable tasks: prompts, and rewards that give credit for part of an answer.

They exist so that a run needs no data, no tokenizer and no judge, and a model of a few thousand weights visibly
learns in a minute. A task is plain Python over token ids.
"""

from collections.abc import Sequence
from random import Random

import attrs

#: Closes the response.
END = 10
#: Closes the prompt; what follows is the response.
ASK = 11


@attrs.frozen
class Task:
    """A verifiable task over token ids below `vocabulary`.

    `max_prompt_len` is in tokens; `end` closes a response; prompts have up to `longest` of `alphabet` symbols.
    """

    name: str
    vocabulary: int
    end: int
    max_prompt_len: int
    alphabet: int
    longest: int

    def prompt(self, random: Random) -> list[int]:
        """Return the tokens of one prompt: some symbols, then the ask token.

        Lengths have a long tail, as those of real rollouts do: most are short, a few are several times longer.
        """
        count = min(self.longest, 2 + int(random.expovariate(1.0) * self.longest / 4))
        return [*(random.randrange(self.alphabet) for _ in range(count)), ASK]

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """Return the right response to a prompt, end token included."""
        return [*sorted(prompt[:-1]), self.end]

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        """Return the share of the answer's places that the response gets right, 1.0 for a perfect one.

        A response that is too long or too short loses the places it has too many or too few.

        >>> sort = TASKS["sort"]
        >>> sort.reward([3, 1, 2, ASK], [1, 2, 3, END]), sort.reward([3, 1, 2, ASK], [1, 2, 2, END])
        (1.0, 0.75)
        >>> sort.reward([3, 1, 2, ASK], [])
        0.0
        """
        answer = self.answer(prompt)
        right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
        return right / max(len(answer), len(response))


TASKS: dict[str, Task] = {
    # Sort the prompt's digits, then stop.
    "sort": Task(
        name="sort",
        vocabulary=12,
        end=END,
        max_prompt_len=11,
        alphabet=5,
        longest=10,
    ),
}
