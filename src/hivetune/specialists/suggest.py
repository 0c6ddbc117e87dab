"""Domains that undeclared texts suggest: stable clusters, for a person to declare.

Spherical k-means (Dhillon and Modha 2001) runs on the words of what the router reads of a text; rare ones weigh more.
Any heap can be cut into k parts. What counts is whether another half of it is cut along the same lines. So the number
of clusters is the largest whose prediction strength is 0.8 (Tibshirani and Walther 2005, who take 0.8 to 0.9), else
there are none. Scripts without spaces between words have no words here, and no clusters.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import write_atomic
from hivetune.routing.domains import MIN_ROWS
from hivetune.routing.text_router import distinct_words, read_part
from hivetune.specialists.survey import Survey

SUGGESTED = "suggested.jsonl"


@dataclass(frozen=True)
class TextCluster:
    """A cluster. `texts`: their numbers. `words`: the most telling ones, each with how many texts inside and outside
    have it.
    """

    texts: tuple[int, ...]
    words: tuple[tuple[str, int, int], ...]
    strength: float

    @property
    def name(self) -> str:
        return "-".join(word for word, _, _ in self.words[:2])


@dataclass(frozen=True)
class Suggestions:
    """The domains that undeclared rows suggest. `undeclared`: rows without the kind that makes domains. `key`: what
    they would declare.

    `clusters`: of at least MIN_ROWS rows. `smaller`: how many stable ones have fewer. `lines`: the file that names each
    of their rows by its source, with a value to declare; None where nothing is suggested.
    """

    undeclared: int
    key: str
    clusters: tuple[TextCluster, ...] = ()
    smaller: int = 0
    lines: Path | None = None


def suggest_domains(survey: Survey) -> Suggestions:
    """Suggest domains from the texts of undeclared rows, in seconds; nothing is decided by it."""
    rows = [row for row in survey.rows if survey.kind is None or survey.kind not in row.keys]
    key = "agent" if survey.kind == "agent" else "category"
    stable = clusters_of([row.text for row in rows]) if len(rows) >= MIN_ROWS else []
    large = tuple(cluster for cluster in stable if len(cluster.texts) >= MIN_ROWS)
    smaller = len(stable) - len(large)
    if not large:
        return Suggestions(len(rows), key, smaller=smaller)
    sources = [survey.snapshot.info(row.numbers[0]).source for row in rows]
    lines = [
        json.dumps({"source": sources[number], key: cluster.name}, ensure_ascii=False)
        for cluster in large
        for number in cluster.texts
    ]
    path = survey.folder / SUGGESTED
    write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
    return Suggestions(len(rows), key, large, smaller, path)


STRENGTH = 0.8
MAX_CLUSTERS = 6
# Texts that the lines are drawn by; all others are only told on which side they lie. With 400, three planted
# topics of which each text has three words were not stable (0.73), with 800 they were (1.0).
MAX_SAMPLED_TEXTS = 800
MIN_LOOKED_AT = 40  # in each half 20: below, any line is an accident
SPLITS, STARTS, ROUNDS = 2, 2, 12
RARE, COMMON = 0.01, 0.9  # shares of the texts between which a word can tell clusters apart
MIN_TEXTS, MIN_WORDS_OF_TEXT = 3, 2  # that have such a word; of such words that a text has
_WORDS_SHOWN = 5

Vector = Mapping[str, float]


def clusters_of(texts: Sequence[str]) -> list[TextCluster]:
    """Return the clusters, the largest first; empty where no division of the texts is stable.

    The same texts in the same order give the same clusters. Texts of fewer than MIN_WORDS_OF_TEXT words that others
    have are in none.
    """
    chosen = random.Random(0)
    looked_at = sorted(chosen.sample(range(len(texts)), min(MAX_SAMPLED_TEXTS, len(texts))))
    word_sets = [distinct_words(read_part(text)) for text in texts]
    weights = _weights([word_sets[number] for number in looked_at])
    vectors = [vector for number in looked_at if (vector := _vector(word_sets[number], weights))]
    if len(vectors) < MIN_LOOKED_AT:
        return []
    stable = {count: prediction_strength(vectors, count) for count in range(2, MAX_CLUSTERS + 1)}
    count = max((count for count, strength in stable.items() if strength >= STRENGTH), default=0)
    if not count:
        return []
    centers = _centers(vectors, count, chosen)
    members: list[list[int]] = [[] for _ in centers]
    for number, has in enumerate(word_sets):
        vector = _vector(has, weights)
        if vector:
            members[_nearest(vector, centers)[0]].append(number)
    everywhere = Counter(word for some in word_sets for word in some)
    clusters = [
        TextCluster(tuple(part), _telling(word_sets, part, everywhere), round(stable[count], 3))
        for part in members
        if part
    ]
    return sorted(clusters, key=lambda cluster: -len(cluster.texts))


def prediction_strength(vectors: Sequence[Vector], count: int) -> float:
    """Return the prediction strength of a clustering (Tibshirani and Walther). It is the share of a cluster's pairs
    that the other half's centers also put together: of the worst cluster, mean over the halves.
    """
    shares = []
    for split in range(SPLITS):
        chosen = random.Random(split)
        order = list(range(len(vectors)))
        chosen.shuffle(order)
        halves = [[vectors[number] for number in order[part::2]] for part in (0, 1)]
        centers = [_centers(half, count, chosen) for half in halves]
        for a, b in ((0, 1), (1, 0)):
            own_clusters = [_nearest(vector, centers[a])[0] for vector in halves[a]]
            other_clusters = [_nearest(vector, centers[b])[0] for vector in halves[a]]
            shares.append(min(_together(own_clusters, other_clusters, number) for number in range(count)))
    return sum(shares) / len(shares)


def _together(own_clusters: Sequence[int], other_clusters: Sequence[int], cluster: int) -> float:
    """Return the share of a cluster's pairs that are also in one of `other_clusters`; 0 for a cluster of one text."""
    sizes = Counter(b for a, b in zip(own_clusters, other_clusters, strict=True) if a == cluster)
    size = sizes.total()
    return sum(part * (part - 1) for part in sizes.values()) / (size * (size - 1)) if size > 1 else 0.0


