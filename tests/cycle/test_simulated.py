"""The loop in a simulated world: clocks that jump, disks that fill and lose artefacts, acts that fail, kills."""

from collections import Counter
from dataclasses import dataclass, field, replace

from cycle.world import NOW, after, check
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.config import CycleConfig
from hivetune.cycle.decide import STATIONS, Action, FailedAct, Observation, Permission, decide

CONFIG = CycleConfig(name="demo", after_rows=10)
LONGEST_WAIT_S = 8 * 86400.0
EVENTS = st.one_of(
    st.tuples(st.just("clock"), st.floats(-1e7, 1e7)),
    st.tuples(st.just("rows"), st.integers(1, 20)),
    st.tuples(st.just("fail"), st.sampled_from(["once", "final", "patient"])),
    st.tuples(st.just("kill"), st.sampled_from(["before", "after"])),
    st.tuples(st.just("lose"), st.sampled_from(STATIONS[:6])),
    st.tuples(st.just("gate"), st.booleans()),
    st.tuples(st.sampled_from(["pause", "resume", "now", "shut", "open", "full", "free", "damage", "worse", "forget"])),
)


@dataclass
class World:
    """A simulated world. `taken`: acts that succeeded since the newest cycle was opened. `promoted`: the gate's answer
    to each."""

    state: Observation = field(
        default_factory=lambda: Observation(desired="demo@1", served="demo@1", disk_free_bytes=1)
    )
    now: float = NOW
    passes: bool = True
    trouble: str = ""
    taken: Counter[str] = field(default_factory=Counter)
    promoted: list[bool | None] = field(default_factory=list)

    def meet(self, event: tuple[str, ...] | tuple[str, float]) -> None:
        kind, value = event[0], event[1] if len(event) > 1 else None
        state, cycle = self.state, self.state.open
        changes: dict[str, dict[str, object]] = {
            "rows": {"new_groups": state.new_groups + int(value or 0), "known": False} if kind == "rows" else {},
            "pause": {"paused": True},
            "resume": {"paused": False},
            "now": {"asked": True},
            "shut": {"allowed": Permission(False, None, self.now + 3600, "shut")},
            "open": {"allowed": Permission()},
            "full": {"disk_needed_bytes": 2},
            "free": {"disk_needed_bytes": 0},
            "damage": {"served": None, "problem": "damaged"},
            "worse": {"watch_failed": "slow"},
            "forget": {"forgotten_rows": 3} if cycle is None else {"open": replace(cycle, void="forgotten")},
        }
        if kind == "clock":
            self.now += float(value or 0)
            if not state.allowed.now:  # the window is asked at each look
                self.state = replace(state, allowed=replace(state.allowed, again=self.now + 3600))
        elif kind in ("fail", "kill"):
            self.trouble = f"{kind} {value}"
        elif kind == "gate":
            self.passes = bool(value)
        elif kind == "lose" and cycle is not None:
            self.state = replace(state, open=replace(cycle, done=cycle.done - {value}))  # type: ignore[arg-type]
            self.taken[str(value)] = 0
        else:
            self.state = replace(state, **changes.get(kind, {}))

    def step(self) -> Action:
        action = decide(self.state, CONFIG, self.now)
        check(action, self.state, CONFIG, self.now)
        if action.kind == "wait":
            return action
        trouble, self.trouble = self.trouble, ""
        if trouble.startswith("fail"):
            before = self.state.failed
            times = before.times + 1 if before is not None and before.kind == action.kind else 1
            how = trouble.removeprefix("fail ")
            failed = FailedAct(action.kind, times, self.now, "why", how == "final", how == "patient")
            self.state = replace(self.state, failed=failed)
        elif trouble != "kill before":  # killed after it: the artefact is there, the outcome is not
            self._done(action)
        return action

    def _done(self, action: Action) -> None:
        if action.kind in ("open", "rebuild"):
            self.taken.clear()
        self.taken[action.kind] += 1
        if action.kind == "promote":
            self.promoted.append(self.state.open.passed if self.state.open else None)
        changed = after(action, self.state, CONFIG, self.now, passes=self.passes)
        if action.kind in ("rebuild", "close"):
            changed = replace(changed, forgotten_rows=0)
        self.state = changed

    def run(self, most: int = 40) -> Action:
        """Run to the next wait."""
        for _ in range(most):
            action = self.step()
            if action.kind == "wait":
                return action
        raise AssertionError(f"it never waits: {self.taken}")


@given(st.lists(EVENTS, max_size=30))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_nothing_is_done_twice_and_it_comes_to_rest(events: list[tuple[str, ...]]) -> None:
    world = World()
    for event in events:
        world.meet(event)
        wait = world.run()
        assert wait.not_before <= world.now + LONGEST_WAIT_S
        assert all(passed for passed in world.promoted)
        assert all(count == 1 for kind, count in world.taken.items() if kind in STATIONS and count), world.taken
    world.trouble = ""
    for healed in ("resume", "open", "free"):
        world.meet((healed,))
    for _ in range(40):
        wait = world.run()
        if (world.state.open is None and "new groups" in wait.reason) or "closed already" in wait.reason:
            return
        world.now = wait.not_before
    raise AssertionError(f"it never came to rest: {wait}")
