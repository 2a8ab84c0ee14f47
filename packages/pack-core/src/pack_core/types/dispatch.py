"""Where the tokens of every sample go: counted expert choices."""

from array import array
from collections.abc import Iterable

import attrs

from pack_core.errors import PackError


@attrs.frozen(repr=False)
class DispatchCounts:
    """(token, expert choice) pairs of every sample, by routed layer and place; the synthetic final row included.

    Attributes:
        layers: numbers of the counted layers on the layer axis of the recorded routes, ascending.
        routed_layers: routed layers the model has; `len(layers)` is fewer under a layer stride, and every figure
            made from such counts is about that subset.
        places: experts, or destinations once folded.
        counts: `[samples, len(layers), places]`, flat, int32.

    Raises:
        PackError: `counts` is no whole number of samples, or there are no layers or places.

    >>> counts = DispatchCounts(layers=(1,), routed_layers=2, places=2, counts=array("i", [12, 0, 2, 10]))
    >>> counts.samples, counts.of(1).tolist(), counts.subset
    (2, [2, 10], True)
    """

    layers: tuple[int, ...]
    routed_layers: int
    places: int
    counts: "array[int]"

    def __attrs_post_init__(self) -> None:
        """Refuse counts that do not fill whole samples."""
        if not self.layers or self.places < 1:
            raise PackError(f"counts of {len(self.layers)} layers and {self.places} places; there must be one of each")
        if len(self.layers) > self.routed_layers:
            raise PackError(f"{len(self.layers)} layers are counted but the model has {self.routed_layers} routed ones")
        if len(self.counts) % self.row:
            raise PackError(
                f"{len(self.counts):,} counts are no whole number of samples of {len(self.layers)} layers x "
                f"{self.places} places"
            )

    @property
    def row(self) -> int:
        """Numbers of one sample, `len(layers) * places`."""
        return len(self.layers) * self.places

    @property
    def samples(self) -> int:
        """How many samples were counted."""
        return len(self.counts) // self.row

    @property
    def subset(self) -> bool:
        """Whether only some of the routed layers were counted."""
        return len(self.layers) < self.routed_layers

    def of(self, sample: int) -> "array[int]":
        """Return the counts of one sample, `[len(layers), places]`, flat."""
        return self.counts[sample * self.row : (sample + 1) * self.row]

    def take(self, samples: Iterable[int]) -> "DispatchCounts":
        """Return the counts of some of the samples, in the order named."""
        taken = array("i")
        for sample in samples:
            taken.extend(self.of(sample))
        return attrs.evolve(self, counts=taken)

    def __repr__(self) -> str:
        """Show the shape, not the counts."""
        part = f" of {self.routed_layers}" if self.subset else ""
        return f"<DispatchCounts of {self.samples:,} samples, {len(self.layers)}{part} layers, {self.places} places>"
