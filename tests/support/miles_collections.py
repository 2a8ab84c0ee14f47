"""Collections as MILES hands them to its hooks, hand-made, and the rules by which it deals them to ranks."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

SAMPLE_FILTER = "pack_miles.producer.reorder_samples"
REWARD_CALLBACK = "pack_miles.producer.reorder_and_normalize"


@dataclass
class HandMade:
    """The fields of MILES' sample that are read, and its one method."""

    index: Any
    group_index: Any
    tokens: list[int]
    response_length: int
    reward: Any = 0.0
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_id: int | None = None
    remove_sample: bool = False

    def get_reward_value(self, args: Namespace) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]


def collection(lengths: Sequence[int], group: int = 4, *, start: int = 0, experts: int | None = None) -> list[HandMade]:
    """Return samples of these lengths, `group` a prompt, with rewards and masks that tell them apart.

    With experts, two decoder layers, the first dense, top-2: two samples of each four like the lower half.
    """
    samples = []
    for place, length in enumerate(lengths):
        index, response = start + place, length // 2
        routes = None
        if experts is not None:
            first = 0 if place % 4 < 2 else experts // 2
            routes = numpy.full((length - 1, 2, 2), -1, dtype=numpy.int32)
            routes[:, 1] = [first, first + 1]
        samples.append(
            HandMade(
                index=index,
                group_index=index // group,
                tokens=[(index + at) % 50 for at in range(length)],
                response_length=response,
                reward=float((index * 7) % 5) / 4,
                loss_mask=[(index + at) % 3 % 2 for at in range(response)],
                weight_versions=[str(index % 3)],
                rollout_log_probs=[-0.25] * response,
                rollout_routed_experts=routes,
            )
        )
    return samples


def in_groups(samples: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Return the samples in lists of these sizes."""
    left = iter(samples)
    return [[next(left) for _ in range(size)] for size in sizes]


def arguments(**given: Any) -> Namespace:
    """Return MILES' arguments for four ranks that train one sample a row, lengths to be evened out."""
    return Namespace(
        **{
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": 4,
            "global_batch_size": 16,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "micro_batch_size": 1,
            "qkv_format": "thd",
            "train_backend": "olmo_core",
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": True,
            "reward_key": None,
            "balance_data": False,
            "use_dynamic_batch_size": False,
            "use_dynamic_global_batch_size": False,
            "custom_reward_post_process_path": REWARD_CALLBACK,
            "custom_convert_samples_to_train_data_path": None,
            "rollout_sample_filter_path": None,
            "save": None,
            "pack_order": "balanced",
            "expert_balance_search_seconds": 1000.0,  # the number of proposals alone ends the search
            "expert_balance_search_proposals": 200,
            **given,
        }
    )


def expert_arguments(checkpoint: Path, **given: Any) -> Namespace:
    """Return the arguments of four ranks in two complete sets of experts, packed rows, routes replayed."""
    options = {
        "pack_order": None,
        "expert_balanced_packing": True,
        "sequence_packing": True,
        "packing_max_tokens": 12,
        "max_sequence_length": 12,
        "expert_parallel_size": 2,
        "router_aux_loss_weight": 0.0,
        "use_rollout_routing_replay": True,
        "hf_checkpoint": str(checkpoint),
    }
    return arguments(**{**options, **given})


def as_filter(args: Namespace) -> Namespace:
    """Return the same arguments with the hook at the other seam."""
    return Namespace(
        **{
            **vars(args),
            "rollout_sample_filter_path": SAMPLE_FILTER,
            "custom_reward_post_process_path": None,
        }
    )


def write_checkpoint(folder: Path, **changed: Any) -> Path:
    """Write the configuration of a model of two decoder layers, the first dense, four experts, top-2."""
    config = {
        "model_type": "olmo3moe",
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "dense_layers_indices": [0],
    }
    config.update(changed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one != "absent"}))
    return folder


def stride_columns(count: int, ranks: int, step: int) -> list[list[list[int]]]:
    """Return by rank and step the positions MILES gives it: every `ranks`th, then cut into local steps."""
    local = step // ranks
    columns = [list(range(rank, count, ranks)) for rank in range(ranks)]
    return [[column[at : at + local] for at in range(0, count // step * local, local)] for column in columns]
