"""The errors of this package: every one is a `ValueError` that says what was given, what is allowed and what to do."""


class PackError(ValueError):
    """Something given to pack_core cannot be used; the base of all errors here.

    >>> from pack_core import pack
    >>> pack([3, 4], capacity=8, strategy="random")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    pack_core.errors.PackError: strategy is 'random'; ...
    """


class LengthError(PackError):
    """A length is not a positive whole number, or a sample is longer than one pack may be.

    >>> from pack_core import pack
    >>> pack([3, 0], capacity=8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    pack_core.errors.LengthError: the sample at position 1 has length 0; ...
    """


class CountError(PackError):
    """A number of packs, of samples or of samples a step cannot be met.

    >>> from pack_core import balance
    >>> balance([3, 4, 5], ranks=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    pack_core.errors.CountError: 3 samples do not give 2 ranks the same number each; ...
    """


class TopologyError(PackError):
    """The ranks cannot be arranged as asked.

    >>> from pack_core import Topology
    >>> Topology(ranks=8, expert_parallel=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    pack_core.errors.TopologyError: 8 ranks cannot hold whole replicas of expert_parallel 3; ...
    """


class RoutingError(PackError):
    """Recorded expert ids are missing or do not fit their sample or model, or a table of owners does not fit.

    >>> from pack_core import owners
    >>> owners(6, 4)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    pack_core.errors.RoutingError: 6 experts cannot be shared out equally over 4 destinations (expert_parallel); ...
    """


class RecordError(PackError):
    """Bytes or a log record do not hold the plan they should.

    >>> from pack_core import decode
    >>> decode(b"?")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    pack_core.errors.RecordError: these 1 bytes are no plan or are damaged: ...
    """
