"""The decision whether a cycle's candidate replaces the champion. Pure: the same evaluations give the same verdict.

  against the base       everything that `gate` requires of a single run
  against the champion   better on the held-out rows, at the error level of the n-th candidate compared with it; not
                         worse on the rows that are new since the champion was made; and shown to be at most
                         `gate.tolerance` worse on the other rows

All candidates that are compared with one champion share an error level of 5 %. So a candidate that is equally good
replaces it with a probability of at most 2.5 % (the test is one-sided), however many nights this is tried. Without
enough evidence the champion stays; the rows are kept, and the next candidate is judged on them and on newer ones.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hivetune.config import GateConfig
from hivetune.judge.statistics import Estimate, jackknife, loss_difference
from hivetune.judge.verdict import Evaluation, judge, loss_columns
from hivetune.records import Verdict, VerdictName

# A part that aborts is never outvoted by one that only lacks evidence.
_GRAVEST_FIRST: tuple[VerdictName, ...] = ("abort", "iterate", "not-enough-evidence", "deploy")
Part = Literal["base", "champion", "earlier rows", "fresh rows"]
NOTHING_REQUIRED = {name: None for name, field in GateConfig.model_fields.items() if field.annotation == float | None}


@dataclass(frozen=True)
class Comparisons:
    """The candidate (`tuned`) beside each rival (`base`), as documents in the format of eval.json.

    `champion` is None if there is none yet. `known`: ids of the rows of the champion's cycle; all others are new.
    `look`: the number of this candidate among those that were compared with this champion, from 1. `shares`: the number
    of domains that share the error level of a comparison.
    """

    base: Evaluation
    champion: Evaluation | None = None
    known: Collection[str] = ()
    look: int = 1
    shares: int = 1


@dataclass(frozen=True)
class CycleVerdict:
    """The verdict on a candidate: the worst verdict of its `parts`. The first `decisive` reasons caused it; the others
    report the remaining metrics."""

    verdict: VerdictName
    reasons: tuple[str, ...]
    parts: Mapping[Part, Verdict]
    decisive: int = 0

    @property
    def passed(self) -> bool:
        return self.verdict == "deploy"


def judge_cycle(contests: Comparisons, config: GateConfig) -> CycleVerdict:
    """Return the worst verdict of all parts. Each reason names the rival that it refers to."""
    documents = [document for document in (contests.base, contests.champion) if document is not None]
    # A row on which a rival's loss is not finite is left out and counted, or it would stop every later candidate.
    broken = {row["id"] for document in documents for row in document["rows"] if row["base"] == "not finite"}
    base, *champion = [
        {**document, "rows": [row for row in document["rows"] if row["id"] not in broken]} for document in documents
    ]
    # Without a champion the base is the rival, so the looks are counted there.
    parts: dict[Part, Verdict] = {"base": judge(base, config, look=None if champion else contests.look)}
    for evaluation in champion:
        parts["champion"] = _against_champion(evaluation, contests, config)
        parts["fresh rows"] = _on_fresh_rows(_gain(evaluation, contests, known=False))
        parts["earlier rows"] = _on_earlier_rows(evaluation, contests, config)
    verdict = min((part.verdict for part in parts.values()), key=_GRAVEST_FIRST.index)
    decisive: list[str] = []
    others: list[str] = []
    for name, part in parts.items():
        said = [f"against the {'base' if name == 'base' else 'champion'}: {reason}" for reason in part.reasons]
        made_it = part.decisive if part.verdict == verdict else 0
        decisive += said[:made_it]
        others += said[made_it:]
    if broken:
        others.append(f"{len(broken)} held-out rows are not finite for a rival either, and say nothing")
    return CycleVerdict(verdict, (*decisive, *others), parts, len(decisive))


def _against_champion(evaluation: Evaluation, contests: Comparisons, config: GateConfig) -> Verdict:
    """Require a gain above 0 over the champion in each required metric."""
    # Where the base model was upgraded since, losses are of other tokens, and answers decide.
    by_answers = (config.loss_gain is None and config.success_gain is not None) or _of_another_base(evaluation)
    loss_gain, success_gain = None if config.loss_gain is None else 0.0, 0.0 if by_answers else None
    config = config.model_copy(update={"loss_gain": loss_gain, "success_gain": success_gain})
    # Speed and size are held against the base, which does not change.
    return judge(evaluation, config, look=contests.look, shares=contests.shares, beside_base=False)


def _on_fresh_rows(gain: Estimate | str) -> Verdict:
    """Return the verdict on the new rows: a candidate that is significantly worse than the champion is refused."""
    # It may know the older rows by heart. Nothing more is asked here: a few fresh rows decide nothing else.
    if isinstance(gain, str) or gain.interval is None:
        return Verdict("deploy", (), ())
    fact, is_worse = _fact("fresh rows", gain), gain.interval[1] < 0
    return Verdict("iterate", (f"{fact}: worse",), (), decisive=1) if is_worse else Verdict("deploy", (fact,), ())


def _on_earlier_rows(evaluation: Evaluation, contests: Comparisons, config: GateConfig) -> Verdict:
    """Return the verdict on the rows that are not fresh: a loss on them must be shown to be within the tolerance. A
    candidate of another base is judged by its answers, on all rows.
    """
    # This reveals a candidate that learned the fresh rows, right or wrong, at the price of everything else.
    if _of_another_base(evaluation):
        answers_alone = {"loss_gain": None, "success_gain": -config.tolerance}
        return judge(evaluation, config.model_copy(update=answers_alone), beside_base=False)
    verdict = _within(_gain(evaluation, contests, known=True), config.tolerance)
    # Better losses do not make up for answers that are wrong now: checked answers once fell from 36 to 2 %.
    answers = judge(evaluation, config.model_copy(update=NOTHING_REQUIRED), beside_base=False)
    if verdict.verdict == "abort" or all(metric.passed is not False for metric in answers.metrics):
        return verdict
    lost = answers.reasons[: answers.decisive]
    return replace(verdict, verdict="iterate", reasons=(*lost, *verdict.reasons), decisive=len(lost) + 1)


def _within(gain: Estimate | str, tolerance: float) -> Verdict:
    """Return the verdict on the earlier rows: deploy only if the loss on them is shown to be within the tolerance."""
    if isinstance(gain, str):
        name: VerdictName = "abort" if "not finite" in gain else "not-enough-evidence"
        return Verdict(name, (f"earlier rows: {gain}",), (), decisive=1)
    if gain.interval is None:
        return Verdict(
            "not-enough-evidence", (f"earlier rows: {gain.units} are too few for an interval",), (), decisive=1
        )
    low, high = gain.interval
    if high < -tolerance:
        name, said = "abort", ": worse by more than"
    elif low <= -tolerance:
        name, said = "not-enough-evidence", ": not shown to be within"
    else:
        name, said = "deploy", ", within"
    return Verdict(name, (f"{_fact('earlier rows', gain)}{said} the tolerance {tolerance:g}",), (), decisive=1)


def _fact(rows: str, gain: Estimate) -> str:
    assert gain.interval is not None, "looked at"
    low, high = gain.interval
    return f"{rows}: gain {gain.value:.4g}, 95 % interval {low:.4g} to {high:.4g}"


def _of_another_base(evaluation: Evaluation) -> bool:
    return "loss" in (evaluation.get("not_compared") or {})


def _gain(evaluation: Evaluation, contests: Comparisons, *, known: bool) -> Estimate | str:
    """Return the candidate's gain in nats per token, on the known or on the fresh rows, or the reason why it is
    unknown.
    """
    rows = [row for row in evaluation["rows"] if (row["id"] in contests.known) is known]
    columns = loss_columns({"rows": rows})
    return columns if isinstance(columns, str) else jackknife(columns, loss_difference).scaled(-1.0)
