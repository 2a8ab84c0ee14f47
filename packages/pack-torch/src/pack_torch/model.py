"""A small mixture-of-experts decoder over packed rows: the model of the demo and of the tests."""

from __future__ import annotations

from typing import cast

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from pack_torch.attention import get_attention
from pack_torch.batch import PackedBatch
from pack_torch.config import ModelConfig as ModelConfig
from pack_torch.experts import Experts, Routing
from pack_torch.layers import Block, Context, norm, rotation, weight
from pack_torch.replay import check_routes
from pack_torch.state import draw_weights


@attrs.frozen(eq=False)
class ModelOutput:
    """What one forward gives.

    Args:
        hidden: `[T, D]` after the last norm; `SmallModel.logits` turns rows of it into logits.
        routes: int32 `[T, layers, top_k]` experts used; dense layers hold -1.
        router_logits: `[T, MoE layers, E]` before the softmax, with their graph, float32 or wider; None unless asked
            for. They go with `routes[:, list(config.moe_layers)]`.
    """

    hidden: Tensor
    routes: Tensor
    router_logits: Tensor | None = None


def _run(block: nn.Module, hidden: Tensor, context: Context, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """Return what the block makes and its router's logits; a list a run, so that running again adds to no other."""
    logits: list[Tensor] = []
    return block(hidden, attrs.evolve(context, router_logits=logits) if keep else context), logits


class SmallModel(nn.Module):
    """A pre-norm decoder: full or linear attention, dense layers where named, mixtures of experts elsewhere.

    Args:
        config: sizes.
        seed: fixes every weight, whatever the expert-parallel degree: each rank draws all experts and keeps its own.
        dtype: of weights and activations; the router's softmax is never narrower than float32.
        attention: a backend by name.
        recompute: keep no activations inside a block and run it again in the backward.
        expert_group: the ranks that share one expert set; None holds it all here. Every rank of it must run as many
            forwards and backwards as the others.

    >>> config = ModelConfig(16, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
    ...                      moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2)
    >>> output = SmallModel(config, seed=0)(PackedBatch(torch.tensor([1, 2, 3, 4, 5]), (3, 2)))
    >>> output.hidden.shape, output.routes.shape, output.routes[0, 0].tolist()
    (torch.Size([5, 8]), torch.Size([5, 2, 2]), [-1, -1])
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        attention: str = "segment",
        recompute: bool = False,
        expert_group: ProcessGroup | None = None,
    ) -> None:
        """Build the layers and draw every weight from `seed`."""
        super().__init__()
        self.config, self.recompute, self.expert_group = config, recompute, expert_group
        self.backend = get_attention(attention)
        self.embedding = weight(config.vocab_size, config.hidden_size, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(config, layer, self.backend, expert_group, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = weight(config.hidden_size, dtype=dtype)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        draw_weights(self, seed)

    def forward(self, batch: PackedBatch, *, router_logits: bool = False) -> ModelOutput:
        """Return hidden states of every token and the experts they went to.

        `batch.routes` replays recorded choices; without it the router chooses. `router_logits` keeps what the routers
        thought, for their losses.

        Raises:
            ValueError: before anything is sent: see `check`.
        """
        self.check(batch)
        config = self.config
        hidden = embedding(batch.input_ids, self.embedding)  # [T, D]
        size = config.hidden_size // config.num_attention_heads
        routing = Routing(config.n_routed_experts, config.num_experts_per_tok, self.expert_group)
        if batch.routes is not None:
            routing.replay(batch.routes, config.moe_layers)
        context = Context(batch, *rotation(batch.position_ids, size, config.rope_theta, hidden.dtype), routing)
        kept: list[Tensor] = []
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                stochastic = config.dropout > 0 and self.training
                hidden, logits = checkpoint(
                    _run, block, hidden, context, router_logits, use_reentrant=False, preserve_rng_state=stochastic
                )
            else:
                hidden, logits = _run(block, hidden, context, router_logits)
            kept += logits
        routes = routing.table(batch.tokens, config.num_hidden_layers, hidden.device)
        stacked = torch.stack(kept, dim=1) if kept else hidden.new_zeros(batch.tokens, 0, config.n_routed_experts)
        return ModelOutput(norm(hidden, self.norm), routes, stacked if router_logits else None)

    def check(self, batch: PackedBatch) -> None:
        """Raise unless this model can run `batch`: attention, token ids, and replayed routes.

        With an expert group, check the packs of all ranks before the first forward: a rank that stops here alone would
        leave the others waiting.

        Raises:
            ValueError: names the sample and what is wrong with it.
        """
        config = self.config
        if batch.shares_prompts and "linear_attention" in (config.layer_types or ()):
            raise ValueError(
                "this model has linear_attention layers, whose state after a prompt would run on from one branch into "
                "the next, but branches share prompts in this row; give a format with shared=False"
            )
        self.backend.check(batch, window=config.sliding_window, dtype=self.embedding.dtype)
        outside = ((batch.input_ids < 0) | (batch.input_ids >= config.vocab_size)).nonzero()
        if outside.numel():
            row = int(outside[0])
            name = batch.name(int(batch.document_ids[row]))
            raise ValueError(
                f"{name}: token {int(batch.input_ids[row])} at row {row:,} of the pack is outside the vocabulary "
                f"of {config.vocab_size:,}; was it tokenized for another model?"
            )
        if batch.routes is None:
            return
        expected = (config.num_hidden_layers, config.num_experts_per_tok)
        if tuple(batch.routes.shape[1:]) != expected:
            _, layers, top_k = batch.routes.shape
            raise ValueError(
                f"{batch.name(0)}: routes have {layers} layers and top_k {top_k} but the "
                f"model has {expected[0]} layers and top_k {expected[1]}; record every decoder layer, dense ones too"
            )
        names = [rollout.id for rollout in batch.rollouts]
        check_routes(
            batch.routes, config.n_routed_experts, config.moe_layers, doc_lens=batch.doc_lens, names=names or None
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[rows, V]` for `[rows, D]`."""
        return cast(Tensor, self.head(hidden))

    def expert_modules(self) -> list[Experts]:
        """Return the experts of every routed layer, in order."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return this rank's share of the experts; ranks of a replica hold different ones."""
        return [parameter for experts in self.expert_modules() for parameter in experts.parameters()]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return everything every rank holds alike: all but the experts."""
        own = {id(parameter) for parameter in self.expert_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in own]
