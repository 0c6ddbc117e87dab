"""The ladder: from a run's failures so far to the next action. Pure functions, without clock, disk or process.

Its steps are: the same again from the newest state, one safe change, replaying the rows, another device, and only where
the settings allow it a smaller training. Then the run stops with what there is. Two faults at one step are no accident:
go up. Faults at scattered steps mean hardware: stay, and wait longer each time.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from hivetune.machine.facts import fault as fault_of
from hivetune.machine.findings import LEAVE_HIPBLASLT
from hivetune.run.choices import NO_CHOICES, Choices

# A card runs behind its host, so its faults are noticed up to a step late.
LATE_STEPS = 1
# After so many faults of one kind on a device, at different steps and with progress between them, a change is tried.
SCATTERED_CHANGE = 5
# After so many failures at one place before, a run leaves its card.
MAX_ALIKE = 2
MAX_WAIT_S = 300.0
EVERY_LAYER = 10_000
# These shrink a step; a worker that dies while it loads needs something else.
OF_A_STEP = frozenset({"isolate", "small", "smallest"})


@dataclass(frozen=True)
class Rung:
    """One safe change. `environment`: variables of the worker (None: removed). `choices`: over those of the plan.

    `exact`: the arithmetic stays the same bit for bit, so a resumed run equals an undisturbed one. `says` completes the
    sentence "computed with ...".
    """

    name: str
    says: str
    environment: Mapping[str, str | None] = field(default_factory=dict)
    choices: Choices = NO_CHOICES
    device_only: bool = False
    exact: bool = False


# A rung that only a run on a card has.
_card = partial(Rung, device_only=True)

RUNGS = {
    rung.name: rung
    for rung in (
        _card("blas", "rocBLAS's own kernels instead of hipBLASLt", LEAVE_HIPBLASLT),
        _card(
            "environment",
            "the driver's and the allocator's plain modes",
            {
                "PYTORCH_ALLOC_CONF": None,
                "PYTORCH_CUDA_ALLOC_CONF": None,
                "PYTORCH_HIP_ALLOC_CONF": None,
                "PYTORCH_NO_HIP_MEMORY_CACHING": "1",  # no operand ends right before unmapped memory
                "HSA_ENABLE_SDMA": "0",  # copies by kernels instead of the DMA engine
                "HSA_ENABLE_INTERRUPT": "0",  # the card is polled
                "HSA_OVERRIDE_GFX_VERSION": None,
            },
            exact=True,
        ),
        Rung(
            "plain",
            "torch's kernels and plain attention instead of our own and fused ones",
            choices=Choices(kernels="torch", products="torch", attention="eager"),
        ),
        Rung("float32", "float32", choices=Choices(dtype="float32")),
        Rung("small", "micro-batches of an eighth of the size, the same effective batch", choices=Choices(halvings=3)),
        Rung(
            "smallest",
            "one document at a time, recomputed activations and streamed layers, the same effective batch",
            choices=Choices(halvings=30, recompute=EVERY_LAYER, streamed=EVERY_LAYER),
        ),
        Rung("general", "the general path by transformers instead of our own kernels", choices=Choices(path="general")),
        _card(
            "cpu",
            "the processor instead of the card",
            {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""},
            Choices(device="cpu"),
        ),
        Rung("rank", "half the rank, trained again from step 0"),
        Rung("sample", "every second of the rows still to come"),
    )
}


@dataclass(frozen=True)
class Failure:
    """One end of the worker. `step`: the step it died in, -1 before the first one of the attempt.

    `durable`: the newest state that survived. `rungs`: in effect when it died. `tried`: the rung that this attempt
    tried first, if any. `isolated`: the step's rows were replayed, or no training row was involved.
    """

    fault: str
    step: int
    durable: int
    quarantined: int = 0
    rungs: tuple[str, ...] = ()
    tried: str = ""
    isolated: bool = False

    def progressed(self, before: "Failure") -> bool:
        """Return whether the run got past the failure before, which is safe by now, or has one harmful row less."""
        return self.durable > max(before.durable, before.step) or self.quarantined > before.quarantined

    def alike(self, failure: "Failure") -> bool:
        """Return whether this is the same fault at the same place."""
        late = LATE_STEPS if self.kind == "device" else 0
        near = abs(self.step - failure.step) <= late
        return self.kind == failure.kind and near and self.quarantined == failure.quarantined

    @property
    def kind(self) -> str:
        """Return what equal faults have in common: a card reports one and the same fault in several ways."""
        return "device" if fault_of(self.fault).domain == "device" else self.fault


@dataclass(frozen=True)
class Bounds:
    """The changes that the machine and the settings allow.

    `void`: rungs that would change nothing here. `published`: by fault, the rungs that helped others with this card, in
    their order, each with its thread. They come before the catalogue's, and at the first failure.
    """

    attempts: int = 6
    on_device: bool = False
    backoff_s: float = 5.0
    allow: frozenset[str] = frozenset()
    void: frozenset[str] = frozenset()
    published: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


ReplyKind = Literal["again", "change", "isolate", "wait", "stop"]
# What an isolation found guilty (isolate.py): rows of the step; a kernel, as the same rows survive another way of
# computing; chance, as it did not happen again; the machine, as rows that were fine before die too.
Culprit = Literal["row", "kernel", "chance", "machine"]


@dataclass(frozen=True)
class Reply:
    """The next action. `rungs` are those of the next attempt; `tried` is the one among them that is new."""

    kind: ReplyKind
    why: str
    rungs: tuple[str, ...] = ()
    tried: str = ""
    wait_s: float = 0.0


def next_action(history: Sequence[Failure], bounds: Bounds) -> Reply:
    """Return the answer to the last failure of `history`, in the light of those before."""
    last, fault = history[-1], fault_of(history[-1].fault)
    if not fault.retry:
        return Reply("stop", f"{fault.title}: another attempt would end the same way", last.rungs)
    if fault.waits_for:
        return Reply("wait", f"{fault.title}: the run waits, and continues by itself", last.rungs)
    asks_rows = "isolate" in fault.rungs and last.step >= 0 and not _rows_replayed(history)
    attempts = attempts_left(history, bounds)
    if attempts <= 0 and asks_rows:
        reason = "no attempt is left; the rows of the step are replayed, in case one of them is the cause"
        return Reply("isolate", reason, remaining_rungs(history))
    if attempts <= 0:
        reason = f"{idle_attempts(history)} attempts without progress, the last one ended by: {fault.title}"
        return Reply("stop", reason, last.rungs)
    alike = _alike(history)
    # Failures that ended in a quarantine were caused by the row, not by the machine.
    scattered = [
        f for f in history[:-1] if (f.fault, f.quarantined) == (last.fault, last.quarantined) and f not in alike
    ]
    often = sum(earlier.rungs == last.rungs for earlier in scattered)
    worn_out = fault.domain == "device" and often + 1 >= SCATTERED_CHANGE
    tried = {failure.tried for failure in (*alike, last)} | set(last.rungs)
    published = bounds.published.get(fault.id, {})
    helped_others = any(name not in tried and _is_open(name, bounds) for name in published)
    if fault.first == "again" and not alike and not worn_out and not helped_others:
        if asks_rows and _rows_did_it(history):
            reason = "a row caused this fault before; the rows of the step are replayed, in case one of them does"
            return Reply("isolate", reason, last.rungs)
        patient = fault.backoff or (fault.domain == "device" and scattered)
        wait_s = _wait_s(len(scattered), bounds) if patient else 0.0
        reason = "faults at different steps point to the machine, not to the data"
        return Reply("again", reason if scattered else "one fault may be chance", last.rungs, wait_s=wait_s)
    # Climb: the next change, the replay of the rows, or the end.
    rungs_kept = remaining_rungs(history)
    if last.step < 0:
        tried |= OF_A_STEP
    elif (worn_out and not alike) or _rows_replayed(history):
        tried.add("isolate")
    rungs = [name for name in dict.fromkeys((*published, *fault.rungs)) if name not in tried and _is_open(name, bounds)]
    # An isolation takes no attempt, and the processor is the safest device; another fault may need the other attempts.
    if attempts == 1 or len(alike) >= MAX_ALIKE:
        rungs = [name for name in ("isolate", "cpu") if name in rungs] or rungs
    rungs = rungs or [name for name in ("rank", "sample") if name in bounds.allow and name not in tried]
    if not rungs and attempts > 1:
        wait_s = _wait_s(idle_attempts(history), bounds)
        return Reply("again", "no change is left to try; the same again after a pause", rungs_kept, wait_s=wait_s)
    if not rungs:
        return Reply("stop", f"no change is left to try against: {fault.title}", rungs_kept)
    if rungs[0] == "isolate":
        reason = "the step failed again; its rows are replayed one by one, in case one of them is the cause"
        return Reply("isolate", reason, rungs_kept)
    rung = RUNGS[rungs[0]]
    reason = f"{rung.says} ({published[rung.name]})" if rung.name in published else rung.says
    return Reply("change", reason, (*rungs_kept, rung.name), rung.name)


def after_isolation(history: Sequence[Failure], culprit: Culprit, reason: str, bounds: Bounds) -> tuple[Reply, Failure]:
    """Return what follows the replay of the last failure's rows, and that failure as the history keeps it.

    A guilty row is quarantined by then, and the step is made without it. Where the replay showed nothing about the
    rows, they may be replayed again.
    """
    last = replace(history[-1], isolated=True)
    with_replay = [*history[:-1], last]
    if culprit == "row":
        return Reply("again", reason, remaining_rungs(with_replay)), last
    if culprit == "chance" and fault_of(last.fault).domain == "host" and attempts_left(with_replay, bounds) > 0:
        return Reply("again", reason, last.rungs), last
    return next_action(with_replay, bounds), history[-1] if culprit == "machine" else last


def _alike(history: Sequence[Failure]) -> list[Failure]:
    """Return earlier failures at the place of the last one that the run has not got past since."""
    last, alike = history[-1], []
    for earlier in reversed(history[:-1]):
        if earlier.alike(last):
            alike.append(earlier)
        elif earlier.step > last.step and earlier.durable > last.step:
            break
    return alike


def _rows_replayed(history: Sequence[Failure]) -> bool:
    """Return whether this step's rows were replayed since one of them was quarantined."""
    last = history[-1]
    return any(failure.isolated and failure.step == last.step for failure in (*_alike(history), last))


