"""The recovery ladder: the next action after a run's failures so far, and what later runs use of it.

The first failure at a step may be chance, so the worker is started again from the newest checkpoint. After a second
failure at the step, the next change (rung) of the fault's list is tried; `isolate` in that list is the replay of the
step's rows. After six failures without a new checkpoint the run stops, and what was saved is kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from hivetune.base.typed import from_plain
from hivetune.machine.facts import fault as fault_of
from hivetune.machine.facts import remedies_of
from hivetune.machine.findings import LEAVE_HIPBLASLT
from hivetune.machine.inventory import Machine
from hivetune.machine.profile import read_profile, write_profile
from hivetune.run.choices import NO_CHOICES, Choices

# A card runs behind its host, so its faults are noticed up to a step late.
LATE_STEPS = 1
MAX_WAIT_S = 300.0
EVERY_LAYER = 10_000
# These shrink a step; a worker that dies while it loads needs something else.
OF_A_STEP = frozenset({"isolate", "small", "smallest"})
# The rungs that change the training itself, and only where `allow` names them. They concern one run's data, so no later
# run begins with them.
SMALLER_TRAINING = ("rank", "sample")
# What filled the memory or broke the card may be gone by then.
FORGET_S = 30 * 86_400.0


@dataclass(frozen=True)
class Rung:
    """One safe change. `environment`: variables of the worker (None: removed). `choices`: replace those of the run.

    `exact`: the arithmetic stays bit-for-bit the same. `says` completes the sentence "computed with ...".
    """

    name: str
    description: str
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
    """One failure of a worker. `step`: the step in which it died, -1 before the first step of the attempt.

    `durable`: the newest saved step. `rungs`: the recovery changes in effect when it died. `tried`: the one that this
    attempt tried first, if any. `isolated`: the step's rows were replayed, or no training row was involved.
    """

    fault: str
    step: int
    durable: int
    quarantined: int = 0
    rungs: tuple[str, ...] = ()
    tried: str = ""
    isolated: bool = False

    def progressed(self, before: "Failure") -> bool:
        """Return whether the run saved a later step, or quarantined a row, after the failure `before`."""
        return self.durable > max(before.durable, before.step) or self.quarantined > before.quarantined

    def is_near(self, failure: "Failure") -> bool:
        """Return whether both failures happened at the same step, or on a card at most LATE_STEPS steps apart."""
        late = LATE_STEPS if self.kind == "device" else 0
        return abs(self.step - failure.step) <= late and self.quarantined == failure.quarantined

    @property
    def kind(self) -> str:
        """Return the key by which faults count as the same: the fault's id, or "device" for all faults of a card."""
        # A card reports one and the same fault in several ways.
        return "device" if fault_of(self.fault).domain == "device" else self.fault


@dataclass(frozen=True)
class Bounds:
    """The limits of recovery: number of attempts, and the changes that the machine and the settings allow.

    `void`: rungs that would change nothing on this machine. `published`: fault -> rungs that helped others with this
    card, in their order, each with the address of the report. They are tried before those of the catalogue.
    """

    attempts: int = 6
    on_device: bool = False
    backoff_s: float = 5.0
    allow: frozenset[str] = frozenset()
    void: frozenset[str] = frozenset()
    published: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


ReplyKind = Literal["again", "change", "isolate", "wait", "stop"]


@dataclass(frozen=True)
class Reply:
    """The ladder's decision. `rungs`: the changes in effect in the next attempt; `tried`: the new one among them."""

    kind: ReplyKind
    why: str
    rungs: tuple[str, ...] = ()
    tried: str = ""
    wait_s: float = 0.0


def next_action(history: Sequence[Failure], bounds: Bounds) -> Reply:
    """Return the next action after the last failure of `history`, given the failures since the run last made progress.

    If the last failure is `isolated`, none of its rows was at fault.
    """
    last, fault = history[-1], fault_of(history[-1].fault)
    if not fault.retry:
        return Reply("stop", f"{fault.title}: another attempt would end the same way", last.rungs)
    if fault.waits_for:
        return Reply("wait", f"{fault.title}: the run waits, and continues by itself", last.rungs)
    stuck = failures_without_progress(history)
    if len(stuck) >= bounds.attempts:
        reason = f"{len(stuck) - 1} attempts without progress, the last one ended by: {fault.title}"
        return Reply("stop", reason, last.rungs)
    here = [failure for failure in stuck if failure.is_near(last)]
    alike = [failure for failure in here if failure.kind == last.kind]
    pause_s = min(bounds.backoff_s * 2.0 ** (len(stuck) - 1), MAX_WAIT_S)
    if fault.first == "again" and len(here) == 1:
        return Reply("again", "one fault may be chance", last.rungs, wait_s=pause_s if fault.backoff else 0.0)
    if fault.domain == "host" and last.isolated and not any(failure.isolated for failure in alike[:-1]):
        # A person or a watchdog may have killed it twice. A change would alter the arithmetic of a run that had no
        # fault (law 4): eight kills on a busy machine ended in another adapter.
        return Reply("again", "no row of the step is at fault: the same again", last.rungs)
    kept = remaining_rungs(history)
    published = bounds.published.get(fault.id, {})
    smaller = [name for name in SMALLER_TRAINING if name in bounds.allow]
    barred = bounds.void | set(last.rungs) | {failure.tried for failure in alike}
    barred |= OF_A_STEP if last.step < 0 else {"isolate"} if any(failure.isolated for failure in alike) else set()
    for name in (*published, *fault.rungs, *smaller):
        if name == "isolate" and name not in barred:
            return Reply("isolate", "the step failed again; its rows are replayed one by one", kept)
        if name not in barred and (bounds.on_device or not RUNGS[name].device_only):
            reason = f"{RUNGS[name].description} ({published[name]})" if name in published else RUNGS[name].description
            return Reply("change", reason, (*kept, name), name)
    return Reply("again", "no change is left to try; the same again after a pause", kept, wait_s=pause_s)


