"""What a sample is: its fields, its length, how it is laid into a row, cut, scored, and taken out again."""

from pack_torch.formats.columns import Field
from pack_torch.formats.cutting import split_row, truncate_row
from pack_torch.formats.encoded import Encoded, Scored
from pack_torch.formats.format import Format
from pack_torch.formats.multimodal import Multimodal
from pack_torch.formats.preference import Preference
from pack_torch.formats.sft import Sft
from pack_torch.formats.shared_prompt import SharedPrompt

__all__ = [
    "Encoded",
    "Field",
    "Format",
    "Multimodal",
    "Preference",
    "Scored",
    "Sft",
    "SharedPrompt",
    "split_row",
    "truncate_row",
]
