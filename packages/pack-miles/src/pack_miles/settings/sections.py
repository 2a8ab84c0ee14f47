"""Every option of a run file, declared once: loader, flags, option table and refusals read this page."""

from typing import Literal

import attrs

from pack_miles.settings.options import Option, Section, option, options_of

#: The largest seed: sums of it and a few million steps still fit 63 bits.
SEEDS = 2**62

#: What a `model.source` ends in that is the file of a model's configuration.
MODEL_FILES = (".json", ".toml")


@attrs.frozen
class Model(Section):
    """What is trained. Everything from `hidden_size` to `dropout` describes the small model; others bring their own."""

    format: Literal["small", "hf", "olmo_core"] = option("small", help="small (built here) or a checkpoint's format")
    source: str | None = option(
        None,
        help="checkpoint of an hf or olmo_core model; of the latter also a .json or .toml file of its configuration",
    )
    hidden_size: int = option(64, low=1, help="width of the small model")
    num_hidden_layers: int = option(3, low=1, help="decoder layers, dense ones included")
    num_attention_heads: int = option(4, low=1, help="attention heads; hidden_size is a multiple, the quotient even")
    intermediate_size: int = option(128, low=1, help="width of a dense layer's feed-forward block")
    moe_intermediate_size: int = option(64, low=1, help="width of one expert")
    n_routed_experts: int = option(8, low=1, help="experts of a layer, a multiple of core.expert_parallel_size")
    num_experts_per_tok: int = option(2, low=1, help="experts a token is sent to (top-k)")
    dense_layers_indices: tuple[int, ...] = option((0,), help="layers without experts")
    dropout: float = option(0.0, low=0, high=1, below=True, help="dropout probability; above 0 scoring is standalone")
    dtype: Literal["float32", "float64"] = option("float32", help="parameters and arithmetic of a model trained here")


@attrs.frozen
class Output(Section):
    """Where a run writes."""

    root: str = option(path=True, alike=True, help="folder of events, checkpoints and the report")


@attrs.frozen
class Data(Section):
    """What is asked: exactly one of an embedded task and a file of prompts."""

    task: str | None = option(None, help="embedded verifiable task, for small and olmo_core")
    prompt_data: str | None = option(None, path=True, help="MILES prompt file (JSON lines)")
    seed: int = option(17, low=0, high=SEEDS, help="seed of the prompts and of the sampling draws")


@attrs.frozen
class Core(Section):
    """Options of the trainer's backend."""

    sequence_packing: bool = option(False, also="trainer", help="concatenate complete samples into one row")
    packing_max_tokens: int | None = option(
        None, also="trainer", low=1, help="tokens of one row at most; left out: max_sequence_length"
    )
    packing_equalize: Literal["tokens", "samples", "balanced"] = option(
        "tokens", also="trainer", help="how a rank splits packs until all ranks have as many"
    )
    pack_order: Literal["arrival", "balanced"] = option(
        "arrival",
        also="trainer",
        help="arrival, or balanced: samples change places inside their optimizer step so that packs are few and full "
        "and all ranks have as much to do",
    )
    expert_balanced_packing: bool = option(
        False, also="trainer", help="balanced order that also evens out expert load, from the replayed routes"
    )
    expert_balance_layer_stride: int = option(
        1, also="trainer", low=1, help="count every so manieth routed layer; all figures are about those"
    )
    expert_balance_search_proposals: int = option(
        1024,
        also="trainer",
        low=0,
        help="swaps scored per optimizer step, for pack_order = balanced too; 0: the best constructed order",
    )
    expert_balance_search_seconds: float = option(
        0.25,
        also="trainer",
        low=0,
        help="allowance of the search for a whole collection, for pack_order = balanced too; counting lies outside",
    )
    expert_balance_method: Literal["priced", "reference"] = option(
        "priced", also="trainer", help="how swaps are chosen; reference: as Open Instruct's trainer does"
    )
    expert_balance_guard: Literal["baseline", "reference"] = option(
        "baseline",
        also="trainer",
        help="what no order may be worse than; reference also holds skew and largest load to arrival order",
    )
    expert_balance_max_slot_assignments: int | None = option(
        None, also="trainer", low=1, help="expert choices of one destination in one layer of one forward at most"
    )
    max_sequence_length: int = option(8192, also="trainer", low=2, help="tokens of one sample at most")
    expert_parallel_size: int = option(
        1, also="trainer", low=1, help="ranks sharing one set of experts; divides run.ranks"
    )
    attention_backend: Literal["torch", "segment", "flash_2", "flash_3", "flash_4", "te"] = option(
        "torch", also="trainer", help="attention; packing needs one that keeps documents apart"
    )
    router_aux_loss_weight: float | None = option(
        None,
        also="trainer",
        low=0,
        help="weight of the routers' load-balancing loss; left out: 0 in the small model, else what its own file says",
    )
    router_z_loss_weight: float | None = option(
        None, also="trainer", low=0, help="weight of the routers' z-loss; left out: as the one above"
    )
    activation_checkpointing: bool = option(True, also="trainer", help="recompute activations in the backward pass")
    max_policy_lag: int = option(
        0, also="async trainer", low=0, help="optimizer steps a sample may be behind the policy"
    )
    scoring_pass_required: bool = option(False, also="trainer", help="always score in a pass of its own")
    scoring_check_interval: int = option(
        50,
        also="trainer",
        low=0,
        help="updates between scoring checks, only the first update of a collection can be compared; "
        "0: only the first of a process",
    )
    scoring_check_tolerance: float = option(
        1e-3, also="trainer", low=0, help="mean log-probability difference a scoring check accepts"
    )
    scoring_check_max_tolerance: float | None = option(
        None, also="trainer", low=0, help="largest single difference a scoring check accepts; left out: reported only"
    )
    max_train_rollout_logprob_abs_diff: float | None = option(
        None, also="trainer", low=0, help="mean difference of trainer and rollout log-probabilities accepted"
    )


