"""The decision to deploy: from eval.json and the config's thresholds to the verdict in gate.json.

`judge` is pure: the same two documents give the same verdict.

    abort                a required metric is worse beyond tolerance, not finite, or its interval leaves no useful gain
    iterate              else, a required metric misses its threshold
    not-enough-evidence  else, an interval straddles its threshold and n is below the n that would decide
    deploy               else: the 95 % bound of each required metric is on the right side
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_json
from hivetune.base.sealed import read_sealed
from hivetune.base.typed import to_plain
from hivetune.errors import HivetuneError, UsageError
from hivetune.judge import statistics as stats
from hivetune.judge.advice import advise, contradictory_rows, curve_document, read_curve
from hivetune.judge.findings import (
    Finding,
    FindingOutcome,
    Thresholds,
    against,
    alone_mean,
    alone_share,
    described,
    frozen_findings,
    gain_finding,
    limit_findings,
    ratio_finding,
    refuse_loss,
    thresholds_of,
    titled,
)
from hivetune.judge.page import write_evaluation_page
from hivetune.records import Metric, Verdict, VerdictName
from hivetune.run.folder import EVALUATION, VERDICT, adapter_hash
from hivetune.run.status import shortest_name
from hivetune.train.open import Run

Evaluation = Mapping[str, Any]


def judge(evaluation: Evaluation, config: Thresholds) -> Verdict:
    """Return the verdict on an evaluation as `held_out.evaluation_document` makes it (docs/formats.md, eval.json)."""
    refuse_not_finite(evaluation)
    findings = [
        _loss(evaluation, config),
        _perplexity(evaluation),
        _success(evaluation, config),
        _ended(evaluation),
        _latency(evaluation, config),
        _speed(evaluation),
        _memory(evaluation, config),
        *limit_findings(evaluation, config),
        *frozen_findings(evaluation, config),
    ]
    missing: Mapping[str, str] = evaluation.get("not_compared") or {}
    for number, finding in enumerate(findings):
        if finding.metric.name in missing:  # these two sides can't have it
            metric = replace(finding.metric, threshold=None, passed=None, required=False)
            why = f"{titled(metric.name)} is not compared: {missing[metric.name]}"
            findings[number] = Finding(metric, "reported", why)
        else:
            findings[number] = refuse_loss(finding, config.tolerance)
    required = any(finding.metric.required for finding in findings)
    name, deciding = _verdict_of(findings, required)
    first = [described(finding) for outcome in deciding for finding in findings if finding.outcome == outcome]
    if not required:
        setting = "gate.success_gain" if "loss" in missing else "gate.loss_gain"
        first.append(f"the gate requires no metric: set at least {setting}")
    reasons = first + [described(finding) for finding in findings if finding.outcome not in deciding]
    decisive = len(first)
    if name == "deploy":
        reasons += _unchecked(evaluation)
    return Verdict(name, tuple(reasons), tuple(finding.metric for finding in findings), decisive=decisive)


def _verdict_of(findings: Sequence[Finding], required: bool) -> tuple[VerdictName, tuple[FindingOutcome, ...]]:
    """Return the verdict, and the outcomes of the findings that made it."""
    outcomes = {finding.outcome for finding in findings}
    if "abort" in outcomes:
        return "abort", ("abort", "missed")
    if "missed" in outcomes or not required:
        return "iterate", ("missed", "undecided")
    if "undecided" in outcomes:
        return "not-enough-evidence", ("undecided",)
    return "deploy", ("passed",)


def refuse_not_finite(evaluation: Evaluation) -> None:
    """Raise HivetuneError for a NaN or an infinity among the judged numbers, naming its field.

    A loss that was not finite is written as "not finite", so such a number was never measured.
    """
    for key in ("rows", "answers", "frozen", "preferences", "base", "tuned", "noise", "repeat_noise"):
        field = _not_finite_field(evaluation.get(key), key)
        if field:
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


def _unchecked(evaluation: Evaluation) -> tuple[str, ...]:
    """Return the gaps in the evidence for `deploy`: no answer was checked, or test rows were nearly trained."""
    reasons: list[str] = []
    if not _answer_pairs(evaluation, "success"):
        reasons.append("no answer was checked: neither the held-out rows nor eval.checker name a checker")
    nearest = evaluation.get("nearest") or {}
    if nearest.get("above"):
        share = nearest["above"] / nearest["test_rows"]
        reasons.append(
            f"{share:.0%} of the test rows ({nearest['above']:,} of {nearest['test_rows']:,}) have at least "
            f"{nearest['bound']:.0%} of their words in common with a training row"
        )
    return tuple(reasons)


def _loss(evaluation: Evaluation, config: Thresholds) -> Finding:
    """Judge nats per trained token: the sum over the tokens of all held-out rows, then one division."""
    columns = loss_columns(evaluation)
    if isinstance(columns, str):
        return _failed("loss", columns, len(evaluation["rows"]), config.loss_gain)
    base_sum, tuned_sum, tokens = (math.fsum(column) for column in columns)
    estimate = stats.loss_estimate(columns)
    metric = _measured("loss", base_sum / tokens, tuned_sum / tokens, len(evaluation["rows"]))
    metric = replace(metric, anytime95=stats.anytime_interval(estimate, estimate.units))
    deciding = stats.loss_estimate(columns, alpha=_alpha(config))
    return gain_finding(metric, estimate, deciding.reversed(), config.loss_gain, config.tolerance)


def _alpha(config: Thresholds) -> float:
    """Return the level at which a gain is decided: that of the gate's look, where it has several."""
    return stats.ALPHA if config.look is None else stats.alpha_of_look(config.look)


