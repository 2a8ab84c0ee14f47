"""OLMo-core models on packed rows: built from Core's own configuration, checked, and run as the small model is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import attrs
import torch
from pack_torch import ModelOutput, PackedBatch, check_routes
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pack_miles.core.arguments import check_forward, document_arguments
from pack_miles.core.attention import check_flash_4, use_segment
from pack_miles.core.checks import check_documents_apart
from pack_miles.core.library import Library, load
from pack_miles.core.replay import Choices, check_replay, install, routers
from pack_miles.core.sharding import gather_state, routed_experts, scatter_state
from pack_miles.errors import InputError
from pack_miles.settings.geometry import Geometry


def build_core(
    config: Any,
    *,
    device: torch.device | str = "cpu",
    attention: str | None = None,
    recompute: bool = False,
    max_tokens: int | None = None,
    seed: int | None = None,
    lb_loss_weight: float | None = None,
    z_loss_weight: float | None = None,
) -> Any:
    """Return an OLMo-core model built on a device, its weights drawn from the configuration's `init_seed`.

    Args:
        config: a `TransformerConfig` of Core, or the mapping one is saved as.
        device: where it lies.
        attention: backend of every attention layer: `segment`, or one of Core's names; None leaves the configuration.
        recompute: keep no activations inside a block and run it again in the backward.
        max_tokens: of the longest row, to prepare rotary tables for.
        seed: of the weights, in place of the configuration's `init_seed`.
        lb_loss_weight: of the routers' load-balancing loss, in place of the configuration's; 0 turns it off.
        z_loss_weight: of the routers' z-loss, as above.

    Raises:
        InputError: OLMo-core is not the one driven here, or the configuration is none of its own or does not build.
    """
    library = load()
    if isinstance(config, Mapping):
        config = _read(library, config)
    if not isinstance(config, library.TransformerConfig):
        raise InputError(
            f"the model configuration is {type(config).__name__}; give OLMo-core's TransformerConfig, or the mapping "
            "that its as_config_dict() saves"
        )
    config = copy.deepcopy(config)
    if seed is not None:
        config.init_seed = seed
    if attention is not None:
        _choose_attention(config, attention)
    _weigh_losses(config, {"lb_loss_weight": lb_loss_weight, "z_loss_weight": z_loss_weight})
    routed = hasattr(config, "recompute_each_block")
    if recompute and routed:
        config.recompute_each_block = True
    try:
        core = config.build(init_device="cpu" if str(device) == "cpu" else "meta")
    except Exception as error:  # what is missing or does not fit, Core says in errors of many kinds
        raise InputError(
            f"OLMo-core cannot build this model here: {error}; install what it names, or change its configuration"
        ) from error
    if attention == "segment":
        use_segment(core)
    core.init_weights(device=torch.device(device), max_seq_len=max_tokens)
    if recompute and not routed:
        core.apply_activation_checkpointing(library.CheckpointingMode.full)
    return core


def _read(library: Library, saved: Mapping[str, Any]) -> Any:
    try:
        return library.TransformerConfig.from_dict(dict(saved))
    except Exception as error:  # it imports the classes that the mapping names, and calls them
        raise InputError(
            f"OLMo-core {library.version} cannot read the model configuration: {error}; give the mapping that its "
            "as_config_dict() saves"
        ) from error


def _choose_attention(config: Any, attention: str) -> None:
    library = load()
    names = [str(name) for name in library.BackendName]
    if attention not in ("segment", *names):
        raise InputError(f"attention {attention!r} is not one of segment, {', '.join(names)}")
    if attention == "flash_4":
        check_flash_4(library)
    backend = library.BackendName("torch" if attention == "segment" else attention)
    for block in _block_configs(config):
        if isinstance(block.sequence_mixer, library.AttentionConfig):
            block.sequence_mixer.backend = backend
            block.sequence_mixer.use_flash = None


def _weigh_losses(config: Any, weights: Mapping[str, float | None]) -> None:
    """Set the weights that are given in every router's configuration; 0 is how Core's own has none."""
    routers = [getattr(block, "routed_experts_router", None) for block in _block_configs(config)]
    found = [router for router in routers if router is not None]
    for name, weight in weights.items():
        if weight and not found:
            raise InputError(f"{name} = {weight:g} but no layer has routed experts; leave it out for a dense model")
        for router in found if weight is not None else ():
            setattr(router, name, weight or None)


def _block_configs(config: Any) -> list[Any]:
    blocks = list(config.block.values()) if isinstance(config.block, dict) else [config.block]
    return [*blocks, *(config.block_overrides or {}).values()]


class CoreModel(nn.Module):
    """An OLMo-core model that takes packed batches; it satisfies `pack_miles.training.policy.Policy`.

    Args:
        core: a built `Transformer` or `OLMoDDPModel`; it takes hooks of this class, and belongs to it from now on.
        packed: rows hold several documents, and every forward is told of them. False is for one sample a row on
            whatever attention there is; a row of several is then refused.
        replay: recorded expert choices will be replayed; refused where they cannot be.
        expert_group: the ranks over which `shard_experts` spread the experts; None where they are all here.

    Raises:
        InputError: a layer that would mix documents, or a router that replay does not reach; lists all of them.
    """

    def __init__(
        self,
        core: nn.Module,
        *,
        packed: bool = True,
        replay: bool = False,
        expert_group: ProcessGroup | None = None,
    ) -> None:
        """Check the model layer by layer and put the hooks on."""
        super().__init__()
        if packed:
            check_documents_apart(core)
            core.register_forward_pre_hook(check_forward, with_kwargs=True)
        if replay:
            check_replay(core)
        install(core)
        self.core, self.packed, self.replay = core, packed, replay
        self.expert_group, self.geometry = expert_group, _geometry(core)

    def forward(self, batch: PackedBatch, *, loss_div_factor: float | None = None) -> ModelOutput:
        """Return hidden states before the head and the experts each token went to.

        Args:
            batch: its `routes` are replayed; without them the routers choose.
            loss_div_factor: what auxiliary router losses are divided by, see `auxiliary_denominator`; needed where
                there are any, in training.

        Raises:
            ValueError: before anything is sent: see `check`; a training forward with auxiliary losses without a factor.
        """
        self.check(batch)
        if loss_div_factor is None and self.training and torch.is_grad_enabled() and self.auxiliary_losses():
            raise ValueError(
                f"the routers have auxiliary losses ({', '.join(self.auxiliary_losses())}) but no loss_div_factor was "
                "given; OLMo-core would weigh them once a pack: give auxiliary_denominator(counts of the step)"
            )
        choices = Choices(batch.routes, self.geometry.moe_layers)
        factor = torch.tensor(float(batch.tokens if loss_div_factor is None else loss_div_factor))
        named: dict[str, Any] = document_arguments(batch) if self.packed else {}
        if self.geometry.moe_layers:
            named["loss_div_factor"] = choices.ride_on(factor.to(batch.input_ids.device))
        hidden = self._hidden(batch.input_ids.unsqueeze(0), named)
        choices.check(self.geometry.moe_layers)
        routes = choices.table(batch.tokens, self.geometry.layers, self.geometry.top_k, hidden.device)
        return ModelOutput(hidden, routes)

    def _hidden(self, tokens: Tensor, named: dict[str, Any]) -> Tensor:
        """Return `[T, D]`, what the blocks make of the row; the head sees it but works on no row."""
        seen: list[Tensor] = []

        def look(head: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen.append(arguments[0])

        none = torch.zeros(1, 0, dtype=torch.int64, device=tokens.device)
        hook = self.head.register_forward_pre_hook(look)
        try:
            self.core(tokens, logits_to_keep=none, **named)
        finally:
            hook.remove()
        return seen[0].squeeze(0)

    def check(self, batch: PackedBatch) -> None:
        """Raise unless this model can run `batch`: documents, token ids, and replayed routes.

        With expert parallelism, check the packs of all ranks before the first forward: a rank that stops here alone
        would leave the others waiting.

        Raises:
            ValueError: names the sample and what is wrong with it.
        """
        geometry = self.geometry
        if not self.packed and batch.documents > 1:
            raise ValueError(
                f"the row has {batch.documents} documents but the model was built for one sample a row; build it with "
                "packed=True"
            )
        if batch.shares_prompts:
            raise ValueError(
                "OLMo-core knows documents by their lengths alone, but branches share prompts in this row; give a "
                "format with shared=False"
            )
        outside = ((batch.input_ids < 0) | (batch.input_ids >= geometry.vocabulary)).nonzero()
        if outside.numel():
            row = int(outside[0])
            raise ValueError(
                f"{batch.name(int(batch.document_ids[row]))}: token {int(batch.input_ids[row])} at row {row:,} of the "
                f"pack is outside the vocabulary of {geometry.vocabulary:,}; was it tokenized for another model?"
            )
        if batch.routes is None:
            return
        if not self.replay:
            raise ValueError(
                "the batch has routes but the model was built without replay; give replay=True, or leave them"
            )
        expected = (geometry.layers, geometry.top_k)
        found = tuple(batch.routes.shape[1:])
        if found != expected:
            raise ValueError(
                f"{batch.name(0)}: routes have {found[0]} layers and top_k {found[1]} but the "
                f"model has {expected[0]} layers and top_k {expected[1]}; record every decoder layer, dense ones too"
            )
        names = [rollout.id for rollout in batch.rollouts]
        check_routes(batch.routes, geometry.experts, geometry.moe_layers, doc_lens=batch.doc_lens, names=names or None)

    @property
    def head(self) -> Any:
        """Core's output head: the last norm and the projection."""
        return cast(Any, self.core).lm_head

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[rows, V]` for `[rows, D]` of a forward's hidden states; the last norm is applied here."""
        return cast(Tensor, self.head(hidden.unsqueeze(0))).squeeze(0)

    def dividing(self, loss_div_factor: float) -> Dividing:
        """Return this model for `response_log_probs`, its forwards dividing auxiliary losses by the factor."""
        return Dividing(self, loss_div_factor)

    def auxiliary_losses(self) -> list[str]:
        """Return the auxiliary router losses that are on, by Core's names."""
        names = ("lb_loss_weight", "z_loss_weight", "orth_loss_weight")
        found = routers(self.core).values()
        return [name for name in names if any(getattr(router, name) for router in found)]

    def stochastic(self) -> list[str]:
        """Return what draws random numbers in training, by path; two forwards of a row then differ."""
        names = [name for name, module in self.core.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
        names += [name for name, module in self.core.named_modules() if getattr(module, "dropout_p", 0) > 0]
        for layer, router in routers(self.core).items():
            options = [option for option in ("jitter_eps", "random_expert_assignment") if getattr(router, option)]
            names += [f"blocks.{layer}.routed_experts_router.{option}" for option in options]
        return names

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return this rank's share of the routed experts; ranks of a replica hold different ones."""
        return [parameter for experts in routed_experts(self.core).values() for parameter in experts.parameters()]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return everything every rank holds alike: all but the routed experts."""
        own = {id(parameter) for parameter in self.expert_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in own]

    def full_state(self) -> dict[str, Tensor]:
        """Return a copy of every parameter by name, experts gathered; every rank of the expert group calls it."""
        return gather_state(self, self.expert_parameters(), self.expert_group)

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's share of what `full_state` returned, of a model of any expert-parallel degree.

        Raises:
            ValueError: a name or a shape differs; names it.
        """
        scatter_state(self, self.expert_parameters(), self.expert_group, state)


@attrs.frozen(eq=False)
class Dividing:
    """A model with the factor that its forwards of one optimizer step divide auxiliary losses by."""

    model: CoreModel
    loss_div_factor: float

    def __call__(self, batch: PackedBatch) -> ModelOutput:
        """Return the model's output for the batch."""
        return cast(ModelOutput, self.model(batch, loss_div_factor=self.loss_div_factor))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[rows, V]` for `[rows, D]`."""
        return self.model.logits(hidden)


def _geometry(core: Any) -> Geometry:
    found = routers(core)
    sizes = {(int(router.num_experts), int(router.top_k)) for router in found.values()}
    if len(sizes) > 1:
        raise InputError(
            f"the routed layers differ in (experts, top_k): {sorted(sizes)}; routes are recorded as one table, so make "
            "them alike"
        )
    experts, top_k = next(iter(sizes), (0, 0))
    return Geometry(len(core.blocks), core.embeddings.num_embeddings, tuple(found), experts, top_k)
