"""Options that do not fit each other, row by row, from the configuration alone."""

from collections.abc import Iterator

from pack_miles.errors import counted
from pack_miles.miles.options import HOOKS
from pack_miles.settings.asynchronous import asynchronous_rows
from pack_miles.settings.config import Config, suggest
from pack_miles.settings.formats import here, small
from pack_miles.settings.ordering import ordering_rows
from pack_miles.settings.refusal import Refusal
from pack_miles.settings.sections import OPTIONS
from pack_miles.tasks import TASKS

#: Attention backends of the small model, and those that keep the documents of a packed row apart.
SMALL_ATTENTION = ("segment", "torch")
APART = ("segment", "flash_2", "flash_3", "flash_4")


def longest_sample(config: Config) -> int:
    """Return the tokens of the longest sample a rollout can produce, as far as the configuration limits it."""
    task = TASKS.get(config.data.task or "")
    prompt = task.max_prompt_len if task else config.miles.rollout_max_prompt_len or 1
    longest = prompt + config.miles.rollout_max_response_len
    return min(longest, config.miles.rollout_max_context_len or longest)


def _prompt(config: Config) -> int:
    return TASKS[config.data.task or ""].max_prompt_len


def _foreign_geometry(config: Config) -> list[str]:
    """Return the options of the small model that are set although the model is another."""
    apart = ("format", "source", "dtype") if here(config) else ("format", "source")
    own = [one for one in OPTIONS if one.section == "model" and one.key not in apart]
    return [] if small(config) else [one.name for one in own if getattr(config.model, one.key) != one.default]


def _bad_dense(config: Config) -> list[int]:
    return [layer for layer in config.model.dense_layers_indices if layer >= config.model.num_hidden_layers]


def _router_losses(config: Config) -> list[str]:
    names = ("router_aux_loss_weight", "router_z_loss_weight")
    return [f"core.{name}" for name in names if getattr(config.core, name)]


def _callbacks(config: Config) -> list[str]:
    names = [one.key for one in OPTIONS if one.section == "miles" and one.key.endswith("_path")]
    return [f"miles.{name}" for name in names if getattr(config.miles, name) is not None]


def _hooks(config: Config) -> list[str]:
    return [f"miles.{name}" for name, path in HOOKS.values() if getattr(config.miles, name) == path]


def _apart(config: Config) -> str:
    return "segment" if here(config) else "flash_4 (flash_3, flash_2 on older GPUs)"


def _packing_rows() -> Iterator[Refusal[Config]]:
    yield Refusal(
        "packing-attention",
        lambda c: c.core.sequence_packing and c.core.attention_backend not in APART,
        lambda c: (
            f"core.sequence_packing = true with core.attention_backend = {c.core.attention_backend!r}: that backend "
            "cannot keep the documents of one row apart, so each would attend to the ones before it"
        ),
        lambda c: f"set core.attention_backend = {_apart(c)}, or core.sequence_packing = false",
    )
    yield Refusal(
        "row-layout",
        lambda c: not c.core.sequence_packing and c.miles.qkv_format == "thd",
        lambda c: "miles.qkv_format = 'thd' contradicts core.sequence_packing = false, whose layout is 'bshd'",
        lambda c: "leave qkv_format out: it is derived",
    )


def _shape_rows() -> Iterator[Refusal[Config]]:
    yield Refusal(
        "ranks-ep",
        lambda c: c.run.ranks % c.core.expert_parallel_size != 0,
        lambda c: (
            f"run.ranks = {c.run.ranks} is not a multiple of core.expert_parallel_size = {c.core.expert_parallel_size}"
        ),
        lambda c: "choose a degree that divides the ranks",
    )
    yield Refusal(
        "step-ranks",
        lambda c: c.step_samples % c.run.ranks != 0,
        lambda c: (
            f"miles.global_batch_size = {c.step_samples} is not a multiple of run.ranks = {c.run.ranks}: "
            "every rank takes as many samples of a step"
        ),
        lambda c: f"take a multiple of {c.run.ranks}",
    )
    yield Refusal(
        "collection-step",
        lambda c: c.collection_samples % c.step_samples != 0,
        lambda c: (
            f"a collection has {counted(c.collection_samples, 'sample')} (rollout_batch_size "
            f"{c.miles.rollout_batch_size} x n_samples_per_prompt {c.miles.n_samples_per_prompt}), not a multiple of "
            f"miles.global_batch_size = {c.step_samples}"
        ),
        lambda c: "take a global_batch_size that divides it, or leave it out for one optimizer step a collection",
    )
    yield Refusal(
        "policy-lag",
        lambda c: c.core.max_policy_lag < c.steps_per_collection - 1,
        lambda c: (
            f"core.max_policy_lag = {c.core.max_policy_lag}, but with {c.steps_per_collection} optimizer steps per "
            f"collection its last samples are {counted(c.steps_per_collection - 1, 'step')} behind"
        ),
        lambda c: f"set max_policy_lag = {c.steps_per_collection - 1}, or a larger global_batch_size",
    )
    yield Refusal(
        "group-of-one",
        lambda c: c.miles.n_samples_per_prompt == 1,
        lambda c: "miles.n_samples_per_prompt = 1: GRPO has no group to compare a sample with, every advantage is 0",
        lambda c: "take at least 2 samples of a prompt",
    )


