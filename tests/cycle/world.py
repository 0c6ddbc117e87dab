"""A world of artefacts without files: what a successful action leaves behind, for tests of the decision alone."""

from dataclasses import replace

from hivetune.config import CycleConfig
from hivetune.cycle.decide import STATIONS, Action, Observation, OpenCycle, ending

NOW = 1_800_000_000.0


def after(
    action: Action, observed: Observation, settings: CycleConfig, now: float, *, passes: bool = True
) -> Observation:
    """Return the state after `action`. `passes`: the gate's answer."""
    kind = action.kind
    if kind == "wait":
        return observed
    state = replace(observed, failed=None)
    cycle = observed.open
    if kind == "restore":
        return replace(state, served=observed.desired)
    if kind == "roll_back":
        promoted = cycle is not None and "promote" in cycle.done
        gone = replace(cycle, withdrawn="slow", replay_due=True) if promoted and cycle is not None else cycle
        return replace(state, watch_failed="", desired="demo@1", served="demo@1", open=gone)
    if kind in ("open", "rebuild"):
        return replace(state, open=OpenCycle("a", "rebuild" if kind == "rebuild" else "rows"), asked=False)
    assert cycle is not None
    if kind == "close":
        end = ending(cycle, settings, observed.failed)
        assert end is not None
        failed = end[0] in ("failed", "rolled_back")
        return replace(
            state,
            open=None,
            known=end[0] != "failed",
            new_groups=observed.new_groups if end[0] in ("failed", "given_up") else 0,
            failed_cycles=observed.failed_cycles + 1 if failed else 0,
            failed_at=now if failed else 0.0,
        )
    if kind == "replay":
        return replace(state, open=replace(cycle, replay_due=False))
    done = replace(cycle, done=cycle.done | {kind})
    if kind == "gate":
        done = replace(done, passed=passes, replay_due=not passes)
    if kind == "promote":
        done = replace(done, promoted_at=now)
        return replace(state, open=done, desired="demo@2", served="demo@2")
    return replace(state, open=done)


def check(action: Action, observed: Observation, settings: CycleConfig, now: float) -> None:
    """Check what holds for every decision."""
    cycle = observed.open
    if action.kind == "wait":
        assert now < action.not_before < now + 10 * 366 * 86400, (action, observed)
        return
    assert action.not_before == now and action.reason, (action, observed)
    assert not observed.paused
    if action.kind == "promote":
        assert cycle is not None and cycle.passed and not cycle.void and not cycle.withdrawn, observed
        assert settings.promote == "auto" and set(STATIONS[: STATIONS.index("promote")]) <= cycle.done
    if action.kind in ("open", "rebuild"):
        assert cycle is None and not observed.known
    if action.kind == "replay":
        assert cycle is not None and cycle.replay_due and not cycle.void
    if action.kind in STATIONS:
        assert cycle is not None and action.kind not in cycle.done
        assert set(STATIONS[: STATIONS.index(action.kind)]) <= cycle.done
