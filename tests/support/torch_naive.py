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


def naive_delta(normed: Tensor, state: dict[str, Tensor], prefix: str, config: ModelConfig) -> Tensor:
    """Kimi delta attention of one document, `[n, D]`, token by token and head by head."""
    tokens, heads, size = normed.shape[0], config.num_attention_heads, config.linear_head_dim
    taps, straight = state[f"{prefix}.taps"], normed @ state[f"{prefix}.qkv"].T
    reach = taps.shape[1]
    mixed = []
    for row in range(tokens):
        total = sum(taps[:, reach - 1 - back] * straight[row - back] for back in range(min(reach, row + 1)))
        mixed.append(_silu(total))
    out = []
    memory = [normed.new_zeros(size, size) for _ in range(heads)]
    for row in range(tokens):
        read = []
        steps = state[f"{prefix}.decay_wide"] @ (state[f"{prefix}.decay_narrow"] @ normed[row])
        steps = torch.log(1 + torch.exp(steps + state[f"{prefix}.dt_bias"]))
        gate = state[f"{prefix}.gate_wide"] @ (state[f"{prefix}.gate_narrow"] @ normed[row])
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            q, k, v = (mixed[row][part * heads * size : (part + 1) * heads * size][own] for part in range(3))
            q, k = (side / torch.sqrt(side @ side + 1e-6) for side in (q, k))
            beta = 1 / (1 + torch.exp(-(state[f"{prefix}.beta"][head] @ normed[row])))
            kept = torch.exp(-torch.exp(state[f"{prefix}.A_log"][head]) * steps[own])
            # (I - beta k k^T) Diag(kept) S + beta k v^T, as the paper writes it
            erase = torch.eye(size, dtype=k.dtype) - beta * torch.outer(k, k)
            memory[head] = erase @ torch.diag(kept) @ memory[head] + beta * torch.outer(k, v)
            found = _norm(memory[head].T @ q / math.sqrt(size), state[f"{prefix}.norm"])
            read.append(found / (1 + torch.exp(-gate[own])))
        out.append(torch.cat(read) @ state[f"{prefix}.out"].T)
    return torch.stack(out)


def _full_attention(normed: Tensor, state: dict[str, Tensor], prefix: str, config: ModelConfig) -> Tensor:
    tokens, heads, size = normed.shape[0], config.num_attention_heads, config.hidden_size // config.num_attention_heads
    q, k, v = ((normed @ part.T).view(tokens, heads, size) for part in state[f"{prefix}.qkv"].split(config.hidden_size))
    q, k = (
        torch.stack([
            torch.stack([naive_rotation(side[row, head], row, config.rope_theta) for head in range(heads)])
            for row in range(tokens)
        ])
        for side in (q, k)
    )  # fmt: skip
    attended = naive_attention(q, k, v, config.sliding_window).reshape(tokens, -1)
    return attended @ state[f"{prefix}.out"].T


def _routed(row: Tensor, state: dict[str, Tensor], prefix: str, top_k: int, ids: list[int] | None) -> Tensor:
    scores = torch.exp(state[f"{prefix}.router"] @ row)
    scores = scores / scores.sum()
    if ids is None:
        ids = sorted(range(scores.numel()), key=lambda expert: -float(scores[expert].detach()))[:top_k]
    total = sum(scores[expert] for expert in ids)
    latent = f"{prefix}.latent_in" in state
    seen = state[f"{prefix}.latent_in"] @ row if latent else row
    out = torch.zeros_like(seen)
    for expert in ids:
        gate_up = seen @ state[f"{prefix}.experts.gate_up"][expert]
        half = gate_up.numel() // 2
        made = (_silu(gate_up[:half]) * gate_up[half:]) @ state[f"{prefix}.experts.down"][expert]
        out = out + scores[expert] / total * made
    return state[f"{prefix}.latent_out"] @ out if latent else out


def naive_log_probs(state: dict[str, Tensor], config: ModelConfig, rollout: Rollout, replay: bool) -> Tensor:
    """Log-probabilities `[R]` of one rollout's response under the weights `state`."""
    tokens = rollout.tokens.tolist()
    x = torch.stack([state["embedding"][token] for token in tokens])
    for layer in range(config.num_hidden_layers):
        prefix = f"blocks.{layer}"
        normed = _norm(x, state[f"{prefix}.attention_norm"])
        mix = _full_attention if config.layer_type(layer) == "full_attention" else naive_delta
        x = x + mix(normed, state, f"{prefix}.attention", config)
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
