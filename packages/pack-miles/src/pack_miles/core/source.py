"""The file that describes an OLMo-core model, JSON or TOML, read without torch and without Core."""

import json
import tomllib
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs

from pack_miles.errors import InputError
from pack_miles.settings.sections import MODEL_FILES

HOW = (
    "save one with json.dump(config.as_config_dict(), file) of OLMo-core's TransformerConfig; weights are drawn from "
    "run.seed, a checkpoint's are not read in this release"
)


@attrs.frozen
class Source:
    """A model's configuration as Core saves it, and a digest of the file's bytes."""

    configuration: Mapping[str, Any]
    digest: str


def read_source(path: str) -> Source:
    """Return the configuration of a file; of a larger one, such as a checkpoint's `config.json`, its `model`.

    Raises:
        InputError: it is no readable JSON or TOML file of one table; says which and how to make one.

    >>> read_source("org/model")
    Traceback (most recent call last):
    pack_miles.errors.InputError: model.source = 'org/model' is no .json or .toml file; save one with json.dump(...
    """
    if not path.endswith(MODEL_FILES):
        raise InputError(f"model.source = {path!r} is no {' or '.join(MODEL_FILES)} file; {HOW}")
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


def source_error(path: str | None) -> str:
    """Return why a file does not describe a model, "" when it may."""
    try:
        read_source(path or "")
    except InputError as error:
        return str(error)
    return ""
