"""The sizes of a model that packing needs to know."""

import attrs

from pack_miles.settings.config import Config
from pack_miles.tasks import TASKS


@attrs.frozen
class Geometry:
    """The sizes of a model, as plans, checks and replay ask for them.

    Args:
        layers: decoder layers, dense ones included.
        vocabulary: rows of the embedding.
        moe_layers: the layers that route, ascending.
        experts: routed experts of a layer, over all ranks; 0 without any.
        top_k: experts of a token; 0 without any.

    >>> Geometry(3, 12, moe_layers=(1, 2), experts=4, top_k=2).dense_layers
    (0,)
    """

    layers: int
    vocabulary: int
    moe_layers: tuple[int, ...] = ()
    experts: int = 0
    top_k: int = 0

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that do not route, ascending."""
        return tuple(layer for layer in range(self.layers) if layer not in self.moe_layers)


def configured(config: Config) -> Geometry | None:
    """Return the sizes that a configuration names itself: those of the small model; None for every other."""
    if config.model.format != "small":
        return None
    task = TASKS.get(config.data.task or "")
    return Geometry(
        layers=config.model.num_hidden_layers,
        vocabulary=task.vocabulary if task else 0,
        moe_layers=config.moe_layers,
        experts=config.model.n_routed_experts,
        top_k=config.model.num_experts_per_tok,
    )