@attrs.frozen
class Miles(Section):
    """Options of the rollout and the loss, under MILES' own names."""

    micro_batch_size: int = option(1, also="trainer", low=1, help="1: one row (of several samples when packing)")
    global_batch_size: int | None = option(
        None, also="trainer", low=1, help="samples of one optimizer step; left out: the whole collection"
    )
    rollout_batch_size: int = option(8, also="inference", low=1, help="prompts of one collection")
    n_samples_per_prompt: int = option(8, also="inference", low=1, help="samples of one prompt (a GRPO group)")
    num_rollout: int = option(100, also="trainer", low=1, alike=True, help="collections of the run")
    rollout_max_prompt_len: int | None = option(None, also="inference", low=1, help="tokens of a prompt at most")
    rollout_max_response_len: int = option(4096, also="inference", low=1, help="tokens of a response at most")
    rollout_max_context_len: int | None = option(
        None, also="inference", low=2, help="tokens of prompt and response together at most"
    )
    rollout_temperature: float = option(1.0, also="inference", low=0, above=True, help="sampling temperature")
    use_rollout_routing_replay: bool = option(
        False, also="trainer inference", help="record the router's choices in the rollout, replay them in training"
    )
    use_miles_router: bool = option(False, also="inference", help="serve through MILES' router, which returns routes")
    use_rollout_logprobs: bool = option(
        False, also="trainer", help="anchor the ratio at the rollout's log-probabilities"
    )
    use_tis: bool = option(
        False,
        also="trainer async",
        help="weight tokens by trainer over rollout probability, truncated (importance sampling)",
    )
    tis_clip: float = option(2.0, also="trainer async", low=0, help="upper limit of the importance weights")
    tis_clip_low: float = option(0.0, also="trainer async", low=0, help="lower limit of the importance weights")
    fully_async: bool = option(
        False,
        also="async trainer inference",
        help="sample while training, at most core.max_policy_lag steps ahead; in a run of this trainer on workers of "
        "their own",
    )
    kl_coef: float = option(0.0, also="trainer", low=0, help="KL penalty inside the advantages")
    calculate_per_token_loss: bool = option(True, also="trainer", help="true: mean over tokens; false: over responses")
    grpo_std_normalization: bool = option(False, also="trainer", help="divide advantages by their group's deviation")
    qkv_format: Literal["thd", "bshd"] | None = option(
        None, also="trainer", help="layout, derived: thd when packing, bshd otherwise"
    )
    balance_data: bool = option(False, also="trainer", help="MILES' own partition; not possible here")
    balance_by_flops: bool = option(False, also="trainer", help="MILES' own partition; not possible here")
    use_dynamic_batch_size: bool = option(False, also="trainer", help="MILES' own packing; not possible here")
    use_dynamic_global_batch_size: bool = option(
        False, also="trainer", help="optimizer steps of as many samples as there are; not possible here"
    )
    partial_rollout: bool = option(False, also="inference", help="go on with rollouts under newer weights")
    rollout_sample_filter_path: str | None = option(
        None, also="inference", help="MILES' callback on finished groups; one place of the producer hook"
    )
    custom_reward_post_process_path: str | None = option(
        None, also="inference", help="MILES' callback on rewards; the other place of the producer hook"
    )
    custom_convert_samples_to_train_data_path: str | None = option(
        None, also="inference", help="MILES' callback that makes training data of samples"
    )
    tensor_model_parallel_size: int | None = option(None, also="trainer", low=1, help="1: layers are not cut up")
    pipeline_model_parallel_size: int | None = option(None, also="trainer", low=1, help="1: a rank has every layer")
    context_parallel_size: int | None = option(None, also="trainer", low=1, help="1: a rank has whole rows")
    eps_clip: float = option(0.2, also="optimizer trainer", low=0, high=1, below=True, help="lower clip of the ratio")
    eps_clip_high: float = option(0.28, also="optimizer trainer", low=0, help="upper clip of the ratio")
    optimizer: str = option("adam", also="optimizer", help="adam")
    lr: float = option(1e-6, also="optimizer", low=0, help="learning rate, constant")
    adam_beta1: float = option(0.9, also="optimizer", low=0, high=1, below=True, help="Adam's first decay")
    adam_beta2: float = option(0.95, also="optimizer", low=0, high=1, below=True, help="Adam's second decay")
    adam_eps: float = option(1e-8, also="optimizer", low=0, above=True, help="Adam's epsilon")
    weight_decay: float = option(0.0, also="optimizer", low=0, help="decoupled weight decay")
    clip_grad: float = option(1.0, also="optimizer", low=0, above=True, help="gradient norm at most")