def _perplexity(evaluation: Evaluation) -> Finding:
    """Report exp(loss), for people who think in it; the loss decides."""
    columns = loss_columns(evaluation)
    n = len(evaluation["rows"])
    if isinstance(columns, str):
        return _failed("perplexity", columns, n)
    estimate = stats.jackknife(columns, lambda sums: _exp(sums[1] / sums[2]) - _exp(sums[0] / sums[2]))
    base, tuned = (_exp(math.fsum(columns[i]) / math.fsum(columns[2])) for i in (0, 1))
    return _reported("perplexity", base, tuned, n, estimate.ci95)


def _success(evaluation: Evaluation, config: Thresholds) -> Finding:
    """Judge the share of answers that pass their checker; rows without one count in the loss only."""
    pairs, threshold = _answer_pairs(evaluation, "success"), config.success_gain
    figure, share = _recorded(evaluation, "success"), alone_share(evaluation)
    if figure is not None and share is not None:
        metric = _measured("success", figure, share.value, share.units)
        gain = against(share, minus=figure)
        return replace(gain_finding(metric, gain, gain, threshold, config.tolerance), gain95=gain.ci95)
    if not pairs:
        return _failed("success", "no held-out row has a checker and both answers", 0, threshold)
    base, tuned = [bool(b) for b, _, _ in pairs], [bool(t) for _, t, _ in pairs]
    groups = [group for _, _, group in pairs]
    estimate = stats.paired_proportions(base, tuned, groups)
    deciding = stats.paired_proportions(base, tuned, groups, alpha=_alpha(config))
    n = len(pairs)
    metric = _measured("success", sum(base) / n, sum(tuned) / n, n)
    finding = gain_finding(metric, estimate, deciding, threshold, config.tolerance)
    gained, lost = stats.discordant(base, tuned)
    detail = f"; {gained} gained, {lost} lost, McNemar p = {stats.mcnemar_p(gained, lost):.3g}"
    return replace(finding, reason=described(finding) + detail, gain95=estimate.ci95)


def _ended(evaluation: Evaluation) -> Finding:
    """Report the share of answers that the model ended: one that never stops is of no use, whatever its loss."""
    pairs = _answer_pairs(evaluation, "ended")
    if not pairs:
        return _failed("ended", "no answers", 0)
    base, tuned = [bool(b) for b, _, _ in pairs], [bool(t) for _, t, _ in pairs]
    n = len(pairs)
    interval = stats.paired_proportions(base, tuned, [group for _, _, group in pairs]).ci95
    return replace(_reported("ended", sum(base) / n, sum(tuned) / n, n, interval), gain95=interval)


