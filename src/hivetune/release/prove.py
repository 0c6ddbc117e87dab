"""The proof of an export: is what is shipped what was trained? Pure; what both sides say of the same tokens comes in.

At some places of held-out conversations the trained model (adapter beside base, float32) and the exported one say how
likely the token there is, and which ones are likeliest. Three things must hold, and the bounds are stated in the proof:

logits   the mean difference of log-probabilities is within the bound of the number type. A quantized file may differ
         as its base differs at the same type, twice that at most.
loss     over the tokens that are there, the same bound.
effect   what the adapter changes in the export, over the base at the same type, is what it changed when it was trained:
         the slope of the one over the other is 1, within a tenth and what its standard error allows.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hivetune.errors import DataRefused
from hivetune.process.protocol import Passage
from hivetune.records import Split

PROOF = "proof.json"
PASSAGES, PLACES = 8, 12
TOP = 16
LONGEST_PASSAGE = 2048  # tokens
# Mean differences in nats. Seen with SmolLM2-135M: f16 0.003, bf16 and merged (rounded to bf16's 8 bits) 0.04.
FLOAT_BOUNDS = {"f32": 0.03, "f16": 0.03, "bf16": 0.1, "merged": 0.1}
# What the base itself may differ by in a quantized type: three times what tiny random models, which suffer most, do in
# q8_0 (0.06 at most), and twice as much for each bit less. Another model differs by whole nats.
BASE_BOUNDS = {"q8_0": 0.2, "q6_k": 0.4, "q5_1": 0.8, "q5_0": 0.8, "q5_k_m": 0.8}
COARSEST_BOUND = 1.2
QUANTIZED_BOUND, QUANTIZED_FACTOR = 0.03, 2.0
EFFECT_BOUND, EFFECT_ERRORS = 0.1, 3.0


@dataclass(frozen=True)
class Saying:
    """What a model says at one place: the log-probability of the token there, and (token, log-probability) of the
    likeliest ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]


# By passage and place. llama.cpp says nothing of a token that is a part of a character.
Sayings = Sequence[Sequence[Saying | None]]
_Said = Mapping[int, float]  # token -> log-probability; that of the token that is there has the key _THERE
_THERE = -1


def read_told(lists: Sequence[Sequence[Any]]) -> list[list[Saying | None]]:
    """From plain lists: [logprob, [[token, logprob], ...]] or null at each place."""
    return [[None if said is None else _told(*said) for said in passage] for passage in lists]


def plain_told(said: Sayings) -> list[list[Any]]:
    """The reverse of `read_told`."""
    return [[None if told is None else [told.logprob, list(told.top)] for told in passage] for passage in said]


def _told(logprob: float, top: Sequence[Sequence[Any]]) -> Saying:
    return Saying(logprob, tuple((token, score) for token, score in top))


class _Rows(Protocol):
    """What is needed of a snapshot (data/snapshot.py)."""

    def rows(self, split: Split) -> list[int]: ...
    def length(self, row: int) -> int: ...
    def tokens(self, row: int) -> memoryview: ...
    def trained(self, row: int) -> memoryview: ...


def choose_passages(snapshot: _Rows, context_tokens: int | None = None) -> list[Passage]:
    """The first tokens of the last answer of some rows, and the one that ends it; held-out rows first. Rows that are
    longer than `context_tokens`, what the export can be asked, are left out.

    Raises DataRefused when every row is longer than that, or than `LONGEST_PASSAGE`.
    """
    longest = min(LONGEST_PASSAGE, context_tokens or LONGEST_PASSAGE)
    splits: tuple[Split, ...] = ("test", "validation", "train")
    rows = (row for split in splits for row in snapshot.rows(split) if snapshot.length(row) <= longest)
    found = [_passage(snapshot.tokens(row), snapshot.trained(row)) for row in itertools.islice(rows, PASSAGES)]
    if not found:
        raise DataRefused(f"every row is longer than {longest:,} tokens, so nothing can be compared")
    return found


def _passage(tokens: memoryview, trained: memoryview) -> Passage:
    end = max(place for place, is_trained in enumerate(trained) if is_trained) + 1
    start = end
    while trained[start - 1]:
        start -= 1
    places = sorted({*range(start, min(start + PLACES, end)), end - 1})
    return Passage(tuple(int(token) for token in tokens[:end]), tuple(places))


