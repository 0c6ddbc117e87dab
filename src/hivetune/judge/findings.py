"""What one metric says about deploying: gains, costs, the tuned model alone, what was kept, and drift. Pure.

Of one side there is an interval too, but none of a difference: `ci95` of the limits of the tuned model alone is that of
the value itself. Drift is answers that became longer or shorter, that loop, that refuse, each paired with the
baseline's. None of the three is worse by itself: a model may have been trained to be brief. Against a champion they are
early signs of a model that learned from its own answers or from a bad source.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from hivetune.config import GateConfig
from hivetune.judge import statistics as stats
from hivetune.models.sides import SIDES
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
_SHOWN_LOST = 3  # questions that are named


# An abort for "no useful gain" needs as many units; and a loss is a sum in float32, which is no finer than that.
MIN_TO_ABORT, RESOLUTION = 20, 1e-6


@dataclass(frozen=True)
class Finding:
    """One metric, its vote on deploying, and the reason. `gain95`: the 95 % interval of the tuned model's gain; None if
    no direction of the metric is worse for users."""

    metric: Metric
    outcome: FindingOutcome
    reason: str = ""
    gain95: stats.Interval | None = None


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
    """Return `passed` of a metric of gate.json in a word. One that more rows would decide is open, and not failed."""
    if metric["passed"] is None:
        return "reported"
    return "yes" if metric["passed"] else "no" if metric.get("needed") is None else "open"


def gain_finding(
    metric: Metric,
    estimate: stats.Estimate,
    deciding: stats.Estimate,
    threshold: float | None,
    tolerance: float,
) -> Finding:
    """Judge a gain: loss, success or preference.

    `estimate`: tuned - base. `deciding`: the gain, positive when the tuned model is better, at the level of the gate's
    look. A gain that is too small is read off the plain interval, since what few units can't exclude is not evidence
    against a model.
    """
    name, gain = titled(metric.name), deciding.value
    needed = stats.rows_needed(estimate, max(tolerance, abs(gain - (threshold or 0.0)))) or stats.MIN_UNITS
    if deciding.plain is not None and deciding.plain[0] > (threshold or 0.0):  # only their number speaks against it
        needed = max(needed, estimate.units + 1)
    make = _outcomes(metric, estimate.ci95, threshold, _rows(metric, estimate, needed))
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


def counted_units(estimate: stats.Estimate, n: int) -> str:
    """Return the number of units in words: rows, or sessions where some of the `n` rows share one."""
    return f"{estimate.units} {'rows' if estimate.units == n else 'sessions'}"


def ratio_finding(
    metric: Metric,
    shown_ci: stats.Interval | None,
    ratio: stats.Estimate,
    limit: float | None,
    tolerance: float,
    busy: str = "",
) -> Finding:
    """Judge a cost, latency or memory: the tuned model may cost at most `limit` times the base.

    `busy`: why the machine was no place to measure time, in words. Then an interval that straddles the limit is
    undecided, whatever n is.
    """
    needed = stats.rows_needed(ratio, max(tolerance, abs(ratio.value - (limit or 0.0)))) or stats.MIN_UNITS
    answers_needed = _rows(metric, ratio, needed)
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
    metric: Metric, ci95: stats.Interval | None, threshold: float | None, needed: int
) -> Callable[[FindingOutcome, str], Finding]:
    """Return a function that makes one metric's findings from outcome and reason. `needed`: rows that would decide."""

    def make(outcome: FindingOutcome, reason: str) -> Finding:
        passed = None if outcome == "reported" else outcome == "passed"
        whole = replace(metric, ci95=ci95, threshold=threshold, passed=passed, required=threshold is not None)
        return Finding(replace(whole, needed=needed) if outcome == "undecided" else whole, outcome, reason)

    return make


class Thresholds(GateConfig):
    """The gate's settings, and the thresholds that only a cycle changes.

    `look`: the number of candidates judged against the champion so far, which share the level of significance.
    """

    latency_ratio: float | None = 1.5
    memory_ratio: float | None = 1.5
    least_kept: float | None = 0.9
    look: int | None = None


def thresholds_of(gate: GateConfig) -> Thresholds:
    """Return the thresholds of a config."""
    return Thresholds(**gate.model_dump())


def limit_findings(evaluation: Mapping[str, Any], config: GateConfig) -> list[Finding]:
    """Return a finding for each of `least_success`, `most_latency_s` and `most_memory_gb` of the gate that is set."""
    findings = []
    if config.min_success is not None:
        share, n = alone_share(evaluation), len(_values(evaluation, "success"))
        findings.append(_alone("least_success", share, n, config.min_success, config.tolerance))
    if config.max_seconds is not None:
        mean, n = alone_mean(evaluation, "seconds"), len(_values(evaluation, "seconds"))
        findings.append(_alone("most_latency_s", mean, n, config.max_seconds, config.tolerance))
    if config.max_gb is not None:
        memory = evaluation["tuned"].get("peak_memory_bytes")
        usable = isinstance(memory, int | float) and math.isfinite(memory) and memory > 0
        gb = memory / 1e9 if usable else math.nan  # one number: no interval
        estimate = stats.Estimate(gb, (gb, gb), 1, math.nan) if usable else None
        findings.append(_alone("most_memory_gb", estimate, 1, config.max_gb, config.tolerance))
    return findings


