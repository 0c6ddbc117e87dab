"""What one metric says about deploying; and the thresholds of the tuned model alone, whatever it is compared with.

Of one side there is an interval too, but none of a difference: `ci95` of these metrics is that of the value itself.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hivetune.config import GateConfig
from hivetune.judge.statistics import MIN_UNITS, Estimate, Interval, by_group, jackknife, proportion, rows_needed
from hivetune.records import Metric

FindingOutcome = Literal["passed", "abort", "missed", "undecided", "reported"]
# How people read a metric, in tables and reasons alike; "alone": of the tuned model, whatever it is compared with.
METRIC_NAMES: Mapping[str, str] = {
    "loss": "loss (nats per token)",
    "ended": "ended by itself",
    "latency_s": "seconds per answer",
    "tokens_per_second": "tokens per second",
    "peak_memory_bytes": "peak memory",
    "least_success": "success alone",
    "most_latency_s": "seconds per answer alone",
    "most_memory_gb": "peak memory alone, GB",
    "kept": "past wins kept",
    "kept_general": "general answers kept",
    "length": "characters per answer",
    "loops": "answers that loop",
    "refusals": "answers that refuse",
    "preferred": "preferred by the judge",
}
SHARES_OF_ANSWERS = ("success", "ended", "least_success", "kept", "kept_general", "loops", "refusals", "preferred")


# An abort for "no useful gain" needs as many units; and a loss is a sum in float32, which is no finer than that.
MIN_TO_ABORT, RESOLUTION = 20, 1e-6


@dataclass(frozen=True)
class Finding:
    """One metric, its vote on deploying, and the reason. `gain95`: the 95 % interval of the tuned model's gain; None if
    no direction of the metric is worse for users."""

    metric: Metric
    outcome: FindingOutcome
    reason: str = ""
    gain95: Interval | None = None


def refuse_loss(finding: Finding, tolerance: float) -> Finding:
    """Return the finding, as missed where its metric is only reported and significantly worse by more than `tolerance`.

    So a loss in a metric without a threshold is not overlooked. To accept the loss, set a threshold for the metric.
    """
    if finding.outcome != "reported" or finding.gain95 is None:
        return finding
    low, high = finding.gain95
    if high >= 0 or low >= -tolerance:
        return finding
    reason = f"{described(finding)}: significantly worse, and not shown to be within the tolerance {tolerance:g}"
    return Finding(replace(finding.metric, passed=False), "missed", reason, finding.gain95)


def described(finding: Finding) -> str:
    """Return the reason of a finding; for a reported metric its values and interval."""
    metric = finding.metric
    if finding.reason:
        return finding.reason
    if metric.tuned is None:
        return f"{titled(metric.name)}: not measured"
    values = f"{metric.tuned:.4g}" if metric.base is None else f"{metric.base:.4g} -> {metric.tuned:.4g}"
    if metric.ci95 is None:
        return f"{titled(metric.name)}: {values}, without an interval"
    title = "95 % interval" if metric.difference is None else f"difference {metric.difference:+.4g}, 95 % interval"
    return f"{titled(metric.name)}: {values}, {title} {metric.ci95[0]:.4g} to {metric.ci95[1]:.4g}"


def metric_name(name: str) -> str:
    """Return the name that begins a row of a table, with its unit."""
    return METRIC_NAMES.get(name, name)


def titled(name: str) -> str:
    """Return the metric's name at the start of a reason, without its unit."""
    return metric_name(name).partition(" (")[0]


def passed_text(metric: Mapping[str, Any]) -> str:
    """Return `passed` of a metric of gate.json in a word.

    A metric that more rows would decide has not failed: it is open.
    """
    if metric["passed"] is None:
        return "reported"
    return "yes" if metric["passed"] else "no" if metric.get("needed") is None else "open"


