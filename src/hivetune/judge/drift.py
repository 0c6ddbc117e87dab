"""Drift: answers that became longer or shorter, that loop, that refuse. Each paired with the baseline's. Pure.

None of the three is worse by itself: a model may have been trained to be brief. Against a champion they are early signs
of a model that learned from its own answers or from a bad source.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hivetune.config import GateConfig
from hivetune.data.checks.rules import has_loop
from hivetune.judge.findings import Finding, FindingOutcome, counted_units, titled
from hivetune.judge.held_out import SIDES
from hivetune.judge.statistics import MIN_UNITS, Estimate, by_group, jackknife, paired_proportions, rows_needed
from hivetune.records import Metric

# How assistants begin to refuse, in the languages of most rows; looked for in the first words, where a refusal stands.
_REFUSAL = re.compile(
    r"\b(?:i(?:['’]m| am) (?:very |so |really )?sorry|i apologi[sz]e|as an? (?:ai|language model)"
    r"|i(?:['’]m| am) (?:not able|unable) to|i (?:can(?:['’]t|not)|won['’]t|will not|must decline)"
    r"|es tut mir leid|ich kann [^.]{0,40}nicht (?:helfen|beantworten)|als (?:ki|sprachmodell)"
    r"|je suis désolée?|je ne peux pas|lo siento|no puedo ayudar|mi dispiace|non posso|sinto muito|desculpe"
    r"|het spijt me|przykro mi|мне жаль|извините|申し訳|很抱歉|抱歉|对不起|죄송)",
    re.IGNORECASE,
)
LOOKED_AT_CHARS = 160


@dataclass(frozen=True)
class _Pairs:
    """The answers that both sides gave: texts of base and tuned model, and their groups."""

    base: list[str]
    tuned: list[str]
    groups: list[str]


def is_refusal(answer: str) -> bool:
    """Return whether an answer begins as refusals do.

    A heuristic: its errors are the same on both sides of a comparison.
    """
    return bool(_REFUSAL.search(answer[:LOOKED_AT_CHARS]))


def drift_findings(evaluation: Mapping[str, Any], config: GateConfig) -> list[Finding]:
    """Return `length` (characters an answer), `loops` and `refusals` (shares of answers), where both sides answered."""
    pairs = _pairs(evaluation["answers"])
    if not pairs.base:
        return []
    return [
        _length(pairs, config.length_drift, config.tolerance),
        _share("loops", pairs, has_loop, config.more_loops, config.tolerance),
        _share("refusals", pairs, is_refusal, config.more_refusals, config.tolerance),
    ]


def _pairs(answers: Sequence[Mapping[str, Any]]) -> _Pairs:
    answered = [answer for answer in answers if all(isinstance(answer[side].get("answer"), str) for side in SIDES)]
    base, tuned = ([answer[side]["answer"] for answer in answered] for side in SIDES)
    return _Pairs(base, tuned, [answer["group"] for answer in answered])


def _length(pairs: _Pairs, limit: float | None, tolerance: float) -> Finding:
    """Judge the ratio of all characters, tuned / base, which may leave its threshold in neither direction."""
    lengths = [[float(len(text)) for text in texts] for texts in (pairs.base, pairs.tuned)]
    columns = by_group([*lengths, [1.0] * len(pairs.base)], pairs.groups)
    n, sums, named = len(pairs.base), [math.fsum(column) for column in columns], titled("length")
    shown = jackknife(columns, lambda s: (s[1] - s[0]) / s[2])
    metric = Metric("length", sums[0] / n, sums[1] / n, shown.value, shown.ci95, n, limit, None, limit is not None)
    if limit is None:
        return Finding(metric, "reported")
    if not sums[0] or not sums[1]:
        return _finding(metric, "missed", f"{named}: one side's answers are all empty")
    ratio = jackknife(columns, lambda s: s[1] / s[0], positive=True)
    bounds = f"between 1/{limit:g} and {limit:g}"
    if ratio.ci95 is None:
        return _finding(metric, "undecided", f"{named}: {counted_units(ratio, metric.n)} are too few for an interval")
    low, high = ratio.ci95
    fact = f"{named}: {ratio.value:.3g} times the baseline's, 95 % interval {low:.3g} to {high:.3g}"
    if 1 / limit <= low and high <= limit:
        return _finding(metric, "passed", f"{fact}, {bounds}")
    if high < 1 / limit or low > limit:
        return _finding(metric, "missed", f"{fact}: not {bounds}")
    return _open(
        metric, ratio, max(tolerance, min(abs(ratio.value - limit), abs(ratio.value - 1 / limit))), fact, bounds
    )


def _share(name: str, pairs: _Pairs, test: Callable[[str], bool], limit: float | None, tolerance: float) -> Finding:
    """Judge how much larger the tuned model's share is."""
    base, tuned = ([test(text) for text in texts] for texts in (pairs.base, pairs.tuned))
    n, rise = len(base), paired_proportions(base, tuned, pairs.groups)
    metric = Metric(name, sum(base) / n, sum(tuned) / n, rise.value, rise.ci95, n, limit, None, limit is not None)
    if limit is None:
        return Finding(metric, "reported", gain95=rise.reversed().ci95)
    if rise.ci95 is None:
        return _finding(
            metric, "undecided", f"{titled(name)}: {counted_units(rise, metric.n)} are too few for an interval"
        )
    low, high = rise.ci95
    counts = f"{sum(tuned)} of {n}, {sum(base)} of the baseline's"
    fact = f"{titled(name)}: {counts}, 95 % interval {low:+.3g} to {high:+.3g}"
    allowed = f"at most {limit:+.3g}"
    if high <= limit:
        return _finding(metric, "passed", f"{fact}, {allowed}")
    if low > limit:
        return _finding(metric, "missed", f"{fact}: more than {allowed}")
    return _open(metric, rise, max(tolerance, abs(rise.value - limit)), fact, allowed)


def _open(metric: Metric, estimate: Estimate, effect: float, fact: str, allowed: str) -> Finding:
    needed, units = rows_needed(estimate, effect) or MIN_UNITS, counted_units(estimate, metric.n)
    if estimate.units < needed:
        return _finding(metric, "undecided", f"{fact}: {allowed} is open; {units}, about {needed} needed to decide")
    return _finding(metric, "missed", f"{fact}: {allowed} is not shown, although {units} are enough")


def _finding(metric: Metric, outcome: FindingOutcome, reason: str) -> Finding:
    return Finding(replace(metric, passed=outcome == "passed"), outcome, reason)
