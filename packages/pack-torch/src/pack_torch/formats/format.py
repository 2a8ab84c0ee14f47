"""What a format is: the protocol that packs, collation and losses go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from pack_torch.formats.columns import Field, Row
from pack_torch.formats.encoded import Encoded, Scored
from pack_torch.intervals import reach_function
from pack_torch.masks import MaskFunction

if TYPE_CHECKING:
    from pack_torch.rows import Batch


class Format(Protocol):
    """One row of a dataset, whatever it holds, is one document of the stream; the format alone knows what is in it.

    Formats of your own inherit from this: `length`, `cut`, `encode`, `decode` and `scored` are theirs to write, the
    rest may stay. `collate` looks nothing up but these.

    >>> from pack_torch import Sft
    >>> format = Sft()
    >>> row = {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}
    >>> format.length(row), format.cost(row), format.cut(row, 0, 2)
    (3, 9, {'input_ids': [5, 6], 'labels': [6, 7]})
    """

    @property
    def tokens(self) -> str:
        """The column of a pack that holds the tokens."""
        ...

    @property
    def fields(self) -> Mapping[str, Field]:
        """The columns of a pack, with what pads them."""
        ...

    @property
    def whole(self) -> str | None:
        """Why no row can ever be cut; None: rows can be, except through `spans`."""
        return None

    def length(self, row: Row) -> int:
        """Return the tokens the row takes in a pack."""
        ...

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Return the length of each row."""
        return list(map(self.length, rows))

    def cost(self, row: Row) -> int:
        """Return what attention over the row costs: pairs of tokens, a shared prompt's own counted once."""
        return self.length(row) ** 2

    def spans(self, row: Row) -> Sequence[tuple[int, int]]:
        """Return the stretches of tokens that no cut may go through, as (start, stop), in order."""
        return ()

    def cut(self, row: Row, start: int, stop: int) -> Row:
        """Return the row's tokens from `start` up to `stop`, with all that belongs to them, as a row.

        Raises:
            ValueError: rows of this format cannot be cut, or not there; says why.
        """
        ...

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return the rows of one pack laid end to end."""
        ...

    def encode_some(self, packs: Sequence[Sequence[Row]]) -> Sequence[Encoded]:
        """Return the first of these packs, each as `encode` lays it out: one, or as many as are sooner done at once."""
        return [self.encode(packs[0])]

    def decode(self, encoded: Encoded) -> list[Row]:
        """Return the rows that `encode` was given."""
        ...

    def scored(self, encoded: Encoded) -> Scored:
        """Return which rows of the pack predict which tokens. Columns are tensors here, of the pack's own rows."""
        ...

    def mask_mod(self, batch: Batch) -> MaskFunction:
        """Return who sees whom: every token its own branch up to the document's start."""
        return reach_function(batch.reach)

    def payload_inputs(self, packs: Sequence[Encoded]) -> Mapping[str, Tensor]:
        """Return what else the model takes, by argument: images and the like of all packs of a batch."""
        return {}

    def carried(self, encoded: Encoded) -> Encoded:
        """Return what travels with a batch beside its tensors: structure and values, not what tensors hold already."""
        return Encoded({}, encoded.segment_lens, encoded.row_segments, encoded.parents, encoded.values)

    def model_positions(self, columns: Mapping[str, Any]) -> str | None:
        """Return the column that holds the positions the model takes, None for the usual ones."""
        return None
