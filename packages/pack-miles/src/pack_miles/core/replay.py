"""Recorded expert choices replayed in OLMo-core's routers, with nothing kept between forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pack_miles.core.library import Library, load
from pack_miles.errors import input_error

#: The attribute by which the choices of one forward ride on its `loss_div_factor`.
RIDES = "_pack_miles_choices"


class Choices:
    """The expert ids of one forward, by layer: recorded ones, or those the routers made.

    It travels as an argument of the blocks, so a recomputation, whenever and on whatever thread it happens, finds the
    same ids; two forwards may be under way at once.
    """

    def __init__(self, routes: Tensor | None, layers: tuple[int, ...]) -> None:
        """Start with the choices of `routes` `[T, decoder layers, top_k]` fixed, or with none."""
        self.ids: dict[int, Tensor] = {}
        self.used: dict[int, Tensor] = {}
        self.recorded = routes is not None
        if routes is not None:
            ids = routes.to(torch.int64).unsqueeze(0)
            self.ids = {layer: ids[:, :, layer].contiguous() for layer in layers}

    def ride_on(self, carrier: Tensor) -> Tensor:
        """Return `carrier`, with these choices on it."""
        setattr(carrier, RIDES, self)
        return carrier

    def table(self, tokens: int, layers: int, top_k: int, device: torch.device) -> Tensor:
        """Return int32 `[tokens, layers, top_k]` ids as used; layers that do not route hold -1."""
        table = torch.full((tokens, layers, top_k), -1, dtype=torch.int32, device=device)
        for layer, ids in self.used.items():
            table[:, layer] = ids[0].to(torch.int32)
        return table

    def check(self, layers: tuple[int, ...]) -> None:
        """Raise RuntimeError unless the routers of all these layers gave what was recorded for them."""
        passed_by = [layer for layer in layers if layer not in self.used]
        if self.recorded:
            # In eager mode they are the very same tensors, and nothing is compared.
            used = [layer for layer in layers if layer not in passed_by and self.used[layer] is not self.ids[layer]]
            passed_by += [layer for layer in used if not torch.equal(self.used[layer], self.ids[layer])]
        if passed_by:
            raise RuntimeError(
                f"the routers of layers {sorted(passed_by)} ran without this forward's choices; was the model wrapped "
                "in something that copies its arguments, or compiled?"
            )


class RouterHook:
    """Hooks of one block that hand its router the choices its arguments carry, for as long as the block runs."""

    def __init__(self, layer: int, block: nn.Module, router: Any) -> None:
        """Install it; a block takes one."""
        if isinstance(getattr(router.get_top_k, "__self__", None), RouterHook):
            raise ValueError(f"blocks.{layer} already has a replay hook; build one CoreModel of a model")
        self.layer, self.router, self.original = layer, router, router.get_top_k
        self.running: list[Choices | None] = []
        router.get_top_k = self.get_top_k
        router.register_forward_hook(self._note)
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        # A recomputation ends in an exception once it has all it needs, and must leave nothing behind either.
        block.register_forward_hook(self._leave, with_kwargs=True, always_call=True)

    def get_top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights `[1, T, top_k]`, gathered from the live scores, and ids `[1, T, top_k]`."""
        choices = self.running[-1] if self.running else None
        if choices is None:
            return self.original(scores)  # type: ignore[no-any-return]
        if choices.recorded:
            ids = choices.ids[self.layer]
        else:
            # A recomputation saves as many tensors as the forward did: it chooses again, and takes the first choice.
            ids = choices.ids.setdefault(self.layer, self.original(scores)[1].detach())
        return scores.gather(-1, ids), ids

    def _enter(self, block: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        self.running.append(getattr(named.get("loss_div_factor"), RIDES, None))

    def _leave(self, block: nn.Module, arguments: Any, named: dict[str, Any], output: Any) -> None:
        if self.running:
            self.running.pop()

    def _note(self, router: nn.Module, arguments: Any, output: Any) -> None:
        choices = self.running[-1] if self.running else None
        if choices is not None:
            choices.used.setdefault(self.layer, output[1])


def blocks(core: Any) -> dict[int, Any]:
    """Return the decoder blocks themselves by layer, whatever recomputation has wrapped them in."""
    return {int(key): getattr(block, "_checkpoint_wrapped_module", block) for key, block in core.blocks.items()}


def routers(core: Any) -> dict[int, Any]:
    """Return the router of every layer that has routed experts, by layer."""
    found = {layer: getattr(block, "routed_experts_router", None) for layer, block in blocks(core).items()}
    return {layer: router for layer, router in found.items() if router is not None}


def install(core: Any) -> None:
    """Put a hook on every layer that routes. Without choices in its arguments a layer is as it was."""
    for layer, router in routers(core).items():
        RouterHook(layer, blocks(core)[layer], router)


def check_replay(core: nn.Module) -> None:
    """Raise unless recorded choices can be replayed in every router of a built model.

    Raises:
        InputError: no layer routes, or a router chooses where the hook does not reach; lists the layers.
    """
    library = load()
    found = routers(core)
    problems = [problem for layer, router in found.items() for problem in _problems(library, layer, router)]
    if not found:
        problems = ["no layer has routed experts; set use_rollout_routing_replay = false for a dense model"]
    if problems:
        raise input_error("recorded expert choices cannot be replayed in this OLMo-core model", problems)


def _problems(library: Library, layer: int, router: Any) -> Iterator[str]:
    name = f"blocks.{layer}.routed_experts_router"
    if type(router) is not library.RouterV2:
        yield f"{name}: {type(router).__name__} chooses by itself; use the plain router of OLMo-core's MoE v2"
        return
    if router.gating_function not in (library.GatingFunction.softmax, library.GatingFunction.sigmoid):
        yield (
            f"{name}: gating {str(router.gating_function)!r} chooses from the logits and passes the hook by; use "
            "softmax or sigmoid, or turn replay off"
        )
    for option in ("uniform_expert_assignment", "random_expert_assignment", "use_recompute_cache"):
        if getattr(router, option):
            yield f"{name}: {option} overrides recorded choices or their weights; turn it off, or turn replay off"
