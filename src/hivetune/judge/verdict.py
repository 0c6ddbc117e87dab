"""The decision to deploy: from the measurements in eval.json and the config's thresholds to a verdict. Pure.

Each metric is a row of KINDS. It is measured as a gain, positive if the tuned model is better, with an interval at the
level that decides. One rule judges all metrics: the margin is the gain less its requirement. If the whole interval of
the margin is above zero the metric passes, if it is below zero the metric misses, else the metric is open, and the rows
that would decide it are counted.

    abort                a required metric is worse beyond tolerance (its whole interval is), or not finite
    iterate              else, one misses, or enough rows did not show it, or a reported one is significantly worse
    not-enough-evidence  else, one is open
    deploy               else: every required metric passes
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hivetune.config import GateConfig
from hivetune.judge import statistics as stats
from hivetune.judge.statistics import Estimate
from hivetune.models.sides import SIDES
from hivetune.records import Metric, Verdict, VerdictName

Evaluation = Mapping[str, Any]
Outcome = Literal["passed", "worse", "missed", "open", "reported"]

# Of an answer's time and of peak memory, beside the base. An adapter is a few percent of the work; what takes half as
# much again has changed in kind, such as answers that no longer end.
MAX_COST_RATIO = 1.5
# Asked alone, which costs more than eight at a time: enough to see half as much time again where single answers vary by
# a factor of two. An evaluation of the demo takes 108 s of processor time, and 123 s with 50.
TIMED_PROMPTS = 24
MIN_KEPT = 0.9  # of the frozen questions: two of 20 may be lost to a better wording
# A loss is a sum in float32 and no finer than that: 2e-10 nats on each of 60 rows once passed as a gain.
RESOLUTION = 1e-6
SHOWN_LOST = 3  # questions that are named
DEFAULT_LEVEL = 1 - stats.ALPHA


@dataclass(frozen=True)
class Reading:
    """The values of one metric in an evaluation.

    `estimate`: the gain over the base, or a value of the tuned model alone; None if it was not measured, for the reason
    in `missing`. `more`: text that is appended to the reason of the verdict.
    """

    base: float | None = None
    tuned: float | None = None
    n: int = 0
    estimate: Estimate | None = None
    more: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Kind:
    """A row of the table of metrics.

    unit: empty for plain numbers. read: returns the metric's Reading, given an evaluation and the error level. form: a
    gain over the base, the share of the base's cost that is saved, or a value of the tuned model alone with a lower or
    an upper limit. setting: the name of the requirement in `gate`; limit: a requirement relative to the base that no
    setting changes. timing: a busy machine can change it. exact: nothing is sampled, so the threshold itself decides.
    """

    title: str
    unit: Literal["", "%", "B", "GB"]
    read: Callable[[Evaluation, float], Reading]
    form: Literal["gain", "saved", "at least", "at most"]
    setting: Callable[[GateConfig], float | None] | None = None
    limit: float | None = None
    timing: bool = False
    exact: bool = False

    @property
    def alone(self) -> bool:
        return self.form in ("at least", "at most")


@dataclass(frozen=True)
class Finding:
    """The finding on one metric: its outcome for the verdict, and the reason."""

    metric: Metric
    outcome: Outcome
    reason: str = ""


def judge(
    evaluation: Evaluation, config: GateConfig, *, look: int | None = None, shares: int = 1, beside_base: bool = True
) -> Verdict:
    """Return the verdict on an evaluation (docs/formats.md, eval.json).

    `look`: the number of this candidate among those that were judged against one champion, from 1: gains are then
    decided at the level of that look, divided by `shares`. `beside_base` False leaves out time, memory and frozen
    questions, which are required beside the base only.
    """
    not_compared: Mapping[str, str] = evaluation.get("not_compared") or {}
    findings: list[Finding] = []
    for name, kind in KINDS.items():
        alpha = stats.alpha_of_look(look) / shares if kind.form == "gain" else stats.ALPHA
        asked = kind.setting(config) if kind.setting else kind.limit if beside_base else None
        reading = kind.read(evaluation, alpha)
        # A limit of the tuned model alone is shown where it is set, frozen questions where there are any.
        if kind.alone and (asked is None if kind.setting else not reading.n):
            continue
        if name == "kept" and reading.n < stats.MIN_UNITS:
            asked = None
        if (why := not_compared.get(name)) is not None:
            # What the user set stays required where it can't be compared; the loss has a default.
            asked = asked if kind.setting and name != "loss" else None
            reading = Reading(n=reading.n, missing=why)
        findings.append(_decide(name, reading, asked, 1 - alpha, config.tolerance))
    required = any(each.metric.required and KINDS[each.metric.name].setting for each in findings)
    verdict, deciding = _of_all({finding.outcome for finding in findings}, required)
    reasons = [finding.reason for outcome in deciding for finding in findings if finding.outcome == outcome]
    if not required:
        setting = "gate.success_gain" if "loss" in not_compared else "gate.loss_gain"
        reasons.append(f"the gate requires no metric: set at least {setting}")
    decisive = len(reasons)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in not_compared.items():
        by_reason[why].append(titled(name))
    reasons += [f"not compared: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    if verdict == "deploy" and not _pairs(evaluation["answers"], "success"):
        reasons.append("no answer was checked: neither the held-out rows nor eval.checker name a checker")
    return Verdict(verdict, tuple(reasons), tuple(finding.metric for finding in findings), decisive=decisive)


def _of_all(outcomes: set[Outcome], required: bool) -> tuple[VerdictName, tuple[Outcome, ...]]:
    """Return the verdict, and the outcomes whose reasons caused it."""
    if "worse" in outcomes:
        return "abort", ("worse", "missed")
    if "missed" in outcomes or not required:
        return "iterate", ("missed", "open")
    return ("not-enough-evidence", ("open",)) if "open" in outcomes else ("deploy", ("passed",))


def _decide(name: str, reading: Reading, asked: float | None, level: float, tolerance: float) -> Finding:
    """Return the finding on one metric by its margin. `asked`: the required gain or limit; None if the metric is only
    reported.
    """
    kind, n, gain, required = KINDS[name], reading.n, reading.estimate, asked is not None
    interval = None if gain is None or gain.interval is None or gain.interval[0] == gain.interval[1] else gain.interval
    shown = None if gain is None or kind.alone else gain.value
    facts = (name, reading.base, reading.tuned, n, asked, False if required else None, required)
    metric = Metric(*facts, gain=shown, interval=interval, level=level)
    words = fact_text(metric) + reading.more if gain else f"{titled(name)}: {reading.missing}"
    if required:
        words += f"; required: {required_text(metric)}"

    def found(outcome: Outcome, said: str = "", needed: int | None = None) -> Finding:
        passed = metric.passed if outcome in ("open", "reported") else outcome == "passed"
        return Finding(replace(metric, passed=passed, needed=needed), outcome, f"{words}: {said or outcome}")

    if gain is None and required:
        # Only a loss is ever not finite, and then the training went wrong: more rows would not help.
        return found("worse" if "not finite" in reading.missing else "open", "open")
    allowed = f"the tolerance {_share(tolerance) if kind.unit == '%' or kind.form == 'saved' else f'{tolerance:g}'}"
    aborts = not kind.alone and not kind.exact
    if gain is None or asked is None:
        low, high = (gain and gain.interval) or (0.0, 0.0)
        if aborts and not kind.timing and high < 0 and low < -tolerance:
            return found("missed", f"worse: the whole interval is below 0, and its lower end beyond {allowed}")
        return found("reported")
    threshold = 1.0 - asked if kind.form == "saved" else asked
    if kind.alone:
        # In shares of the limit, so that the tolerance means the same for seconds and for gigabytes.
        factor = -1.0 / asked if kind.form == "at most" else 1.0
        gain, threshold = gain.scaled(factor, -factor * asked), 0.0
    units = f"{gain.units} {'rows' if gain.units == n else 'sessions'}"
    if gain.interval is None:
        needed = math.ceil(stats.MIN_UNITS * n / max(1, gain.units))
        return found(
            "open", f"open, since {units} are too few for an interval; about {needed} rows in all would decide", needed
        )
    low, high = gain.interval
    if low - threshold > RESOLUTION or (kind.exact and low >= threshold):
        return found("passed")
    if aborts and high < min(threshold, 0.0) - tolerance:
        return found("worse", f"missed by more than {allowed}, with the whole interval")
    if high < threshold:
        return found("missed")
    # The rows that would show the tolerance, or the margin where that is larger, with 80 % power at this level.
    needed_units = stats.rows_needed(gain, max(tolerance, abs(gain.value - threshold)), 1 - level)
    needed = math.ceil(needed_units * n / gain.units)
    if gain.units < needed_units and not (kind.timing and needed > TIMED_PROMPTS):
        return found("open", f"open, {units} measured, about {needed} rows in all would decide", needed)
    if kind.timing:  # the noise of other programs never decides against a model
        return found("open", "open; times vary too much here, so evaluate again on a quiet machine")
    return found("missed", f"not shown, although {units} are enough to see {allowed}")


# What is read from an evaluation.


def _loss(evaluation: Evaluation, alpha: float) -> Reading:
    # The sum over the tokens of all held-out rows, then one division, as the training's loss has it: a mean of rows
    # would weigh a token of a short answer more.
    columns, n = loss_columns(evaluation), len(evaluation["rows"])
    if isinstance(columns, str):
        return Reading(n=n, missing=columns)
    base, tuned, tokens = (math.fsum(column) for column in columns)
    return Reading(base / tokens, tuned / tokens, n, stats.loss_estimate(columns, alpha=alpha).scaled(-1.0))


def _shares(key: str, missing: str, evaluation: Evaluation, alpha: float) -> Reading:
    """Return the reading of a share of answers, of both sides. Rows without a checker count in the loss only."""
    pairs = _pairs(evaluation["answers"], key)
    if not pairs:
        return Reading(missing=missing)
    base, tuned, groups = zip(*pairs, strict=True)
    gain = stats.paired_proportions(base, tuned, groups, alpha=alpha)
    gained, lost = stats.discordant(base, tuned)
    more = f"; of {len(pairs)} rows {gained} gained and {lost} lost"
    return Reading(sum(base) / len(pairs), sum(tuned) / len(pairs), len(pairs), gain, more)


def _latency(evaluation: Evaluation, _alpha: float) -> Reading:
    """Return the reading of the time of an answer, on prompts that both sides answered one right after the other."""
    timed = [pair for pair in _pairs(evaluation["answers"], "seconds") if pair[0] and pair[1]]
    if not timed:
        return Reading(missing="it was not measured")
    bases, tuned, groups = zip(*timed, strict=True)
    gain = stats.time_ratio(bases, tuned, groups)
    return Reading(math.fsum(bases) / len(timed), math.fsum(tuned) / len(timed), len(timed), gain.scaled(-1.0, 1.0))


def _alone(key: str, missing: str, estimate: Callable[..., Estimate], evaluation: Evaluation, _alpha: float) -> Reading:
    found = [(each["tuned"][key], each["group"]) for each in evaluation["answers"] if each["tuned"][key] is not None]
    if not found:
        return Reading(missing=missing)
    whole = estimate(*zip(*found, strict=True))
    return Reading(None, whole.value, len(found), whole)


def _mean(values: Sequence[float], groups: Sequence[str]) -> Estimate:
    columns = stats.by_group([values, [1.0] * len(values)], groups)
    return stats.jackknife(columns, lambda sums: sums[0] / sums[1], positive=True)


def _memory(evaluation: Evaluation, _alpha: float) -> Reading:
    base, tuned = (evaluation[side].get("peak_memory_bytes") for side in SIDES)
    if not base or not tuned:
        return Reading(missing="it was not measured")
    return Reading(base, tuned, 1, _certain(1.0 - tuned / base))


def _memory_alone(evaluation: Evaluation, _alpha: float) -> Reading:
    memory = (evaluation["tuned"].get("peak_memory_bytes") or 0) / 1e9
    return Reading(None, memory, 1, _certain(memory)) if memory else Reading(missing="not measured")


def _kept(evaluation: Evaluation, _alpha: float) -> Reading:
    """Return the reading of the share of past wins and of the user's own questions that are still right; `n` is 0 if
    there are none.
    """
    # A past win must be kept whatever the baseline answers today: the baseline never had to keep it. Of the user's own
    # questions, only what the baseline answers rightly can be lost.
    rows: Sequence[Mapping[str, Any]] = evaluation.get("frozen") or ()
    asked = [row for row in rows if row["origin"] == "win" or row["base"]["success"]]
    answered = [row for row in asked if row["tuned"]["success"] is not None]
    lost = [row for row in answered if not row["tuned"]["success"]]
    share = 1 - len(lost) / len(answered) if answered else None
    # A share that is missed already is missed, whatever the rest would say.
    if share is None or (len(answered) < len(asked) and share >= MIN_KEPT):
        unchecked = f"{len(asked) - len(answered)} of {len(asked)} questions could not be checked"
        return Reading(tuned=share, n=len(asked), missing=unchecked)
    more = f", {len(answered) - len(lost)} of {len(answered)} questions that were answered rightly before"
    if lost:
        shown = ", ".join(f'"{" ".join(row["prompt"].split())[:60]}"' for row in lost[:SHOWN_LOST])
        more += f", lost: {shown}{' ...' * (len(lost) > SHOWN_LOST)}"
    # The questions are a fixed list and the answers greedy, so nothing is sampled.
    return Reading(None, share, len(asked), _certain(share), more=more)


def _certain(value: float) -> Estimate:
    """Return an exact value as an estimate with an interval of zero width."""
    return Estimate(value, (value, value), 1, 0.0, least_units=1)


def loss_columns(evaluation: Evaluation) -> list[list[float]] | str:
    """Return [base nll, tuned nll, tokens] per group, or the reason why there is no loss."""
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
    """Return (base, tuned, group) of each row for which both models have a value of `key`."""
    found = [(answer["base"][key], answer["tuned"][key], answer["group"]) for answer in answers]
    return [(base, tuned, group) for base, tuned, group in found if base is not None and tuned is not None]


_success = partial(_shares, "success", "no held-out row has a checker and both answers")
_success_alone = partial(_alone, "success", "no held-out row has a checker and an answer", stats.proportion)
_ended = partial(_shares, "ended", "no answers")
_seconds_alone = partial(_alone, "seconds", "not measured", _mean)
KINDS: Mapping[str, Kind] = {
    "loss": Kind("loss (nats per token)", "", _loss, "gain", lambda gate: gate.loss_gain),
    "success": Kind("success", "%", _success, "gain", lambda gate: gate.success_gain),
    "min_success": Kind("success alone", "%", _success_alone, "at least", lambda gate: gate.min_success),
    "ended": Kind("ended by itself", "%", _ended, "gain"),
    "latency_s": Kind("seconds per answer", "", _latency, "saved", limit=MAX_COST_RATIO, timing=True),
    "max_seconds": Kind(
        "seconds per answer alone", "", _seconds_alone, "at most", lambda gate: gate.max_seconds, timing=True
    ),
    "peak_memory_bytes": Kind("peak memory", "B", _memory, "saved", limit=MAX_COST_RATIO, exact=True),
    "max_gb": Kind("peak memory alone", "GB", _memory_alone, "at most", lambda gate: gate.max_gb, exact=True),
    "kept": Kind("frozen questions kept", "%", _kept, "at least", limit=MIN_KEPT, exact=True),
}
# What only answers can say.
OF_ANSWERS = tuple(name for name in KINDS if name not in ("loss", "kept"))


# What people read: each number in its unit, in reasons, tables and pages alike.


def metric_name(name: str) -> str:
    """Return the name of a metric with its unit, as the first cell of its row. A cycle has additional metrics."""
    return KINDS[name].title if name in KINDS else name


def titled(name: str) -> str:
    """Return the metric's name without its unit."""
    return metric_name(name).partition(" (")[0]


