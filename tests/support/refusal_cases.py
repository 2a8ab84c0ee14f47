"""Cases of the table of refusals: for every row what triggers it, words of what is told, and what is let pass."""

import json
from pathlib import Path
from typing import Any

from support.asynchronous_cases import ASYNCHRONOUS
from support.miles_config import NODE, SMALL

#: A small run whose routes are replayed.
ROUTED = SMALL | {"miles.use_rollout_routing_replay": True}

#: A run on GPUs, under MILES, whose samples change places by their routes.
EXPERTS = NODE | {
    "core.expert_balanced_packing": True,
    "core.router_aux_loss_weight": 0.0,
    "miles.use_rollout_routing_replay": True,
    "miles.use_miles_router": True,
}

#: The checkpoints that cases name, by folder: what their `config.json` holds.
CHECKPOINTS = {
    "olmo3moe": {
        "model_type": "olmo3moe",
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "dense_layers_indices": [0],
        "emo_eos_token_id": None,
    },
    "emo": {"model_type": "olmo3moe", "emo_eos_token_id": 2},
    "llama": {"model_type": "llama"},
}

#: Code -> base, the settings it refuses, words of its message, and the nearest settings that pass.
RUN_FILE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "packing-attention": (
        SMALL,
        {"core.attention_backend": "torch"},
        "'torch': that backend cannot keep the documents of one row apart, so each would attend to the ones before "
        "it; set core.attention_backend = segment",
        {"core.attention_backend": "torch", "core.sequence_packing": False, "core.packing_max_tokens": None},
    ),
    "packing-off-limit": (
        SMALL,
        {"core.sequence_packing": False},
        "core.packing_max_tokens = 128 requires core.sequence_packing = true",
        {"core.sequence_packing": False, "core.packing_max_tokens": None},
    ),
    "packing-cover": (
        SMALL,
        {"core.packing_max_tokens": 63},
        "core.packing_max_tokens = 63 must cover core.max_sequence_length = 64",
        {"core.packing_max_tokens": 64},
    ),
    "row-layout": (
        SMALL,
        {"core.sequence_packing": False, "core.packing_max_tokens": None, "miles.qkv_format": "thd"},
        "miles.qkv_format = 'thd' contradicts core.sequence_packing = false, whose layout is 'bshd'",
        {"core.sequence_packing": False, "core.packing_max_tokens": None, "miles.qkv_format": "bshd"},
    ),
    "qkv-format": (
        SMALL,
        {"miles.qkv_format": "bshd"},
        "miles.qkv_format = 'bshd' contradicts core.sequence_packing = true, whose layout is 'thd'",
        {"miles.qkv_format": "thd"},
    ),
    "micro-batch": (SMALL, {"miles.micro_batch_size": 2}, "miles.micro_batch_size = 2", {"miles.micro_batch_size": 1}),
    "ranks-ep": (
        SMALL,
        {"run.ranks": 4, "core.expert_parallel_size": 8},
        "run.ranks = 4 is not a multiple of core.expert_parallel_size = 8",
        {"run.ranks": 4, "core.expert_parallel_size": 4},
    ),
    "step-ranks": (
        SMALL,
        {"run.ranks": 6},
        "miles.global_batch_size = 8 is not a multiple of run.ranks = 6",
        {"run.ranks": 8},
    ),
    "collection-step": (
        SMALL,
        {"miles.global_batch_size": 12},
        "a collection has 16 samples (rollout_batch_size 4 x n_samples_per_prompt 4), not a multiple of "
        "miles.global_batch_size = 12",
        {"miles.global_batch_size": 16},
    ),
    "policy-lag": (
        SMALL,
        {"miles.global_batch_size": 4},
        "core.max_policy_lag = 1, but with 4 optimizer steps per collection its last samples are 3 steps behind",
        {"miles.global_batch_size": 4, "core.max_policy_lag": 3},
    ),
    "group-of-one": (
        SMALL,
        {"miles.n_samples_per_prompt": 1, "miles.rollout_batch_size": 16},
        "miles.n_samples_per_prompt = 1: GRPO has no group",
        {"miles.n_samples_per_prompt": 2, "miles.rollout_batch_size": 8},
    ),
    "expert-world": (
        ROUTED,
        {"core.expert_balanced_packing": True, "core.expert_parallel_size": 4},
        "core.expert_balanced_packing = true needs world > expert_parallel_size > 1, but run.ranks = 4 and "
        "core.expert_parallel_size = 4",
        {"core.expert_balanced_packing": True, "core.expert_parallel_size": 2},
    ),
    "expert-packing": (
        ROUTED,
        {"core.expert_balanced_packing": True, "core.sequence_packing": False, "core.packing_max_tokens": None},
        "core.expert_balanced_packing = true requires core.sequence_packing = true",
        {"core.pack_order": "balanced", "core.sequence_packing": False, "core.packing_max_tokens": None},
    ),
    "expert-replay": (
        ROUTED,
        {"core.expert_balanced_packing": True, "miles.use_rollout_routing_replay": False},
        "core.expert_balanced_packing = true requires miles.use_rollout_routing_replay = true",
        {"core.pack_order": "balanced", "miles.use_rollout_routing_replay": False},
    ),
    "expert-arrival": (
        ROUTED,
        {"core.expert_balanced_packing": True, "core.pack_order": "arrival"},
        "core.pack_order = 'arrival' contradicts core.expert_balanced_packing = true",
        {"core.expert_balanced_packing": True, "core.pack_order": "balanced"},
    ),
    "method-experts": (
        ROUTED,
        {"core.pack_order": "balanced", "core.expert_balance_method": "reference"},
        "core.expert_balance_method = 'reference' needs core.expert_balanced_packing = true",
        {"core.expert_balanced_packing": True, "core.expert_balance_method": "reference"},
    ),
    "slots-experts": (
        ROUTED,
        {"core.pack_order": "balanced", "core.expert_balance_max_slot_assignments": 99},
        "core.expert_balance_max_slot_assignments = 99 needs core.expert_balanced_packing = true",
        {"core.expert_balanced_packing": True, "core.expert_balance_max_slot_assignments": 99},
    ),
    "balance-data": (
        SMALL,
        {"miles.balance_data": True},
        "miles.balance_data = true: it deals samples to ranks anew, and position p of a step has to go to rank p % "
        "ranks as planned; leave miles.balance_data out",
        {},
    ),
    "prompt-context": (
        NODE,
        {"miles.rollout_max_prompt_len": 6144},
        "miles.rollout_max_prompt_len = 6144 leaves no token of miles.rollout_max_context_len = 6144",
        {"miles.rollout_max_prompt_len": 6143},
    ),
    "sample-length": (
        NODE,
        {"miles.rollout_max_context_len": None, "miles.rollout_max_prompt_len": 2049},
        "a rollout may reach 6145 tokens, prompt and response together, more than core.max_sequence_length = 6144",
        {"miles.rollout_max_context_len": None, "miles.rollout_max_prompt_len": 2048},
    ),
    "task-prompt": (
        SMALL,
        {"miles.rollout_max_prompt_len": 5},
        "miles.rollout_max_prompt_len = 5, but prompts of task 'sort' have up to",
        {"miles.rollout_max_prompt_len": 40},
    ),
    "task-context": (
        SMALL,
        {"miles.rollout_max_context_len": 21},
        "miles.rollout_max_context_len = 21, but a prompt of task 'sort'",
        {"miles.rollout_max_context_len": 64},
    ),
    "small-attention": (
        SMALL,
        {"core.attention_backend": "flash_4"},
        "core.attention_backend = 'flash_4' with model.format = 'small'",
        {"core.attention_backend": "segment"},
    ),
    "segment-attention": (
        NODE,
        {"core.attention_backend": "segment"},
        "core.attention_backend = 'segment' with model.format = 'hf'",
        {"core.attention_backend": "flash_2"},
    ),
    "model-source": (NODE, {"model.source": None}, "model.format = 'hf' needs model.source", {"model.source": "x"}),
    "foreign-geometry": (
        NODE,
        {"model.hidden_size": 128, "model.dropout": 0.1},
        "model.hidden_size, model.dropout set with model.format = 'hf'",
        {"model.hidden_size": 64},
    ),
    "head-size": (
        SMALL,
        {"model.hidden_size": 66},
        "model.hidden_size = 66 is not a multiple of model.num_attention_heads = 4",
        {"model.hidden_size": 72},
    ),
    "odd-head": (SMALL, {"model.hidden_size": 68}, "heads of 17 numbers are odd", {"model.hidden_size": 72}),
    "dense-index": (
        SMALL,
        {"model.dense_layers_indices": [0, 3]},
        "model.dense_layers_indices names layer 3, but the model has layers 0 to 2",
        {"model.dense_layers_indices": [0, 2]},
    ),
    "top-k": (
        SMALL,
        {"model.num_experts_per_tok": 9},
        "model.num_experts_per_tok = 9 is more than model.n_routed_experts = 8",
        {"model.num_experts_per_tok": 8},
    ),
    "experts-ep": (
        SMALL,
        {"model.n_routed_experts": 5},
        "model.n_routed_experts = 5 is not a multiple of core.expert_parallel_size = 2",
        {"model.n_routed_experts": 6},
    ),
    "replay-dense": (
        SMALL,
        {"model.dense_layers_indices": [0, 1, 2], "miles.use_rollout_routing_replay": True},
        "every layer is dense: there is no router to replay",
        {"model.dense_layers_indices": [0, 1, 2]},
    ),
    "replay-router": (
        NODE,
        {"miles.use_rollout_routing_replay": True},
        "miles.use_rollout_routing_replay = true needs miles.use_miles_router = true",
        {"miles.use_rollout_routing_replay": True, "miles.use_miles_router": True},
    ),
    "data-source": (
        NODE,
        {"data.prompt_data": None},
        "neither data.task nor data.prompt_data is given",
        {"data.prompt_data": "other.jsonl"},
    ),
    "unknown-task": (
        SMALL,
        {"data.task": "sorts"},
        "data.task = 'sorts' is unknown; did you mean sort?; tasks: sort",
        {"data.task": "sort"},
    ),
    "task-format": (
        NODE,
        {"data.prompt_data": None, "data.task": "sort"},
        "data.task = 'sort' speaks its own few tokens",
        {},
    ),
    "prompts-format": (
        SMALL,
        {"data.task": None, "data.prompt_data": "p.jsonl"},
        "data.prompt_data is given with model.format = 'small', which has no tokenizer",
        {},
    ),
    "balance-flops": (SMALL, {"miles.balance_by_flops": True}, "miles.balance_by_flops = true: it deals samples", {}),
    "dynamic-global-batch": (
        SMALL,
        {"miles.use_dynamic_global_batch_size": True},
        "miles.use_dynamic_global_batch_size = true: the samples of a step are not known",
        {"miles.global_batch_size": 8},
    ),
    "dynamic-micro-batches": (
        NODE,
        {"miles.use_dynamic_batch_size": True},
        "miles.use_dynamic_batch_size = true: MILES packs rows itself, and only one planner may be on",
        {"core.packing_max_tokens": 34816},
    ),
    "context-parallel": (
        NODE,
        {"miles.context_parallel_size": 2},
        "miles.context_parallel_size = 2: ranks would share a row",
        {"miles.context_parallel_size": 1},
    ),
    "model-parallel": (
        NODE,
        {"miles.tensor_model_parallel_size": 2, "miles.pipeline_model_parallel_size": 4},
        "miles.tensor_model_parallel_size = 2, miles.pipeline_model_parallel_size = 4: ranks that share samples",
        {"miles.tensor_model_parallel_size": 1, "miles.pipeline_model_parallel_size": 1},
    ),
    "partial-rollout": (
        NODE,
        {"core.pack_order": "balanced", "miles.partial_rollout": True},
        "miles.partial_rollout = true: rollouts continued under newer weights are not reordered",
        {"miles.partial_rollout": True},
    ),
    "sample-filter": (
        EXPERTS,
        {"miles.rollout_sample_filter_path": "mine.filter"},
        "miles.rollout_sample_filter_path = 'mine.filter' stands beside or in place of the hook",
        {"miles.rollout_sample_filter_path": "pack_miles.producer.reorder_samples"},
    ),
    "reward-callback": (
        EXPERTS,
        {"miles.custom_reward_post_process_path": "mine.rewards"},
        "miles.custom_reward_post_process_path = 'mine.rewards': what it makes of the order of samples is not known",
        {"miles.custom_reward_post_process_path": "pack_miles.producer.reorder_and_normalize"},
    ),
    "conversion-callback": (
        NODE,
        {"core.pack_order": "balanced", "miles.custom_convert_samples_to_train_data_path": "mine.convert"},
        "miles.custom_convert_samples_to_train_data_path = 'mine.convert': it replaces the reward callback",
        {"miles.custom_convert_samples_to_train_data_path": "mine.convert"},
    ),
    "idle-hook": (
        NODE,
        {"miles.rollout_sample_filter_path": "pack_miles.producer.reorder_samples"},
        "given while core.expert_balanced_packing and core.pack_order leave samples in arrival order",
        {"core.pack_order": "balanced"},
    ),
    "callbacks-here": (
        SMALL,
        {"miles.custom_reward_post_process_path": "mine.rewards"},
        "miles.custom_reward_post_process_path given in a run that samples and rewards a task itself",
        {},
    ),
    "auxiliary-loss": (
        EXPERTS,
        {"core.router_aux_loss_weight": None, "core.router_z_loss_weight": 0.001},
        "core.router_aux_loss_weight is 0.01, its default if it was left out, with core.expert_balanced_packing = true",
        {"core.router_aux_loss_weight": 0.0, "core.router_z_loss_weight": 0.001},
    ),
    "routerless-losses": (
        SMALL,
        {"model.dense_layers_indices": [0, 1, 2], "core.router_z_loss_weight": 0.001},
        "core.router_z_loss_weight set, but every layer is dense: there is no router",
        {"core.router_z_loss_weight": 0.001},
    ),
    "emo-routing": (
        NODE,
        {"model.source": "emo"},
        "emo/config.json sets emo_eos_token_id, and EMO routing takes its documents from end-of-sequence tokens",
        {"model.source": "olmo3moe"},
    ),
    "model-kind": (
        EXPERTS,
        {"model.source": "llama"},
        "llama/config.json: model_type is 'llama', and experts are counted for 'olmo3moe' alone",
        {"model.source": "olmo3moe"},
    ),
    "checkpoint": (
        EXPERTS,
        {"model.format": "olmo_core"},
        "core.expert_balanced_packing reads the model's HF configuration, and no HF checkpoint is given",
        {},
    ),
    "optimizer": (NODE, {"miles.optimizer": "sgd"}, "miles.optimizer = 'sgd': only adam", {"miles.optimizer": "adam"}),
    **ASYNCHRONOUS,
}