def _alone(name: str, estimate: stats.Estimate | None, n: int, limit: float, tolerance: float) -> Finding:
    """Judge a value of the tuned model alone: a success may not be below its limit, a cost not above it."""
    least = name == "least_success"
    metric = Metric(name, None, None, None, None, n, limit, False, True)
    if estimate is None:
        missing = "no held-out row has a checker and an answer" if least else "it was not measured"
        return Finding(metric, "undecided", f"{titled(name)}: {missing}")
    metric = replace(metric, tuned=estimate.value, ci95=estimate.ci95)
    low, high = estimate.ci95 or (estimate.value, estimate.value)
    shown = "" if low == high else f", 95 % interval {low:.4g} to {high:.4g}"
    fact = f"{titled(name)}: {estimate.value:.4g}{shown}; the limit {limit:g}"
    if estimate.ci95 is None:
        units = counted_units(estimate, n) if least else f"{estimate.units} answers"
        return _too_few(metric, estimate, f"{fact}; {units}")
    holds, fails = (low >= limit, high < limit) if least else (high <= limit, low > limit)
    effect = max(tolerance if least else tolerance * limit, abs(estimate.value - limit))
    says = ("is shown", "is missed") if least else ("is kept", "is exceeded")
    reasons = Reasons(f"{fact} {says[0]}", f"{fact} {says[1]}", fact)
    return _bounded(metric, estimate, effect, reasons, holds=holds, fails=fails)


def _too_few(metric: Metric, estimate: stats.Estimate, fact: str) -> Finding:
    """Leave a bound open: there are too few units for an interval. `fact` ends with their number."""
    metric = replace(metric, passed=False, needed=_rows(metric, estimate, stats.MIN_UNITS))
    return Finding(metric, "undecided", f"{fact} are too few for an interval")


def _rows(metric: Metric, estimate: stats.Estimate, units: int) -> int:
    """Return the rows that as many units would have; some rows may share a session."""
    return math.ceil(units * metric.n / max(1, estimate.units))


class Reasons(NamedTuple):
    """What is said of a bound that holds, of one that fails, and the beginning of what is said of one that is open."""

    holds: str
    fails: str
    open: str


def _bounded(
    metric: Metric, estimate: stats.Estimate, effect: float, reasons: Reasons, *, holds: bool, fails: bool
) -> Finding:
    """Judge a bound. `holds`, `fails`: what its interval shows. `effect`: what must be seen to decide it."""
    if holds:
        return Finding(replace(metric, passed=True), "passed", reasons.holds)
    metric = replace(metric, passed=False)
    if fails:
        return Finding(metric, "missed", reasons.fails)
    needed, units = stats.rows_needed(estimate, effect) or stats.MIN_UNITS, counted_units(estimate, metric.n)
    if estimate.units < needed:
        metric = replace(metric, needed=_rows(metric, estimate, needed))
        return Finding(metric, "undecided", f"{reasons.open} is open; {units}, about {needed} needed to decide")
    return Finding(metric, "missed", f"{reasons.open} is not shown, although {units} are enough")


def alone_share(evaluation: Mapping[str, Any]) -> stats.Estimate | None:
    """Return the share of the tuned model's answers that succeed; None without a checker."""
    values = _values(evaluation, "success")
    if not values:
        return None
    return stats.proportion([bool(value) for value, _ in values], [group for _, group in values])


def alone_mean(evaluation: Mapping[str, Any], key: str) -> stats.Estimate | None:
    """Return the mean over the tuned model's answers, with an interval over whole groups."""
    values = _values(evaluation, key)
    if not values:
        return None
    columns = stats.by_group(
        [[float(value) for value, _ in values], [1.0] * len(values)], [group for _, group in values]
    )
    return stats.jackknife(columns, lambda sums: sums[0] / sums[1], positive=True)


def against(estimate: stats.Estimate, *, minus: float = 0.0, times: float = 1.0) -> stats.Estimate:
    """Return the estimate transformed to `value * times - minus`, to compare it with a recorded figure."""
    interval = estimate.ci95
    shifted = None if interval is None else (interval[0] * times - minus, interval[1] * times - minus)
    return stats.Estimate(estimate.value * times - minus, shifted, estimate.units, estimate.unit_sd * times)


def _values(evaluation: Mapping[str, Any], key: str) -> list[tuple[Any, str]]:
    return [
        (answer["tuned"][key], answer["group"])
        for answer in evaluation["answers"]
        if answer["tuned"].get(key) is not None
    ]


# What each part of the rows shows, for people; it decides nothing.


