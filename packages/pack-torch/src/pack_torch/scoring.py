"""The scored tokens of several packs, put together for one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pack_torch.formats.encoded import Encoded, Scored
from pack_torch.scored import ScoredSample


@attrs.frozen(eq=False)
class Score:
    """The scored tokens of all packs together, S in all; rows count the flattened batch."""

    rows: Tensor
    targets: Tensor
    active: Tensor
    fields: Mapping[str, Tensor]
    samples: tuple[ScoredSample, ...]
    chosen: frozenset[str | int] | None

    def on(self, move: Callable[[Tensor], Tensor]) -> Score:
        """Return it with every tensor moved."""
        fields = {name: move(values) for name, values in self.fields.items()}
        return attrs.evolve(
            self, rows=move(self.rows), targets=move(self.targets), active=move(self.active), fields=fields
        )


def merged(parts: Sequence[Scored], starts: Sequence[int], packs: Sequence[Encoded]) -> Score:
    """Return the scored tokens of packs that begin at these rows of the flattened batch."""
    names = _names([value for pack in packs for value in pack.values.get("id", [None] * pack.rows)])
    samples: list[ScoredSample] = []
    chosen: set[str | int] = set()
    before = 0
    for part, pack in zip(parts, packs, strict=True):
        active = (
            part.lens
            if part.active is None
            else [int(one.sum()) for one in torch.split_with_sizes(part.active, list(part.lens))]
        )
        for place, (owner, label) in enumerate(zip(part.owners, part.labels, strict=True)):
            group = names[before + owner]
            name = f"{group}/{label}" if label else group
            samples.append(ScoredSample(name, group, part.lengths[place], part.lens[place], active[place]))
            if label == "chosen":
                chosen.add(name)
        before += pack.rows
    return Score(
        rows=torch.cat([part.rows + start for part, start in zip(parts, starts, strict=True)]),
        targets=torch.cat([part.targets for part in parts]),
        active=torch.cat([torch.ones_like(p.rows, dtype=torch.bool) if p.active is None else p.active for p in parts]),
        fields={name: torch.cat([part.fields[name] for part in parts]) for name in parts[0].fields},
        samples=tuple(samples),
        chosen=frozenset(chosen) if chosen else None,
    )


def _names(given: Sequence[Any]) -> list[str | int]:
    """Return one name per row, all different: its own `id`, its number where it has none; `#2` marks a second one."""
    seen: Counter[str | int] = Counter()
    names: list[str | int] = []
    for number, value in enumerate(given):
        name = number if value is None else value if isinstance(value, (str, int)) else str(value)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
