"""The errors of this package: every one is a `ValueError` that says what was given, what is allowed and what to do."""


class PackError(ValueError):
    """Something given to pack_core cannot be used; the base of all errors here."""


class LengthError(PackError):
    """A length is not a positive whole number, or a sample is longer than one pack may be."""


class CountError(PackError):
    """A number of packs, of samples or of samples a step cannot be met."""


class TopologyError(PackError):
    """The ranks cannot be arranged as asked."""


class RoutingError(PackError):
    """Recorded expert ids are missing or do not fit their sample or model, or a table of owners does not fit."""


class RecordError(PackError):
    """Bytes or a log record do not hold the plan they should."""
