"""The examples for other frameworks, loaded from their folder, and what runs them on ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "embedding"


def example(name: str) -> ModuleType:
    """The example of that name."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rows(dict[str, Any]):
    """Columns of arrays or tensors that are sliced together, as a TensorDict is."""

    def __getitem__(self, key: Any) -> Any:
        """A column by its name, or the rows with some indices."""
        return super().__getitem__(key) if isinstance(key, str) else Rows({k: v[key] for k, v in self.items()})


def micro_batches_of(rank: int, lengths: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    """The rows of each micro-batch of one rank of a group."""
    import torch
    from torch import distributed

    mask = torch.arange(max(map(max, lengths))) < torch.tensor(lengths[rank])[:, None]
    batch = Rows(input_ids=mask.long(), attention_mask=mask.long())
    module = example("verl_micro_batches")
    _, places = module.rearrange_micro_batches(batch, dp_group=distributed.group.WORLD, **options)
    return places  # type: ignore[no-any-return]
