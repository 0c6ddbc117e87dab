"""Thresholds of the tuned model alone, and against figures that were recorded elsewhere."""

import random
from typing import Any

import pytest

from hivetune.judge.findings import Thresholds
from hivetune.judge.gate import judge
from hivetune.judge.statistics import proportion

NOTHING: dict[str, Any] = {"loss_gain": None, "latency_ratio": None, "memory_ratio": None}


def evaluation(
    rate: float = 1.0, seconds: float = 10.0, memory: float | None = 8e9, n: int = 300, **base: Any
) -> dict[str, Any]:
    rng = random.Random(5)
    empty = {"success": None, "ended": None, "seconds": None}
    answers = [
        {
            "source": f"f:{row}",
            "group": f"g{row}",
            "base": empty,
            "tuned": {"success": row < rate * n, "ended": True, "seconds": seconds * rng.uniform(0.9, 1.1)},
        }
        for row in range(n)
    ]
    why = {"loss": "an endpoint has none"}
    tuned = {"peak_memory_bytes": memory}
    return {"rows": [], "answers": answers, "base": base, "tuned": tuned, "not_compared": why}


SITUATIONS = {
    "success shown": (evaluation(), {"min_success": 0.98}, "deploy", "is shown"),
    "success missed": (evaluation(rate=0.9), {"min_success": 0.98}, "iterate", "is missed"),
    "success open": (evaluation(n=60), {"min_success": 0.98}, "not-enough-evidence", "60 rows, about 573 needed"),
    "too few rows": (evaluation(n=3), {"min_success": 0.98}, "not-enough-evidence", "too few for an interval"),
    "fast enough": (evaluation(), {"max_seconds": 12}, "deploy", "is kept"),
    "too slow": (evaluation(seconds=15), {"max_seconds": 12}, "iterate", "is exceeded"),
    "small enough": (evaluation(), {"max_gb": 10}, "deploy", "is kept"),
    "too large": (evaluation(memory=11e9), {"max_gb": 10}, "iterate", "is exceeded"),
    "memory unknown": (evaluation(memory=None), {"max_gb": 10}, "not-enough-evidence", "not measured"),
    "nothing required": (evaluation(), {}, "iterate", "gate.success_gain"),
    "a loss that nobody has is not required": (evaluation(), {"loss_gain": 0.0}, "iterate", "an endpoint has none"),
    "40 % faster than was recorded": (
        evaluation(recorded=True, latency_s=20.1),
        {"latency_ratio": 0.6},
        "deploy",
        "within 0.6",
    ),
    "faster, but not by 40 %": (evaluation(recorded=True, latency_s=15.0), {"latency_ratio": 0.6}, "iterate", "0.6"),
    "slower than was recorded": (evaluation(recorded=True, latency_s=5.0), {"latency_ratio": 0.6}, "abort", "beyond"),
    "better than was recorded": (evaluation(recorded=True, success=0.9), {"success_gain": 0.0}, "deploy", "above"),
    "worse than was recorded": (
        evaluation(rate=0.8, recorded=True, success=0.987),
        {"success_gain": 0.0},
        "abort",
        "worse by more",
    ),
    "a third of the memory that was recorded": (
        evaluation(recorded=True, peak_memory_bytes=32.5e9),
        {"memory_ratio": 0.5},
        "deploy",
        "within 0.5",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_verdicts(name: str) -> None:
    document, thresholds, expected, words = SITUATIONS[name]
    verdict = judge(document, Thresholds(**{**NOTHING, **thresholds}))
    assert verdict.verdict == expected, verdict.reasons
    assert words in " ".join(verdict.reasons)


@pytest.mark.parametrize(
    ("document", "thresholds", "name", "needed"),
    [
        (evaluation(n=60), {"min_success": 0.98}, "least_success", 573),
        (evaluation(n=3), {"min_success": 0.98}, "least_success", 5),
        (evaluation(n=3), {"max_seconds": 12}, "most_latency_s", 5),
    ],
)
def test_a_limit_that_more_rows_would_decide_is_open(
    document: dict[str, Any], thresholds: dict[str, float], name: str, needed: int
) -> None:
    verdict = judge(document, Thresholds(**{**NOTHING, **thresholds}))
    (metric,) = [metric for metric in verdict.metrics if metric.name == name]
    assert (metric.passed, metric.needed) == (False, needed)
    assert "; 3 " in verdict.reasons[0] or "60 rows" in verdict.reasons[0]

    shown = judge(evaluation(), Thresholds(**{**NOTHING, **thresholds}))
    assert all(metric.needed is None for metric in shown.metrics)


def test_all_of_a_team_at_once() -> None:
    """Latency <= 12 s and -40 %, success >= 98 %, memory <= 10 GB against a model with 20.1 s, 98.7 % and 32.5 GB."""
    figures = {"recorded": True, "latency_s": 20.1, "success": 0.987, "peak_memory_bytes": 32.5e9}
    config = Thresholds(loss_gain=None, latency_ratio=0.6, min_success=0.98, max_seconds=12, max_gb=10, memory_ratio=1)
    assert judge(evaluation(**figures), config).verdict == "deploy"
    assert judge(evaluation(seconds=13, **figures), config).verdict == "iterate"


@pytest.mark.parametrize(("share", "n"), [(0.5, 10), (0.9, 30), (0.98, 100), (0.2, 30)])
def test_the_interval_of_a_share_holds_it_as_often_as_it_says(share: float, n: int) -> None:
    rng = random.Random(n)
    held = 0
    for _ in range(4000):
        low, high = proportion([rng.random() < share for _ in range(n)]).ci95 or (1, 0)
        held += low <= share <= high
    # Few counts are possible, so the coverage of any interval swings around 95 % with share and n.
    assert 0.925 <= held / 4000 <= 0.99