@attrs.frozen
class Tracking(Section):
    """How a run is followed."""

    use_wandb: bool = option(
        False, alike=True, help="log to Weights & Biases from rank 0; its own environment variables say where"
    )
    progress: bool = option(True, alike=True, help="show a progress bar")


@attrs.frozen
class Run(Section):
    """The processes of a run."""

    ranks: int = option(1, low=1, help="processes that train")
    engine: Literal["spawn", "ray"] = option(
        "spawn",
        alike=True,
        help="who starts the ranks: spawn, as processes of this machine; ray, as actors of the cluster of RAY_ADDRESS "
        "(left out: of one on this machine). Under torchrun neither",
    )
    rollout_workers: int = option(
        1, also="async inference", low=1, alike=True, help="Ray actors that sample, with miles.fully_async"
    )
    backend: Literal["gloo", "nccl"] = option("gloo", help="collectives: gloo on CPU, nccl on GPUs")
    seed: int = option(17, low=0, high=SEEDS, help="seed of the parameters and of dropout")
    checkpoint_every: int = option(0, low=0, alike=True, help="collections between checkpoints; 0: none")
    checkpoint_keep: int = option(2, low=1, alike=True, help="newest checkpoints kept")
    resume: bool = option(False, alike=True, help="go on from the newest checkpoint of output.root")
    timeout_seconds: float = option(
        120.0, low=0, above=True, alike=True, help="wait of a rank for the others before it gives up"
    )
    threads_per_rank: int = option(1, low=1, help="CPU threads of one rank")
    save_rollouts: bool = option(False, alike=True, help="write each collection as a rollouts file")


#: Section name -> the class that declares its options.
SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "output": Output,
    "data": Data,
    "core": Core,
    "miles": Miles,
    "tracking": Tracking,
    "run": Run,
}

#: Every option once, in the order of the sections.
OPTIONS: tuple[Option, ...] = tuple(one for name, values in SECTIONS.items() for one in options_of(name, values))

#: Options that came after the first digests were written: left at their defaults they are left out of it, so that a run
#: that does not ask for them keeps its own.
LATER = frozenset(
    [
        *(f"core.{key}" for key in ("router_aux_loss_weight", "router_z_loss_weight")),
        *(f"miles.{key}" for key in ("balance_by_flops", "use_dynamic_batch_size", "use_dynamic_global_batch_size")),
        *(f"miles.{key}" for key in ("partial_rollout", "rollout_sample_filter_path")),
        *(f"miles.{key}" for key in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")),
        *(f"miles.{key}_model_parallel_size" for key in ("tensor", "pipeline")),
        *(f"miles.{key}" for key in ("context_parallel_size", "use_tis", "tis_clip", "tis_clip_low", "fully_async")),
    ]
)

#: Every dotted name an option may be written under -> the option.
PLACES: dict[str, Option] = {place: one for one in OPTIONS for place in one.places}

#: Every section of a run file, those that only group options of others included.
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(place.split(".")[0] for place in PLACES))
