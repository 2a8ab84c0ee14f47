"""The errors of this package: every one is a `ValueError` that says what was given, what is allowed and what to do."""


class PackError(ValueError):
    """Something given to pack_core cannot be used; the base of all errors here."""


class LengthError(PackError):
    """A length is not a positive whole number, or a sample is longer than one pack may be."""


class CountError(PackError):
    """A number of packs, of samples or of samples a step cannot be met."""


class TopologyError(PackError):
    """The ranks cannot be arranged as asked."""


class RecordError(PackError):
    """Bytes or a log record do not hold the plan they should."""
