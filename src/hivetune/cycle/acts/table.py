"""Each action and the act that it names."""

import time
from collections.abc import Callable, Mapping

from hivetune.cycle.acts.data import make_run, open_cycle_of, open_rebuild
from hivetune.cycle.acts.doing import Doing
from hivetune.cycle.acts.experts import look_for_experts
from hivetune.cycle.acts.model import evaluate_beside, judge_candidate, train_slice
from hivetune.cycle.acts.night import Requests
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
from hivetune.cycle.decide import HEAVY, Action, ActionKind
from hivetune.process.still import moving_s, yielding

ACTS: Mapping[ActionKind, Callable[[Doing], str]] = {
    "restore": restore_champion,
    "roll_back": return_to_previous,
    "experts": look_for_experts,
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
    """Do it; what came out, in words. Raises SliceEnded, and HivetuneError and OSError for what failed.

    Long work stands still for requests: training by its supervisor, which knows that the silence is no hang, all else
    here.
    """
    if action.kind not in HEAVY - {"train"} or doing.config.cycle.yield_to == "nothing":
        return ACTS[action.kind](doing)
    began_s, moved_s = time.monotonic(), moving_s()
    try:
        with yielding(Requests()):
            return ACTS[action.kind](doing)
    finally:
        stood_still_s = (time.monotonic() - began_s) - (moving_s() - moved_s)
        if stood_still_s >= 1:
            doing.details["stood_still_s"] = round(stood_still_s)
