"""The router of texts: which specialist answers a text better than the shared adapter, or that it does not know.

It is trained on which adapter scored a row better by a margin, not on the name of the row's domain. So texts that two
domains answer differently without a cue are labelled both ways, no line parts them, and the router says that it does
not know. For each specialist it is a line through hashed words, a calibration and a threshold.

It reads the words of a text and its runs of four characters as hashes, so any text in any script has features. The
loops run in C, since a request waits for them: 0.2 ms for 1,000 characters.
"""

import math
import random
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

# A text as the numbers of its words and of its runs of four characters: what the router reads of a question.
#
# No vocabulary is kept: a word's number is its hash, so any text in any script has one. The loops run in C, since a
# request waits for this: 0.2 ms for 1,000 characters.

BITS = 16
_WORDS = 1 << BITS  # numbers of words lie above those of characters
_MASK = _WORDS - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio (Knuth, volume 3, 6.4)
_SHIFT = 64 - BITS
READ_CHARS = 600  # of the beginning and of the end of a text: what is asked stands there
_WORD = re.compile(r"\w+")


def read_part(text: str) -> str:
    """Return the part of a text that is used: its beginning and end, in lower case, white space as one space."""
    if len(text) > 2 * READ_CHARS:
        text = f"{text[:READ_CHARS]} {text[-READ_CHARS:]}"
    return " ".join(text.lower().split())


def distinct_words(text: str) -> set[str]:
    return set(_WORD.findall(text))


def word_numbers(text: str) -> set[int]:
    """Return the hashes of the words of `read_part`, 32 bits each."""
    return {zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in _WORD.findall(text)}


def features_of(text: str) -> list[int]:
    """Return the numbers of words and of runs of four characters in `read_part`, each once, below 2 * 2^BITS."""
    raw = f" {text} ".encode("utf-16-le", "surrogatepass")
    features: set[int] = set()
    for start in range(0, 8, 2):
        count = (len(raw) - start) // 8
        runs = struct.unpack_from(f"<{count}Q", raw, start) if count > 0 else ()
        features.update([(run * _ODD >> _SHIFT) & _MASK for run in runs])
    features.update([_WORDS + ((word * 0x9E3779B1 >> BITS) & _MASK) for word in word_numbers(text)])
    return list(features)


@dataclass(frozen=True)
class TextSpecialist:
    """One specialist in the router. `weights`: by number of feature. `slope`, `offset`: a probability from the score
    (Platt 1999).

    `threshold` is None where no text is routed to it; `why_not` says why.
    """

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
        """Return the probability that the specialist answers better than the shared adapter by a margin."""
        z = self.slope * self.score(features) + self.offset
        return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


@dataclass(frozen=True)
class TextRouter:
    """The specialists and what the router learned from.

    `words`: of the rows that it learned from. A text with a smaller share of them than `least_known`, or longer than
    `longest` characters, is of another kind, and no line through such rows says anything about it.
    """

    specialists: tuple[TextSpecialist, ...] = ()
    words: frozenset[int] = frozenset()
    least_known: float = 0.0
    longest: int = 0


@dataclass(frozen=True)
class TextChoice:
    """The router's answer. `specialist` is None for the shared adapter. `probability`: of the likeliest specialist."""

    specialist: str | None
    probability: float
    reason: str


def route_text(router: TextRouter, text: str) -> TextChoice:
    """Return which specialist answers `text`, and why."""
    if not router.specialists:
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
    scored = [(specialist.probability(features), specialist) for specialist in router.specialists]
    sure = [
        (p, specialist) for p, specialist in scored if specialist.threshold is not None and p >= specialist.threshold
    ]
    if sure:
        probability, specialist = max(sure, key=lambda pair: pair[0])
        return TextChoice(
            specialist.name, probability, f"text: {probability:.2f} that {specialist.name} answers better"
        )
    probability, specialist = max(scored, key=lambda pair: pair[0])
    needed = "is never chosen by text" if specialist.threshold is None else f"needs {specialist.threshold:.2f}"
    return TextChoice(
        None, probability, f"unsure: {probability:.2f} that {specialist.name} answers better, it {needed}"
    )


def known_share(part: str, words: frozenset[int]) -> float:
    """Return the share of the different words of `read_part` that are among `words`; 0 for a text without words."""
    numbers = word_numbers(part)
    return len(numbers & words) / len(numbers) if numbers else 0.0


