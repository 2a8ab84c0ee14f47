"""One rollout: its tokens, and everything per response token that belongs to them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cached_property
from typing import Any, cast

import attrs
import torch
from torch import Tensor

#: The integer widths recorded expert ids may come in.
ROUTE_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

#: The fields that hold one number per response token.
RESPONSE_FIELDS = ("loss_mask", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")


def _as_tokens(values: Any) -> Tensor:
    tokens = torch.as_tensor(values)
    if tokens.numel() and (tokens.is_floating_point() or tokens.dtype == torch.bool):
        raise ValueError(f"tokens are {tokens.dtype} but must be integers")
    return tokens.to(torch.int64)


def _as_floats(values: Any) -> Tensor | None:
    if values is None:
        return None
    # Python floats are doubles: keep them whole, the loss casts to the dtype it works in.
    known = isinstance(values, Tensor) or hasattr(values, "dtype")
    floats = torch.as_tensor(values) if known else torch.as_tensor(values, dtype=torch.float64)
    return floats if floats.is_floating_point() else floats.to(torch.float64)


def _as_versions(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ValueError(f"weight_versions is the text {values!r}; give a list of versions")
    return tuple(values)


def _as_routes(values: Any) -> Tensor | None:
    return None if values is None else torch.as_tensor(values)


def _as_mask(values: Any, instance: attrs.AttrsInstance) -> Tensor:
    rollout = cast(Rollout, instance)
    if values is None:
        return torch.ones(max(rollout.response_length, 0), dtype=torch.bool)
    mask = torch.as_tensor(values)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"sample {rollout.id!r}: loss_mask has values other than 0 and 1")
    return mask.to(torch.bool)


@attrs.frozen(eq=False)
class Rollout:
    """One sample of a collection: prompt and response in one row of tokens.

    The response is always the suffix of `tokens`. Every `[R]` field counts from the first response token, and goes
    wherever its sample goes. Values are compared by identity; `attrs.evolve` makes a copy with fields added.

    Args:
        id: unique within the collection; named by every error about this sample.
        tokens: `[T]` token ids, any integer dtype, stored as int64.
        response_length: R, the number of response tokens; 0 is legal, T is not (a prompt has at least one token).
        loss_mask: `[R]` 0/1 or bool, which response tokens train; None trains all of them.
        group: the prompt this rollout answers; advantages compare rollouts of one group.
        routes: `[T-1, layers, top_k]` expert ids as recorded, one row per token that was run. The last token was
            sampled but never run. The layer axis counts every decoder layer, dense ones too.
        advantages: `[R]`.
        old_log_probs: `[R]` log-probabilities under the policy that anchors the update.
        rollout_log_probs: `[R]` log-probabilities under the policy that sampled.
        ref_log_probs: `[R]` log-probabilities under the reference policy.
        reward: one number for the whole response.
        weight_versions: the versions of the weights that sampled it, oldest first.

    Raises:
        ValueError: a field has the wrong shape, length or dtype; names the sample and the field.

    >>> rollout = Rollout(id="q17/3", tokens=[5, 6, 7, 8], response_length=2)
    >>> rollout.length, rollout.prompt_length, rollout.loss_mask.tolist()
    (4, 2, [True, True])
    """

    id: str | int
    tokens: Tensor = attrs.field(converter=_as_tokens, repr=False)
    response_length: int = attrs.field(converter=operator.index)
    loss_mask: Tensor = attrs.field(
        default=None,
        converter=attrs.Converter(_as_mask, takes_self=True),  # type: ignore[misc]
        repr=False,
    )
    group: str | int | None = None
    routes: Tensor | None = attrs.field(default=None, converter=_as_routes, repr=False)
    advantages: Tensor | None = attrs.field(default=None, converter=_as_floats, repr=False)
    old_log_probs: Tensor | None = attrs.field(default=None, converter=_as_floats, repr=False)
    rollout_log_probs: Tensor | None = attrs.field(default=None, converter=_as_floats, repr=False)
    ref_log_probs: Tensor | None = attrs.field(default=None, converter=_as_floats, repr=False)
    reward: float | None = None
    weight_versions: tuple[str, ...] = attrs.field(default=(), converter=_as_versions)

    def __attrs_post_init__(self) -> None:
        """Check every field against the sample's own lengths."""
        _check_lengths(self)
        for name in RESPONSE_FIELDS:
            values = getattr(self, name)
            if values is not None and tuple(values.shape) != (self.response_length,):
                raise ValueError(
                    f"sample {self.id!r}: {name} has shape {list(values.shape)} but the response has "
                    f"{self.response_length:,} tokens; give one value per response token"
                )
        if self.routes is not None:
            _check_routes(self, self.routes)

    @cached_property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return int(self.tokens.numel())

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, at least one."""
        return self.length - self.response_length

    @property
    def active_tokens(self) -> int:
        """Response tokens that the loss mask lets train."""
        return int(self.loss_mask.sum())

    def check_finite(self) -> None:
        """Raise unless every number that trains is finite; what the mask hides may be anything.

        Raises:
            ValueError: naming the sample, the field and the response token.

        >>> Rollout("a", [1, 2, 3], 2, loss_mask=[0, 1], advantages=[float("nan"), 1.0]).check_finite()
        """
        for name in RESPONSE_FIELDS[1:]:
            values = getattr(self, name)
            if values is None:
                continue
            wrong = (self.loss_mask & ~torch.isfinite(values)).nonzero()
            if wrong.numel():
                place = int(wrong[0])
                raise ValueError(
                    f"sample {self.id!r}: {name} is {float(values[place])} at response token {place}, which trains; "
                    "mask the token or mend its value"
                )


def _check_lengths(rollout: Rollout) -> None:
    if rollout.tokens.dim() != 1 or rollout.length == 0:
        raise ValueError(
            f"sample {rollout.id!r}: tokens have shape {list(rollout.tokens.shape)}; give one row of at least one token"
        )
    if not 0 <= rollout.response_length < rollout.length:
        raise ValueError(
            f"sample {rollout.id!r}: response_length is {rollout.response_length:,} of {rollout.length:,} tokens but "
            f"must be 0 to {rollout.length - 1:,}: a response is scored from the row before it, which is the prompt's; "
            "give the prompt at least one token"
        )


def _check_routes(rollout: Rollout, routes: Tensor) -> None:
    if routes.dtype not in ROUTE_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in ROUTE_DTYPES)
        raise ValueError(f"sample {rollout.id!r}: routes are {routes.dtype}; expert ids are one of {allowed}")
    rows = rollout.length - 1
    if routes.dim() != 3 or routes.shape[0] != rows:
        raise ValueError(
            f"sample {rollout.id!r}: routes have shape {list(routes.shape)} but must be [tokens-1, layers, top_k] per "
            f"sample, with {rows:,} rows for its {rollout.length:,} tokens; the last token was never run and has no row"
        )