def by_part(evaluation: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    """Return loss and success of each agent, category or session: [{"agent", "rows", "answers", "base_loss", ...,
    "p_holm"}].

    `part`: agent, category or group; a group of one row, which has no session, is left out. `p_holm` is the p value of
    no difference in its loss, adjusted for the number of parts. So the part that happens to look best or worst of many
    is not taken for a finding. It is 1 where there are too few independent rows.
    """
    rows: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    answers: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for rows_of_kind, key in ((rows, "rows"), (answers, "answers")):
        for row in evaluation[key]:
            rows_of_kind[row[part] or ""].append(row)
    names = sorted(name for name in rows.keys() | answers.keys() if part != "group" or len(rows[name]) > 1)
    summaries = [{part: name or None, **_part_summary(rows[name], answers[name])} for name in names]
    adjusted = stats.holm([summary.pop("p") for summary in summaries])
    return [{**summary, "p_holm": p} for summary, p in zip(summaries, adjusted, strict=True)]


def _part_summary(rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens = sum(row["tokens"] or 0 for row in rows)
    checked = [answer for answer in answers if all(answer[side]["success"] is not None for side in SIDES)]
    summary: dict[str, Any] = {"rows": len(rows), "answers": len(checked)}
    for side in SIDES:
        values = [row[side] for row in rows]
        usable = tokens > 0 and all(isinstance(value, float) for value in values)
        summary[f"{side}_loss"] = math.fsum(values) / tokens if usable else None
        summary[f"{side}_success"] = sum(a[side]["success"] for a in checked) / len(checked) if checked else None
    summary["p"] = 1.0  # of "no difference in loss", whole sessions together; 1 too where a loss is missing
    if rows and all(isinstance(row[side], float) for row in rows for side in SIDES):
        columns = [[row[key] for row in rows] for key in (*SIDES, "tokens")]
        grouped = stats.by_group(columns, [row["group"] for row in rows])
        summary["p"] = stats.p_value(stats.jackknife(grouped, stats.loss_difference))
    return summary


# Forgetting: what a release answered rightly before, its successors must answer too. The questions are a fixed list
# and the answers greedy, so nothing is sampled. The share that is kept is exact, and its interval only says how far it
# would carry to other questions of the kind.


@dataclass(frozen=True)
class KeptQuestions:
    """The questions that must be kept: their number `n`, how many the tuned model answers right, and the lost ones."""

    n: int
    kept: int
    lost: tuple[str, ...]  # file:line of each
    unanswered: int = 0  # without an answer, or whose checker failed: neither kept nor lost


def kept_questions(evaluation: Mapping[str, Any], origins: Collection[str]) -> KeptQuestions:
    """Return how many frozen questions of these origins the tuned model of an evaluation keeps (win, own, general).

    A past win must be kept whatever the baseline answers today. Of the others, what the baseline answers rightly must
    be kept.
    """
    rows = [row for row in evaluation.get("frozen") or () if row["origin"] in origins]
    required = [row for row in rows if row["origin"] == "win" or row["base"]["success"]]
    answered = [row for row in required if row["tuned"]["success"] is not None]
    lost = tuple(row["source"] for row in answered if not row["tuned"]["success"])
    return KeptQuestions(len(answered), len(answered) - len(lost), lost, len(required) - len(answered))


def frozen_findings(evaluation: Mapping[str, Any], config: Thresholds) -> list[Finding]:
    """Return `kept` (past wins and the user's own) and `kept_general`, where such questions exist."""
    findings = []
    for name, origins, limit in (
        ("kept", ("win", "own"), config.least_kept),
        ("kept_general", ("general",), None),
    ):
        questions = kept_questions(evaluation, origins)
        if questions.n or questions.unanswered:
            rows = [row for row in evaluation["frozen"] if row["origin"] in origins]
            pairs = [(row["base"]["success"], row["tuned"]["success"]) for row in rows]
            answered = [(bool(base), bool(tuned)) for base, tuned in pairs if None not in (base, tuned)]
            # The gain is over all questions that both sides answered: lost and won ones count.
            gain = stats.paired_proportions([base for base, _ in answered], [tuned for _, tuned in answered])
            findings.append(replace(_kept_finding(name, questions, limit), gain95=gain.ci95))
    return findings


def _kept_finding(name: str, kept: KeptQuestions, limit: float | None) -> Finding:
    share = kept.kept / kept.n if kept.n else None
    interval = None if share is None else stats.proportion([True] * kept.kept + [False] * len(kept.lost)).ci95
    required = limit is not None and kept.n >= stats.MIN_UNITS
    passed = share is not None and limit is not None and share >= limit
    metric = Metric(name, None, share, None, interval, kept.n, limit, passed if required else None, required)
    fact = f"{titled(name)}: {kept.kept} of {kept.n} frozen questions that were answered rightly still are"
    if kept.lost:
        fact += f"; lost: {', '.join(kept.lost[:_SHOWN_LOST])}{' ...' * (len(kept.lost) > _SHOWN_LOST)}"
    if kept.unanswered:
        fact += f"; {kept.unanswered} could not be checked"
    if not required:
        few = f" ({kept.n} are too few to require any)" if limit is not None else ""
        return Finding(metric, "reported", fact + few)
    if kept.unanswered and passed:
        return Finding(metric, "undecided", f"{fact}: not every one was answered")
    return Finding(metric, "passed" if passed else "missed", f"{fact}; at least {limit:.0%} must be kept")
