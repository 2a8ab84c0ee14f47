"""What a built OLMo-core model must be so that the trainer of this package may train it."""

from collections.abc import Iterator

import torch
from pack_torch import PackedBatch

from pack_miles.core.model import CoreModel
from pack_miles.core.replay import routers
from pack_miles.errors import InputError, input_error
from pack_miles.settings.config import Config


def check_trainable(model: CoreModel, config: Config, vocabulary: int) -> None:
    """Raise unless the trainer can train a model as the configuration asks.

    Args:
        model: as built.
        config: the run's.
        vocabulary: token ids that the run's task speaks.

    Raises:
        InputError: lists everything that is in the way, and what to do.
    """
    problems = list(_problems(model, config, vocabulary))
    if problems:
        raise input_error(f"{config.model.source}: this OLMo-core model cannot be trained", problems)


@torch.no_grad()
def check_runs(model: CoreModel, device: torch.device) -> None:
    """Raise unless a model runs where it lies, by running a row of two documents; nothing of it changes.

    Args:
        model: with every expert on this rank.
        device: where it lies.

    Raises:
        InputError: a kernel is missing; says what stopped it.
    """
    model.eval()
    row = PackedBatch(torch.zeros(3, dtype=torch.int64), (2, 1)).to(device)
    try:
        model.logits(model(row).hidden)
    except Exception as error:  # each missing kernel fails in its own way
        told = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(
            f"this OLMo-core model does not run on {device}: {told}; its mixtures of experts and delta attention run "
            "on GPUs only (run.backend = nccl), dense models with full attention anywhere"
        ) from error


def _problems(model: CoreModel, config: Config, vocabulary: int) -> Iterator[str]:
    if model.geometry.vocabulary < vocabulary:
        yield (
            f"vocab_size is {model.geometry.vocabulary} but task {config.data.task!r} speaks {vocabulary} token ids; "
            f"set vocab_size to {vocabulary} or more"
        )
    if model.stochastic():
        yield (
            f"{', '.join(model.stochastic())} draw random numbers in training, so that no two forwards of a row agree; "
            "turn them off"
        )
    for layer, router in routers(model.core).items():
        if getattr(router, "bias_gamma", None) is not None:
            yield (
                f"blocks.{layer}.routed_experts_router: bias_gamma moves a bias after every step of OLMo-core's own "
                "trainer, which does not run here; leave it out"
            )
    losses = [name for name in model.auxiliary_losses() if name != "z_loss_weight"]
    if losses and config.core.expert_balanced_packing:
        yield (
            f"{', '.join(losses)} with core.expert_balanced_packing = true: these losses are means over the tokens of "
            "a forward, so another order would train another loss; set them to 0, z_loss_weight may stay"
        )
