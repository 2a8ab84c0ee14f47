"""Whole datasets into packed rows; needs pyarrow, which the extras `offline`, `datasets` and `ray` bring."""

from pack_torch.offline.advice import Advice, Trial, advise
from pack_torch.offline.datasets import pack_dataset, to_dataset
from pack_torch.offline.errors import DatasetError
from pack_torch.offline.files import Files, find_files
from pack_torch.offline.layout import Layout, Losses, Recipe, Rows, lay_out
from pack_torch.offline.packed import PackedRows, pack_source
from pack_torch.offline.writing import Written, write_rows

__all__ = [
    "Advice",
    "DatasetError",
    "Files",
    "Layout",
    "Losses",
    "PackedRows",
    "Recipe",
    "Rows",
    "Trial",
    "Written",
    "advise",
    "find_files",
    "lay_out",
    "pack_dataset",
    "pack_source",
    "to_dataset",
    "write_rows",
]