#: Row -> the arguments of MILES that trigger it where a producer hook reads them, and words of what is told.
ARGUMENT_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "packing-off-limit": ({"packing_max_tokens": 9000}, "core.packing_max_tokens = 9000 requires"),
    "packing-cover": ({"sequence_packing": True, "packing_max_tokens": 6144}, "must cover"),
    "qkv-format": ({"sequence_packing": True, "qkv_format": "bshd"}, "--qkv-format = 'bshd' contradicts"),
    "micro-batch": ({"micro_batch_size": 2}, "--micro-batch-size = 2: a forward takes one row"),
    "context-parallel": ({"context_parallel_size": 2}, "--context-parallel-size = 2: ranks would share a row"),
    "model-parallel": ({"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size = 2: ranks that share"),
    "emo-routing": ({"sequence_packing": True, "hf_checkpoint": "emo"}, "emo/config.json sets emo_eos_token_id"),
    "expert-world": (
        {"expert_balanced_packing": True, "expert_parallel_size": 4},
        "but actor_num_nodes x actor_num_gpus_per_node = 4 and core.expert_parallel_size = 4",
    ),
    "expert-packing": ({"expert_balanced_packing": True}, "requires core.sequence_packing = true: it balances packs"),
    "auxiliary-loss": ({"expert_balanced_packing": True}, "core.router_aux_loss_weight is 0.01"),
    "expert-replay": ({"expert_balanced_packing": True}, "requires --use-rollout-routing-replay = true"),
    "expert-arrival": ({"pack_order": "arrival", "expert_balanced_packing": True}, "'arrival' contradicts"),
    "dynamic-global-batch": ({"use_dynamic_global_batch_size": True}, "--use-dynamic-global-batch-size = true"),
    "dynamic-micro-batches": ({"use_dynamic_batch_size": True}, "only one planner may be on"),
    "balance-data": ({"balance_data": True}, "--balance-data = true: it deals samples to ranks anew"),
    "balance-flops": ({"balance_by_flops": True}, "--balance-by-flops = true: it deals samples to ranks anew"),
    "partial-rollout": ({"partial_rollout": True}, "--partial-rollout = true: rollouts continued"),
    "sample-filter": (
        {"rollout_sample_filter_path": "pack_miles.producer.reorder_samples"},
        "only one planner may be on; leave --rollout-sample-filter-path out",
    ),
    "reward-callback": ({"custom_reward_post_process_path": "mine.rewards"}, "= 'mine.rewards'"),
    "conversion-callback": ({"custom_convert_samples_to_train_data_path": "mine.convert"}, "= 'mine.convert'"),
    "positional-rewards": ({}, "this MILES does not normalize rewards by group_index"),
    "multi-lora": ({"multi_lora_n_adapters": 2}, "LoRA adapters"),
    "indep-dp": ({"indep_dp": True}, "--indep-dp is on"),
    "ranks": ({"global_batch_size": 18}, "18 over 4 ranks"),
    "expert-sets": ({"expert_balanced_packing": True, "expert_parallel_size": 3}, "4 ranks are no whole sets"),
    "stock-backend": ({"sequence_packing": True, "train_backend": "megatron"}, "'megatron'"),
    "log-directory": ({"save": "runs/details/events/a", "dump_details": "runs/details"}, "event directory"),
    "model-config": ({"expert_balanced_packing": True, "model_config": "{}"}, "core.model_config is given"),
    "checkpoint": ({"expert_balanced_packing": True}, "no HF checkpoint is given"),
    "model-kind": ({"expert_balanced_packing": True, "hf_checkpoint": "llama"}, "experts are counted for 'olmo3moe'"),
}


def write_checkpoints(folder: Path) -> None:
    """Write the checkpoints that cases name into a folder."""
    for name, config in CHECKPOINTS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
