"""The full counts behind docs/experts.md: `make proof NAME=experts`. test_planted_domains.py runs one seed of some.

What a seed came to is kept below HIVETUNE_PROOF_FOLDER, so that a proof that was stopped goes on with the next seed.
"""

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serve.hive import make_home
from specialists.planted import SHARED, config_of, domain, planted_home, share, shuffled_agents

from hivetune.data.frozen import general_questions
from hivetune.routing.choose import read_table
from hivetune.routing.text_router import TextRouter, route_text
from hivetune.specialists.station import propose_specialists, train_specialists

pytestmark = pytest.mark.proof
SEEDS, FEWER_SEEDS = 20, 5
ROWS = 300
Record = Callable[[str, object], None]


def conflict(seed: int, *, cue: bool = True) -> list[Any]:
    return [
        *domain("coder", "brief", ROWS, cue="code" * cue, seed=seed),
        *domain("tester", "formal", ROWS, cue="test" * cue, seed=seed),
    ]


def rows_of(kind: str, seed: int) -> list[Any]:
    if kind == "shuffled":
        return shuffled_agents(conflict(seed), seed)
    if kind == "same":
        cued = (("coder", "code"), ("tester", "test"))
        return [one for agent, cue in cued for one in domain(agent, "brief", ROWS, cue=cue, seed=seed)]
    if kind == "names":
        return [
            *domain("ops", "brief", ROWS, cue="code", seed=seed),
            *domain("sre", "brief", ROWS, cue="code", seed=seed),
            *domain("dev", "formal", ROWS, cue="test", seed=seed),
            *domain("novice", "list", 30, cue="odd", seed=seed),
        ]
    return conflict(seed, cue=kind == "cue")


def looked_at(folder: Path, kind: str, seed: int) -> dict[str, Any]:
    """What became of the planted domains of one seed, in a home of its own: found, or made and kept."""
    folder = Path(os.environ.get("HIVETUNE_PROOF_FOLDER", folder)) / f"{kind}-{seed}"
    path = folder / "came-to.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with planted_home(folder / "home"):
            make_home()
            config = config_of(folder, rows_of(kind, seed), seed=seed)
            share(config, folder / "shared")
            made = propose_specialists(config) if kind in ("shuffled", "same") else train_specialists(config)
            found: dict[str, Any] = {"|".join(step.domain.values): step.step for step in made.steps}
            if made.routed is not None:
                found["worse"] = sum(one.worse for one in made.routed.by_text)
                found["unsure"] = sum(one.worse for one in made.routed.by_key)
                found["gains"] = [one.gain for one in made.routed.by_key]
                found["texts"] = _texts(router_of(), kind, seed)
        path.write_text(json.dumps(found))
    known: dict[str, Any] = json.loads(path.read_text())
    return known


def router_of() -> TextRouter:
    table = read_table(SHARED)
    assert table is not None
    return table.router


def _texts(router: TextRouter, kind: str, seed: int) -> dict[str, int]:
    """Fresh texts of the same domains, and texts of none: how many an expert answers, how many the wrong one."""
    counts = Counter[str]()
    for row in rows_of(kind, seed + 1000):
        chosen = route_text(router, row["messages"][0]["content"]).specialist
        counts["fresh"] += 1
        counts["routed"] += chosen is not None
        counts["wrong"] += chosen is not None and row["agent"] not in chosen
    for question in general_questions():
        counts["outside"] += 1
        counts["outside routed"] += route_text(router, question.messages[-1].content).specialist is not None
    return {name: counts[name] for name in ("fresh", "routed", "wrong", "outside", "outside routed")}


