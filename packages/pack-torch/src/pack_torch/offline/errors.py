"""The one error of documents, files and folders that cannot be used as they are."""

from pack_core import PackError


class DatasetError(PackError):
    """A dataset, a file or a folder cannot be used: the message says what was found, what is allowed, what to do."""


class NothingToPack(DatasetError):
    """No document has a token."""


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, in the plural unless there is one.

    >>> counted(1, "pack"), counted(1200, "document")
    ('1 pack', '1,200 documents')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share as text.

    >>> percent(0.9996, 2)
    '99.96 %'
    """
    return f"{100 * share:.{digits}f} %"
