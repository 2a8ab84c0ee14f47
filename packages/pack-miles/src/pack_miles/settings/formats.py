"""Whose a run's model is, and whether the trainer here samples and trains it by itself."""

from pack_miles.settings.config import Config


def small(config: Config) -> bool:
    """Return whether the model is the one built here."""
    return config.model.format == "small"


def core(config: Config) -> bool:
    """Return whether the model is OLMo-core's."""
    return config.model.format == "olmo_core"


def here(config: Config) -> bool:
    """Return whether the run is one of this trainer alone: it samples a task itself, from a model of its own."""
    return small(config) or (core(config) and config.data.task is not None)
