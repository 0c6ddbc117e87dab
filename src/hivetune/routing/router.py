"""The router of texts as data: for each expert a line through hashed words, a calibration and a threshold. Pure.

It says which expert answers a text better, or that it does not know; then the shared adapter answers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from hivetune.routing.features import features_of, read_part, word_numbers


@dataclass(frozen=True)
class TextExpert:
    """`weights` by number of feature; `slope` and `offset` make a probability of the score (Platt 1999). `threshold`
    None: no text is routed to it, `why_not` says why."""

    name: str
    weights: Mapping[int, float]
    bias: float = 0.0
    slope: float = 1.0
    offset: float = 0.0
    threshold: float | None = None
    why_not: str = ""

    def score(self, features: Sequence[int]) -> float:
        if not features:
            return self.bias
        return self.bias + math.fsum(map(self.weights.get, features, repeat(0.0))) / math.sqrt(len(features))

    def probability(self, features: Sequence[int]) -> float:
        """That it answers better than the shared adapter by a margin."""
        z = self.slope * self.score(features) + self.offset
        return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


@dataclass(frozen=True)
class TextRouter:
    """`words`: those of the rows that it learned from; a text with a smaller share of them than `least_known`, or
    longer than `longest` characters, is of another kind, and no line through such rows says anything of it."""

    experts: tuple[TextExpert, ...] = ()
    words: frozenset[int] = frozenset()
    least_known: float = 0.0
    longest: int = 0


@dataclass(frozen=True)
class TextChoice:
    """`expert` None: the shared adapter. `probability`: of the likeliest expert."""

    expert: str | None
    probability: float
    reason: str


def route_text(router: TextRouter, text: str) -> TextChoice:
    """Which expert answers `text`, and why."""
    if not router.experts:
        return TextChoice(None, 0.0, "no expert is found by text")
    if len(text) > router.longest:
        return TextChoice(
            None,
            0.0,
            f"{len(text):,} characters are more than any text that the router learned from ({router.longest:,})",
        )
    part = read_part(text)
    share = known_share(part, router.words)
    if share < router.least_known:
        return TextChoice(None, 0.0, f"{share:.0%} of its words are known, {router.least_known:.0%} are needed")
    features = features_of(part)
    scored = [(expert.probability(features), expert) for expert in router.experts]
    sure = [(p, expert) for p, expert in scored if expert.threshold is not None and p >= expert.threshold]
    if sure:
        probability, expert = max(sure, key=lambda pair: pair[0])
        return TextChoice(expert.name, probability, f"text: {probability:.2f} that {expert.name} answers better")
    probability, expert = max(scored, key=lambda pair: pair[0])
    needed = "is never chosen by text" if expert.threshold is None else f"needs {expert.threshold:.2f}"
    return TextChoice(None, probability, f"unsure: {probability:.2f} that {expert.name} answers better, it {needed}")


def known_share(part: str, words: frozenset[int]) -> float:
    """Share of the different words of `read_part` that are among `words`; 0 for a text without any."""
    found = word_numbers(part)
    return len(found & words) / len(found) if found else 0.0