def prove(
    kind: str, trained: Mapping[str, Sayings], exported: Sayings, exported_base: Sayings | None
) -> dict[str, Any]:
    """`holds`, `problems` in words, and the measurements behind them.

    `kind`: a number type of GGUF, or "merged". `trained` has "base" and "tuned"; `exported_base` is the base at the
    same type, None where numbers are not quantized: then the base itself is taken.
    """
    places, unreported = _places(trained["base"], trained["tuned"], exported_base or trained["base"], exported)
    if not places:
        return {"places": 0, "holds": False, "problems": ["llama.cpp reported no log-probability at all"]}
    base, tuned, its_base, its = zip(*places, strict=True)
    typical, largest = _distance(its, tuned)
    measured: dict[str, Any] = {"places": len(places), "unreported": unreported}
    measured |= {"typical": typical, "largest": largest}
    if exported_base is None:
        bound = FLOAT_BOUNDS[kind]
    else:
        measured["base_typical"] = _distance(its_base, base)[0]
        bound = QUANTIZED_BOUND + QUANTIZED_FACTOR * measured["base_typical"]
    losses = [-_mean([said[_THERE] for said in side]) for side in (tuned, its)]
    slope, error = _effect(places)
    measured |= {"bound": bound, "loss_trained": losses[0], "loss_exported": losses[1]}
    measured |= {"effect": slope, "effect_error": error}
    problems = []
    if exported_base is not None and not measured["base_typical"] <= (most := BASE_BOUNDS.get(kind, COARSEST_BOUND)):
        problems.append(
            f"the base alone differs by {measured['base_typical']:.3f} nats on average, at most {most:g} in {kind}"
        )
    if not typical <= bound:
        problems.append(f"log-probabilities differ by {typical:.3f} nats on average, at most {bound:.3f} expected")
    if not abs(losses[1] - losses[0]) <= bound:
        problems.append(f"the loss is {losses[1]:.3f} instead of {losses[0]:.3f}, at most {bound:.3f} apart expected")
    if slope is not None and error is not None and not abs(slope - 1) <= EFFECT_BOUND + EFFECT_ERRORS * error:
        problems.append(f"{slope:.2f} times the adapter's effect arrived instead of once")
    return {**measured, "holds": not problems, "problems": problems}


def _distance(one: Sequence[_Said], other: Sequence[_Said]) -> tuple[float, float]:
    """Mean and largest absolute difference over the tokens that are there and the likeliest that both name."""
    differences = [
        abs(a[token] - b[token]) for a, b in zip(one, other, strict=True) for token in sorted(a.keys() & b.keys())
    ]
    return _mean(differences), max(differences)


def _effect(places: Sequence[Sequence[_Said]]) -> tuple[float | None, float | None]:
    """Slope through zero of the exported change over the trained one, and its standard error; None without a change.

    The tokens of a place share their error (one sum of all exponentials, the same rounded weights), so the error is
    that of places as clusters (Liang and Zeger 1986): taken one by one they claim a third of it.
    """
    clusters = []
    for a, b, c, d in places:
        shared = sorted(a.keys() & b.keys() & c.keys() & d.keys())
        clusters.append([(b[token] - a[token], d[token] - c[token]) for token in shared])
    squares = math.fsum(x * x for pairs in clusters for x, _ in pairs)
    if squares == 0 or len(clusters) < 2:
        return None, None
    slope = math.fsum(x * y for pairs in clusters for x, y in pairs) / squares
    left = math.fsum(math.fsum(x * (y - slope * x) for x, y in pairs) ** 2 for pairs in clusters)
    return slope, math.sqrt(left * len(clusters) / (len(clusters) - 1)) / squares


def _places(*sides: Sayings) -> tuple[list[tuple[_Said, ...]], int]:
    """At each place, what each side says; and how many places were left out since one side says nothing there."""
    found: list[tuple[_Said, ...]] = []
    unreported = 0
    for passages in zip(*sides, strict=True):
        for told in zip(*passages, strict=True):
            said = [{**dict(each.top), _THERE: each.logprob} for each in told if each is not None]
            if len(said) == len(told):
                found.append(tuple(said))
            else:
                unreported += 1
    return found, unreported


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