def _rows_did_it(history: Sequence[Failure]) -> bool:
    """Return whether a row caused this kind of fault before: more rows may follow."""
    return any(
        failure.isolated and failure.kind == history[-1].kind and after.quarantined > failure.quarantined
        for failure, after in itertools.pairwise(history)
    )


def idle_attempts(history: Sequence[Failure]) -> int:
    """Count the newest failures that brought no progress over the one before them."""
    idle = 0
    while idle + 1 < len(history) and not history[-1 - idle].progressed(history[-2 - idle]):
        idle += 1
    return idle


def attempts_left(history: Sequence[Failure], bounds: Bounds) -> int:
    """Return how many attempts are left: failures without a later durable step between them are counted, all alike."""
    return bounds.attempts - 1 - idle_attempts(history)


def remaining_rungs(history: Sequence[Failure]) -> tuple[str, ...]:
    """Return the rungs that stay after the last failure: all but a change that did not help, one at a time.

    Changes that save memory stay: each is a step on the way to what fits.
    """
    last = history[-1]
    before = history[-2] if len(history) > 1 else None
    no_help = before is not None and last.alike(before) and not last.progressed(before)
    if not last.tried or not no_help or fault_of(last.fault).domain == "memory":
        return last.rungs
    return tuple(name for name in last.rungs if name != last.tried)