def _weights(texts: Sequence[set[str]]) -> dict[str, float]:
    """Return a weight for each word that is neither in nearly all texts nor in single ones: the root of its inverse
    frequency.

    Without the root, rare words hide "how do I" and "what does". Without weights common ones hide topics.
    """
    counts = Counter(word for words in texts for word in words)
    least, most = max(MIN_TEXTS, RARE * len(texts)), COMMON * len(texts)
    return {word: math.sqrt(math.log(len(texts) / count)) for word, count in counts.items() if least <= count <= most}


def _vector(words: set[str], weights: Mapping[str, float]) -> Vector:
    """Return a vector of length 1; empty for a text that is in no cluster."""
    weighted = {word: weights[word] for word in sorted(words) if word in weights}
    length = math.sqrt(math.fsum(weight * weight for weight in weighted.values()))
    return {word: weight / length for word, weight in weighted.items()} if len(weighted) >= MIN_WORDS_OF_TEXT else {}


def _centers(vectors: Sequence[Vector], count: int, chosen: random.Random) -> list[Vector]:
    """Return the best centers of STARTS by the sum of cosines.

    Each start has centers far from each other (Arthur and Vassilvitskii 2007).
    """
    best: tuple[float, list[Vector]] = (-math.inf, [])
    for _ in range(STARTS):
        centers = _first_centers(vectors, count, chosen)
        labels: list[int] = []
        total = -math.inf
        for _ in range(ROUNDS):
            nearest = [_nearest(vector, centers) for vector in vectors]
            total = math.fsum(cosine for _, cosine in nearest)
            if (now := [number for number, _ in nearest]) == labels:
                break
            labels = now
            parts = [
                [v for v, label in zip(vectors, labels, strict=True) if label == number] for number in range(count)
            ]
            centers = [_mean(part) if part else centers[number] for number, part in enumerate(parts)]
        best = max(best, (total, centers), key=lambda c: c[0])
    return best[1]


def _first_centers(vectors: Sequence[Vector], count: int, chosen: random.Random) -> list[Vector]:
    centers = [chosen.choice(vectors)]
    far = [1.0] * len(vectors)
    while len(centers) < count:
        far = [min(d, max(0.0, 1 - _cosine(vector, centers[-1]))) for d, vector in zip(far, vectors, strict=True)]
        centers.append(chosen.choices(vectors, [d * d for d in far])[0] if any(far) else chosen.choice(vectors))
    return centers


def _mean(vectors: Sequence[Vector]) -> Vector:
    """Return the mean direction, of length 1."""
    total: dict[str, float] = {}
    for vector in vectors:
        for word, weight in vector.items():
            total[word] = total.get(word, 0.0) + weight
    length = math.sqrt(math.fsum(weight * weight for weight in total.values()))
    return {word: weight / length for word, weight in total.items()}


def _nearest(vector: Vector, centers: Sequence[Vector]) -> tuple[int, float]:
    cosines = [_cosine(vector, center) for center in centers]
    best = max(range(len(cosines)), key=cosines.__getitem__)
    return best, cosines[best]


def _cosine(vector: Vector, center: Vector) -> float:
    return sum([weight * center[word] for word, weight in vector.items() if word in center])


def _telling(
    words: Sequence[set[str]], part: Sequence[int], everywhere: Mapping[str, int]
) -> tuple[tuple[str, int, int], ...]:
    """Return the most telling words of a cluster.

    They are ranked by how many standard errors the log of their odds inside lies above that outside (Monroe, Colaresi
    and Quinn 2008, with half a text as the prior).
    """
    inside = Counter(word for number in part for word in words[number])
    size, rest = len(part), len(words) - len(part)

    def surprise(word: str) -> float:
        inner, outer = inside[word], everywhere[word] - inside[word]
        odds = math.log((inner + 0.5) / (size - inner + 0.5)) - math.log((outer + 0.5) / (rest - outer + 0.5))
        return odds / math.sqrt(1 / (inner + 0.5) + 1 / (outer + 0.5))

    ranked = sorted(inside, key=lambda word: (-surprise(word), word))[:_WORDS_SHOWN]
    return tuple((word, inside[word], everywhere[word] - inside[word]) for word in ranked if surprise(word) > 0)