def test_planted_conflicts_are_found_and_routed(tmp_path: Path, record_property: Record) -> None:
    """Both serve in 19 of 20 seeds; better by 0.1 nats a token; at most 2 % of fresh texts to the wrong expert; at
    least 90 % of texts of no domain to none.

    No text may be routed to a domain's harm. That a specialist is better on its own test rows is for the gate to show,
    which these homes leave out: it misses one of them now and then, by a rounding (seed 0 with one thread).
    """
    seeds = [looked_at(tmp_path, "cue", seed) for seed in range(SEEDS)]
    found = [seed for seed in seeds if (seed["coder"], seed["tester"]) == ("serving", "serving")]
    gains = [gain for seed in found for gain in seed["gains"]]
    texts = sum((Counter(seed["texts"]) for seed in seeds), Counter[str]())
    record_property("planted conflicts", len(seeds))
    record_property("found", len(found))
    record_property("routed minus shared, nats a token, median", round(statistics.median(gains), 3))
    record_property("routed minus shared, nats a token, smallest", round(min(gains), 3))
    record_property("domains not known to be safe from texts", sum(seed["worse"] for seed in seeds))
    record_property("specialists not known to be better", sum(seed["unsure"] for seed in seeds))
    for name in sorted(texts):
        record_property(f"texts: {name}", texts[name])
    assert len(found) >= 19
    assert statistics.median(gains) >= 0.1
    assert not any(seed["worse"] for seed in seeds)
    assert sum(seed["unsure"] > 0 for seed in seeds) <= 1
    assert texts["wrong"] <= 0.02 * texts["fresh"]
    assert texts["outside routed"] <= 0.1 * texts["outside"]


def test_without_a_cue_text_decides_nothing(tmp_path: Path, record_property: Record) -> None:
    """The same questions, told apart by their key alone."""
    seeds = [looked_at(tmp_path, "nocue", seed) for seed in range(FEWER_SEEDS)]
    texts = sum((Counter(seed["texts"]) for seed in seeds), Counter[str]())
    record_property("conflicts without a cue", len(seeds))
    record_property("found by key", sum((seed["coder"], seed["tester"]) == ("serving", "serving") for seed in seeds))
    record_property("texts without a cue", texts["fresh"])
    record_property("of them routed by text", texts["routed"])
    record_property("domains not known to be safe from texts", sum(seed["worse"] for seed in seeds))
    record_property("specialists not known to be better", sum(seed["unsure"] for seed in seeds))
    assert texts["routed"] <= 0.1 * texts["fresh"]
    assert not any(seed["worse"] for seed in seeds)
    assert sum(seed["unsure"] > 0 for seed in seeds) <= 1


@pytest.mark.parametrize(("kind", "count", "most"), [("shuffled", SEEDS, 1), ("same", FEWER_SEEDS, 0)])
def test_no_expert_without_a_domain(kind: str, count: int, most: int, tmp_path: Path, record_property: Record) -> None:
    """Shuffled labels: at most 1 false birth in 20. Domains that do not conflict: none."""
    seeds = [looked_at(tmp_path, kind, seed) for seed in range(count)]
    for step, times in sorted(Counter(step for seed in seeds for step in seed.values()).items()):
        record_property(f"{kind}: {step}", times)
    births = sum("born" in seed.values() for seed in seeds)
    record_property(f"{kind}: seeds with a birth", births)
    assert births <= most


def test_one_domain_under_two_names_becomes_one(tmp_path: Path, record_property: Record) -> None:
    """And one of 30 rows is too small."""
    seeds = [looked_at(tmp_path, "names", seed) for seed in range(2)]
    stayed_two = sum((seed["ops"], seed["sre"]) == ("serving", "serving") for seed in seeds)
    record_property("one domain under two names", len(seeds))
    record_property("became one", sum(seed.get("ops|sre") == "serving" for seed in seeds))
    record_property("stayed two", stayed_two)
    assert not stayed_two
    assert {seed["novice"] for seed in seeds} == {"too-small"}


def test_the_99th_percentile_of_a_decision(tmp_path: Path, record_property: Record) -> None:
    """10,000 texts of 20 to 1,200 characters, two experts, one core: below a millisecond of its time."""
    looked_at(tmp_path, "cue", 0)
    folder = Path(os.environ.get("HIVETUNE_PROOF_FOLDER", tmp_path)) / "cue-0"
    with planted_home(folder / "home"):
        router = router_of()
    texts = [row["messages"][0]["content"] for row in conflict(7)]
    seconds = []
    for number in range(10_000):
        text = " ".join(texts[(number + n) % len(texts)] for n in range(1 + number % 30))[: min(1200, router.longest)]
        started = time.process_time()
        route_text(router, text)
        seconds.append(time.process_time() - started)
    percentile = sorted(seconds)[int(0.99 * len(seconds))]
    record_property("decisions", len(seconds))
    record_property("p99 in ms", round(percentile * 1000, 3))
    assert percentile < 1e-3
