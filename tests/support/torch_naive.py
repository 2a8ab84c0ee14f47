"""The small model again, slowly: one document, one token, one expert at a time, from the formulas alone."""

from __future__ import annotations

import math

import torch
from pack_torch import ModelConfig, Rollout
from torch import Tensor


def naive_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """Causal softmax attention of one document, `[n, heads, size]`, row by row and head by head."""
    rows = []
    for row in range(query.shape[0]):
        heads = []
        seen = range(0 if window is None else max(0, row - window + 1), row + 1)
        for head in range(query.shape[1]):
            scores = torch.stack([query[row, head] @ key[past, head] for past in seen])
            weights = torch.exp(scores / math.sqrt(query.shape[2]))
            weights = weights / weights.sum()
            heads.append(sum(weight * value[past, head] for weight, past in zip(weights, seen, strict=True)))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def naive_rotation(vector: Tensor, position: int, theta: float) -> Tensor:
    """Turn pair (i, i + half) of `vector` by position / theta^(2i / size)."""
    half = vector.numel() // 2
    out = [vector.new_zeros(()) for _ in range(2 * half)]
    for i in range(half):
        angle = position / theta ** (2 * i / (2 * half))
        first, second = vector[i], vector[i + half]
        out[i] = first * math.cos(angle) - second * math.sin(angle)
        out[i + half] = first * math.sin(angle) + second * math.cos(angle)
    return torch.stack(out)


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / torch.sqrt((rows**2).mean(dim=-1, keepdim=True) + 1e-6) * weight


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _routed(row: Tensor, state: dict[str, Tensor], prefix: str, top_k: int, ids: list[int] | None) -> Tensor:
    scores = torch.exp(state[f"{prefix}.router"] @ row)
    scores = scores / scores.sum()
    if ids is None:
        ids = sorted(range(scores.numel()), key=lambda expert: -float(scores[expert].detach()))[:top_k]
    total = sum(scores[expert] for expert in ids)
    out = torch.zeros_like(row)
    for expert in ids:
        gate_up = row @ state[f"{prefix}.experts.gate_up"][expert]
        half = gate_up.numel() // 2
        made = (_silu(gate_up[:half]) * gate_up[half:]) @ state[f"{prefix}.experts.down"][expert]
        out = out + scores[expert] / total * made
    return out


def naive_log_probs(state: dict[str, Tensor], config: ModelConfig, rollout: Rollout, replay: bool) -> Tensor:
    """Log-probabilities `[R]` of one rollout's response under the weights `state`."""
    tokens = rollout.tokens.tolist()
    x = torch.stack([state["embedding"][token] for token in tokens])
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        prefix = f"blocks.{layer}"
        normed = _norm(x, state[f"{prefix}.attention_norm"])
        q, k, v = (
            (normed @ part.T).view(len(tokens), heads, size)
            for part in state[f"{prefix}.attention.qkv"].split(config.hidden_size)
        )
        q, k = (
            torch.stack([
                torch.stack([naive_rotation(side[row, head], row, config.rope_theta) for head in range(heads)])
                for row in range(len(tokens))
            ])
            for side in (q, k)
        )  # fmt: skip
        attended = naive_attention(q, k, v, config.sliding_window).reshape(len(tokens), -1)
        x = x + attended @ state[f"{prefix}.attention.out"].T
        normed = _norm(x, state[f"{prefix}.mlp_norm"])
        if layer in config.dense_layers_indices:
            gate_up = normed @ state[f"{prefix}.mlp.gate_up"].T
            half = gate_up.shape[1] // 2
            x = x + (_silu(gate_up[:, :half]) * gate_up[:, half:]) @ state[f"{prefix}.mlp.down"].T
            continue
        rows = []
        for row in range(len(tokens)):
            ids = None
            if replay:
                last = row == len(tokens) - 1
                ids = list(range(config.num_experts_per_tok)) if last else rollout.routes[row, layer].tolist()
            rows.append(_routed(normed[row], state, f"{prefix}.mlp", config.num_experts_per_tok, ids))
        x = x + torch.stack(rows)
    logits = _norm(x, state["norm"]) @ state["head.weight"].T
    scored = range(rollout.prompt_length - 1, len(tokens) - 1)
    probabilities = [torch.exp(logits[row]) / torch.exp(logits[row]).sum() for row in scored]
    found = [torch.log(p[tokens[row + 1]]) for p, row in zip(probabilities, scored, strict=True)]
    return torch.stack(found) if found else x.new_zeros(0)


def naive_loss(log_probs: Tensor, rollout: Rollout, reduction: str) -> Tensor:
    """One sample's numerator of the clipped loss, token by token."""
    total, active = log_probs.new_zeros(()), 0
    for token in range(rollout.response_length):
        if not bool(rollout.loss_mask[token]):
            continue
        active += 1
        advantage = float(rollout.advantages[token])
        ratio = torch.exp(log_probs[token] - float(rollout.old_log_probs[token]))
        seen = float(ratio.detach())
        held = min(max(seen, 0.8), 1.28)
        total = total - advantage * (held if -advantage * held > -advantage * seen else ratio)
    return total / active if reduction == "response" and active else total