def _latency(evaluation: Evaluation, config: Thresholds) -> Finding:
    """Judge seconds per answer; the threshold is on tuned / base.

    The units are blocks that both models answered one right after the other, or sessions where those are fewer. A
    moment in which the machine was busy is one piece of evidence, however many answers fell into it.
    """
    timed = [a for a in evaluation["answers"] if a["base"]["seconds"] and a["tuned"]["seconds"]]
    limit, n = config.latency_ratio, len(timed)
    figure, mean = _recorded(evaluation, "latency_s"), alone_mean(evaluation, "seconds")
    if figure and mean is not None:
        metric = _measured("latency_s", figure, mean.value, mean.units)
        shown_ci = against(mean, minus=figure).ci95
        return ratio_finding(metric, shown_ci, against(mean, times=1 / figure), limit, config.tolerance)
    base, tuned = ([a[side]["seconds"] for a in timed] for side in ("base", "tuned"))
    if not timed or not _all_finite([*base, *tuned]):
        return _failed("latency_s", "not measured", n, limit)
    columns = _by_moment([base, tuned, [1.0] * n], timed)
    ratio = stats.jackknife(columns, lambda sums: sums[1] / sums[0], positive=True)
    # The interval of the difference in seconds comes from the same units: mean of tuned - base.
    shown = stats.jackknife(columns, stats.loss_difference)
    metric = _measured("latency_s", sum(columns[0]) / n, sum(columns[1]) / n, n)
    busy = _busy(evaluation)
    finding = ratio_finding(metric, shown.ci95, ratio, limit, config.tolerance, busy)
    if finding.reason and busy and busy not in finding.reason:
        return replace(finding, reason=f"{finding.reason}; {busy}")
    return finding


def _busy(evaluation: Evaluation) -> str:
    """Return in words what shows that something else ran while answers were timed; empty on a quiet machine."""
    noise, repeats = (_positive(evaluation.get(key)) for key in ("noise", "repeat_noise"))
    share = evaluation.get("others_share")
    if stats.is_busy(share):
        return f"the machine was busy: other programs used {share:.0%} of its cores"
    if noise is not None and repeats is not None and stats.was_busy(noise, repeats):
        return f"the machine was busy: equal work took up to {noise:.2g} x"
    return ""


