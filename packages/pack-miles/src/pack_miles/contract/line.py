"""What every contract event is made of: its common fields, and the kinds of numbers in it."""

import re
from typing import Annotated, Literal

import msgspec

#: The version of the contract written here and understood by the reader.
SCHEMA_VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_tag, forbid_unknown_fields=True):
    """What every event carries: who wrote it and when in the run."""

    rank: Count
    step: Count
    schema_version: Literal[1] = 1

    @property
    def update(self) -> int:
        """The optimizer update, counted from 1, that this event belongs to; of several, the first."""
        return self.step