def value_text(name: str, value: float | None, *, gain: bool = False) -> str:
    """Return a metric's value in its unit; shares are percentages. `gain`: the value is a gain, which gets a sign; the
    gain of a cost is a share of the base's cost."""
    if value is None:
        return "-"
    kind = KINDS.get(name, KINDS["loss"])
    sign = "+" if gain and value > 0 else ""
    if kind.unit == "%" or (gain and kind.form == "saved"):
        return f"{sign}{100 * value:.1f} %"
    if kind.unit:
        return f"{value / (1e9 if kind.unit == 'B' else 1):.2f} GB"
    return f"{sign}{value:.4f}" if abs(value) < 0.1 else f"{sign}{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def interval_text(metric: Metric) -> str:
    """Return both ends of the interval as text; "" if there is none."""
    return " to ".join(value_text(metric.name, end, gain=metric.gain is not None) for end in metric.interval or ())


def level_text(level: float) -> str:
    """Return the name of an interval at this level, such as "95 % interval"."""
    return f"{100 * level:.4g} % interval"


def fact_text(metric: Metric) -> str:
    """Return the measured values of a metric as text: both sides, gain and interval."""
    name, interval = metric.name, interval_text(metric)
    text = value_text(name, metric.tuned)
    if metric.gain is not None:
        text = f"{value_text(name, metric.base)} -> {text}, gain {value_text(name, metric.gain, gain=True)}"
    return f"{metric_name(name)}: {text}" + (f" ({level_text(metric.level)} {interval})" if interval else "")


