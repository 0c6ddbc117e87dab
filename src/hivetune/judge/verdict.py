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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from hivetune.config import GateConfig
from hivetune.judge import statistics as stats
from hivetune.judge.statistics import Estimate, Interval
from hivetune.models.sides import SIDES
from hivetune.records import Advice, Metric, Verdict, VerdictName

Evaluation = Mapping[str, Any]
Outcome = Literal["passed", "worse", "missed", "open", "reported"]

MAX_COST_RATIO = 1.5  # of an answer's time and of peak memory, beside the base: an adapter is a few percent of work
MIN_KEPT = 0.9  # of the frozen questions that must be kept: two of 20 may be lost to a better wording
RESOLUTION = 1e-6  # a loss is a sum in float32 and no finer than that
SHOWN_LOST = 3  # questions that are named
DEFAULT_LEVEL = 1 - stats.ALPHA
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
_PERCENT = ("success", "ended", "min_success", "kept")
_RATIOS = ("latency_s", "peak_memory_bytes")  # their gain is the share of the base's cost that is saved
# What a user sets explicitly stays required where it can't be compared.
_SET_BY_USER = ("success", "min_success", "max_seconds", "max_gb")


@dataclass(frozen=True)
class Measure:
    """One metric as measured.

    gain: positive where the tuned model is better, at the level that decides. threshold: the gain that is asked for, or
    None for a metric that is only reported. missing: why it was not measured. beside: the gain is one over the base, so
    that a loss beyond tolerance aborts. timing: of a busy machine, which never decides against a model by its noise.
    exact: the share of a fixed list, or one number, of which the threshold itself is enough.
    """

    metric: Metric
    gain: Estimate | None
    threshold: float | None
    more: str = ""
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
    evaluation: Evaluation, config: GateConfig, *, look: int | None = None, shares: int = 1, beside_base: bool = True
) -> Verdict:
    """Return the verdict on an evaluation (docs/formats.md, eval.json).

    `look`: the number of this candidate among those that were judged against one champion, from 1: gains are then
    decided at the level of that look, divided by `shares`. `beside_base` False leaves time, memory and frozen questions
    out, which are required beside the base alone.
    """
    not_compared: Mapping[str, str] = evaluation.get("not_compared") or {}
    findings: list[Finding] = []
    for measure in _measures(evaluation, config, stats.alpha_of_look(look) / shares, beside_base):
        name = measure.metric.name
        why = not_compared.get(name)
        if why is not None and not (name in _SET_BY_USER and measure.threshold is not None):
            metric = replace(measure.metric, threshold=None, passed=None, required=False)
            findings.append(Finding(metric, "reported", ""))
        else:
            findings.append(_decide(replace(measure, missing=why) if why else measure, config.tolerance))
    required = any(each.metric.required and each.metric.name in ("loss", *_SET_BY_USER) for each in findings)
    verdict, deciding = _verdict_of({finding.outcome for finding in findings}, required)
    reasons = [finding.reason for outcome in deciding for finding in findings if finding.outcome == outcome]
    if not required:
        setting = "gate.success_gain" if "loss" in not_compared else "gate.loss_gain"
        reasons.append(f"the gate requires no metric: set at least {setting}")
    decisive = len(reasons)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in not_compared.items():
        by_reason[why].append(titled(name))
    reasons += [f"not compared: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    if verdict == "deploy":
        reasons += _gaps(evaluation)
    return Verdict(verdict, tuple(reasons), tuple(finding.metric for finding in findings), decisive=decisive)


def _verdict_of(outcomes: set[Outcome], required: bool) -> tuple[VerdictName, tuple[Outcome, ...]]:
    """Return the verdict, and the outcomes of the findings that made it."""
    if "worse" in outcomes:
        return "abort", ("worse", "missed")
    if "missed" in outcomes or not required:
        return "iterate", ("missed", "open")
    if "open" in outcomes:
        return "not-enough-evidence", ("open",)
    return "deploy", ("passed",)


def _decide(measure: Measure, tolerance: float) -> Finding:
    """Judge one metric by its margin."""
    gain, threshold, n = measure.gain, measure.threshold, measure.metric.n
    required = threshold is not None
    metric = replace(measure.metric, required=required, passed=False if required else None)
    if gain is None:
        outcome: Outcome = "worse" if measure.not_finite else "open" if required else "reported"
        asked = f"; required: {required_text(metric)}: open" if outcome == "open" else ""
        return Finding(metric, outcome, f"{titled(metric.name)}: {measure.missing}{asked}")
    units = f"{gain.units} {'rows' if gain.units == n else 'sessions'}"
    allowed = f"the tolerance {_share(tolerance) if metric.name in (*_PERCENT, *_RATIOS) else f'{tolerance:g}'}"
    fact = f"{fact_text(metric)}{measure.more}"
    if threshold is not None:
        fact += f"; required: {required_text(metric)}"
    if gain.interval is None:
        if threshold is None:
            return Finding(metric, "reported", "")
        needed = math.ceil(stats.MIN_UNITS * n / max(1, gain.units))
        reason = f"{fact}: open, since {units} are too few for an interval; about {needed} rows needed"
        return Finding(replace(metric, needed=needed), "open", reason)
    low, high = gain.interval
    if threshold is None:
        if measure.beside and not measure.timing and high < 0 and low < -tolerance:
            reason = f"{fact}: significantly worse, and not shown to be within {allowed}"
            return Finding(replace(metric, passed=False), "missed", reason)
        return Finding(metric, "reported", "")
    if low - threshold > RESOLUTION or (measure.exact and low >= threshold):
        return Finding(replace(metric, passed=True), "passed", f"{fact}: passed")
    if measure.beside and high < min(threshold, 0.0) - tolerance:
        return Finding(metric, "worse", f"{fact}: worse by more than {allowed}")
    if high < threshold:
        return Finding(metric, "missed", f"{fact}: missed")
    needed_units = stats.rows_needed(gain, max(tolerance, abs(gain.value - threshold)), 1 - metric.level)
    if gain.units < needed_units:
        needed = math.ceil(needed_units * n / gain.units)
        return Finding(
            replace(metric, needed=needed), "open", f"{fact}: open, {units} measured, about {needed} rows needed"
        )
    if measure.timing:
        return Finding(metric, "open", f"{fact}: open; times vary too much here, so evaluate again on a quiet machine")
    return Finding(metric, "missed", f"{fact}: not shown, although {units} are enough to see {allowed}")


def _measures(evaluation: Evaluation, config: GateConfig, alpha: float, beside_base: bool) -> Iterator[Measure]:
    answers, ratio = evaluation["answers"], MAX_COST_RATIO if beside_base else None
    yield _loss(evaluation, config.loss_gain, alpha)
    yield _paired("success", answers, config.success_gain, alpha)
    if config.min_success is not None:
        values, groups = _of_tuned(answers, "success")
        yield _alone("min_success", stats.proportion(values, groups), len(values), config.min_success, 1.0)
    yield _paired("ended", answers, None, alpha)
    yield _latency(answers, ratio)
    if config.max_seconds is not None:
        values, groups = _of_tuned(answers, "seconds")
        mean = Estimate(math.nan, None, 0, math.nan)
        if values:
            columns = stats.by_group([values, [1.0] * len(values)], groups)
            mean = stats.jackknife(columns, lambda sums: sums[0] / sums[1], positive=True)
        yield _alone("max_seconds", mean, len(values), config.max_seconds, -1.0 / config.max_seconds, timing=True)
    yield _memory(evaluation, ratio)
    if config.max_gb is not None:
        memory = evaluation["tuned"].get("peak_memory_bytes")
        known = _certain(memory / 1e9 if memory else math.nan)
        yield _alone("max_gb", known, int(bool(memory)), config.max_gb, -1.0 / config.max_gb, exact=True)
    yield from _frozen(evaluation, MIN_KEPT if beside_base else None)


def _loss(evaluation: Evaluation, threshold: float | None, alpha: float) -> Measure:
    """Measure nats per trained token: the sum over the tokens of all held-out rows, then one division."""
    columns, n = loss_columns(evaluation), len(evaluation["rows"])
    if isinstance(columns, str):
        return _missing("loss", columns, n, threshold, not_finite="not finite" in columns)
    base_sum, tuned_sum, tokens = (math.fsum(column) for column in columns)
    gain, plain = (stats.loss_estimate(columns, alpha=level) for level in (alpha, stats.ALPHA))
    return _beside(
        "loss", (base_sum / tokens, tuned_sum / tokens), n, gain.scaled(-1.0), plain.interval, threshold, alpha
    )


def _paired(name: str, answers: Sequence[Mapping[str, Any]], threshold: float | None, alpha: float) -> Measure:
    """Measure a share of answers of both sides: rows without a checker count in the loss only."""
    pairs = _pairs(answers, name)
    if not pairs:
        missing = "no held-out row has a checker and both answers" if name == "success" else "no answers"
        return _missing(name, missing, 0, threshold)
    base, tuned, groups = [bool(b) for b, _, _ in pairs], [bool(t) for _, t, _ in pairs], [g for _, _, g in pairs]
    gain, plain = (stats.paired_proportions(base, tuned, groups, alpha=level) for level in (alpha, stats.ALPHA))
    gained, lost = stats.discordant(base, tuned)
    shares = sum(base) / len(pairs), sum(tuned) / len(pairs)
    measure = _beside(name, shares, len(pairs), gain, plain.interval, threshold, alpha)
    return replace(measure, more=f"; of {len(pairs)} rows {gained} gained and {lost} lost")


def _latency(answers: Sequence[Mapping[str, Any]], limit: float | None) -> Measure:
    """Measure the time of an answer, tuned / base, on prompts that both answered one right after the other."""
    timed = [(b, t, group) for b, t, group in _pairs(answers, "seconds") if b and t]
    if not timed:
        return _missing("latency_s", "it was not measured", 0, limit)
    columns = [[float(row[side]) for row in timed] for side in (0, 1)]
    columns = stats.by_group([*columns, [1.0] * len(timed)], [group for _, _, group in timed])
    means = math.fsum(columns[0]) / len(timed), math.fsum(columns[1]) / len(timed)
    gain = stats.jackknife(columns, lambda sums: sums[1] / sums[0], positive=True).scaled(-1.0, 1.0)
    plain = stats.jackknife(columns, stats.loss_difference)
    return replace(_beside("latency_s", means, len(timed), gain, plain.interval, limit, stats.ALPHA), timing=True)


def _memory(evaluation: Evaluation, limit: float | None) -> Measure:
    base, tuned = (evaluation[side].get("peak_memory_bytes") for side in SIDES)
    if not base or not tuned:
        return _missing("peak_memory_bytes", "it was not measured", 0, limit)
    gain = _certain(1.0 - tuned / base)
    measure = _beside("peak_memory_bytes", (base, tuned), 1, gain, None, limit, stats.ALPHA)
    return replace(measure, beside=False, exact=True)


def _frozen(evaluation: Evaluation, limit: float | None) -> Iterator[Measure]:
    """Measure `kept`, of past wins and the user's own questions, where there are any.

    A past win must be kept whatever the baseline answers today; of the user's own, what the baseline answers rightly.
    The questions are a fixed list and the answers greedy, so nothing is sampled and the share is exact.
    """
    rows: Sequence[Mapping[str, Any]] = evaluation.get("frozen") or ()
    asked = [row for row in rows if row["origin"] == "win" or row["base"]["success"]]
    if not asked:
        return
    answered = [row for row in asked if row["tuned"]["success"] is not None]
    lost = [row for row in answered if not row["tuned"]["success"]]
    share = 1 - len(lost) / len(answered) if answered else None
    metric = Metric("kept", None, share, None, None, len(answered), limit, None)
    if limit is None or len(asked) < stats.MIN_UNITS:
        yield Measure(replace(metric, threshold=None), None, None)
    elif share is None or (len(answered) < len(asked) and share >= limit):
        unchecked = f"{len(asked) - len(answered)} of {len(asked)} questions could not be checked"
        yield Measure(metric, None, limit, missing=unchecked)
    else:
        more = f", {len(answered) - len(lost)} of {len(answered)} questions that were answered rightly before"
        if lost:
            shown = ", ".join(f'"{" ".join(row["prompt"].split())[:60]}"' for row in lost[:SHOWN_LOST])
            more += f", lost: {shown}{' ...' * (len(lost) > SHOWN_LOST)}"
        yield Measure(metric, _certain(share - limit), 0.0, more, beside=False, exact=True)


def _beside(
    name: str,
    sides: tuple[float, float],
    n: int,
    gain: Estimate,
    ci95: Interval | None,
    limit: float | None,
    alpha: float,
) -> Measure:
    """Return the measure of a metric of both sides. `ci95`: of the difference, at 95 % whatever decides."""
    base, tuned = sides
    interval = None if gain.interval is None or gain.interval[0] == gain.interval[1] else gain.interval
    metric = Metric(name, base, tuned, tuned - base, ci95, n, limit, None)
    metric = replace(metric, gain=gain.value, interval=interval, level=1 - alpha)
    threshold = None if limit is None else 1.0 - limit if name in _RATIOS else limit
    return Measure(metric, gain, threshold)


def _alone(
    name: str, value: Estimate, n: int, limit: float, factor: float, *, timing: bool = False, exact: bool = False
) -> Measure:
    """Return the measure of a value of the tuned model alone; its interval is that of the value itself. The gain is
    `factor` times what it is above the limit."""
    if not n:
        return _missing(name, "no held-out row has a checker and an answer" if factor > 0 else "not measured", 0, limit)
    interval = None if exact else value.interval
    metric = Metric(name, None, value.value, None, interval, n, limit, None, interval=interval)
    gain = value.scaled(factor, -factor * limit)
    return Measure(metric, gain, 0.0, beside=False, timing=timing, exact=exact)


def _missing(name: str, why: str, n: int, threshold: float | None, *, not_finite: bool = False) -> Measure:
    """Return the measure of a metric without a value: never 0, and never passed."""
    metric = Metric(name, None, None, None, None, n, threshold, None)
    return Measure(metric, None, threshold, missing=why, not_finite=not_finite and threshold is not None)


def _certain(value: float) -> Estimate:
    """Return one number that was read, and not sampled."""
    return Estimate(value, (value, value), 1, 0.0, least_units=1)


# What people read: each number in its unit, in reasons, tables and pages alike.


def metric_name(name: str) -> str:
    """Return the name that begins a row of a table, with its unit."""
    return METRIC_NAMES.get(name, name)


def titled(name: str) -> str:
    """Return the metric's name without its unit."""
    return metric_name(name).partition(" (")[0]


def value_text(name: str, value: float | None, *, gain: bool = False) -> str:
    """Return a metric in its unit: shares as percent. `gain`: a gain has a sign, and that of a cost is the share of the
    base's that is saved."""
    if value is None:
        return "-"
    sign = "+" if gain and value > 0 else ""
    if name in _PERCENT or (gain and name in _RATIOS):
        return f"{sign}{100 * value:.1f} %"
    if name in ("peak_memory_bytes", "max_gb"):
        return f"{value / (1e9 if name == 'peak_memory_bytes' else 1):.2f} GB"
    return f"{sign}{value:.4f}" if abs(value) < 0.1 else f"{sign}{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def interval_text(metric: Metric) -> str:
    """Return both ends of the interval, empty where there is none."""
    if metric.interval is None:
        return ""
    return " to ".join(value_text(metric.name, end, gain=metric.gain is not None) for end in metric.interval)


def level_text(level: float) -> str:
    """Return the name of an interval of this level: 95 % interval."""
    return f"{100 * level:.4g} % interval"


def fact_text(metric: Metric) -> str:
    """Return what was measured."""
    name, interval = metric.name, interval_text(metric)
    text = value_text(name, metric.tuned)
    if metric.gain is not None:
        text = f"{value_text(name, metric.base)} -> {text}, gain {value_text(name, metric.gain, gain=True)}"
    return f"{metric_name(name)}: {text}" + (f" ({level_text(metric.level)} {interval})" if interval else "")


def required_text(metric: Metric) -> str:
    """Return what the gate asks of a metric; empty for one that is only reported."""
    limit, name = metric.threshold, metric.name
    if limit is None:
        return ""
    if name in _RATIOS:
        return f"at most {100 * (limit - 1):.0f} % more than the base"
    if name in ("min_success", "kept"):
        return f"at least {_share(limit)}"
    if name in ("max_seconds", "max_gb"):
        return f"at most {limit:g} {'s' if name == 'max_seconds' else 'GB'}"
    return f"a gain above {_share(limit) if name in _PERCENT else f'{limit:g}'}"


def _share(value: float) -> str:
    return f"{100 * value:.4g} %"


def passed_text(metric: Metric) -> str:
    """Return `passed` in a word. A required metric that more rows or a quiet machine would decide is open."""
    if metric.passed is None:
        return "reported"
    return "yes" if metric.passed else "no" if metric.needed is None else "open"


def _gaps(evaluation: Evaluation) -> Iterator[str]:
    """Yield the gaps in the evidence for `deploy`: no answer was checked, or test rows were nearly trained."""
    if not _pairs(evaluation["answers"], "success"):
        yield "no answer was checked: neither the held-out rows nor eval.checker name a checker"
    nearest = evaluation.get("nearest") or {}
    if nearest.get("above"):
        share = nearest["above"] / nearest["test_rows"]
        yield (
            f"{share:.0%} of the test rows ({nearest['above']:,} of {nearest['test_rows']:,}) have at least "
            f"{nearest['bound']:.0%} of their words in common with a training row"
        )


# What is read from an evaluation.


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
    found = [(answer["base"][key], answer["tuned"][key], answer["group"]) for answer in answers]
    return [(base, tuned, group) for base, tuned, group in found if base is not None and tuned is not None]


def _of_tuned(answers: Sequence[Mapping[str, Any]], key: str) -> tuple[list[Any], list[str]]:
    """Return the values of the tuned model that are there, and their groups."""
    found = [answer for answer in answers if answer["tuned"].get(key) is not None]
    return [answer["tuned"][key] for answer in found], [answer["group"] for answer in found]


def by_part(evaluation: Evaluation, part: str) -> list[dict[str, Any]]:
    """Return loss and success of each agent or category (`part`): [{"agent", "rows", "answers", "base_loss", ...}].

    For people; it decides nothing.
    """
    lines = []
    for name in sorted({row[part] or "" for key in ("rows", "answers") for row in evaluation[key]}):
        rows = [row for row in evaluation["rows"] if (row[part] or "") == name]
        checked = [a for a in evaluation["answers"] if (a[part] or "") == name and _pairs([a], "success")]
        tokens = sum(row["tokens"] or 0 for row in rows)
        line: dict[str, Any] = {part: name or None, "rows": len(rows), "answers": len(checked)}
        for side in SIDES:
            usable = tokens > 0 and all(isinstance(row[side], float) for row in rows)
            line[f"{side}_loss"] = math.fsum(row[side] for row in rows) / tokens if usable else None
            line[f"{side}_success"] = sum(a[side]["success"] for a in checked) / len(checked) if checked else None
        lines.append(line)
    return lines


# What to change before the next run. Nothing is said without the measurement that says it.

MIN_VALIDATIONS = 3
ROSE = 0.01  # of the validation loss: repeated validations of one run differ by less
STILL_FALLING = 0.02  # of the loss, in the last third of the steps
WORSE_SHARE, SHOWN_ROWS = 0.1, 5


@dataclass(frozen=True)
class Curve:
    """(step, loss) of a run's steps and validations, and the steps of one epoch."""

    steps: Sequence[tuple[int, float]]
    validations: Sequence[tuple[int, float]]
    per_epoch: float


def advise(curve: Curve, evaluation: Evaluation) -> tuple[Advice, ...]:
    """Return advice, what helps most first."""
    return tuple(advice for advice in (_trained_enough(curve), _worse(evaluation)) if advice is not None)


def _trained_enough(curve: Curve) -> Advice | None:
    """Train against validation: too long, or not long enough."""
    if len(curve.validations) < MIN_VALIDATIONS:
        return None
    best_step, best = min(curve.validations, key=lambda validation: validation[1])
    last_step, last = curve.validations[-1]
    if last > (1 + ROSE) * best and best_step >= curve.per_epoch:
        before = [loss for step, loss in curve.steps if best_step - curve.per_epoch <= step <= best_step]
        after = [loss for step, loss in curve.steps if step > best_step]
        if before and after and median(after) < median(before):
            return Advice(
                "epochs",
                f"over-trained: validation was lowest at step {best_step} of {last_step} ({best:.3f}) and rose to "
                f"{last:.3f} while the training loss fell from {median(before):.3f} to {median(after):.3f}; epochs: "
                f"{max(1.0, best_step / curve.per_epoch):.2g} is enough, more rows would be better",
            )
    earlier = [loss for step, loss in curve.validations if step <= last_step * 2 / 3]
    if last == best and earlier and earlier[-1] - last > STILL_FALLING * last:
        return Advice(
            "epochs",
            f"under-trained: validation still fell from {earlier[-1]:.3f} to {last:.3f} in the last third of the steps"
            f"; train about twice as long (now {last_step / curve.per_epoch:.2g} epochs)",
        )
    return None


def _worse(evaluation: Evaluation) -> Advice | None:
    """Name the held-out rows whose loss got worse, the largest rise first, and their most frequent agent."""
    rows = [row for row in evaluation["rows"] if row["tokens"] and all(isinstance(row[side], float) for side in SIDES)]
    rises = [((row["tuned"] - row["base"]) / row["tokens"], row) for row in rows if row["tuned"] > row["base"]]
    if not rows or len(rises) < WORSE_SHARE * len(rows):
        return None
    rises.sort(key=lambda rise: -rise[0])
    fact = f"{len(rises)} of {len(rows)} held-out rows got worse"
    agent, count = Counter(row["agent"] for _, row in rises).most_common(1)[0]
    if agent and count > len(rises) / 2 and sum(row["agent"] == agent for row in rows) < len(rows) / 2:
        fact += f", {count} of them of agent {agent!r}: it has few rows, or rows that say otherwise"
    shown = tuple(f"{row['source']}: +{rise:.3f} nats a token" for rise, row in rises[:SHOWN_ROWS])
    return Advice("rows", f"{fact}; look at those that lost most", shown)
