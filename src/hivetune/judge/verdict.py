"""The decision to deploy: from the measurements in eval.json and the config's thresholds to a verdict. Pure.

Each metric is measured as a gain, positive where the tuned model is better, with an interval at the level that decides.
One rule judges them all: the gain less what is asked for is a margin; where its interval lies above zero the metric
passes, below zero it misses, and else it is open, with the rows that would decide it.

    abort                a required metric is worse beyond tolerance (its whole interval is), or not finite
    iterate              else, one misses, or enough rows did not show it, or a reported one is significantly worse
    not-enough-evidence  else, one is open
    deploy               else: every required metric passes
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hivetune.config import GateConfig
from hivetune.errors import HivetuneError
from hivetune.judge import statistics as stats
from hivetune.judge.statistics import Estimate, Interval
from hivetune.models.sides import SIDES
from hivetune.records import Metric, Verdict, VerdictName

Evaluation = Mapping[str, Any]
Outcome = Literal["passed", "worse", "missed", "open", "reported"]

MAX_COST_RATIO = 1.5  # of an answer's time and of peak memory, beside the base: an adapter is a few percent of work
MIN_KEPT = 0.9  # of the frozen questions that must be kept: two of 20 may be lost to a better wording
RESOLUTION = 1e-6  # a loss is a sum in float32 and no finer than that
SHOWN_LOST = 3  # questions that are named
# How people read a metric; "alone": of the tuned model, whatever it is compared with.
METRIC_NAMES: Mapping[str, str] = {
    "loss": "loss (nats per token)",
    "ended": "ended by itself",
    "min_success": "success alone",
    "latency_s": "seconds per answer",
    "max_seconds": "seconds per answer alone",
    "peak_memory_bytes": "peak memory",
    "max_gb": "peak memory alone",
    "kept": "frozen questions kept",
}
SHARES_OF_ANSWERS = ("success", "ended", "min_success", "kept")
RATIOS = ("latency_s", "peak_memory_bytes")  # their gain is the share of the base's cost that is saved
# What a user sets explicitly stays required where it can't be compared.
_SET_BY_USER = ("success", "min_success", "max_seconds", "max_gb")
_SET = ("loss", *_SET_BY_USER)  # a gate without any of them requires nothing


@dataclass(frozen=True)
class Measure:
    """One metric as measured.

    gain: positive where the tuned model is better, at the level that decides. threshold: the gain that is asked for, or
    None for a metric that is only reported. missing: why it was not measured. asks: the threshold in words. beside:
    the gain is one over the base, so that a loss beyond tolerance aborts. timing: of a busy machine, which never
    decides against a model. exact: the share of a fixed list, of which the threshold itself is enough.
    """

    metric: Metric
    gain: Estimate | None
    threshold: float | None
    fact: str = ""
    asks: str = ""
    missing: str = ""
    not_finite: bool = False
    beside: bool = True
    timing: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Finding:
    """One metric, its vote on deploying, and the reason."""

    metric: Metric
    outcome: Outcome
    reason: str


def judge(
    evaluation: Evaluation,
    config: GateConfig,
    *,
    look: int | None = None,
    shares: int = 1,
    beside_base: bool = True,
) -> Verdict:
    """Return the verdict on an evaluation (docs/formats.md, eval.json).

    `look`: the number of this candidate among those that were judged against one champion, from 1: gains are then
    decided at the level of that look, divided by `shares`. `beside_base` False leaves time, memory and frozen questions
    out, which are required beside the base alone. Raises HivetuneError for a number that is not finite.
    """
    refuse_not_finite(evaluation)
    not_compared: Mapping[str, str] = evaluation.get("not_compared") or {}
    findings, notes = [], []
    for measure in _measures(evaluation, config, stats.alpha_of_look(look) / shares, beside_base):
        name = measure.metric.name
        why = not_compared.get(name)
        if why is not None and not (name in _SET_BY_USER and measure.threshold is not None):
            metric = replace(measure.metric, threshold=None, passed=None, required=False)
            findings.append(Finding(metric, "reported", ""))
        else:
            findings.append(_decide(replace(measure, missing=why) if why else measure, config.tolerance))
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in not_compared.items():
        by_reason[why].append(titled(name))
    notes += [f"not compared: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    required = any(finding.metric.required and finding.metric.name in _SET for finding in findings)
    verdict, deciding = _verdict_of(findings, required)
    reasons = [finding.reason for outcome in deciding for finding in findings if finding.outcome == outcome]
    if not required:
        setting = "gate.success_gain" if "loss" in not_compared else "gate.loss_gain"
        reasons.append(f"the gate requires no metric: set at least {setting}")
    decisive = len(reasons)
    if verdict == "deploy":
        notes += _gaps(evaluation)
    return Verdict(verdict, (*reasons, *notes), tuple(finding.metric for finding in findings), decisive=decisive)


def _verdict_of(findings: Sequence[Finding], required: bool) -> tuple[VerdictName, tuple[Outcome, ...]]:
    """Return the verdict, and the outcomes of the findings that made it."""
    outcomes = {finding.outcome for finding in findings}
    if "worse" in outcomes:
        return "abort", ("worse", "missed")
    if "missed" in outcomes or not required:
        return "iterate", ("missed", "open")
    if "open" in outcomes:
        return "not-enough-evidence", ("open",)
    return "deploy", ("passed",)


def _decide(measure: Measure, tolerance: float) -> Finding:
    """Judge one metric by its margin."""
    metric, gain, threshold = measure.metric, measure.gain, measure.threshold
    title = titled(metric.name)
    required = threshold is not None
    metric = replace(metric, required=required, passed=False if required else None)
    if gain is None:
        outcome: Outcome = "worse" if measure.not_finite else "open" if required else "reported"
        return Finding(metric, outcome, f"{title}: {measure.missing}")
    units = f"{gain.units} {'rows' if gain.units == metric.n else 'sessions'}"
    if gain.interval is None:
        needed = math.ceil(stats.MIN_UNITS * metric.n / max(1, gain.units))
        reason = f"{title}: {units} are too few for an interval, about {needed} rows needed"
        return Finding(replace(metric, needed=needed), "open", reason) if required else Finding(metric, "reported", "")
    low, high = gain.interval
    if threshold is None:
        if measure.beside and not measure.timing and high < 0 and low < -tolerance:
            reason = f"{measure.fact}: significantly worse, and not shown to be within the tolerance {tolerance:g}"
            return Finding(replace(metric, passed=False), "missed", reason)
        return Finding(metric, "reported", "")
    fact = f"{measure.fact}; {measure.asks}"
    if low - threshold > RESOLUTION or (measure.exact and low >= threshold):
        return Finding(replace(metric, passed=True), "passed", fact)
    if measure.beside and high < min(threshold, 0.0) - tolerance:
        return Finding(metric, "worse", f"{fact}: worse by more than the tolerance {tolerance:g}")
    if high < threshold:
        return Finding(metric, "missed", f"{fact}: missed")
    effect = max(tolerance, abs(gain.value - threshold))
    needed_units = stats.rows_needed(gain, effect, 1 - metric.level)
    if gain.units < needed_units:
        needed = math.ceil(needed_units * metric.n / gain.units)
        reason = f"{fact}: open; {units}, about {needed} rows needed to decide"
        return Finding(replace(metric, needed=needed), "open", reason)
    if measure.timing:
        return Finding(metric, "open", f"{fact}: open; times vary too much here, so evaluate again on a quiet machine")
    return Finding(metric, "missed", f"{fact}: not shown, although {units} are enough to see {tolerance:g}")


def _measures(evaluation: Evaluation, config: GateConfig, alpha: float, beside_base: bool) -> Iterable[Measure]:
    ratio = MAX_COST_RATIO if beside_base else None
    yield _loss(evaluation, config.loss_gain, alpha)
    yield _paired("success", evaluation["answers"], config.success_gain, alpha)
    if config.min_success is not None:
        yield _min_success(evaluation, config.min_success)
    yield _paired("ended", evaluation["answers"], None, alpha)
    yield _latency(evaluation, ratio)
    if config.max_seconds is not None:
        yield _max_seconds(evaluation, config.max_seconds)
    yield _memory(evaluation, ratio)
    if config.max_gb is not None:
        yield _max_gb(evaluation, config.max_gb)
    yield from _frozen(evaluation, MIN_KEPT if beside_base else None)


def _loss(evaluation: Evaluation, threshold: float | None, alpha: float) -> Measure:
    """Measure nats per trained token: the sum over the tokens of all held-out rows, then one division."""
    columns, n = loss_columns(evaluation), len(evaluation["rows"])
    if isinstance(columns, str):
        return _missing("loss", columns, n, threshold, not_finite="not finite" in columns)
    base_sum, tuned_sum, tokens = (math.fsum(column) for column in columns)
    gain = stats.loss_estimate(columns, alpha=alpha).scaled(-1.0)
    shown = stats.loss_estimate(columns).interval
    metric = _metric("loss", base_sum / tokens, tuned_sum / tokens, n, shown, gain, alpha, threshold)
    fact = f"loss: gain {gain.value:.4g} nats per token{_interval_text(gain.interval, alpha)}"
    return Measure(metric, gain, threshold, fact, f"more than {threshold or 0:g} required")


def _paired(name: str, answers: Sequence[Mapping[str, Any]], threshold: float | None, alpha: float) -> Measure:
    """Measure a share of answers of both sides: rows without a checker count in the loss only."""
    pairs = _pairs(answers, name)
    if not pairs:
        missing = "no held-out row has a checker and both answers" if name == "success" else "no answers"
        return _missing(name, missing, 0, threshold)
    base, tuned = [bool(b) for b, _, _ in pairs], [bool(t) for _, t, _ in pairs]
    groups, n = [group for _, _, group in pairs], len(pairs)
    gain = stats.paired_proportions(base, tuned, groups, alpha=alpha)
    shown = stats.paired_proportions(base, tuned, groups).interval
    metric = _metric(name, sum(base) / n, sum(tuned) / n, n, shown, gain, alpha, threshold)
    gained, lost = stats.discordant(base, tuned)
    fact = f"{titled(name)}: gain {gain.value:+.1%}{_interval_text(gain.interval, alpha, share=True)}"
    fact += f", {gained} rows gained and {lost} lost"
    return Measure(metric, gain, threshold, fact, f"more than {threshold or 0:+.1%} required")


def _min_success(evaluation: Evaluation, limit: float) -> Measure:
    values = [(bool(a["tuned"]["success"]), a["group"]) for a in evaluation["answers"] if _has(a, "success")]
    if not values:
        return _missing("min_success", "no held-out row has a checker and an answer", 0, limit)
    share = stats.proportion([value for value, _ in values], [group for _, group in values])
    metric = _alone("min_success", share, len(values), limit)
    fact = f"success alone: {share.value:.1%}{_interval_text(share.interval, stats.ALPHA, share=True)}"
    return Measure(metric, share.scaled(1.0, -limit), 0.0, fact, f"at least {limit:.1%} required", beside=False)


def _latency(evaluation: Evaluation, limit: float | None) -> Measure:
    """Measure the time of an answer, tuned / base, on prompts that both answered one right after the other."""
    timed = [a for a in evaluation["answers"] if a["base"]["seconds"] and a["tuned"]["seconds"]]
    if not timed:
        return _missing("latency_s", "it was not measured", 0, limit)
    columns = stats.by_group(
        [
            [float(a["base"]["seconds"]) for a in timed],
            [float(a["tuned"]["seconds"]) for a in timed],
            [1.0] * len(timed),
        ],
        [a["group"] for a in timed],
    )
    base, tuned = (math.fsum(column) / len(timed) for column in columns[:2])
    ratio = stats.jackknife(columns, lambda sums: sums[1] / sums[0], positive=True)
    shown = stats.jackknife(columns, stats.loss_difference).interval
    gain, threshold = ratio.scaled(-1.0, 1.0), None if limit is None else 1.0 - limit
    metric = _metric("latency_s", base, tuned, len(timed), shown, gain, stats.ALPHA, limit)
    fact = f"seconds per answer: {ratio.value:.3g} times the base{_interval_text(ratio.interval, stats.ALPHA)}"
    return Measure(metric, gain, threshold, fact, f"at most {limit or 0:g} times allowed", timing=True)


def _max_seconds(evaluation: Evaluation, limit: float) -> Measure:
    values = [(float(a["tuned"]["seconds"]), a["group"]) for a in evaluation["answers"] if _has(a, "seconds")]
    if not values:
        return _missing("max_seconds", "it was not measured", 0, limit)
    seconds = [value for value, _ in values]
    columns = stats.by_group([seconds, [1.0] * len(values)], [group for _, group in values])
    mean = stats.jackknife(columns, lambda sums: sums[0] / sums[1], positive=True)
    metric = _alone("max_seconds", mean, len(values), limit)
    fact = f"seconds per answer alone: {mean.value:.3g} s{_interval_text(mean.interval, stats.ALPHA)}"
    gain = mean.scaled(-1.0 / limit, 1.0)
    return Measure(metric, gain, 0.0, fact, f"at most {limit:g} s allowed", beside=False, timing=True)


def _memory(evaluation: Evaluation, limit: float | None) -> Measure:
    base, tuned = (evaluation[side].get("peak_memory_bytes") for side in SIDES)
    if not base or not tuned:
        return _missing("peak_memory_bytes", "it was not measured", 0, limit)
    gain, threshold = _certain(1.0 - tuned / base), None if limit is None else 1.0 - limit
    metric = _metric("peak_memory_bytes", base, tuned, 1, None, gain, stats.ALPHA, limit)
    fact = f"peak memory: {tuned / base:.3g} times the base"
    return Measure(metric, gain, threshold, fact, f"at most {limit or 0:g} times allowed", beside=False, exact=True)


def _max_gb(evaluation: Evaluation, limit: float) -> Measure:
    memory = evaluation["tuned"].get("peak_memory_bytes")
    if not memory:
        return _missing("max_gb", "it was not measured", 0, limit)
    metric = Metric("max_gb", None, memory / 1e9, None, None, 1, limit, None)
    fact = f"peak memory alone: {memory / 1e9:.3g} GB"
    gain = _certain(1.0 - memory / 1e9 / limit)
    return Measure(metric, gain, 0.0, fact, f"at most {limit:g} GB allowed", beside=False, exact=True)


def _frozen(evaluation: Evaluation, limit: float | None) -> Iterable[Measure]:
    """Measure `kept`, of past wins and the user's own questions, where there are any.

    A past win must be kept whatever the baseline answers today; of the user's own, what the baseline answers rightly.
    The questions are a fixed list and the answers greedy, so nothing is sampled and the share is exact.
    """
    rows: Sequence[Mapping[str, Any]] = evaluation.get("frozen") or ()
    asked = [row for row in rows if row["origin"] == "win" or (row["origin"] == "own" and row["base"]["success"])]
    answered = [row for row in asked if row["tuned"]["success"] is not None]
    if asked:
        lost = [row for row in answered if not row["tuned"]["success"]]
        share = 1 - len(lost) / len(answered) if answered else None
        fact = f"frozen questions kept: {len(answered) - len(lost)} of {len(answered)} that were answered rightly"
        if lost:
            shown = ", ".join(f'"{" ".join(row["prompt"].split())[:60]}"' for row in lost[:SHOWN_LOST])
            fact += f"; lost: {shown}{' ...' * (len(lost) > SHOWN_LOST)}"
        metric = Metric("kept", None, share, None, None, len(answered), limit, None)
        if limit is None or len(asked) < stats.MIN_UNITS:
            yield Measure(replace(metric, threshold=None), None, None, fact)
        elif share is None or (len(answered) < len(asked) and share >= limit):
            missing = f"{len(asked) - len(answered)} of {len(asked)} questions could not be checked"
            yield Measure(metric, None, limit, missing=missing)
        else:
            gain = _certain(share - limit)
            yield Measure(metric, gain, 0.0, fact, f"at least {limit:.0%} required", beside=False, exact=True)


def _metric(
    name: str,
    base: float,
    tuned: float,
    n: int,
    ci95: Interval | None,
    gain: Estimate,
    alpha: float,
    threshold: float | None,
) -> Metric:
    return Metric(
        name,
        base,
        tuned,
        tuned - base,
        ci95,
        n,
        threshold,
        None,
        gain=gain.value,
        interval=gain.interval,
        level=1 - alpha,
    )


def _alone(name: str, estimate: Estimate, n: int, limit: float) -> Metric:
    """Return a value of the tuned model alone; its interval is that of the value itself."""
    return Metric(name, None, estimate.value, None, estimate.interval, n, limit, None, interval=estimate.interval)


def _missing(name: str, why: str, n: int, threshold: float | None, *, not_finite: bool = False) -> Measure:
    """Return the measure of a metric without a value: never 0, and never passed."""
    metric = Metric(name, None, None, None, None, n, threshold, None)
    return Measure(metric, None, threshold, missing=why, not_finite=not_finite and threshold is not None)


def _certain(value: float) -> Estimate:
    """Return one number that was read, and not sampled."""
    return Estimate(value, (value, value), 1, 0.0, least_units=1)


def _interval_text(interval: Interval | None, alpha: float, *, share: bool = False) -> str:
    if interval is None or interval[0] == interval[1]:
        return ""
    low, high = (f"{end:.1%}" if share else f"{end:.4g}" for end in interval)
    return f", {level_text(1 - alpha)} {low} to {high}"


def level_text(level: float) -> str:
    """Return the name of an interval of this level: 95 % interval."""
    return f"{100 * level:.4g} % interval"


def metric_name(name: str) -> str:
    """Return the name that begins a row of a table, with its unit."""
    return METRIC_NAMES.get(name, name)


def titled(name: str) -> str:
    """Return the metric's name at the start of a reason, without its unit."""
    return metric_name(name).partition(" (")[0]