@dataclass(frozen=True)
class ArithmeticChange:
    """A rung in effect that rounds differently from an undisturbed run.

    `fault`: the title of what it answers, after it came twice in `step`. Both are empty where an earlier run of this
    model on this machine needed the rung.
    """

    rung: str
    says: str
    fault: str = ""
    step: int | None = None

    @property
    def words(self) -> str:
        began = f"from step {self.step} on" if self.step is not None else "from the first step on"
        reason = f"workers kept ending there: {self.fault}" if self.fault else "an earlier run here needed it"
        return f"{began} it computed with {self.says} ({reason})"


def arithmetic_changes(events: Iterable[Mapping[str, Any]], rungs: Sequence[str]) -> list[ArithmeticChange]:
    """Return those of `rungs` that are not exact, with the reason for each, by the run's events."""
    failure: Mapping[str, Any] = {}
    changes: dict[str, ArithmeticChange] = {}
    for event in events:
        if event["event"] == "failure":
            failure = event
        if event["event"] == "action" and event["tried"] in RUNGS:
            title, step = fault_of(failure["fault"]).title, failure["step"]
            changes[event["tried"]] = ArithmeticChange(event["tried"], event["why"], title, max(0, step))
    return [changes.get(name, ArithmeticChange(name, RUNGS[name].says)) for name in rungs if not RUNGS[name].exact]


def effects_of(rungs: Sequence[str]) -> tuple[dict[str, str | None], Choices]:
    """Return environment and choices of all `rungs` together; a later one wins."""
    environment: dict[str, str | None] = {}
    choices = Choices()
    for name in rungs:
        environment |= RUNGS[name].environment
        choices = RUNGS[name].choices.over(choices)
    return environment, choices


def void_rungs(environment: Mapping[str, str], choices: Choices) -> frozenset[str]:
    """Return the rungs already in effect, by the worker's environment and choices: trying them proves nothing.

    The general path has nothing to stream.
    """
    values = choices.made() | ({"streamed": EVERY_LAYER} if choices.path == "general" else {})

    def is_void(rung: Rung) -> bool:
        same = [environment.get(name) == value for name, value in rung.environment.items()]
        same += [values.get(name, False) == value for name, value in rung.choices.made().items()]
        return bool(same) and all(same)

    return frozenset(name for name, rung in RUNGS.items() if is_void(rung))


def _is_open(name: str, bounds: Bounds) -> bool:
    return name == "isolate" or (name not in bounds.void and (bounds.on_device or not RUNGS[name].device_only))


def _wait_s(number: int, bounds: Bounds) -> float:
    return min(bounds.backoff_s * 2.0**number, MAX_WAIT_S)