def _length_rows() -> Iterator[Refusal[Config]]:
    yield Refusal(
        "prompt-context",
        lambda c: (c.miles.rollout_max_prompt_len or 0) >= (c.miles.rollout_max_context_len or float("inf")),
        lambda c: (
            f"miles.rollout_max_prompt_len = {c.miles.rollout_max_prompt_len} leaves no token of "
            f"miles.rollout_max_context_len = {c.miles.rollout_max_context_len} for a response"
        ),
        lambda c: "take a shorter prompt limit or a longer context",
    )
    yield Refusal(
        "sample-length",
        lambda c: longest_sample(c) > c.core.max_sequence_length,
        lambda c: (
            f"a rollout may reach {longest_sample(c)} tokens, prompt and response together, more than "
            f"core.max_sequence_length = {c.core.max_sequence_length}"
        ),
        lambda c: (
            "raise max_sequence_length, or lower rollout_max_prompt_len, rollout_max_response_len or "
            "rollout_max_context_len"
        ),
    )
    yield Refusal(
        "task-prompt",
        lambda c: c.data.task in TASKS and (c.miles.rollout_max_prompt_len or _prompt(c)) < _prompt(c),
        lambda c: (
            f"miles.rollout_max_prompt_len = {c.miles.rollout_max_prompt_len}, but prompts of task {c.data.task!r} "
            f"have up to {_prompt(c)} tokens and are never cut or left out"
        ),
        lambda c: f"leave rollout_max_prompt_len out, or set at least {_prompt(c)}",
    )
    yield Refusal(
        "task-context",
        lambda c: (
            c.data.task in TASKS
            and (c.miles.rollout_max_context_len or float("inf")) < _prompt(c) + c.miles.rollout_max_response_len
        ),
        lambda c: (
            f"miles.rollout_max_context_len = {c.miles.rollout_max_context_len}, but a prompt of task {c.data.task!r} "
            f"({_prompt(c)} tokens at most) and a response ({c.miles.rollout_max_response_len}) may be longer, and the "
            "trainer's own rollout ends a response by its own length only"
        ),
        lambda c: "lower rollout_max_response_len, or leave rollout_max_context_len out",
    )


def _model_rows() -> Iterator[Refusal[Config]]:
    yield Refusal(
        "small-attention",
        lambda c: small(c) and c.core.attention_backend not in SMALL_ATTENTION,
        lambda c: (
            f"core.attention_backend = {c.core.attention_backend!r} with model.format = 'small': the small model runs "
            "segment or torch attention"
        ),
        lambda c: "set core.attention_backend = segment",
    )
    yield Refusal(
        "segment-attention",
        lambda c: not here(c) and c.core.attention_backend == "segment",
        lambda c: (
            f"core.attention_backend = 'segment' with model.format = {c.model.format!r}: segment attention belongs to "
            "models that are trained here, on a task"
        ),
        lambda c: "set flash_2, flash_3 or flash_4 (torch without packing)",
    )
    yield Refusal(
        "model-source",
        lambda c: small(c) == (c.model.source is not None),
        lambda c: (
            f"model.source = {c.model.source!r} with model.format = 'small', which is built here and reads no "
            "checkpoint"
            if small(c)
            else f"model.format = {c.model.format!r} needs model.source"
        ),
        lambda c: "leave source out, or name its format" if small(c) else "give the checkpoint",
    )
    yield Refusal(
        "foreign-geometry",
        lambda c: bool(_foreign_geometry(c)),
        lambda c: (
            f"{', '.join(_foreign_geometry(c))} set with model.format = {c.model.format!r}, whose checkpoint brings "
            "its own geometry"
        ),
        lambda c: "leave them out",
    )
    yield Refusal(
        "head-size",
        lambda c: c.model.hidden_size % c.model.num_attention_heads != 0,
        lambda c: (
            f"model.hidden_size = {c.model.hidden_size} is not a multiple of model.num_attention_heads = "
            f"{c.model.num_attention_heads}"
        ),
        lambda c: "take a head count that divides the width",
    )
    yield Refusal(
        "odd-head",
        lambda c: (
            c.model.hidden_size % c.model.num_attention_heads == 0
            and c.model.hidden_size // c.model.num_attention_heads % 2 == 1
        ),
        lambda c: (
            f"heads of {c.model.hidden_size // c.model.num_attention_heads} numbers are odd, and rotary positions "
            "turn pairs"
        ),
        lambda c: "choose hidden_size / num_attention_heads even",
    )
    yield Refusal(
        "dense-index",
        lambda c: bool(_bad_dense(c)),
        lambda c: (
            f"model.dense_layers_indices names layer {_bad_dense(c)[0]}, but the model has layers 0 to "
            f"{c.model.num_hidden_layers - 1}"
        ),
        lambda c: "name only layers that exist",
    )
    yield Refusal(
        "top-k",
        lambda c: bool(c.moe_layers) and c.model.num_experts_per_tok > c.model.n_routed_experts,
        lambda c: (
            f"model.num_experts_per_tok = {c.model.num_experts_per_tok} is more than model.n_routed_experts = "
            f"{c.model.n_routed_experts}"
        ),
        lambda c: "send a token to fewer experts",
    )
    yield Refusal(
        "experts-ep",
        lambda c: small(c) and bool(c.moe_layers) and c.model.n_routed_experts % c.core.expert_parallel_size != 0,
        lambda c: (
            f"model.n_routed_experts = {c.model.n_routed_experts} is not a multiple of core.expert_parallel_size = "
            f"{c.core.expert_parallel_size}: every rank of a replica owns as many experts"
        ),
        lambda c: "choose a degree that divides the experts",
    )


