"""Plans become packed rows: varlen tensors, document-aware attention, replayed routes, per-sample losses."""

from pack_torch.advantages import grpo_advantages
from pack_torch.attention import AttentionBackend, get_attention
from pack_torch.batch import PackedBatch, build_batch
from pack_torch.choice import Availability, available, choose_attention
from pack_torch.chunked import chunked_log_probs
from pack_torch.collate import Batch, PackCollator
from pack_torch.config import ModelConfig
from pack_torch.counts import GroupSizes, Normalization, group_sizes, normalization
from pack_torch.formats import Field, Format, Multimodal, Preference, Sft, SharedPrompt, split_row, truncate_row
from pack_torch.hardware import Hardware
from pack_torch.importance import ImportanceWeights, importance_weights
from pack_torch.iterable import EvenPacks, PackedIterable, even_packs, follow, mix, shuffle
from pack_torch.kl import entropy_bonus, kl_loss, kl_penalty, token_kl
from pack_torch.loss import PolicyLoss, policy_loss
from pack_torch.masks import block_mask, document_causal_mask, mask_function
from pack_torch.metrics import SampleMetrics, sample_metrics, total_metrics
from pack_torch.model import ModelOutput, SmallModel
from pack_torch.pack import Pack, build_pack
from pack_torch.parallel import Groups, build_groups, clip_gradients, gradient_norm, reduce_gradients
from pack_torch.recurrence import gated_delta_rule, kimi_delta_attention, short_convolution
from pack_torch.reductions import TokenLoss, reduce_tokens
from pack_torch.replay import check_routes, pack_routes
from pack_torch.rollout import Rollout
from pack_torch.router_losses import RouterLoss, load_balancing_loss, router_z_loss
from pack_torch.slicing import batch_log_probs, response_log_probs, scored_rows, scored_targets, target_log_probs
from pack_torch.state import full_gradients, full_state, load_full_state
from pack_torch.stream import StreamPacker
from pack_torch.supervised import PreferenceLoss, dpo_loss, sft_loss
from pack_torch.tallies import add_metrics, progress_line, summarize

__all__ = [
    "AttentionBackend",
    "Availability",
    "Batch",
    "EvenPacks",
    "Field",
    "Format",
    "GroupSizes",
    "Groups",
    "Hardware",
    "ImportanceWeights",
    "ModelConfig",
    "ModelOutput",
    "Multimodal",
    "Normalization",
    "Pack",
    "PackCollator",
    "PackedBatch",
    "PackedIterable",
    "PolicyLoss",
    "Preference",
    "PreferenceLoss",
    "Rollout",
    "RouterLoss",
    "SampleMetrics",
    "Sft",
    "SharedPrompt",
    "SmallModel",
    "StreamPacker",
    "TokenLoss",
    "add_metrics",
    "available",
    "batch_log_probs",
    "block_mask",
    "build_batch",
    "build_groups",
    "build_pack",
    "check_routes",
    "choose_attention",
    "chunked_log_probs",
    "clip_gradients",
    "document_causal_mask",
    "dpo_loss",
    "entropy_bonus",
    "even_packs",
    "follow",
    "full_gradients",
    "full_state",
    "gated_delta_rule",
    "get_attention",
    "gradient_norm",
    "group_sizes",
    "grpo_advantages",
    "importance_weights",
    "kimi_delta_attention",
    "kl_loss",
    "kl_penalty",
    "load_balancing_loss",
    "load_full_state",
    "mask_function",
    "mix",
    "normalization",
    "pack_routes",
    "policy_loss",
    "progress_line",
    "reduce_gradients",
    "reduce_tokens",
    "response_log_probs",
    "router_z_loss",
    "sample_metrics",
    "scored_rows",
    "scored_targets",
    "sft_loss",
    "short_convolution",
    "shuffle",
    "split_row",
    "summarize",
    "target_log_probs",
    "token_kl",
    "total_metrics",
    "truncate_row",
]