def _by_moment(columns: stats.Columns, timed: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the columns summed by session, or by the block in which both models wrote, whichever are fewer."""
    sessions: list[Hashable] = [answer["group"] for answer in timed]
    blocks: list[Hashable] = [answer["base"].get("block") for answer in timed]
    groupings = [sessions] if None in blocks else [sessions, blocks]
    return min((stats.by_group(columns, groups) for groups in groupings), key=lambda grouped: len(grouped[0]))


def _recorded(evaluation: Evaluation, name: str) -> float | None:
    """Return the baseline's figure where it was measured elsewhere: it is taken as exact."""
    return evaluation["base"].get(name) if evaluation["base"].get("recorded") else None


def _speed(evaluation: Evaluation) -> Finding:
    """Report tokens per second of both sides, measured in turns in one sitting.

    Served sides are timed by their answers, one at a time: a figure in an older document may be of another day.
    """
    base, tuned = (_positive(evaluation[side].get("tokens_per_second")) for side in ("base", "tuned"))
    timed = [
        answer
        for answer in evaluation["answers"]
        if all(a["seconds"] and a.get("new_tokens") is not None for a in (answer["base"], answer["tuned"]))
    ]
    if "kind" not in evaluation["tuned"] or _recorded(evaluation, "tokens_per_second") is not None:
        return _reported("tokens_per_second", base, tuned, len(evaluation["answers"]), None)
    if not timed:
        return _failed("tokens_per_second", "not measured in turns", 0)
    columns = [[float(a[side][key]) for a in timed] for side in ("base", "tuned") for key in ("new_tokens", "seconds")]
    sums = [math.fsum(column) for column in columns]
    interval = stats.jackknife(_by_moment(columns, timed), lambda s: s[2] / s[3] - s[0] / s[1]).ci95
    return _reported("tokens_per_second", sums[0] / sums[1], sums[2] / sums[3], len(timed), interval)


def _memory(evaluation: Evaluation, config: Thresholds) -> Finding:
    base, tuned = (_positive(evaluation[side].get("peak_memory_bytes")) for side in ("base", "tuned"))
    limit = config.memory_ratio
    if base is None or tuned is None:
        return _failed("peak_memory_bytes", "not measured", 0, limit)
    metric = _measured("peak_memory_bytes", base, tuned, 1)
    # One number a side has no interval: it passes or it misses, and never aborts.
    ratio = stats.Estimate(tuned / base, (tuned / base, tuned / base), 1, math.nan)
    finding = ratio_finding(metric, None, ratio, limit, config.tolerance)
    return replace(finding, outcome="missed" if finding.outcome == "abort" else finding.outcome)


def _measured(name: str, base: float, tuned: float, n: int) -> Metric:
    return Metric(name, base, tuned, tuned - base, None, n, None, None)


def _failed(name: str, reason: str, n: int, threshold: float | None = None) -> Finding:
    """Return the finding of a metric that is missing or not finite: never 0, and never passed."""
    if threshold is None:
        return Finding(Metric(name, None, None, None, None, n, None, None), "reported")
    metric = Metric(name, None, None, None, None, n, threshold, False, True)
    return Finding(metric, "abort" if "not finite" in reason else "undecided", f"{titled(name)}: {reason}")


def _reported(name: str, base: float | None, tuned: float | None, n: int, ci95: stats.Interval | None) -> Finding:
    if base is None or tuned is None or not _all_finite((base, tuned)):
        return _failed(name, "it was not measured", n)
    interval = ci95 if ci95 is not None and _all_finite(ci95) else None
    return Finding(replace(_measured(name, base, tuned, n), ci95=interval), "reported")


def loss_columns(evaluation: Evaluation) -> list[list[float]] | str:
    """Return [base nll, tuned nll, tokens] per group, or why there is no loss."""
    rows: Sequence[Mapping[str, Any]] = evaluation["rows"]
    not_finite = [
        f"{row['source']} ({side})" for row in rows for side in ("base", "tuned") if row[side] == "not finite"
    ]
    if not_finite:
        return f"it is not finite on {len(not_finite)} rows, first {not_finite[0]}"
    missing = [row["source"] for row in rows if row["base"] is None or row["tuned"] is None]
    if missing:
        return f"{len(missing)} held-out rows were not scored, first {missing[0]}"
    if not any(row["tokens"] for row in rows):
        return "no held-out rows"
    columns = [[row[key] for row in rows] for key in ("base", "tuned", "tokens")]
    # Rows on which both models lose the same, to a thousandth of a nat per token, are one row that was written twice.
    alike = [
        (n, round(base / n, 3), round(tuned / n, 3)) if n else None for base, tuned, n in zip(*columns, strict=True)
    ]
    return stats.by_group(columns, stats.merge_groups([row["group"] for row in rows], alike))


def _answer_pairs(evaluation: Evaluation, key: str) -> list[tuple[Any, Any, str]]:
    """Return (base, tuned, group) of each row for which both models have `key`."""
    return [
        (answer["base"][key], answer["tuned"][key], answer["group"])
        for answer in evaluation["answers"]
        if answer["base"][key] is not None and answer["tuned"][key] is not None
    ]


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


def _all_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)


# The station `gate`: eval.json in, gate.json and the page out.


def judge_run(run: Run) -> Verdict:
    """Judge `eval.json` by the config's thresholds and write `gate.json`. Raises UsageError without an evaluation."""
    path = run.folder / EVALUATION
    evaluation = read_evaluation(path) if path.exists() else None
    if evaluation is None or evaluation.get("adapter_sha256") != adapter_hash(run.folder):
        name = shortest_name(run.folder)
        raise UsageError(f"the adapter of {name} was not evaluated", hint=f"evaluate it: hivetune eval {name}")
    verdict, curve = judge(evaluation, thresholds_of(run.config.gate)), read_curve(run)
    advice = advise(curve, evaluation, evaluation.get("rank"), contradictory_rows(run.snapshot), verdict.metrics)
    verdict = replace(verdict, advice=advice)
    document = verdict_document(verdict)
    write_json(run.folder / VERDICT, document)
    write_evaluation_page(run.folder, evaluation, {**document, "curve": curve_document(curve)})
    return verdict


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read an eval.json or a comparison of its form. Raises UsageError for a file that is missing or damaged,
    HivetuneError naming file and field for a number that is not finite.
    """
    evaluation = read_sealed(path)
    try:
        refuse_not_finite(evaluation)
    except HivetuneError as error:
        raise HivetuneError(f"{path}: {error.message}", hint=error.hint) from None
    return evaluation


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """Return the JSON of `gate --json` and gate.json."""
    plain = to_plain(verdict)
    return {"schema": 1, **{key: plain[key] for key in ("verdict", "reasons", "decisive", "metrics", "advice")}}