def _replay_and_data_rows() -> Iterator[Refusal[Config]]:
    yield Refusal(
        "replay-dense",
        lambda c: small(c) and c.miles.use_rollout_routing_replay and not c.moe_layers,
        lambda c: "miles.use_rollout_routing_replay = true, but every layer is dense: there is no router to replay",
        lambda c: "turn replay off, or leave a layer out of dense_layers_indices",
    )
    yield Refusal(
        "replay-router",
        lambda c: not here(c) and c.miles.use_rollout_routing_replay and not c.miles.use_miles_router,
        lambda c: (
            "miles.use_rollout_routing_replay = true needs miles.use_miles_router = true, which returns the routes"
        ),
        lambda c: "set use_miles_router = true",
    )
    yield Refusal(
        "routerless-losses",
        lambda c: small(c) and not c.moe_layers and bool(_router_losses(c)),
        lambda c: f"{' and '.join(_router_losses(c))} set, but every layer is dense: there is no router",
        lambda c: "leave them out, or a layer out of dense_layers_indices",
    )
    yield Refusal(
        "idle-hook",
        lambda c: c.pack_order == "arrival" and bool(_hooks(c)),
        lambda c: (
            f"{' and '.join(_hooks(c))} given while core.expert_balanced_packing and core.pack_order leave samples in "
            "arrival order: nothing is reordered"
        ),
        lambda c: "set one of the two, or leave the callback out",
    )
    yield Refusal(
        "callbacks-here",
        lambda c: here(c) and bool(_callbacks(c)),
        lambda c: (
            f"{' and '.join(_callbacks(c))} given in a run that samples and rewards a task itself: MILES' callbacks "
            "are not called"
        ),
        lambda c: "leave them out: core.pack_order and core.expert_balanced_packing reorder samples here, too",
    )
    yield Refusal(
        "data-source",
        lambda c: (c.data.task is None) == (c.data.prompt_data is None),
        lambda c: (
            "neither data.task nor data.prompt_data is given"
            if c.data.task is None
            else f"both data.task = {c.data.task!r} and data.prompt_data = {c.data.prompt_data!r} are given"
        ),
        lambda c: "give exactly one of them",
    )
    yield Refusal(
        "unknown-task",
        lambda c: c.data.task is not None and c.data.task not in TASKS,
        lambda c: f"data.task = {c.data.task!r} is unknown{suggest(c.data.task or '', TASKS)}",
        lambda c: f"tasks: {', '.join(TASKS)}",
    )
    yield Refusal(
        "task-format",
        lambda c: c.data.task is not None and not here(c),
        lambda c: (
            f"data.task = {c.data.task!r} speaks its own few tokens, not those of a {c.model.format!r} checkpoint"
        ),
        lambda c: "give data.prompt_data, or model.format = small or olmo_core",
    )
    yield Refusal(
        "prompts-format",
        lambda c: c.data.prompt_data is not None and small(c),
        lambda c: "data.prompt_data is given with model.format = 'small', which has no tokenizer",
        lambda c: f"give data.task (one of: {', '.join(TASKS)})",
    )
    yield Refusal(
        "optimizer",
        lambda c: c.miles.optimizer != "adam",
        lambda c: f"miles.optimizer = {c.miles.optimizer!r}: only adam is implemented",
        lambda c: "set adam, or leave it out",
    )


#: Every row, in the order they are told.
COMBINATIONS: tuple[Refusal[Config], ...] = (
    *_packing_rows(),
    *_shape_rows(),
    *ordering_rows(),
    *asynchronous_rows(),
    *_length_rows(),
    *_model_rows(),
    *_replay_and_data_rows(),
)
