"""What the producer hook is told: Core's options out of MILES' arguments, and MILES' own arguments beside them."""

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import attrs

from pack_miles.errors import InputError
from pack_miles.miles.samples import read_field
from pack_miles.settings.options import Section, option
from pack_miles.settings.sections import MODEL_FILES, Miles

Seam = Literal["groups", "rewards"]

#: What each seam is called on MILES' command line, and the function that belongs there.
HOOKS: dict[Seam, tuple[str, str]] = {
    "groups": ("rollout_sample_filter_path", "pack_miles.producer.reorder_samples"),
    "rewards": ("custom_reward_post_process_path", "pack_miles.producer.reorder_and_normalize"),
}


@attrs.frozen
class Core(Section):
    """The Core options that the producer follows; `pack_order` and `packing_equalize` are this project's own."""

    pack_order: Literal["arrival", "balanced"] | None = option(
        None, help="balanced: reorder complete optimizer batches by length, and by routes where those are counted"
    )
    packing_equalize: Literal["tokens", "samples", "balanced"] = option("tokens", help="as the trainer's")
    sequence_packing: bool = option(False, help="the trainer concatenates complete samples into one row")
    packing_max_tokens: int | None = option(None, low=1, help="tokens of one row; left out: max_sequence_length")
    max_sequence_length: int = option(8192, low=2, help="tokens of one sample at most")
    expert_parallel_size: int = option(1, low=1, help="ranks sharing one set of experts")
    expert_balanced_packing: bool = option(False, help="count recorded routes and even expert load out")
    expert_balance_layer_stride: int = option(1, low=1, help="count every so manieth routed layer")
    expert_balance_search_proposals: int = option(1024, low=0, help="most swaps scored for an optimizer step")
    expert_balance_search_seconds: float = option(0.25, low=0, help="search allowance of a collection")
    expert_balance_method: Literal["priced", "reference"] = option("priced", help="how swaps are chosen")
    expert_balance_guard: Literal["baseline", "reference"] = option("baseline", help="what no order may be worse than")
    expert_balance_max_slot_assignments: int | None = option(None, low=1, help="load of a destination at most")
    router_aux_loss_weight: float = option(0.01, low=0, help="as the trainer's")
    model_config: str | None = option(None, help="as the trainer's: a model configuration of Core's own")


NAMES = tuple(field.name for field in attrs.fields(Core))

#: What rows of the table call an option of MILES -> its flag.
FLAGS = {f"miles.{field.name}": f"--{field.name.replace('_', '-')}" for field in attrs.fields(Miles)} | {
    "run.ranks": "actor_num_nodes x actor_num_gpus_per_node"
}

#: Options of the trainer that are spelt almost as one above.
NEIGHBOURS = frozenset({"router_z_loss_weight"})


@attrs.frozen
class Settings:
    """Core's options, MILES' arguments, and which of the two seams they were read at.

    `written` says what a message calls an option. `starting` is whether MILES runs, so that the files its arguments
    name are on this machine; otherwise those that are not here are not judged.
    """

    core: Core
    args: Any = attrs.field(repr=False)
    seam: Seam
    written: Mapping[str, str] = attrs.field(default=FLAGS, repr=False)
    starting: bool = True

    @property
    def counts_experts(self) -> bool:
        """Whether recorded routes are counted."""
        return self.core.expert_balanced_packing

    @property
    def enabled(self) -> bool:
        """Whether anything is reordered."""
        return self.core.expert_balanced_packing or self.core.pack_order == "balanced"

    @property
    def ranks(self) -> int:
        """The trainer's data-parallel ranks; 0 where the arguments do not say."""
        nodes, gpus = self.arg("actor_num_nodes"), self.arg("actor_num_gpus_per_node")
        return nodes * gpus if isinstance(nodes, int) and isinstance(gpus, int) else 0

    @property
    def model_file(self) -> Path | None:
        """The file that describes the model, None where none is named or, before the start, it is not here."""
        source = self.arg("hf_checkpoint") or self.arg("model_source")
        if source is None:
            return None
        path = Path(source) if str(source).endswith(MODEL_FILES) else Path(source) / "config.json"
        return path if self.starting or path.is_file() else None

    @property
    def capacity(self) -> int:
        """Most tokens of a packed row."""
        return self.core.packing_max_tokens or self.core.max_sequence_length

    @property
    def log_path(self) -> Path | None:
        """Where `expert_schedule` events go: beside the trainer's contract, under `--save`; None without it."""
        save = self.arg("save")
        return None if save is None else Path(save) / "expert_schedule.jsonl"

    def arg(self, name: str) -> Any:
        """Return an argument of MILES, None where it has no such one."""
        return read_field(self.args, name)


def read_settings(args: Any, seam: Seam) -> Settings:
    """Return what MILES' arguments say, from wherever they say it.

    Options come from `--olmo-core-config`, one JSON text; from a section `core` of the file of `--custom-config-path`;
    or from single names in that file, `pack_order` or `core.pack_order`. Two places must agree.

    Raises:
        InputError: an option is misspelt, has a value that cannot be, or is given twice and differently.

    >>> from argparse import Namespace
    >>> read_settings(Namespace(pack_order="balanced"), "rewards").enabled
    True
    """
    found: dict[str, tuple[Any, str]] = {}
    for name, value, place in _given(args):
        if name in found and found[name][0] != value:
            other, where = found[name]
            raise InputError(f"{name} is {other!r} in {where} and {value!r} in {place}; give it once")
        found.setdefault(name, (value, place))
    return Settings(Core(**{name: value for name, (value, _) in found.items()}), args, seam)


def _given(args: Any) -> Iterator[tuple[str, Any, str]]:
    for attribute, place in (("olmo_core_config", "--olmo-core-config"), ("core", "section core")):
        for name, value in _section(read_field(args, attribute), place).items():
            if name in NAMES:
                # A model configuration of Core's own may be a table; here it only matters whether there is one.
                yield name, json.dumps(value) if name == "model_config" and isinstance(value, dict) else value, place
            elif name not in NEIGHBOURS and (near := next(iter(get_close_matches(name, NAMES, n=1, cutoff=0.9)), None)):
                raise InputError(f"{place} has an unknown option {name!r}; did you mean {near!r}?")
    for name in NAMES:
        for spelt in (name, f"core.{name}"):
            if (value := read_field(args, spelt)) is not None:
                yield name, value, f"the argument {spelt}"


def _section(given: Any, place: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise InputError(f"{place} is no JSON text ({error}); give Core's options as one JSON object") from None
    if not isinstance(given, Mapping):
        raise InputError(f"{place} is a {type(given).__name__}; give Core's options as names and values")
    return given
