"""Plans become packed rows: varlen tensors, document-aware attention, replayed routes, per-sample losses."""

from pack_torch.advantages import grpo_advantages
from pack_torch.attention import AttentionBackend, get_attention
from pack_torch.batch import PackedBatch, build_batch
from pack_torch.config import ModelConfig
from pack_torch.loss import Normalization, PolicyLoss, normalization, policy_loss
from pack_torch.masks import document_causal_mask
from pack_torch.model import ModelOutput, SmallModel
from pack_torch.parallel import Groups, build_groups, clip_gradients, gradient_norm, reduce_gradients
from pack_torch.replay import check_routes, pack_routes
from pack_torch.rollout import Rollout
from pack_torch.slicing import response_log_probs, scored_rows, scored_targets, target_log_probs
from pack_torch.state import full_gradients, full_state, load_full_state

__all__ = [
    "AttentionBackend",
    "Groups",
    "ModelConfig",
    "ModelOutput",
    "Normalization",
    "PackedBatch",
    "PolicyLoss",
    "Rollout",
    "SmallModel",
    "build_batch",
    "build_groups",
    "check_routes",
    "clip_gradients",
    "document_causal_mask",
    "full_gradients",
    "full_state",
    "get_attention",
    "gradient_norm",
    "grpo_advantages",
    "load_full_state",
    "normalization",
    "pack_routes",
    "policy_loss",
    "reduce_gradients",
    "response_log_probs",
    "scored_rows",
    "scored_targets",
    "target_log_probs",
]
