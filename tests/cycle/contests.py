"""Candidates as evaluations, drawn with a seed: how much better or worse they are is known, how it looks is chance."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivetune.config import GateConfig
from hivetune.cycle.gate import Comparisons

# Answers are not asked in these worlds, so nothing is required of them.
LOSS_ONLY = GateConfig()
BASE_NLL, ROW_SD = 2.0, 0.2


@dataclass
class HeldOutWorld:
    """Held-out rows that grow from cycle to cycle, one group each. `noise`: the random part of a model's loss on a row,
    in nats per token. A champion's noise stays with its rows, so that all its candidates meet the same luck."""

    seed: int
    rows: int
    noise: float = ROW_SD
    tokens: list[int] = field(default_factory=list)
    hard: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.grow(self.rows)

    def grow(self, count: int) -> None:
        for _ in range(count):
            self.tokens.append(self.random.randint(10, 40))
            self.hard.append(self.random.gauss(0, 0.3))

    def model(self, better: float = 0.0, *, fresh: float | None = None, known: int = 0) -> list[float]:
        """Return a model's nats per token on each row: `better` than the base on the first `known` rows (or
        everywhere), `fresh` on the others."""
        others = better if fresh is None else fresh
        return [
            BASE_NLL + hard - (better if row < known else others) + self.random.gauss(0, self.noise)
            for row, hard in enumerate(self.hard)
        ]

    def more(self, model: list[float], better: float) -> None:
        """Extend an older model's losses to the rows that came since."""
        for hard in self.hard[len(model) :]:
            model.append(BASE_NLL + hard - better + self.random.gauss(0, self.noise))

    def evaluation(self, rival: Sequence[float], candidate: Sequence[float]) -> Mapping[str, Any]:
        rows = [
            {
                "id": f"r{n}",
                "source": f"f:{n}",
                "group": f"g{n}",
                "tokens": tokens,
                "base": tokens * a,
                "tuned": tokens * b,
            }
            for n, (tokens, a, b) in enumerate(zip(self.tokens, rival, candidate, strict=True))
        ]
        not_asked = dict.fromkeys(("latency_s", "peak_memory_bytes"), "nothing was asked")
        return {"rows": rows, "answers": [], "base": {}, "tuned": {}, "not_compared": not_asked}


def contest(
    world: HeldOutWorld,
    base: Sequence[float],
    champion: Sequence[float],
    candidate: Sequence[float],
    known: int,
    *,
    look: int = 1,
) -> Comparisons:
    return Comparisons(
        base=world.evaluation(base, candidate),
        champion=world.evaluation(champion, candidate),
        known={f"r{n}" for n in range(known)},
        look=look,
    )
