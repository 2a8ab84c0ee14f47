"""What the trainer uses of a model, and the one place that builds the models of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch
from pack_torch import Groups, ModelConfig, Normalization, PackedBatch
from pack_torch.slicing import ScoringModel
from torch import Tensor
from torch.nn import Parameter

from pack_miles.core.arguments import auxiliary_denominator
from pack_miles.core.fitness import check_runs, check_trainable
from pack_miles.core.model import CoreModel, build_core
from pack_miles.core.sharding import shard_experts
from pack_miles.core.source import read_source
from pack_miles.core.weights import load_weights
from pack_miles.settings.config import Config
from pack_miles.settings.geometry import Geometry
from pack_miles.training.small import RouterWeights, SmallPolicy

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Policy(ScoringModel, Protocol):
    """A model that samples, scores and trains: forwards of packed rows, what it can do, and whose its parameters are.

    A forward takes a `PackedBatch`, replays its `routes` where it has some, and gives `hidden` `[T, D]` and the
    `routes` that were executed, int32 `[T, layers, top_k]`, -1 in layers that do not route.
    """

    @property
    def geometry(self) -> Geometry:
        """The sizes of the whole model, over all ranks."""

    def check(self, batch: PackedBatch) -> None:
        """Raise ValueError unless the model can run the row; called for all rows before the first forward of any."""

    def auxiliary_losses(self) -> list[str]:
        """Return the router losses that its backward adds to the policy's."""

    def dividing(self, loss_div_factor: float) -> ScoringModel:
        """Return the model with the number that the auxiliary losses of its forwards are divided by."""

    def stochastic(self) -> list[str]:
        """Return what makes two training forwards of a row differ."""

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter of this rank."""

    def dense_parameters(self) -> list[Parameter]:
        """Return the parameters every rank holds."""

    def expert_parameters(self) -> list[Parameter]:
        """Return this rank's share of the experts."""

    def full_state(self) -> dict[str, Tensor]:
        """Return a copy of every parameter, all experts gathered; every rank of the expert group calls it."""

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's share of what `full_state` returned, of a model of any expert-parallel degree."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank holds, for its part of a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Take back what `state_dict` returned on this rank."""

    def train(self) -> Any:
        """Turn to training."""

    def eval(self) -> Any:
        """Turn to scoring."""


def training_model(policy: Policy, counts: Normalization) -> ScoringModel:
    """Return the model of a step's training forwards; auxiliary losses are divided by the tokens of the whole step.

    Args:
        policy: the model that trains.
        counts: of the step, over all ranks; gradients are summed over them.
    """
    return policy.dividing(auxiliary_denominator(counts)) if policy.auxiliary_losses() else policy


@attrs.frozen(eq=False)
class Policies:
    """The models of one rank.

    Args:
        model: the one that trains, with this rank's share of the experts.
        sampler: holds every expert, so that a rank samples alone; its weights are loaded before each collection.
        reference: the first weights, frozen, with every expert; None where no KL penalty asks for it.
    """

    model: Policy
    sampler: Policy
    reference: Policy | None = None


def build_policies(config: Config, vocabulary: int, groups: Groups, device: torch.device) -> Policies:
    """Return the models that a configuration asks for; every rank calls it, and gets the same weights.

    Args:
        config: the run's.
        vocabulary: token ids of the run's task.
        groups: this rank's.
        device: where the training model and the reference live.

    Raises:
        InputError: on every rank, where the configuration of an OLMo-core model does not build or may not be trained.
    """
    if config.model.format == "olmo_core":
        # Kernels may need the device, so a model of OLMo-core samples where it trains.
        whole = _core(config, vocabulary, device)
        check_runs(whole, device)
        frozen: Policy | None = _core(config, vocabulary, device) if config.miles.kl_coef else None
        return Policies(_core(config, vocabulary, device, groups), whole, frozen)
    sampler = build_sampler(config, vocabulary, device)
    reference = _small(config, vocabulary, device) if config.miles.kl_coef else None
    return Policies(_small(config, vocabulary, device, groups), sampler, reference)


def build_sampler(config: Config, vocabulary: int, device: torch.device) -> Policy:
    """Return a model that samples, with every expert; its weights are to be loaded.

    Args:
        config: the run's.
        vocabulary: token ids of the run's task.
        device: where the training model lives.
    """
    if config.model.format == "olmo_core":
        return _core(config, vocabulary, device)
    # The small model samples on the CPU, where launching its few operations costs least.
    return _small(config, vocabulary, torch.device("cpu"))


def _small(config: Config, vocabulary: int, device: torch.device, groups: Groups | None = None) -> SmallPolicy:
    shape = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=config.model.hidden_size,
        num_hidden_layers=config.model.num_hidden_layers,
        num_attention_heads=config.model.num_attention_heads,
        intermediate_size=config.model.intermediate_size,
        moe_intermediate_size=config.model.moe_intermediate_size,
        n_routed_experts=config.model.n_routed_experts,
        num_experts_per_tok=config.model.num_experts_per_tok,
        dense_layers_indices=config.model.dense_layers_indices,
        dropout=config.model.dropout,
    )
    dtype, seed = DTYPES[config.model.dtype], config.run.seed
    core = config.core
    if groups is None:
        return SmallPolicy(shape, seed=seed, dtype=dtype, attention="segment").to(device)
    return SmallPolicy(
        shape,
        seed=seed,
        dtype=dtype,
        attention=core.attention_backend,
        recompute=core.activation_checkpointing,
        expert_group=groups.expert,
        router_weights=RouterWeights(core.router_aux_loss_weight or 0.0, core.router_z_loss_weight or 0.0),
    ).to(device)


def _core(config: Config, vocabulary: int, device: torch.device, groups: Groups | None = None) -> CoreModel:
    """Return an OLMo-core model; without groups a whole one, which samples rows of several prompts."""
    attention = "segment" if groups is None else config.core.attention_backend
    source = read_source(config.model.source or "")
    core = build_core(
        source.configuration,
        device=device,
        attention=attention,
        recompute=groups is not None and config.core.activation_checkpointing,
        max_tokens=config.capacity,
        seed=config.run.seed,
        lb_loss_weight=config.core.router_aux_loss_weight,
        z_loss_weight=config.core.router_z_loss_weight,
    ).to(DTYPES[config.model.dtype])
    if source.weights is not None:
        load_weights(core, source.weights)
    if groups is not None:
        shard_experts(core, groups.topology, groups.expert)
    model = CoreModel(
        core,
        packed=attention == "segment",
        replay=groups is not None and config.miles.use_rollout_routing_replay,
        expert_group=groups.expert if groups else None,
    )
    check_trainable(model, config, vocabulary)
    return model
