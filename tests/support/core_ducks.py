"""Stand-ins that answer as NumPy arrays and torch tensors do, for an environment that has neither."""

from typing import Any


class Scalar:
    """A 0-d array: it tells its value by `tolist` and, like torch, passes for an index whatever it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tolist(self) -> Any:
        return self.value

    def __repr__(self) -> str:
        return f"Scalar({self.value!r})"

    def __index__(self) -> int:
        return int(self.value)


class Row:
    """A one-dimensional array: it can be turned into a list, has no truth value and iterates over 0-d arrays."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def tolist(self) -> list[Any]:
        return list(self.values)

    def __iter__(self) -> Any:
        return iter([Scalar(value) for value in self.values])

    def __len__(self) -> int:
        return len(self.values)

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


class Index:
    """An integer of some library: it has `__index__` and nothing else."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value
