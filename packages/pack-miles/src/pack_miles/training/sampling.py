"""Rollouts sampled from the current policy, with the routes and log-probabilities of every step recorded."""

from collections.abc import Sequence

import attrs
import torch
from pack_torch import PackedBatch
from torch import Tensor

from pack_miles.training.policy import Policy


@attrs.frozen(eq=False)
class Sampled:
    """One response: all `tokens`, and per response token its `log_probs` under the policy it was sampled from.

    `routes` is int32 `[tokens - 1, layers, top_k]`: the last token was sampled but never run.
    """

    tokens: list[int]
    response_length: int
    log_probs: list[float]
    routes: Tensor


@torch.no_grad()
def sample(
    model: Policy, prompts: Sequence[Sequence[int]], draws: Tensor, *, end: int, temperature: float
) -> list[Sampled]:
    """Return one sampled response for each prompt.

    Each step runs the unfinished sequences as one packed row and adds a token to each. There is no cache: the rows
    before the last are computed again, which for a model of this size is cheaper than the code that would avoid it.
    Each token's route is recorded at the step that first ran it, as an inference engine does.

    Args:
        model: the policy, with all its experts on this rank.
        prompts: token ids, at least one each.
        draws: `[prompts, longest response]` float64 uniform in [0, 1), the only source of randomness: a number
            chooses a token where it falls among the cumulated probabilities. A response is cut at their number.
        end: the token that ends a response.
        temperature: divides the logits.
    """
    model.eval()
    device = next(iter(model.parameters())).device
    sequences = [list(prompt) for prompt in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    routes: list[list[Tensor]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    for step in range(draws.shape[1]):
        if not active:
            break
        lengths = tuple(len(sequences[i]) for i in active)
        ids = torch.tensor([token for i in active for token in sequences[i]])
        output = model(PackedBatch(input_ids=ids, doc_lens=lengths).to(device))
        ends = torch.tensor(lengths).cumsum(0)
        scores = torch.log_softmax(model.logits(output.hidden[ends - 1]).cpu() / temperature, dim=-1)
        executed = output.routes.cpu()
        chosen = _choose(scores, draws[active, step])
        chances = scores.gather(1, chosen[:, None])[:, 0].tolist()
        for place, i in enumerate(active):
            last = int(ends[place])
            new = lengths[place] - sum(len(rows) for rows in routes[i])
            routes[i].append(executed[last - new : last])
            sequences[i].append(int(chosen[place]))
            log_probs[i].append(chances[place])
        active = [i for i in active if sequences[i][-1] != end]
    return [
        Sampled(sequence, len(chances), chances, torch.cat(rows))
        for sequence, chances, rows in zip(sequences, log_probs, routes, strict=True)
    ]


def _choose(scores: Tensor, draws: Tensor) -> Tensor:
    """Return `[rows]` the token in whose share of [0, 1) each draw falls."""
    shares = scores.double().exp().cumsum(dim=-1)
    # Rounding may leave the last sum a little under 1, and a draw above it belongs to the last token.
    return torch.searchsorted(shares, draws[:, None], right=True)[:, 0].clamp(max=scores.shape[1] - 1)
