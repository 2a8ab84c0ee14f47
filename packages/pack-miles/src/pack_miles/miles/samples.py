"""MILES' samples, and the rollouts it saves for debugging, as the values this project plans and trains with.

Nothing here imports MILES: whatever has the fields of its `Sample`, an object or the dictionary of its `to_dict`, will
do. Every error names the sample.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from pack_core import Sample
from pack_core.errors import PackError
from pack_core.lengths import as_integer

from pack_miles.errors import InputError
from pack_miles.faults import called, json_fault
from pack_miles.samples import GZIP_MAGIC, RolloutRow, check_row

if TYPE_CHECKING:
    from pack_torch import Rollout

#: How a file of `torch.save` begins.
ZIP_MAGIC = b"PK"


def read_field(sample: object, name: str) -> Any:
    """Return a field of an object or of a mapping, None where it has none.

    >>> read_field({"index": 5}, "index"), read_field({"index": 5}, "reward")
    (5, None)
    """
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)


def to_sample(sample: object, place: int = 0) -> Sample:
    """Return what a plan needs of a MILES sample: its `index`, length and `group_index`.

    Args:
        sample: with the fields of MILES' `Sample`.
        place: where it stands in its collection, for errors about samples without index.

    Raises:
        ValueError: it has no whole `index`, or no tokens.

    >>> to_sample({"index": 5, "group_index": 1, "tokens": [7, 8, 9]})
    Sample(id=5, length=3, group=1)
    """
    index = whole_field(sample, "index", place)
    tokens = read_field(sample, "tokens")
    if tokens is None or not len(tokens):
        raise ValueError(f"sample {index} has no tokens; leave samples that were never generated out of the collection")
    group = read_field(sample, "group_index")
    return Sample(index, len(tokens), None if group is None else whole_field(sample, "group_index", place))


def to_row(
    sample: object, place: int = 0, *, reward_key: str | None = None, dense_layers: Collection[int] = ()
) -> RolloutRow:
    """Return a MILES sample as a row of a rollouts file.

    A sample marked `remove_sample` is masked from end to end, as MILES masks it when it makes training data of it.

    Args:
        sample: with the fields of MILES' `Sample`.
        place: as in `to_sample`.
        reward_key: which of several rewards counts, MILES' `--reward-key`; None when the reward is a number.
        dense_layers: layers that do not route; their recorded columns may hold anything.

    Raises:
        ValueError: a field is missing, has the wrong length or a value that cannot be; names the sample.

    >>> row = to_row({"index": 5, "tokens": [7, 8, 9], "response_length": 2, "reward": 1.0, "remove_sample": True})
    >>> row.loss_mask, row.reward
    ([0, 0], 1.0)
    """
    index = whole_field(sample, "index", place)
    group = read_field(sample, "group_index")
    response = whole_field(sample, "response_length", place)
    mask = _values(sample, "loss_mask", index)
    routes = _values(sample, "rollout_routed_experts", index)
    row = RolloutRow(
        tokens=_wholes(_values(sample, "tokens", index) or [], "tokens", index),
        response_length=response,
        loss_mask=[0] * max(response, 0)
        if read_field(sample, "remove_sample")
        else None
        if mask is None
        else _wholes(mask, "loss_mask", index),
        rollout_log_probs=_values(sample, "rollout_log_probs", index),
        rollout_routed_experts=routes,
        reward=reward_of(sample, index, reward_key),
        index=index,
        group_index=None if group is None else whole_field(sample, "group_index", place),
        weight_versions=[str(version) for version in read_field(sample, "weight_versions") or []] or None,
    )
    if not row.tokens:
        raise ValueError(f"sample {index} has no tokens; leave samples that were never generated out of the collection")
    try:
        check_row(row, place)
    except TypeError as error:
        raise ValueError(f"sample {index} has a field of another type than MILES gives it: {error}") from None
    if routes:
        _check_whole_rows(routes, index, dense_layers)
    return row


def to_rollout(sample: object, place: int = 0, *, reward_key: str | None = None) -> Rollout:
    """Return a MILES sample as a `pack_torch.Rollout`: tokens, mask, routes, log-probabilities, weight versions.

    Args:
        sample: with the fields of MILES' `Sample`.
        place: as in `to_sample`.
        reward_key: as in `to_row`.

    Raises:
        ValueError: as `to_row`.

    >>> to_rollout({"index": 5, "tokens": [7, 8, 9], "response_length": 2, "weight_versions": ["3"]}).weight_versions
    ('3',)
    """
    import torch
    from pack_torch import Rollout

    row = to_row(sample, place, reward_key=reward_key)
    routes = read_field(sample, "rollout_routed_experts")
    return Rollout(
        id=cast(int, row.index),
        tokens=row.tokens,
        response_length=row.response_length,
        loss_mask=row.loss_mask,
        group=row.group_index,
        routes=None if routes is None else torch.as_tensor(routes),
        rollout_log_probs=row.rollout_log_probs,
        reward=row.reward,
        weight_versions=tuple(row.weight_versions or ()),
    )


def read_debug_rollouts(
    path: str | Path, *, reward_key: str | None = None, dense_layers: Collection[int] = ()
) -> list[RolloutRow]:
    """Return the rows of what MILES saved for debugging: a `.pt` file, or the same samples as JSON lines.

    A `.pt` file is read without running anything it holds; one with objects other than plain values, tensors and
    arrays is refused.

    Args:
        path: a file of `--save-debug-rollout-data`, or one sample's dictionary a line, gzip too.
        reward_key, dense_layers: as in `to_row`.

    Raises:
        InputError: naming the file and, where it has one, the sample.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(2)
        saved = _read_saved(path) if start == ZIP_MAGIC else _read_lines(path, start == GZIP_MAGIC)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give one that MILES saved by --save-debug-rollout-data") from None
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not saved:
        raise InputError(f"{path}: holds no samples; MILES saves a rollout with all of its samples")
    try:
        return [
            to_row(one, place, reward_key=reward_key, dense_layers=dense_layers) for place, one in enumerate(saved, 1)
        ]
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def whole_field(sample: object, name: str, place: int) -> int:
    """Return a field that must be a whole number of at least 0.

    Raises:
        ValueError: naming the sample by its index, or by its place where the index itself is wrong.

    >>> whole_field({"index": 5, "group_index": -1}, "group_index", 0)
    Traceback (most recent call last):
    ValueError: sample 5 has group_index -1; MILES' data source numbers it from 0
    """
    value, index = read_field(sample, name), read_field(sample, "index")
    who = f"the sample at place {place}" if name == "index" or index is None else called(index, place)
    if value is None:
        raise ValueError(f"{who} has no {name}; keep the {name} that MILES' data source gave it")
    try:
        return as_integer(value, name, least=0)
    except PackError:
        raise ValueError(f"{who} has {name} {value!r}; MILES' data source numbers it from 0") from None