def passed_text(metric: Mapping[str, Any]) -> str:
    """Return `passed` of a metric in a word. One that more rows would decide is open, and not failed."""
    if metric["passed"] is None:
        return "reported"
    return "yes" if metric["passed"] else "no" if metric.get("needed") is None else "open"


def _gaps(evaluation: Evaluation) -> list[str]:
    """Return the gaps in the evidence for `deploy`: no answer was checked, or test rows were nearly trained."""
    gaps: list[str] = []
    if not _pairs(evaluation["answers"], "success"):
        gaps.append("no answer was checked: neither the held-out rows nor eval.checker name a checker")
    nearest = evaluation.get("nearest") or {}
    if nearest.get("above"):
        share = nearest["above"] / nearest["test_rows"]
        gaps.append(
            f"{share:.0%} of the test rows ({nearest['above']:,} of {nearest['test_rows']:,}) have at least "
            f"{nearest['bound']:.0%} of their words in common with a training row"
        )
    return gaps


def refuse_not_finite(evaluation: Evaluation) -> None:
    """Raise HivetuneError for a NaN or an infinity among the judged numbers, naming its field.

    A loss that was not finite is written as "not finite", so such a number was never measured.
    """
    for key in ("rows", "answers", "frozen", "base", "tuned"):
        if field := _not_finite_field(evaluation.get(key), key):
            raise HivetuneError(f"{field} is not a finite number", hint="measure again: hivetune eval")


