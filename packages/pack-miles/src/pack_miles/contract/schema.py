"""The JSON schema of the contract events, generated from their structs: for readers in other languages."""

from typing import Any

import msgspec

from pack_miles.contract.events import Event
from pack_miles.contract.line import SCHEMA_VERSION

#: What the published schema says of itself.
TITLE = "pack-miles contract events"
DESCRIPTION = (
    "One line of a training_contract_rank*.jsonl file. Generated from pack_miles.contract.events; write it anew with "
    "`python -m pack_miles.contract.schema > docs/events/schema_v{version}.json`."
)


def event_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a line of a contract file, any event.

    >>> schema = event_schema()
    >>> schema["discriminator"]["propertyName"], schema["version"]
    ('event', 1)
    >>> schema["$defs"]["RunFailed"]["required"]
    ['event', 'rank', 'step', 'error']
    """
    generated = msgspec.json.schema(Event)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLE,
        "description": DESCRIPTION.format(version=SCHEMA_VERSION),
        "version": SCHEMA_VERSION,
        **generated,
    }


def written_schema() -> str:
    """Return the schema as it is published: indented JSON with sorted keys, the same in every process."""
    text = msgspec.json.format(msgspec.json.encode(event_schema(), order="sorted"), indent=1)
    return text.decode() + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(written_schema())
