"""Every event of a real log against the published schema, judged by a validator that knows nothing of this project."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.miles_runs import events

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "events" / "schema_v1.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def lines(followed: Path) -> list[dict[str, Any]]:
    """Return all events of a run of four ranks, read by json alone."""
    return [event for rank in range(4) for event in events(followed, rank)]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_event_of_a_real_log_validates(lines: list[dict[str, Any]]) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    kinds = {line["event"] for line in lines}
    assert {
        "run_started",
        "rollout",
        "plan",
        "packing",
        "expert_balance",
        "scores",
        "optimizer",
        "memory",
        "checkpoint",
    } <= kinds
    for line in lines:
        assert [error.message for error in validator.iter_errors(line)] == []


@pytest.mark.parametrize("change", [{"packs": -1}, {"packs": None}, {"bins": 2}, {"pass": "replay"}, {"event": "pack"}])
def test_what_is_not_of_the_contract_does_not_validate(lines: list[dict[str, Any]], change: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    packing = next(line for line in lines if line["event"] == "packing")
    assert validator.is_valid(packing)
    assert not validator.is_valid(packing | change)
