"""Runs with random scripted faults, and how they go by the ladder alone: no process, thousands in a second.

`kinds` are the faults that a run can survive, as scripted_worker.py plays them; `play` does in memory what that worker
and the supervisor do with each other, so that a rule of the ladder can be held against many more histories.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scripted import BATCH, BLAS, GPU_FAULT, NUM_ROWS
from scripted_worker import applies

from hivetune.train.supervise.ladder import (
    Bounds,
    Failure,
    Reply,
    effects_of,
    next_action,
    remaining_rungs,
    void_rungs,
)

STEPS = NUM_ROWS // BATCH
DIAGNOSES = {
    "kill": "killed",
    "segv": "crashed",
    "out of memory": "device-out-of-memory",
    "freeze": "hang",
    "hold the GIL": "hang",
    "nan": "not-finite",
    GPU_FAULT: "device-memory-fault",
    BLAS: "blas-failed",
    "[Errno 5] Input/output error": "disk-error",
}
MOST_ATTEMPTS = 100


def kinds(number: random.Random) -> dict[str, dict[str, Any]]:
    """One fault of each kind that can be survived, each at a random place of its own."""

    def step() -> int:
        return number.randrange(1, STEPS)

    gpu = {"do": GPU_FAULT, "device": True}
    return {
        "killed": {"do": "kill", "step": step(), "times": 1},
        "killed while loading": {"do": "kill", "step": -1, "times": number.randrange(1, 3)},
        "segfault of a row": {"do": "segv", "row": number.randrange(NUM_ROWS)},
        "segfault of our kernels": {"do": "segv", "step": step(), "rung": {"path": "general"}},
        "GPU fault by chance": {**gpu, "chance": 0.03, "times": 3},
        "GPU fault of a row": {"do": GPU_FAULT, "row": number.randrange(NUM_ROWS)},
        "GPU fault with hipBLASLt": {**gpu, "step": step(), "rung": {"ROCBLAS_USE_HIPBLASLT": "0"}},
        "matrix library at a shape": {
            "do": "raise",
            "text": BLAS,
            "step": step(),
            "device": True,
            "rung": {"TORCH_BLAS_PREFER_HIPBLASLT": "0"},
        },
        "a card that can't do it": {**gpu, "step": step()},
        "out of memory": {"do": "out of memory", "tokens_above": 20, "device": True},
        "hang": {"do": "freeze", "step": step(), "times": 1},
        "hang that holds the GIL": {"do": "hold the GIL", "step": step(), "times": 1},
        "NaN in one precision": {"do": "nan", "step": step(), "rung": {"dtype": "float32"}},
        "disk error": {"do": "raise", "text": "[Errno 5] Input/output error", "step": step(), "times": 1},
    }


def draw(seed: int) -> tuple[list[str], list[dict[str, Any]]]:
    """The names and the script of one to three faults."""
    number = random.Random(seed)
    named = kinds(number)
    chosen = number.sample(sorted(named), number.randint(1, 3))
    return chosen, [named[name] for name in chosen]


@dataclass
class World:
    """A run and its card; `rows[step]` of its plan, of which `gone` are quarantined. 13 tokens a row."""

    faults: Sequence[Mapping[str, Any]]
    bounds: Bounds
    random: random.Random
    durable: int = 0
    gone: set[int] = field(default_factory=set)
    met: dict[int, int] = field(default_factory=dict)

    def rows(self, step: int) -> list[int]:
        return [row for row in range(step * BATCH, (step + 1) * BATCH) if row not in self.gone]

    def attempt(self, rungs: Sequence[str]) -> tuple[str, int] | None:
        """The diagnosis and the step of its death; None when it came to the end."""
        environment, choices = effects_of(rungs)
        settings = {**environment, **choices.as_dict()}
        death = self._meets(settings, -1, ())
        if death is not None:
            return death, -1
        for step in range(self.durable, STEPS):
            death = self._meets(settings, step, self.rows(step))
            self.durable = step
            if death is not None:
                return death, step
        return None

    def isolate(self, step: int, rungs: Sequence[str]) -> bool:
        """Whether a row was taken out. A fault by chance hits the good row too: nothing is learned."""
        environment, choices = effects_of(rungs)
        settings = {**environment, **choices.as_dict()}
        bad = {row for row in self.rows(step) if self._meets(settings, None, [row], chance=False) is not None}
        if self._meets(settings, None, [], chance=True) is not None:
            return False
        self.gone |= bad
        return bool(bad)

    def _meets(
        self, settings: Mapping[str, Any], step: int | None, rows: Sequence[int], *, chance: bool = True
    ) -> str | None:
        tokens = 13 * -(-len(rows) // 2 ** settings.get("halvings", 0))
        for number, fault in enumerate(self.faults):
            met = self.met.get(number, 0)
            if (chance or "chance" not in fault) and applies(
                fault, met, settings, step, rows, tokens, draw=self.random.random
            ):
                self.met[number] = met + 1
                return DIAGNOSES[fault["text"] if fault["do"] == "raise" else fault["do"]]
        return None


def play(world: World) -> tuple[str, list[Failure]]:
    """done, stop or endless, and every failure on the way; as the supervisor does it."""
    history: list[Failure] = []
    action = Reply("again", "")
    while len(history) < MOST_ATTEMPTS:
        death = world.attempt(action.rungs)
        if death is None:
            return "done", history
        failure = Failure(*death, world.durable, len(world.gone), action.rungs, action.tried)
        history.append(failure)
        bounds = _bounds(world, failure.rungs)
        action = next_action(history, bounds)
        if action.kind == "isolate":
            found = world.isolate(failure.step, failure.rungs)
            action = after_isolation(history, found, bounds)
        if action.kind == "stop":
            return "stop", history
    return "endless", history


def after_isolation(history: list[Failure], found: bool, bounds: Bounds) -> Reply:
    """What the supervisor does after the replay of the last failure's rows."""
    history[-1] = replace(history[-1], isolated=True)
    return Reply("again", "", remaining_rungs(history)) if found else next_action(history, bounds)


def _bounds(world: World, rungs: Sequence[str]) -> Bounds:
    environment, choices = effects_of(rungs)
    variables = {name: value for name, value in environment.items() if value is not None}
    on_device = world.bounds.on_device and "cpu" not in rungs
    return replace(world.bounds, on_device=on_device, void=void_rungs(variables, choices))
