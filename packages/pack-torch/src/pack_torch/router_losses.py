"""Losses on the router of a mixture of experts: balanced loads, and logits that stay small.

Shapes: T tokens of the row, L routed layers, E experts, N documents. A document is prompt and response, its last token,
which scores nothing, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, get_args

import attrs
import torch
from torch import Tensor
from torch.nn.functional import softmax

from pack_torch.precision import wide

#: Whose tokens one histogram of experts counts: the packed forward's, or each document's own.
Grouping = Literal["local_batch", "sequence"]

#: What weighs alike in the end: every token, or every document.
RouterReduction = Literal["token", "response"]

#: The experts that are counted: those of the routes that ran, or those this forward's router would choose.
CountSource = Literal["replayed", "live"]


@attrs.frozen(eq=False)
class RouterLoss:
    """The part one pack adds to a router loss, summed over the routed layers.

    Args:
        numerator: scalar with its graph. Divide by the step's global `Normalization.model_tokens` after `token`
            reduction, after `response` by its number of documents: `Normalization.samples`, fully masked ones counted.
            Multiply by a coefficient and call backward.
        tokens: of this row, all of them, prompts too.
        documents: of this row.
    """

    numerator: Tensor
    tokens: int
    documents: int


def load_balancing_loss(
    router_logits: Tensor,
    routes: Tensor,
    doc_lens: Sequence[int],
    *,
    grouping: Grouping = "local_batch",
    reduction: RouterReduction = "token",
    count_source: CountSource = "replayed",
) -> RouterLoss:
    """Return the numerator of the load-balancing loss of one packed row.

    A document d of n_d tokens has, in each layer, the mean probability p_d[e] of every expert and the penalty
    E * sum over e of f[e] p_d[e]; f[e] is the share of the choices that fell on e, counted without gradient. The
    numerator sums n_d times the penalty (`token`) or the penalty (`response`) over documents and layers. It is 1 per
    token or document and layer where the loads or the probabilities are even.

    With grouping `sequence`, f is the document's own share and the penalty depends on that document alone: any cut into
    packs gives the same sum. With `local_batch` one histogram counts all tokens of the packed forward. That is a
    product of two means over the pack: it is not the sum of the losses of its documents, and another packing is another
    objective, however it is divided. Choose it to balance what runs together, never to compare packings.

    Args:
        router_logits: `[T, L, E]` before the softmax.
        routes: `[T, L, top_k]` experts that ran, of the routed layers only.
        doc_lens: tokens of each document; they sum to T.
        grouping: `local_batch` or `sequence`.
        reduction: `token` or `response`.
        count_source: `replayed` counts `routes`; `live` the top_k that these logits would choose. Only f changes.

    Raises:
        ValueError: an unknown name, shapes or lengths that do not fit, an expert that does not exist.

    Switch Transformer (Fedus et al., 2021, equations 4 to 6), for top_k choices.

    >>> even, skewed = [0.25, 0.25, 0.25, 0.25], [0.75, 0.125, 0.0625, 0.0625]
    >>> logits = torch.tensor([even] * 2 + [skewed] * 6).log().unsqueeze(1)
    >>> routes = torch.zeros(8, 1, 1, dtype=torch.int64)  # all to expert 0: penalties 4 * 1 * 0.25 and 4 * 1 * 0.75
    >>> loss = load_balancing_loss(logits, routes, (2, 6), grouping="sequence")
    >>> float(loss.numerator) / loss.tokens  # (2 * 1 + 6 * 3) / 8
    2.5
    """
    lengths = _check(router_logits, doc_lens, reduction)
    _check_name("grouping", grouping, get_args(Grouping))
    _check_name("count_source", count_source, get_args(CountSource))
    _check_routes(routes, router_logits)
    experts, top_k = router_logits.shape[2], routes.shape[2]
    logits = wide(router_logits)
    ids = logits.detach().topk(top_k, dim=2).indices if count_source == "live" else routes.to(torch.int64)
    chosen = torch.zeros_like(logits, requires_grad=False).scatter_add_(
        2, ids.to(logits.device), torch.ones_like(ids, dtype=logits.dtype, device=logits.device)
    )
    counted = lengths if grouping == "sequence" else [sum(lengths)]
    shares = _means(chosen, counted) / top_k  # [N or 1, L, E]
    penalties = experts * (shares * _means(softmax(logits, dim=2), lengths)).sum(dim=(1, 2))  # [N]
    return _reduce(penalties, lengths, reduction)


def router_z_loss(
    router_logits: Tensor, doc_lens: Sequence[int], *, reduction: RouterReduction = "token"
) -> RouterLoss:
    """Return the numerator of the squared logarithm of the routers' normalizers, which keeps logits small.

    `token` sums logsumexp(logits)^2 over tokens and layers; `response` sums its mean over each document. Neither
    depends on what is packed together.

    Args:
        router_logits: `[T, L, E]` before the softmax.
        doc_lens: tokens of each document; they sum to T.
        reduction: `token` or `response`.

    Raises:
        ValueError: an unknown reduction, shapes or lengths that do not fit.

    ST-MoE (Zoph et al., 2022, equation 5).

    >>> router_z_loss(torch.tensor([[[2.0]], [[4.0]], [[3.0]]]), (2, 1), reduction="response").numerator  # 10 + 9
    tensor(19.)
    """
    lengths = _check(router_logits, doc_lens, reduction)
    squares = torch.logsumexp(wide(router_logits), dim=2).square()  # [T, L]
    return _reduce(_means(squares, lengths).sum(dim=1), lengths, reduction)


def _means(values: Tensor, lengths: list[int]) -> Tensor:
    return torch.stack([rows.mean(dim=0) for rows in torch.split_with_sizes(values, lengths)])


def _reduce(penalties: Tensor, lengths: list[int], reduction: RouterReduction) -> RouterLoss:
    weights = torch.tensor(lengths).to(penalties) if reduction == "token" else torch.ones_like(penalties)
    return RouterLoss((weights * penalties).sum(), sum(lengths), len(lengths))


def _check_name(what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"{what} {given!r} is not one of {', '.join(allowed)}")


def _check(router_logits: Tensor, doc_lens: Sequence[int], reduction: str) -> list[int]:
    _check_name("reduction", reduction, get_args(RouterReduction))
    if router_logits.dim() != 3:
        raise ValueError(
            f"router_logits have shape {list(router_logits.shape)} but must be [tokens, routed layers, experts]"
        )
    lengths = [operator.index(length) for length in doc_lens]
    if not lengths or min(lengths) < 1 or sum(lengths) != router_logits.shape[0]:
        raise ValueError(
            f"doc_lens {lengths} do not partition the {router_logits.shape[0]:,} rows of router_logits; give every "
            "document of the row, each of at least one token"
        )
    return lengths


def _check_routes(routes: Tensor, router_logits: Tensor) -> None:
    tokens, layers, experts = router_logits.shape
    if routes.dim() != 3 or tuple(routes.shape[:2]) != (tokens, layers) or not 1 <= routes.shape[2] <= experts:
        raise ValueError(
            f"routes have shape {list(routes.shape)} but router_logits {list(router_logits.shape)}; give [tokens, "
            "routed layers, top_k], without the columns of dense layers"
        )
    if routes.is_floating_point() or routes.dtype == torch.bool:
        raise ValueError(f"routes are {routes.dtype} but expert ids are integers")
    outside = ((routes < 0) | (routes >= experts)).nonzero()
    if outside.numel():
        row, layer, place = (int(index) for index in outside[0])
        raise ValueError(
            f"routes name expert {int(routes[row, layer, place])} at row {row:,}, routed layer {layer}, but experts "
            f"are 0 to {experts - 1}; leave out the columns of dense layers, which hold -1"
        )