def _not_finite_field(value: Any, field: str) -> str:
    """Return where the first number below `value` is that is not finite; empty when all are finite."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else field
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        inner = ((f"{field}.{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{field}[{index}]", item) for index, item in enumerate(value))
    return next((path for name, item in inner if (path := _not_finite_field(item, name))), "")


def loss_columns(evaluation: Evaluation) -> list[list[float]] | str:
    """Return [base nll, tuned nll, tokens] per group, or why there is no loss."""
    rows: Sequence[Mapping[str, Any]] = evaluation["rows"]
    not_finite = [f"{row['source']} ({side})" for row in rows for side in SIDES if row[side] == "not finite"]
    if not_finite:
        return f"it is not finite on {len(not_finite)} rows, first {not_finite[0]}"
    missing = [row["source"] for row in rows if row["base"] is None or row["tuned"] is None]
    if missing:
        return f"{len(missing)} held-out rows were not scored, first {missing[0]}"
    if not any(row["tokens"] for row in rows):
        return "no held-out rows"
    return stats.by_group([[row[key] for row in rows] for key in (*SIDES, "tokens")], [row["group"] for row in rows])


def _pairs(answers: Sequence[Mapping[str, Any]], key: str) -> list[tuple[Any, Any, str]]:
    """Return (base, tuned, group) of each row for which both models have `key`."""
    return [
        (answer["base"][key], answer["tuned"][key], answer["group"])
        for answer in answers
        if answer["base"][key] is not None and answer["tuned"][key] is not None
    ]


def _has(answer: Mapping[str, Any], key: str) -> bool:
    return answer["tuned"].get(key) is not None


def by_part(evaluation: Evaluation, part: str) -> list[dict[str, Any]]:
    """Return loss and success of each agent, category or session: [{"agent", "rows", "answers", "base_loss", ...}].

    For people; it decides nothing. `part`: agent, category or group; a group of one row, which has no session, is left
    out.
    """
    rows: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    answers: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for rows_of_kind, key in ((rows, "rows"), (answers, "answers")):
        for row in evaluation[key]:
            rows_of_kind[row[part] or ""].append(row)
    names = sorted(name for name in rows.keys() | answers.keys() if part != "group" or len(rows[name]) > 1)
    return [{part: name or None, **_part_summary(rows[name], answers[name])} for name in names]


def _part_summary(rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens = sum(row["tokens"] or 0 for row in rows)
    checked = [answer for answer in answers if all(answer[side]["success"] is not None for side in SIDES)]
    summary: dict[str, Any] = {"rows": len(rows), "answers": len(checked)}
    for side in SIDES:
        values = [row[side] for row in rows]
        usable = tokens > 0 and all(isinstance(value, float) for value in values)
        summary[f"{side}_loss"] = math.fsum(values) / tokens if usable else None
        summary[f"{side}_success"] = sum(a[side]["success"] for a in checked) / len(checked) if checked else None
    return summary