BETTER_BY = 0.02  # nats a token: a smaller difference is nobody's better answer
MAX_HARM = 0.05  # of the texts that are routed to an expert: the 95 % upper bound of those that it answers worse
THRESHOLDS = (0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
MIN_CERTIFIED = 59  # with no harm at all the bound is 0.05 from 59 on: 1 - 0.05 ** (1 / 59)
MAX_LEARNED = 6000  # rows: more cost minutes and move no line
EPOCHS, RATE, DECAY = 12, 0.5, 1e-4
# Texts that know fewer of their words than 98 of 100 rows of the validation are of another kind.
UNKNOWN_SHARE = 0.02
LONGER = 4  # times the longest text that it learned from


@dataclass(frozen=True)
class RoutedText:
    """A text and, for each specialist, how many nats a token it is better than the shared adapter.

    `held_out`: no adapter was trained on it, so it can certify a threshold.
    """

    text: str
    gains: Mapping[str, float]
    held_out: bool


def learn_router(rows: Sequence[RoutedText], specialists: Sequence[str], outside: Sequence[str] = ()) -> TextRouter:
    """Train the router of `specialists`.

    `outside`: texts of no domain, which every specialist learns to leave alone.
    """
    tests = [row for row in rows if row.held_out]
    learned = _sample([row for row in rows if not row.held_out])
    nothing = dict.fromkeys(specialists, 0.0)
    learned += [RoutedText(text, nothing, held_out=False) for text in outside]
    inputs = [features_of(read_part(row.text)) for row in learned]
    checks = [features_of(read_part(row.text)) for row in tests]
    words = frozenset[int]().union(*(word_numbers(read_part(row.text)) for row in learned))
    learnt = []
    for name in specialists:
        specialist = _fit(name, inputs, [row.gains[name] > BETTER_BY for row in learned])
        specialist = _calibrate(specialist, checks, [row.gains[name] > BETTER_BY for row in tests])
        learnt.append(_with_threshold(specialist, checks, [row.gains[name] < -BETTER_BY for row in tests], tests))
    shares = sorted(known_share(read_part(row.text), words) for row in tests)
    least = shares[int(UNKNOWN_SHARE * len(shares))] if shares else 1.0
    longest = LONGER * max((len(row.text) for row in rows), default=0)
    return TextRouter(tuple(learnt), words, least, longest)


def harm_bound(harmful: int, routed: int) -> float:
    """Return the exact 95 % upper bound of a share (Clopper and Pearson 1934).

    It is the largest share under which `harmful` or fewer of `routed` have a probability of 5 %.
    """
    if routed == 0 or harmful >= routed:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        share = (low + high) / 2
        tail = math.fsum(_binomial(routed, k, share) for k in range(harmful + 1))
        low, high = (share, high) if tail > 0.05 else (low, share)
    return high


def _binomial(n: int, k: int, share: float) -> float:
    choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(choose + k * math.log(share) + (n - k) * math.log1p(-share))


def _sample(rows: Sequence[RoutedText]) -> list[RoutedText]:
    if len(rows) <= MAX_LEARNED:
        return list(rows)
    return random.Random(0).sample(list(rows), MAX_LEARNED)


def _fit(name: str, inputs: Sequence[Sequence[int]], labels: Sequence[bool]) -> TextSpecialist:
    """Fit a logistic regression by AdaGrad (Duchi, Hazan and Singer 2011), rows in an order that the seed gives."""
    weights: dict[int, float] = {}
    squares: dict[int, float] = {}
    bias, bias_square = 0.0, 1e-8
    order = list(range(len(inputs)))
    for epoch in range(EPOCHS):
        random.Random(epoch).shuffle(order)
        for index in order:
            features = inputs[index]
            if not features:
                continue
            size = 1 / math.sqrt(len(features))
            error = _sigmoid(bias + size * sum(weights.get(feature, 0.0) for feature in features)) - labels[index]
            bias_square += error * error
            bias -= RATE * error / math.sqrt(bias_square)
            for feature in features:
                weight = weights.get(feature, 0.0)
                slope = error * size + DECAY * weight
                squares[feature] = square = squares.get(feature, 1e-8) + slope * slope
                weights[feature] = weight - RATE * slope / math.sqrt(square)
    return TextSpecialist(name, {feature: round(weight, 5) for feature, weight in weights.items()}, bias)


def _calibrate(specialist: TextSpecialist, inputs: Sequence[Sequence[int]], labels: Sequence[bool]) -> TextSpecialist:
    """Fit Platt's slope and offset on held-out rows by Newton's method; his smoothed targets keep both finite."""
    positives = sum(labels)
    if not positives or positives == len(labels):
        return specialist
    high, low = (positives + 1) / (positives + 2), 1 / (len(labels) - positives + 2)
    points = [
        (specialist.score(features), high if label else low) for features, label in zip(inputs, labels, strict=True)
    ]
    slope, offset = 1.0, 0.0
    for _ in range(30):
        g1 = g2 = 0.0
        h11 = h22 = 1e-6
        h12 = 0.0
        for score, target in points:
            p = _sigmoid(slope * score + offset)
            w = p * (1 - p)
            g1, g2 = g1 + (p - target) * score, g2 + p - target
            h11, h12, h22 = h11 + w * score * score, h12 + w * score, h22 + w
        determinant = h11 * h22 - h12 * h12
        if determinant < 1e-9:
            break
        slope -= (h22 * g1 - h12 * g2) / determinant
        offset -= (h11 * g2 - h12 * g1) / determinant
    if not (math.isfinite(slope) and math.isfinite(offset) and slope > 0):
        return specialist
    return replace(specialist, slope=slope, offset=offset)


def _with_threshold(
    specialist: TextSpecialist, inputs: Sequence[Sequence[int]], harmful: Sequence[bool], rows: Sequence[RoutedText]
) -> TextSpecialist:
    """Choose the lowest threshold whose harm is bounded.

    The search goes from the strictest threshold that routes enough rows downwards, up to the first that fails. So the
    bound holds for the chosen one, however many are tried (fixed sequence testing).
    """
    probabilities = [specialist.probability(features) for features in inputs]
    chosen, problem = None, f"fewer than {MIN_CERTIFIED} held-out rows are like its own"
    for threshold in THRESHOLDS:
        routed = [index for index, p in enumerate(probabilities) if p >= threshold]
        if len(routed) < MIN_CERTIFIED:
            continue
        bound = harm_bound(sum(harmful[index] for index in routed), len(routed))
        if bound > MAX_HARM:
            problem = f"up to {bound:.0%} of the texts that would be routed to it are answered worse"
            break
        # Routing must be worth it too: on average over what is routed the expert is better by the margin.
        if math.fsum(rows[index].gains[specialist.name] for index in routed) / len(routed) <= BETTER_BY:
            problem = "what would be routed to it is answered no better"
            break
        chosen = threshold
    return replace(specialist, threshold=chosen, why_not="" if chosen is not None else problem)


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z > -700 else 0.0
