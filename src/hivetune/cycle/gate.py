"""Whether a cycle's candidate replaces the champion. Pure: the same evaluations give the same verdict.

    against the base       all that `gate` asks of a single run
    against the champion   better on the held-out rows, at the level that is left to the n-th look at this champion; and
                           not worse on those rows that are new since it was made
    against the best ever  not worse than `gate.tolerance`, on the rows that both were held against before

All looks at one champion together may spend 5 %. So an equal candidate replaces it with a probability of at most 2.5 %
(the test is one-sided), however many nights it is tried. A tolerance against the champion would add up to any loss,
night after night. So only the best ever has one, and being within it must be shown. Without enough evidence the
champion stays: the rows are kept, and the next candidate is judged on them and on newer ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hivetune.judge.findings import Thresholds
from hivetune.judge.gate import Evaluation, judge, loss_columns
from hivetune.judge.statistics import Estimate, jackknife, loss_difference
from hivetune.records import Metric, Verdict, VerdictName

_GRAVEST_FIRST: tuple[VerdictName, ...] = ("abort", "iterate", "not-enough-evidence", "deploy")
Rival = Literal["base", "champion", "best"]
NOTHING_REQUIRED = {name: None for name, field in Thresholds.model_fields.items() if field.annotation == float | None}


@dataclass(frozen=True)
class Comparisons:
    """The candidate (`tuned`) beside each rival (`base`), as documents in the format of eval.json.

    `champion` and `best` are None before there is a champion; `best` also while the champion is the best. `known`: ids
    of the rows that the champion's cycle had; all others are fresh. `look`: the number of this candidate among those
    that were judged against this champion, from 1.
    """

    base: Evaluation
    champion: Evaluation | None = None
    best: Evaluation | None = None
    known: Collection[str] = ()
    look: int = 1


@dataclass(frozen=True)
class CycleVerdict:
    """The verdict on a candidate. `becomes_best`: once promoted it is the best ever. `parts`: the verdict against each
    rival. The first `decisive` reasons made the verdict; the others name what else was measured."""

    verdict: VerdictName
    reasons: tuple[str, ...]
    parts: Mapping[Rival, Verdict]
    look: int
    becomes_best: bool
    fresh_rows: int
    kl_to_base: float | None
    decisive: int = 0

    @property
    def passed(self) -> bool:
        return self.verdict == "deploy"


def judge_cycle(contests: Comparisons, config: Thresholds) -> CycleVerdict:
    """Return the worst of the verdicts against each rival; its reasons name the rival.

    A held-out row on which a rival's loss is not finite is left out and counted. Otherwise one such row would stop
    every later candidate.
    """
    rivals = {name: getattr(contests, name) for name in ("base", "champion", "best")}
    documents = [document for document in rivals.values() if document is not None]
    broken = {row["id"] for document in documents for row in document["rows"] if row["base"] == "not finite"}
    usable: dict[str, Any] = {
        name: {**document, "rows": [row for row in document["rows"] if row["id"] not in broken]}
        for name, document in rivals.items()
        if document is not None
    }
    contests = replace(contests, **usable)
    against_base = config.model_copy(update={"look": contests.look if contests.champion is None else None})
    parts: dict[Rival, Verdict] = {"base": judge(contests.base, against_base)}
    if contests.champion is not None:
        parts["champion"] = _against_champion(contests.champion, contests, config)
        parts["best"] = _against_best(contests.best or contests.champion, contests, config)
    verdict = min((part.verdict for part in parts.values()), key=_GRAVEST_FIRST.index)
    gravest = {rival: part for rival, part in parts.items() if part.verdict == verdict}
    reasons = [_against(rival, reason) for rival, part in gravest.items() for reason in part.reasons[: part.decisive]]
    decisive = len(reasons)
    reasons += [_against(rival, reason) for rival, part in gravest.items() for reason in part.reasons[part.decisive :]]
    if broken:
        reasons.append(f"{len(broken)} held-out rows are not finite for a rival either, and say nothing")
    fresh = [row for row in contests.base["rows"] if row["id"] not in contests.known]
    best = contests.best or contests.champion
    gain = None if best is None else _gain(best["rows"])
    return CycleVerdict(
        verdict=verdict,
        reasons=tuple(reasons),
        parts=parts,
        look=contests.look,
        becomes_best=verdict == "deploy" and (gain is None or (isinstance(gain, Estimate) and gain.value > 0)),
        fresh_rows=len(fresh),
        kl_to_base=(contests.base.get("kl_to_base") or {}).get("nats_per_token"),
        decisive=decisive,
    )


def _against(rival: Rival, reason: str) -> str:
    return f"against the {'best ever' if rival == 'best' else rival}: {reason}"


def _against_champion(evaluation: Evaluation, contests: Comparisons, config: Thresholds) -> Verdict:
    """Require any gain in the required metrics. Speed and size are held against the base, which does not change. Where
    the base model was upgraded since, losses are of other tokens, and answers decide."""
    by_answers = config.loss_gain is None and config.success_gain is not None
    required = config.model_copy(
        update={
            "look": contests.look,
            "loss_gain": None if config.loss_gain is None else 0.0,
            "success_gain": 0.0 if by_answers or _of_another_base(evaluation) else None,
            "latency_ratio": None,
            "memory_ratio": None,
        }
    )
    verdict = judge(evaluation, required)
    fresh = _gain([row for row in evaluation["rows"] if row["id"] not in contests.known])
    if isinstance(fresh, str) or fresh.ci95 is None:
        return verdict
    low, high = fresh.ci95
    fact = f"fresh rows: gain {fresh.value:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    if high < 0:
        worse = verdict.verdict == "abort"
        reasons, decisive = (f"{fact}: worse", *verdict.reasons), 1 + verdict.decisive * worse
        return replace(verdict, verdict="abort" if worse else "iterate", reasons=reasons, decisive=decisive)
    return replace(verdict, reasons=(*verdict.reasons, fact))


def _against_best(evaluation: Evaluation, contests: Comparisons, config: Thresholds) -> Verdict:
    """Require that the tolerance is shown to hold on the rows that are not fresh.

    This reveals a candidate that learned the fresh rows, right or wrong, at the price of everything else. A candidate
    of another base is judged by its answers, on all rows.
    """
    if _of_another_base(evaluation):
        no_loss = {"loss_gain": None, "latency_ratio": None, "memory_ratio": None}
        return judge(evaluation, config.model_copy(update={**no_loss, "success_gain": -config.tolerance}))
    answers = judge(evaluation, config.model_copy(update=NOTHING_REQUIRED))
    lost = tuple(reason for reason in answers.reasons[: answers.decisive] if "significantly worse" in reason)
    earlier = [row for row in evaluation["rows"] if row["id"] in contests.known]
    verdict = _of_earlier_rows(_gain(earlier), config.tolerance)
    if lost and verdict.verdict != "abort":
        reasons = (*lost, *verdict.reasons)
        verdict = replace(verdict, verdict="iterate", reasons=reasons, decisive=len(reasons))
    return replace(verdict, metrics=(*verdict.metrics, *answers.metrics))


def _of_earlier_rows(gain: Estimate | str, tolerance: float) -> Verdict:
    if isinstance(gain, str):
        name: VerdictName = "abort" if "not finite" in gain else "not-enough-evidence"
        return Verdict(name, (f"earlier rows: {gain}",), (), decisive=1)
    metric = Metric("earlier_loss", None, None, -gain.value, None, gain.units, tolerance, None, True)
    if gain.ci95 is None:
        reason = f"earlier rows: {gain.units} are too few for an interval"
        return Verdict("not-enough-evidence", (reason,), (metric,), decisive=1)
    low, high = gain.ci95
    metric = replace(metric, ci95=(-high, -low), passed=low > -tolerance)
    fact = f"earlier rows: gain {gain.value:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    if high < -tolerance:
        name, reason = "abort", f"{fact}: worse by more than the tolerance {tolerance:g}"
    elif low <= -tolerance:
        name, reason = "not-enough-evidence", f"{fact}: not shown to be within the tolerance {tolerance:g}"
    else:
        name, reason = "deploy", f"{fact}, within the tolerance {tolerance:g}"
    return Verdict(name, (reason,), (metric,), decisive=1)


def replay_gain(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """Return whether a training without the new rows (`base`) beats the candidate (`tuned`), and what was measured."""
    gain = _gain(rows)
    if isinstance(gain, str) or gain.ci95 is None:
        why = gain if isinstance(gain, str) else f"{gain.units} older rows are too few for an interval"
        return False, f"a training without them can't be compared: {why}"
    high, low = (0.0 - bound for bound in gain.ci95)
    seen = f"gain {0.0 - gain.value:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    return low > 0, f"a training without them is {'' if low > 0 else 'not shown to be '}better: {seen}"


def _of_another_base(evaluation: Evaluation) -> bool:
    return "loss" in (evaluation.get("not_compared") or {})


def _gain(rows: Sequence[Mapping[str, Any]]) -> Estimate | str:
    """Return the candidate's gain on these rows in nats per token, or why it is unknown."""
    columns = loss_columns({"rows": rows})
    if isinstance(columns, str):
        return columns
    return jackknife(columns, loss_difference).reversed()
