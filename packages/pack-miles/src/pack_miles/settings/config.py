"""The run file, typed: every option has one value, wherever it was written, and every mistake says where it stands."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import attrs
from pack_core import Topology

from pack_miles.errors import InputError, input_error
from pack_miles.settings.options import Option, spell
from pack_miles.settings.sections import (
    GROUPS,
    LATER,
    MODEL_FILES,
    OPTIONS,
    PLACES,
    SECTIONS,
    Core,
    Data,
    Miles,
    Model,
    Output,
    Run,
    Tracking,
)

#: The version of the run file this release reads.
SCHEMA_VERSION = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@attrs.frozen
class Config:
    """A run, every option typed and within its own limits.

    Whether the options fit each other is `pack_miles.settings.refusals.refuse`'s question; the properties below
    are meaningful for a configuration that it lets pass. `file` is the run file, and `written` says where an option
    was given (`core.lr` -> `optimizer.lr (line 7)` or `--optimizer.lr`), both for messages only.
    """

    name: str
    output: Output
    model: Model = attrs.Factory(Model)
    data: Data = attrs.Factory(Data)
    core: Core = attrs.Factory(Core)
    miles: Miles = attrs.Factory(Miles)
    tracking: Tracking = attrs.Factory(Tracking)
    run: Run = attrs.Factory(Run)
    file: str = attrs.field(default="", eq=False)
    written: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)

    @property
    def collection_samples(self) -> int:
        """Samples of one collection: prompts times samples of a prompt."""
        return self.miles.rollout_batch_size * self.miles.n_samples_per_prompt

    @property
    def step_samples(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.miles.global_batch_size or self.collection_samples

    @property
    def steps_per_collection(self) -> int:
        """Optimizer steps of one collection."""
        return self.collection_samples // self.step_samples

    @property
    def capacity(self) -> int:
        """Tokens of one row at most: the limit of a pack, or of a single sample when packing is off."""
        return self.core.packing_max_tokens or self.core.max_sequence_length

    @property
    def max_documents(self) -> int | None:
        """Samples of one row at most: None when packing, 1 on the one-sample path."""
        return None if self.core.sequence_packing else 1

    @property
    def pack_order(self) -> Literal["arrival", "balanced"]:
        """The order samples are packed in; evening out expert load means balancing."""
        return "balanced" if self.core.expert_balanced_packing else self.core.pack_order

    @property
    def topology(self) -> Topology:
        """The ranks and the degree of expert parallelism."""
        return Topology(ranks=self.run.ranks, expert_parallel=self.core.expert_parallel_size)

    @property
    def reduction(self) -> Literal["token", "response"]:
        """What the loss is a mean over."""
        return "token" if self.miles.calculate_per_token_loss else "response"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers of the small model that have experts."""
        dense = self.model.dense_layers_indices
        return tuple(layer for layer in range(self.model.num_hidden_layers) if layer not in dense)

    @property
    def qkv_format(self) -> Literal["thd", "bshd"]:
        """The layout that packing on or off asks for."""
        return "thd" if self.core.sequence_packing else "bshd"

    @property
    def digest(self) -> str:
        """Hexadecimal digest of everything that decides what the run computes; the same in every process.

        Where it writes, how it is followed, and when it checkpoints are left out: changing them resumes the same run.
        """
        resolved = self.resolved()
        for one in OPTIONS:
            if one.alike or (one.name in LATER and resolved[one.section][one.key] == one.default):
                del resolved[one.section][one.key]
        if self.pack_order == "arrival":
            # How to search for an order decides nothing where none is searched.
            for key in [key for key in resolved["core"] if key == "pack_order" or key.startswith("expert_balance")]:
                del resolved["core"][key]
        text = json.dumps(resolved, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def resolved(self) -> dict[str, Any]:
        """Return every option under its canonical name, derived ones filled in: nested, and ready for JSON."""
        sections = {name: getattr(self, name).as_dict() for name in SECTIONS}
        sections["miles"] |= {"global_batch_size": self.step_samples, "qkv_format": self.qkv_format}
        if self.core.sequence_packing:
            sections["core"]["packing_max_tokens"] = self.capacity
        sections["core"]["pack_order"] = self.pack_order
        return {"schema_version": SCHEMA_VERSION, "name": self.name, **sections}


def load_config(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Return the configuration of a run file with flags applied: flags win, the last one last.

    `overrides` are pairs of a dotted name (any place an option may be written, or `name`) and its text. Relative
    paths in the file are relative to the file; those in flags to the current directory.

    Raises:
        InputError: naming the file and every option that is unknown, mistyped, out of range, contradictory or missing.
    """
    text = _text(Path(path))
    table = _table(path, text)
    problems: list[str] = []
    values, written = _file_values(table, Path(path), text, problems)
    name = table.get("name")
    for place, given in overrides:
        if place == "name":
            name = given
            continue
        one = PLACES.get(place)
        if one is None:
            problems.append(f"--{place}: unknown option{suggest(place, PLACES)}")
            continue
        try:
            values[one], written[one.name] = _located(one, one.read(given), Path()), f"--{place}"
        except ValueError as error:
            problems.append(f"--{place} {error}")
            written.setdefault(one.name, f"--{place}")
    problems += _name_problems(name)
    problems += [f"{one.name} is missing: {one.help}" for one in OPTIONS if one.required and one.name not in written]
    if problems:
        raise input_error(str(path), problems)
    sections = {
        section: build(**{one.key: value for one, value in values.items() if one.section == section})
        for section, build in SECTIONS.items()
    }
    return Config(name=name, file=str(path), written=written, **sections)  # type: ignore[arg-type]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the path of a TOML run file, like examples/dev.toml") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file in UTF-8 (byte {error.start}); give a TOML run file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _table(path: str | Path, text: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of thousands of digits
        line = re.search(r"line (\d+)", str(error))
        number = line[1] if line else str(text.count("\n") + 1)
        raise InputError(f"{path}:{number}: not valid TOML: {error}") from None
    version = table.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        given = "is missing" if version is None else f"is {spell(version)}"
        raise InputError(f"{path}: schema_version {given}; this release reads schema_version = {SCHEMA_VERSION}")
    return table


def _name_problems(name: Any) -> Iterator[str]:
    if name is None:
        yield 'name is missing: give the run one, like name = "first-run"'
    elif not isinstance(name, str) or not NAME.fullmatch(name):
        yield f"name must start with a letter or digit, then letters, digits, '_', '.', '-'; got {spell(name)}"


def _file_values(
    table: Mapping[str, Any], path: Path, text: str, problems: list[str]
) -> tuple[dict[Option, Any], dict[str, str]]:
    """Return the values the file gives, and where it gives each; append every mistake to `problems`."""
    values: dict[Option, Any] = {}
    written: dict[str, str] = {}
    for section, entries in table.items():
        if section in ("schema_version", "name"):
            continue
        if section not in GROUPS and isinstance(entries, Mapping):
            problems.append(f"[{section}]{_line(text, section)}: unknown section{suggest(section, GROUPS)}")
        elif section not in GROUPS:
            problems.append(
                f"{section}{_line(text, '', section)}: no option outside a section{_suggest_place(section)}"
            )
        elif not isinstance(entries, Mapping):
            line = _line(text, "", section)
            problems.append(f"{section}{line} must be a section, [{section}]; got {spell(entries)}")
        else:
            for key, given in entries.items():
                place = f"{section}.{key}" + _line(text, section, key)
                one = PLACES.get(f"{section}.{key}")
                if one is None:
                    problems.append(f"{place}: unknown option{suggest(f'{section}.{key}', PLACES)}")
                    continue
                try:
                    value = one.check(given)
                except ValueError as error:
                    problems.append(f"{place} {error}")
                    written.setdefault(one.name, place)
                    continue
                if one in values and values[one] != value:
                    problems.append(
                        f"{written[one.name]} = {spell(values[one])} and {place} = {spell(value)} set the same option "
                        f"({one.name}) and disagree; keep one of them"
                    )
                values[one], written[one.name] = value, place
    return {one: _located(one, value, path.parent) for one, value in values.items()}, written


def _located(one: Option, value: Any, base: Path) -> Any:
    # A model's name may look like a path: it is one where it ends as a file does, or where such a folder is.
    model = one.name == "model.source" and value and (value.endswith(MODEL_FILES) or (base / value).is_dir())
    if value is None or not (one.path or model):
        return value
    return str((base / Path(value).expanduser()).resolve())


def _line(text: str, section: str, key: str = "") -> str:
    """Return ` (line n)` of an option, or of a section's header, in their plain form; nothing for other forms.

    Section "" is what stands before the first header.
    """
    inside = not section
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w-]+)\s*\]", line):
            inside = header[1] == section
            if inside and not key:
                return f" (line {number})"
        elif inside and key and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return f" (line {number})"
    return ""


def _suggest_place(key: str) -> str:
    """Return `; did you mean optimizer.lr?` for the key of an option that stands outside every section."""
    head = get_close_matches(key, ("name", "schema_version"), n=1, cutoff=0.75)
    near = get_close_matches(key, [one.key for one in OPTIONS], n=1, cutoff=0.75)
    # Where an option has several places, the backend's own section comes first and the one people write in second.
    places = head or [one.places[:2][-1] for one in OPTIONS if one.key in near]
    return f"; did you mean {' or '.join(places)}?" if places else "; see pack-miles --help-options"


def suggest(given: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Return `; did you mean x?` for the nearest known name, or where the names are listed.

    >>> suggest("trainer.sequence_pack", ["trainer.sequence_packing"])
    '; did you mean trainer.sequence_packing?'
    """
    near = get_close_matches(given, list(known), n=1, cutoff=0.75)
    key = given.rpartition(".")[2]
    if not near and "." in given:
        near = [name for name in known if name.rpartition(".")[2] == key][:1]
    return f"; did you mean {near[0]}?" if near else "; see pack-miles --help-options"
