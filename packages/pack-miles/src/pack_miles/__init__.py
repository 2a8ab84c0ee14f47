"""The shell around packed RL training: checked configuration, the Core actor, contract events, reports.

Importing the package needs neither torch nor a GPU; the training runtime is imported by the `train` command alone.
"""

from pack_miles.errors import InputError
from pack_miles.reporting.forecast import Forecast, forecast
from pack_miles.samples import RolloutRow, read_rows, to_samples, write_rows
from pack_miles.scoring_pass import ScoringPass, decide
from pack_miles.settings.config import Config, load_config
from pack_miles.settings.refusals import refuse, refuse_machine

__all__ = [
    "Config",
    "Forecast",
    "InputError",
    "RolloutRow",
    "ScoringPass",
    "decide",
    "forecast",
    "load_config",
    "read_rows",
    "refuse",
    "refuse_machine",
    "to_samples",
    "write_rows",
]
