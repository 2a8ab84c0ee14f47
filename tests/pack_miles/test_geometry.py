"""The small model's own rules and the refusals before start-up: what the one cannot build, the other refuses."""

from pathlib import Path
from typing import Any

import pytest
from pack_miles.settings.refusals import refused
from pack_torch import ModelConfig
from support.miles_config import SMALL, make_config

GEOMETRY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "dense_layers_indices": [0],
}


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"hidden_size": 65}, False),
        ({"hidden_size": 20, "num_attention_heads": 4}, False),  # heads of 5, and positions turn pairs
        ({"num_experts_per_tok": 9}, False),
        ({"num_experts_per_tok": 8}, True),
        ({"dense_layers_indices": [3]}, False),
        ({"dense_layers_indices": [0, 1, 2]}, True),
    ],
)
def test_what_the_model_cannot_build_is_refused_before_start_up(
    tmp_path: Path, changes: dict[str, Any], good: bool
) -> None:
    geometry = GEOMETRY | changes
    options = {f"model.{name}": value for name, value in geometry.items()}
    config = make_config(tmp_path, SMALL | options)
    found = refused(config)
    try:
        ModelConfig(vocab_size=12, **geometry)
        built = True
    except ValueError:
        built = False
    assert built == good
    assert (found == []) == good, found