def reward_of(sample: object, index: int, reward_key: str | None) -> float | None:
    """Return the reward of a sample, or None where it has none.

    Raises:
        ValueError: there are several rewards and no key, or no such one, or it is no number.

    >>> reward_of({"reward": {"right": 1.0, "short": 0.5}}, 5, "short")
    0.5
    """
    reward = read_field(sample, "reward")
    if reward is None:
        return None
    if isinstance(reward, Mapping):
        if reward_key not in reward:
            raise ValueError(
                f"sample {index} has the rewards {', '.join(map(repr, reward))}, and reward_key is {reward_key!r}; "
                "choose one of them by reward_key"
            )
        reward = reward[reward_key]
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise ValueError(f"sample {index} has reward {reward!r}; a reward is a finite number")
    return float(reward)


def _values(sample: object, name: str, index: int) -> list[Any] | None:
    value = read_field(sample, name)
    if value is None:
        return None
    tolist = getattr(value, "tolist", None)
    listed = tolist() if callable(tolist) else value
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise ValueError(f"sample {index} has {name} that is a {type(value).__name__}; give a list or an array")
    return list(listed)


def _wholes(values: list[Any], name: str, index: int) -> list[int]:
    try:
        return [as_integer(value, name, least=-(2**63)) for value in values]
    except PackError as error:
        raise ValueError(f"sample {index}: {error}") from None


def _check_whole_rows(routes: list[Any], index: int, dense_layers: Collection[int]) -> None:
    for row, layers in enumerate(routes):
        for layer, experts in enumerate(layers):
            if layer not in dense_layers and min(experts) < 0 <= max(experts):
                raise ValueError(
                    f"sample {index} is routed to {list(experts)} at row {row}, layer {layer}: the row is partly "
                    "missing; record it anew or leave the sample out"
                )


def _read_saved(path: Path) -> list[Any]:
    import pickle

    import numpy
    import torch

    arrays: list[Any] = [numpy.ndarray, numpy.dtype, *{type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdU"}]
    rebuild = numpy.empty(0).__reduce__()[0]
    scalar = numpy.float64(0).__reduce__()[0]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # NumPy 1 and 2 name it differently
        arrays += [(rebuild, f"{module}._reconstruct"), (scalar, f"{module}.scalar")]
    try:
        with torch.serialization.safe_globals(arrays):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0])
        raise InputError(
            f"{path}: holds more than plain values, tensors and arrays, or is damaged ({reason.strip()}); load it "
            "where you trust it and pass its samples on by to_row"
        ) from None
    samples = saved.get("samples") if isinstance(saved, dict) else None
    if not isinstance(samples, list):
        raise InputError(f"{path}: has no list of samples; MILES saves them under 'samples'")
    return samples


def _read_lines(path: Path, zipped: bool) -> list[Any]:
    rows: list[Any] = []
    with gzip.open(path) if zipped else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows.append(msgspec.json.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InputError(f"{path}:{number}: {json_fault(line, number, str(error), zipped)}") from None
            if not isinstance(rows[-1], dict):
                raise InputError(f"{path}:{number}: the line holds no object; give one sample's fields a line")
    return rows
