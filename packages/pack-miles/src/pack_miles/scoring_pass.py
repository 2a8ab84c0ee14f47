"""Whether a collection is scored in a pass of its own before it trains, decided from configuration alone."""

import attrs

from pack_miles.settings.config import Config


@attrs.frozen
class ScoringPass:
    """The decision and why. `standalone`: log-probabilities of the old policy come from a pass of their own.

    Otherwise they are the training forward's at unchanged weights, and the pass runs only when a check is due.
    """

    standalone: bool
    reason: str
    optimizer_steps_per_collection: int


def decide(config: Config) -> ScoringPass:
    """Return whether scoring is standalone; the first condition that holds gives the reason.

    After a first optimizer step the training forward no longer shows the policy that is to be the anchor; a KL
    penalty needs log-probabilities before the advantages; dropout makes two forwards differ.

    >>> from pack_miles.settings.config import Config
    >>> from pack_miles.settings.sections import Miles, Output
    >>> decide(Config(name="a", output=Output(root="runs"), miles=Miles(global_batch_size=32))).reason
    '2 optimizer steps per collection'
    """
    steps = config.steps_per_collection
    if config.core.scoring_pass_required:
        return ScoringPass(True, "core.scoring_pass_required is set", steps)
    if steps != 1:
        return ScoringPass(True, f"{steps} optimizer steps per collection", steps)
    if config.miles.kl_coef != 0:
        return ScoringPass(True, f"kl_coef is {config.miles.kl_coef:g}: KL enters the advantages", steps)
    if config.model.dropout > 0:
        return ScoringPass(True, f"stochastic model configuration: dropout {config.model.dropout:g}", steps)
    if config.miles.use_rollout_logprobs:
        return ScoringPass(False, "rollout log-probabilities are the anchor", steps)
    return ScoringPass(False, "the training forward at unchanged weights gives the anchor", steps)
