"""What a score task works with, and what each model cost. Base and tuned model take turns."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from hivetune.base.journal import Journal
from hivetune.data.snapshot import Snapshot
from hivetune.process.child import Heartbeat
from hivetune.run.choices import Choices

SideName = Literal["base", "tuned"]


@dataclass
class Side:
    """The cost of one model: sums over its rows and answers."""

    nll: float = 0.0
    tokens: int = 0
    loss_seconds: float = 0.0
    new_tokens: int = 0
    answer_seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def add_loss(self, line: Mapping[str, Any]) -> None:
        self.nll += math.nan if line["nll"] is None else line["nll"]
        self.tokens += line["tokens"]

    def add_turn(self, turn: Mapping[str, Any], answers: Iterable[Mapping[str, Any]]) -> None:
        for answer in answers:
            self.latencies.append(answer["seconds"])
            self.new_tokens += answer["new_tokens"] + answer["ended"]
        self.answer_seconds += turn["seconds"]
        self.peak_memory_bytes = max(self.peak_memory_bytes, turn["peak_memory_bytes"])

    def summary(self) -> dict[str, Any]:
        answers = len(self.latencies)
        return {
            "loss": self.nll / self.tokens if self.tokens and math.isfinite(self.nll) else None,
            "tokens": self.tokens,
            "loss_seconds": round(self.loss_seconds, 3),
            "answers": answers,
            "latency_s": sum(self.latencies) / answers if answers else None,
            "tokens_per_second": self.new_tokens / self.answer_seconds if self.answer_seconds else None,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


@dataclass(frozen=True)
class Scoring:
    """The input of a score task."""

    model: Path
    adapter: Path | None
    snapshot: Snapshot
    device: torch.device
    dtype: torch.dtype
    choices: Choices
    sides: Mapping[SideName, Side]
    lines: Journal
    stored: "StoredScores"
    heartbeat: Heartbeat


@dataclass
class StoredScores:
    """The results of an earlier task in `scores`: for each model the rows with a loss, and the finished turns."""

    losses: set[tuple[str, int]] = field(default_factory=set)
    turns: set[tuple[str, int]] = field(default_factory=set)
    probes_s: list[float] = field(default_factory=list)


def in_turns(sides: Sequence[SideName], count: int) -> list[tuple[int, SideName]]:
    """Return (block, model) in the order of answering; a model stays for the first turn of the next block."""
    turns: list[tuple[int, SideName]] = []
    for block in range(count):
        turns += [(block, side) for side in (sides if block % 2 == 0 else reversed(sides))]
    return turns
