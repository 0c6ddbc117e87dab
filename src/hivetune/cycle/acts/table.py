"""Each action and the act that it names."""

from collections.abc import Callable, Mapping

from hivetune.cycle.acts.data import make_run, open_cycle_of, open_rebuild
from hivetune.cycle.acts.doing import Doing
from hivetune.cycle.acts.model import evaluate_beside, judge_candidate, train_slice
from hivetune.cycle.acts.release import (
    close_cycle,
    end_watch,
    export_adapter,
    promote_candidate,
    register_candidate,
    restore_champion,
    return_to_previous,
    wait_until_loaded,
)
from hivetune.cycle.decide import Action, ActionKind

ACTS: Mapping[ActionKind, Callable[[Doing], str]] = {
    "restore": restore_champion,
    "roll_back": return_to_previous,
    "open": open_cycle_of,
    "rebuild": open_rebuild,
    "snapshot": make_run,
    "train": train_slice,
    "evaluate": evaluate_beside,
    "gate": judge_candidate,
    "export": export_adapter,
    "register": register_candidate,
    "warm": wait_until_loaded,
    "promote": promote_candidate,
    "watch": end_watch,
    "close": close_cycle,
}


def act(action: Action, doing: Doing) -> str:
    """Do it; what came out, in words. Raises SliceEnded, and HivetuneError and OSError for what failed."""
    return ACTS[action.kind](doing)
