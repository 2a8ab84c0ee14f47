"""The published schema of the events is the one their structs have, and says what the contract says."""

import json
from pathlib import Path

from pack_miles.contract.schema import written_schema

FOLDER = Path(__file__).parents[2] / "docs" / "events"


def test_the_published_schema_is_up_to_date() -> None:
    assert (FOLDER / "schema_v1.json").read_text() == written_schema(), "python -m pack_miles.contract.schema writes it"


def test_it_names_every_event_once_and_lets_nothing_unknown_in() -> None:
    schema = json.loads((FOLDER / "schema_v1.json").read_text())
    kinds = {
        kind["properties"]["event"]["enum"][0]: kind
        for kind in schema["$defs"].values()
        if "event" in kind["properties"]
    }
    assert set(kinds) == set(schema["discriminator"]["mapping"])
    assert {"run_started", "packing", "expert_balance", "optimizer", "memory", "run_finished"} < set(kinds)
    for kind in kinds.values():
        assert kind["additionalProperties"] is False
        assert {"event", "rank", "step"} <= set(kind["required"])
        assert kind["properties"]["schema_version"]["enum"] == [1]


def test_a_hand_written_packing_event_has_the_fields_the_schema_asks_for() -> None:
    schema = json.loads((FOLDER / "schema_v1.json").read_text())
    packing = schema["$defs"]["Packing"]
    wanted = (
        "event rank step rollout_id pass plan_digest samples packs model_tokens max_pack_tokens token_budget "
        "fill_fraction samples_per_pack"
    )
    assert sorted(packing["required"]) == sorted(wanted.split())
    assert packing["properties"]["pass"]["enum"] == ["scoring", "training"]
    assert packing["properties"]["token_budget"] == {"type": "integer", "minimum": 1}