def gain_finding(
    metric: Metric,
    estimate: Estimate,
    deciding: Estimate,
    threshold: float | None,
    tolerance: float,
) -> Finding:
    """Judge a gain: loss, success or preference.

    `estimate`: tuned - base. `deciding`: the gain, positive when the tuned model is better, at the level of the gate's
    look. A gain that is too small is read off the plain interval, since what few units can't exclude is not evidence
    against a model.
    """
    name, gain = titled(metric.name), deciding.value
    needed = rows_needed(estimate, max(tolerance, abs(gain - (threshold or 0.0)))) or MIN_UNITS
    if deciding.plain is not None and deciding.plain[0] > (threshold or 0.0):  # only their number speaks against it
        needed = max(needed, estimate.units + 1)
    make = _outcomes(metric, estimate.ci95, threshold, math.ceil(needed * metric.n / max(1, estimate.units)))
    if threshold is None:
        return make("reported", "")
    units = counted_units(estimate, metric.n)
    if deciding.ci95 is None:
        return make("undecided", f"{name}: {units} are too few for an interval, about {needed} needed")
    low, high = deciding.ci95
    plain_low, plain_high = deciding.plain or deciding.ci95
    fact = f"{name}: gain {gain:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    plainly = f"{name}: gain {gain:.4g}, 95 % interval {plain_low:.4g} to {plain_high:.4g}"
    if low > threshold or (threshold > 0 and low == threshold):
        return make("passed", f"{fact}, above the required {threshold:g}")
    if high < -tolerance:
        return make("abort", f"{fact}: worse by more than the tolerance {tolerance:g}")
    if plain_high <= threshold + RESOLUTION and plain_low > RESOLUTION:
        return make("missed", f"{plainly}: better, but less than the required {threshold:g}")
    if plain_high <= threshold + RESOLUTION and estimate.units >= MIN_TO_ABORT:
        return make("abort", f"{plainly}: leaves no useful gain (required: more than {threshold:g})")
    if estimate.units < needed:
        return make("undecided", f"{fact} straddles {threshold:g}; {units}, about {needed} needed to decide")
    return make("missed", f"{fact} straddles {threshold:g} although {units} are enough to see {tolerance:g}")


def counted_units(estimate: Estimate, n: int) -> str:
    """Return the number of units in words: rows, or sessions where some of the `n` rows share one."""
    return f"{estimate.units} {'rows' if estimate.units == n else 'sessions'}"


def ratio_finding(
    metric: Metric, shown_ci: Interval | None, ratio: Estimate, limit: float | None, tolerance: float, busy: str = ""
) -> Finding:
    """Judge a cost, latency or memory: the tuned model may cost at most `limit` times the base.

    `busy`: why the machine was no place to measure time, in words. Then an interval that straddles the limit is
    undecided, whatever n is.
    """
    needed = rows_needed(ratio, max(tolerance, abs(ratio.value - (limit or 0.0)))) or MIN_UNITS
    answers_needed = math.ceil(needed * metric.n / max(1, ratio.units))
    make = _outcomes(metric, shown_ci, limit, answers_needed)
    if limit is None:
        return make("reported", "")
    if ratio.ci95 is None:
        return make(
            "undecided",
            f"{titled(metric.name)}: {metric.n} answers are too few for an interval, {answers_needed} needed",
        )
    low, high = ratio.ci95
    fact = f"{titled(metric.name)}: {ratio.value:.3g} times the base (95 % interval {low:.3g} to {high:.3g})"
    if high <= limit:
        return make("passed", f"{fact}, within {limit:g}")
    if low > max(limit, 1.0) * (1 + tolerance):  # of a limit below 1, a smaller gain is one too
        return make("abort", f"{fact}: beyond {limit:g}")
    if low <= limit and busy:
        finding = make("undecided", f"{fact} straddles {limit:g}: undecided, since {busy}; eval again when it is quiet")
        return replace(finding, metric=replace(finding.metric, needed=None))  # more rows would not help
    if low <= limit and ratio.units < needed:
        return make("undecided", f"{fact} straddles {limit:g}; n = {metric.n}, about {answers_needed} needed to decide")
    return make("missed", f"{fact}: not shown to stay within {limit:g}")


def _outcomes(
    metric: Metric, ci95: Interval | None, threshold: float | None, needed: int
) -> Callable[[FindingOutcome, str], Finding]:
    """Return a function that makes the findings of one metric, which differ in outcome and reason only.

    `needed`: rows that would decide.
    """

    def make(outcome: FindingOutcome, reason: str) -> Finding:
        passed = None if outcome == "reported" else outcome == "passed"
        whole = replace(metric, ci95=ci95, threshold=threshold, passed=passed, required=threshold is not None)
        return Finding(replace(whole, needed=needed) if outcome == "undecided" else whole, outcome, reason)

    return make


def limit_findings(evaluation: Mapping[str, Any], config: GateConfig) -> list[Finding]:
    """Return a finding for each of `gate.least_success`, `gate.most_latency_s` and `gate.most_memory_gb` that is
    set.
    """
    findings = []
    if config.least_success is not None:
        share = alone_share(evaluation)
        n = len(_values(evaluation, "success"))
        findings.append(_least("least_success", share, n, config.least_success, config.tolerance))
    if config.most_latency_s is not None:
        mean = alone_mean(evaluation, "seconds")
        n = len(_values(evaluation, "seconds"))
        findings.append(_most("most_latency_s", mean, n, config.most_latency_s, config.tolerance))
    if config.most_memory_gb is not None:
        memory = evaluation["tuned"].get("peak_memory_bytes")
        usable = isinstance(memory, int | float) and math.isfinite(memory) and memory > 0
        gb = memory / 1e9 if usable else math.nan  # one number: no interval
        estimate = Estimate(gb, (gb, gb), 1, math.nan) if usable else None
        findings.append(_most("most_memory_gb", estimate, 1, config.most_memory_gb, config.tolerance))
    return findings


