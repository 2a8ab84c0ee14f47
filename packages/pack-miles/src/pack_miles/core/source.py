"""What describes an OLMo-core model: a file, JSON or TOML, or a checkpoint; read without torch and without Core."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs

from pack_miles.errors import InputError
from pack_miles.settings.sections import MODEL_FILES

HOW = (
    "save one with json.dump(config.as_config_dict(), file) of OLMo-core's TransformerConfig, whose weights are drawn "
    "from run.seed, or give the folder of a checkpoint, whose weights are read"
)

#: What a checkpoint of OLMo-core's trainer holds: its configuration, and the folder of its weights.
CONFIGURATION, WEIGHTS = "config.json", "model_and_optim"


@attrs.frozen
class Source:
    """A model's configuration as Core saves it, a digest of the file, and the folder of its weights if there is one.

    The digest is of the file's bytes; of weights it tells by the names and sizes of their files.
    """

    configuration: Mapping[str, Any]
    digest: str
    weights: Path | None = None


def read_source(path: str) -> Source:
    """Return the configuration of a file, of a larger one its `model`; of a checkpoint's folder also the weights.

    Raises:
        InputError: it is no readable JSON or TOML file of one table, and no checkpoint; says which and how to make one.

    >>> read_source("org/model")
    Traceback (most recent call last):
    pack_miles.errors.InputError: model.source = 'org/model' is no .json or .toml file and no folder; save one with ...
    """
    if (Path(path) / CONFIGURATION).is_file():
        return _checkpoint(Path(path))
    if not path.endswith(MODEL_FILES):
        what = f"holds no {CONFIGURATION}" if Path(path).is_dir() else "is no .json or .toml file and no folder"
        raise InputError(f"model.source = {path!r} {what}; {HOW}")
    try:
        text = Path(path).read_bytes()
        table = json.loads(text) if path.endswith(".json") else tomllib.loads(text.decode())
    except OSError as error:
        raise InputError(f"model.source = {path!r} cannot be read: {error.strerror}; {HOW}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"model.source = {path!r} is not valid: {error}; {HOW}") from None
    if isinstance(table, dict) and isinstance(table.get("model"), dict):
        table = table["model"]
    if not isinstance(table, dict):
        raise InputError(f"model.source = {path!r} holds no configuration but {type(table).__name__}; {HOW}")
    return Source(table, blake2b(text, digest_size=16).hexdigest())


def _checkpoint(folder: Path) -> Source:
    described, weights = read_source(str(folder / CONFIGURATION)), folder / WEIGHTS
    if not weights.is_dir():
        raise InputError(
            f"model.source = {str(folder)!r} holds {CONFIGURATION} but no {WEIGHTS}; give a checkpoint of OLMo-core's "
            f"trainer, or {folder / CONFIGURATION} itself for drawn weights"
        )
    files = sorted((file.name, file.stat().st_size) for file in weights.iterdir() if file.is_file())
    digest = blake2b(f"{described.digest} {files}".encode(), digest_size=16).hexdigest()
    return Source(described.configuration, digest, weights)


def source_error(path: str | None) -> str:
    """Return why a file does not describe a model, "" when it may."""
    try:
        read_source(path or "")
    except InputError as error:
        return str(error)
    return ""


def set_options(path: str | Path, name: str) -> tuple[str, ...]:
    """Return the options of a model's file that are called `name`, or begin with `name_`, and are set to something.

    OLMo-core nests them in its blocks, Hugging Face configurations have them at the top; a file that cannot be read
    sets nothing here, for whoever needs it will say so.

    >>> set_options("nowhere.json", "emo")
    ()
    """
    try:
        table: Any = read_source(str(path)).configuration
    except InputError:
        return ()
    return tuple(sorted({key for key, value in _entries(table) if value and (key + "_").startswith(name + "_")}))


def largest(path: str | Path, name: str) -> float:
    """Return the largest number that an option of a model's file has in any block, 0 where it is nowhere.

    >>> largest("nowhere.json", "lb_loss_weight")
    0.0
    """
    try:
        table: Any = read_source(str(path)).configuration
    except InputError:
        return 0.0
    found = [value for key, value in _entries(table) if key == name and isinstance(value, (int, float))]
    return float(max(found, default=0.0))


def _entries(table: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of nested tables and lists."""
    if isinstance(table, Mapping):
        for key, value in table.items():
            yield str(key), value
            yield from _entries(value)
    elif isinstance(table, list):
        for value in table:
            yield from _entries(value)
