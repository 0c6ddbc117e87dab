"""How long a worker may be silent, when it saves, and how often it is started again: the same for every run."""

import json
import os
from dataclasses import dataclass

# JSON with other values. Tests set it so that a hang takes seconds; children inherit it.
VARIABLE = "HIVETUNE_SUPERVISION"


@dataclass(frozen=True)
class Supervision:
    """`hang_factor`: a step hangs after this many times its usual time, at least after `hang_floor_s`. `attempts`:
    without progress before giving up. `backoff_s`: the first pause after a device fault; doubled up to 300 s if faults
    come at different steps. `checkpoint_every_s`: None for an interval from measured costs, by Young's rule.
    """

    hang_factor: float = 5.0
    hang_floor_s: float = 60.0
    start_timeout_s: float = 900.0  # imports, model, first compilation
    evaluate_timeout_s: float = 1800.0
    save_timeout_s: float = 600.0
    attempts: int = 6
    backoff_s: float = 5.0
    checkpoint_every_s: float | None = None


def supervision() -> Supervision:
    """Return the limits of every run."""
    return Supervision(**json.loads(os.environ.get(VARIABLE, "{}")))