def alone_share(evaluation: Mapping[str, Any]) -> Estimate | None:
    """Return the share of the tuned model's answers that succeed; None without a checker. None without a checker."""
    values = _values(evaluation, "success")
    if not values:
        return None
    return proportion([bool(value) for value, _ in values], [group for _, group in values])


def alone_mean(evaluation: Mapping[str, Any], key: str) -> Estimate | None:
    """Return the mean over the tuned model's answers, with an interval over whole groups."""
    values = _values(evaluation, key)
    if not values:
        return None
    columns = by_group([[float(value) for value, _ in values], [1.0] * len(values)], [group for _, group in values])
    return jackknife(columns, lambda sums: sums[0] / sums[1], positive=True)


def against(estimate: Estimate, *, minus: float = 0.0, times: float = 1.0) -> Estimate:
    """Return the estimate transformed to `value * times - minus`, to compare it with a recorded figure."""
    interval = estimate.ci95
    shifted = None if interval is None else (interval[0] * times - minus, interval[1] * times - minus)
    return Estimate(estimate.value * times - minus, shifted, estimate.units, estimate.unit_sd * times)


def _values(evaluation: Mapping[str, Any], key: str) -> list[tuple[Any, str]]:
    return [
        (answer["tuned"][key], answer["group"])
        for answer in evaluation["answers"]
        if answer["tuned"].get(key) is not None
    ]


def _least(name: str, estimate: Estimate | None, n: int, limit: float, tolerance: float) -> Finding:
    if estimate is None:
        return _unknown(name, n, limit, "no held-out row has a checker and an answer")
    if estimate.ci95 is None:
        few = f"{counted_units(estimate, n)} are too few for an interval"
        return _finding(name, estimate, n, limit, "undecided", few)
    low, high = estimate.ci95
    if low >= limit:
        return _finding(name, estimate, n, limit, "passed", "is shown")
    if high < limit:
        return _finding(name, estimate, n, limit, "missed", "is missed")
    return _straddling(name, estimate, n, limit, tolerance)


def _most(name: str, estimate: Estimate | None, n: int, limit: float, tolerance: float) -> Finding:
    if estimate is None:
        return _unknown(name, n, limit, "it was not measured")
    if estimate.ci95 is None:
        return _finding(name, estimate, n, limit, "undecided", f"{estimate.units} answers are too few for an interval")
    low, high = estimate.ci95
    if high <= limit:
        return _finding(name, estimate, n, limit, "passed", "is kept")
    if low > limit:
        return _finding(name, estimate, n, limit, "missed", "is exceeded")
    return _straddling(name, estimate, n, limit, tolerance * limit)


def _straddling(name: str, estimate: Estimate, n: int, limit: float, effect: float) -> Finding:
    needed = rows_needed(estimate, max(effect, abs(estimate.value - limit))) or MIN_UNITS
    units = counted_units(estimate, n)
    if estimate.units < needed:
        return _finding(name, estimate, n, limit, "undecided", f"is open; {units}, about {needed} needed to decide")
    return _finding(name, estimate, n, limit, "missed", f"is not shown, although {units} are enough")


def _finding(name: str, estimate: Estimate, n: int, limit: float, outcome: FindingOutcome, text: str) -> Finding:
    interval = estimate.ci95
    shown = (
        ""
        if interval is None or interval[0] == interval[1]
        else f", 95 % interval {interval[0]:.4g} to {interval[1]:.4g}"
    )
    metric = Metric(name, None, estimate.value, None, interval, n, limit, outcome == "passed", True)
    return Finding(metric, outcome, f"{titled(name)}: {estimate.value:.4g}{shown}; the limit {limit:g} {text}")


def _unknown(name: str, n: int, limit: float, reason: str) -> Finding:
    return Finding(
        Metric(name, None, None, None, None, n, limit, False, True), "undecided", f"{titled(name)}: {reason}"
    )


def not_compared(finding: Finding, reason: str) -> Finding:
    """Return the finding as reported and not required, for a metric that these two sides can't have."""
    metric = replace(finding.metric, threshold=None, passed=None, required=False)
    return Finding(metric, "reported", f"{titled(finding.metric.name)} is not compared: {reason}")