def required_text(metric: Metric) -> str:
    """Return the gate's requirement on a metric as text; "" if the metric is only reported."""
    limit, kind = metric.threshold, KINDS.get(metric.name, KINDS["loss"])
    if limit is None:
        return "not worse" if kind.form == "gain" and not kind.exact else ""
    if kind.form == "saved":
        return f"at most {100 * (limit - 1):.0f} % more than the base"
    text = _share(limit) if kind.unit == "%" else f"{limit:g}"
    if kind.form == "gain":
        return f"a gain above {text}"
    return f"{kind.form} {text}" + (f" {kind.unit or 's'}" if kind.form == "at most" else "")


def _share(value: float) -> str:
    return f"{100 * value:.4g} %"


def passed_text(metric: Metric) -> str:
    """Return `passed` as a word. A required metric that more rows or a quiet machine would decide is "open"."""
    if metric.passed is None:  # nothing is known without an interval
        return "yes" if metric.interval and required_text(metric) else "reported"
    if metric.passed:
        return "yes"
    kind, (low, high) = KINDS[metric.name], metric.interval or (math.inf, math.inf)
    # The interval of a value alone is in its own unit, as its limit is.
    limit = math.nan if metric.threshold is None else metric.threshold if kind.alone else 1.0 - metric.threshold
    return "no" if metric.needed is None and not (kind.timing and low <= limit <= high) else "open"