def failures_without_progress(history: Sequence[Failure]) -> Sequence[Failure]:
    """Return the failures since the run last made progress."""
    first = len(history) - 1
    while first and not history[first].progressed(history[first - 1]):
        first -= 1
    return history[first:]


def remaining_rungs(history: Sequence[Failure]) -> tuple[str, ...]:
    """Return the recovery changes (rungs) that stay in effect after the last failure: all but the newest, if it did not
    help."""
    last = history[-1]
    before = failures_without_progress(history)[-2:-1]
    no_help = any(failure.is_near(last) and failure.kind == last.kind for failure in before)
    # Changes that save memory stay: each is a step on the way to what fits.
    if not no_help or fault_of(last.fault).domain == "memory":
        return last.rungs
    return tuple(name for name in last.rungs if name != last.tried)


def arithmetic_changes(events: Iterable[Mapping[str, Any]], rungs: Sequence[str]) -> list[str]:
    """Return a sentence, with the reason, for each recovery change in `rungs` that rounds differently.

    `events`: those of the whole run. A change that they do not explain was needed by an earlier run of the model.
    """
    failure: Mapping[str, Any] = {}
    said: dict[str, str] = {}
    for event in events:
        if event["event"] == "failure":
            failure = event
        if event["event"] == "action" and event["tried"] in RUNGS:
            reason = f"workers kept ending there: {fault_of(failure['fault']).title}"
            said[event["tried"]] = f"from step {max(0, failure['step'])} on it computed with {event['why']} ({reason})"
    remembered = "from the first step on it computed with {} (an earlier run here needed it)"
    return [said.get(name, remembered.format(RUNGS[name].description)) for name in rungs if not RUNGS[name].exact]


def effects_of(rungs: Sequence[str]) -> tuple[dict[str, str | None], Choices]:
    """Return the environment variables and choices of the recovery changes `rungs`; a later one overrides an earlier
    one."""
    environment: dict[str, str | None] = {}
    choices = Choices()
    for name in rungs:
        environment |= RUNGS[name].environment
        choices = choices.updated(RUNGS[name].choices)
    return environment, choices


def void_rungs(environment: Mapping[str, str], choices: Choices) -> frozenset[str]:
    """Return the recovery changes (rungs) that are in effect already, so that trying them would be useless."""
    # The general path has nothing to stream.
    values = choices.as_dict() | ({"streamed": EVERY_LAYER} if choices.path == "general" else {})

    def is_void(rung: Rung) -> bool:
        same = [environment.get(name) == value for name, value in rung.environment.items()]
        same += [values.get(name, False) == value for name, value in rung.choices.as_dict().items()]
        return bool(same) and all(same)

    return frozenset(name for name, rung in RUNGS.items() if is_void(rung))


def open_failures(events: Iterable[Mapping[str, Any]]) -> list[Failure]:
    """Return the failures since the run last ended without one. After a killed supervisor the count continues; a new
    start by the user begins a new count."""
    failures: list[Failure] = []
    for entry in events:
        if entry["event"] == "supervisor_ended":
            failures = []
        elif entry["event"] == "failure":
            failures.append(from_plain(Failure, {name: entry[name] for name in Failure.__dataclass_fields__}))
    return failures


def last_rungs(events: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the recovery changes (rungs) in effect when the last supervisor ended or was killed; a resumed run keeps
    them, so that its arithmetic does not change."""
    of = [entry["rungs"] for entry in events if entry["event"] in ("attempt", "action", "supervisor_ended")]
    return tuple(of[-1]) if of else ()


def published_remedies(machine: Machine) -> dict[str, dict[str, str]]:
    """Return fault -> recovery changes (rungs) that helped others with a card of `machine` -> the address of the
    report."""
    remedies: dict[str, dict[str, str]] = {}
    for remedy in (each for card in machine.cards if card.kind == "rocm" for each in remedies_of(card.architecture)):
        for fault in remedy["faults"]:
            remedies.setdefault(fault, {}).setdefault(remedy["rung"], f"as in {remedy['source']}")
    return remedies


def remembered_rungs(fingerprint: str, model: str, now_s: float) -> tuple[str, ...]:
    """Return the recovery changes (rungs) with which a run of `model` begins on this machine: those that a run of it
    needed within the last 30 days."""
    # They are kept in the machine's profile; another driver, card or torch has another profile.
    needed = read_profile(fingerprint).rungs.get(model, {})
    return tuple(name for name, time_s in needed.items() if name in RUNGS and now_s - time_s < FORGET_S)


def remember_rungs(fingerprint: str, model: str, rungs: Sequence[str], now_s: float) -> None:
    """Store that a run of `model` needed these recovery changes (rungs) on this machine.

    Raises OSError if the profile can't be written.
    """
    profile, remembered = read_profile(fingerprint), remembered_rungs(fingerprint, model, now_s)
    before = profile.rungs.get(model, {})
    kept = [name for name in rungs if name not in SMALLER_TRAINING]
    # One that it began with keeps the time of its need: each finished run renewed it, and one hang that ended on `cpu`
    # kept a nightly cycle there for ever.
    needed = {name: before[name] if name in remembered else round(now_s) for name in kept}
    write_profile(replace(profile, rungs={**profile.rungs, model: needed}))
