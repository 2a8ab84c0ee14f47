"""What can be wrong with the samples of a collection, and the row of the table of refusals that says so."""

from collections.abc import Callable

import numpy
from support.miles_collections import HandMade


def without_routes(samples: list[HandMade]) -> None:
    samples[20].rollout_routed_experts = None


def one_row_short(samples: list[HandMade]) -> None:
    samples[20].rollout_routed_experts = samples[20].rollout_routed_experts[1:]


def one_layer_short(samples: list[HandMade]) -> None:
    samples[20].rollout_routed_experts = samples[20].rollout_routed_experts[:, 1:]


def floating(samples: list[HandMade]) -> None:
    samples[20].rollout_routed_experts = samples[20].rollout_routed_experts.astype(numpy.float32)


def partly_missing(samples: list[HandMade]) -> None:
    samples[20].rollout_routed_experts[1, 1, 1] = -1


def unknown_expert(samples: list[HandMade]) -> None:
    samples[20].rollout_routed_experts[1, 1, 1] = 4


def no_index(samples: list[HandMade]) -> None:
    samples[20].index = None


def repeated_index(samples: list[HandMade]) -> None:
    samples[20].index = 3


def true_for_an_index(samples: list[HandMade]) -> None:
    samples[20].index = True


def repeated_in_the_tail(samples: list[HandMade]) -> None:
    samples[35].index = 3


def no_group(samples: list[HandMade]) -> None:
    samples[20].group_index = None


def negative_group(samples: list[HandMade]) -> None:
    samples[20].group_index = -1


def several_of_one_rollout(samples: list[HandMade]) -> None:
    samples[20].rollout_id = 7


def too_long(samples: list[HandMade]) -> None:
    samples[20].tokens = [1] * 25
    samples[20].rollout_routed_experts = numpy.zeros((24, 2, 2), dtype=numpy.int32)


def no_tokens(samples: list[HandMade]) -> None:
    samples[20].tokens = []


def another_prompt(samples: list[HandMade]) -> None:
    samples[20].group_index = 99


def a_list_for_a_sample(samples: list[HandMade]) -> None:
    samples[20] = [samples[20]]  # type: ignore[call-overload]


#: What was done to a collection -> the row of the table it runs into, and what is told.
FAULTS: dict[Callable[[list[HandMade]], None], tuple[str, str]] = {
    without_routes: ("missing-routes", "sample 20.*no routes"),
    one_row_short: ("malformed-routes", "sample 20"),
    one_layer_short: ("malformed-routes", "sample 20"),
    floating: ("malformed-routes", "sample 20.*integers"),
    partly_missing: ("malformed-routes", "sample 20 .*: row 1 is partly missing: 1 of 2 ids .* the first in layer 1"),
    unknown_expert: ("malformed-routes", "sample 20 .*: row 1 of layer 1 is routed to expert 4"),
    no_index: ("sample-index", "place 20 has no index"),
    repeated_index: ("repeated-index", "index 3 is that of the samples at places 3 and 20"),
    true_for_an_index: ("sample-index", "place 20 has index True"),
    repeated_in_the_tail: ("repeated-index", "index 3 is that of the samples at places 3 and 35"),
    no_group: ("sample-group", "sample 20 has no group_index"),
    negative_group: ("sample-group", "sample 20 has group_index -1"),
    several_of_one_rollout: ("several-of-a-rollout", "sample 20 has rollout_id 7.*turn the reordering off"),
    too_long: ("sample-too-long", "sample 20.*25 tokens"),
    no_tokens: ("sample-tokens", "sample 20 has no tokens"),
    another_prompt: ("mixed-group", "group 5 holds samples of group_index"),
    a_list_for_a_sample: ("nested-samples", "the sample at place 20 is a list.*compact or multi-turn"),
}

#: Faults that only the sample filter can see, for only there samples come in groups.
IN_GROUPS = (another_prompt,)

#: The rows of scope data that have a case.
DATA_CASES = {code for code, _ in FAULTS.values()}
