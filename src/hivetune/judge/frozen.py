"""Forgetting: what a release answered rightly before, its successors must answer too.

The questions are a fixed list and the answers greedy, so nothing is sampled. The share that is kept is exact, and its
interval only says how far it would carry to other questions of the kind.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base.sealed import read_sealed
from hivetune.config import EvalConfig, GateConfig
from hivetune.data.frozen import (
    FrozenQuestion,
    freeze,
    general_questions,
    is_name,
    own_questions,
    win_of,
    wins_of,
)
from hivetune.data.render.dialect import template_message
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import UsageError
from hivetune.judge.answers import Prompt, last_question
from hivetune.judge.findings import Finding, titled
from hivetune.judge.statistics import MIN_UNITS, paired_proportions, proportion
from hivetune.models.sides import parse_side
from hivetune.records import Metric
from hivetune.release.registry import Release
from hivetune.run.folder import EVALUATION, read_record

WINS_PER_RELEASE = 20
MAX_WINS = 200  # a set is asked of every candidate: 200 answers of 64 tokens take a minute at 217 tokens/s
_SHOWN = 3


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


def frozen_findings(evaluation: Mapping[str, Any], config: GateConfig) -> list[Finding]:
    """Return `kept` (past wins and the user's own) and `kept_general`, where such questions exist."""
    findings = []
    for name, origins, limit in (
        ("kept", ("win", "own"), config.least_kept),
        ("kept_general", ("general",), config.least_general),
    ):
        questions = kept_questions(evaluation, origins)
        if questions.n or questions.unanswered:
            rows = [row for row in evaluation["frozen"] if row["origin"] in origins]
            pairs = [(row["base"]["success"], row["tuned"]["success"]) for row in rows]
            answered = [(bool(base), bool(tuned)) for base, tuned in pairs if None not in (base, tuned)]
            # The gain is over all questions that both sides answered: lost and won ones count.
            gain = paired_proportions([base for base, _ in answered], [tuned for _, tuned in answered])
            findings.append(replace(_finding(name, questions, limit), gain95=gain.ci95))
    return findings


def _finding(name: str, kept: KeptQuestions, limit: float | None) -> Finding:
    share = kept.kept / kept.n if kept.n else None
    interval = None if share is None else proportion([True] * kept.kept + [False] * len(kept.lost)).ci95
    required = limit is not None and kept.n >= MIN_UNITS
    passed = share is not None and limit is not None and share >= limit
    metric = Metric(name, None, share, None, interval, kept.n, limit, passed if required else None, required)
    fact = f"{titled(name)}: {kept.kept} of {kept.n} frozen questions that were answered rightly still are"
    if kept.lost:
        fact += f"; lost: {', '.join(kept.lost[:_SHOWN])}{' ...' * (len(kept.lost) > _SHOWN)}"
    if kept.unanswered:
        fact += f"; {kept.unanswered} could not be checked"
    if not required:
        few = f" ({kept.n} are too few to require any)" if limit is not None else ""
        return Finding(metric, "reported", fact + few)
    if kept.unanswered and passed:
        return Finding(metric, "undecided", f"{fact}: not every one was answered")
    return Finding(metric, "passed" if passed else "missed", f"{fact}; at least {limit:.0%} must be kept")


def choose_wins(answers: Sequence[Mapping[str, Any]], num_kept: int) -> list[Mapping[str, Any]]:
    """Choose which answers of an evaluation (rows of `answers` in eval.json) to freeze when its model becomes champion.

    Only correct answers are chosen, first ones that the baseline got wrong. Agents and categories take turns. The
    limits are WINS_PER_RELEASE, and MAX_WINS with those `num_kept`.
    """
    strata: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for answer in answers:
        if answer["checker"] is not None and answer["tuned"]["success"]:
            strata[answer["agent"] or "", answer["category"] or ""].append(answer)
    ranked = []
    for stratum, rows in strata.items():
        rows.sort(key=lambda row: (bool(row["base"]["success"]), blake2b(row["id"].encode(), digest_size=8).digest()))
        ranked += [(turn, stratum, row) for turn, row in enumerate(rows)]
    ranked.sort(key=lambda rank: rank[:2])
    return [row for _, _, row in ranked][: max(0, min(WINS_PER_RELEASE, MAX_WINS - num_kept))]


def frozen_prompts(settings: EvalConfig, sides: Iterable[str]) -> list[Prompt]:
    """Return the prompts beside the held-out rows: past wins of the sides' releases, the user's own, general ones.

    Their numbers go from -1 downwards, as they are not rows of a snapshot. Raises DataRefused for a file that can't be
    used, UsageError for a damaged set.
    """
    names = {side.name.partition("@")[0] for side in map(parse_side, sides) if side.kind == "release"}
    names |= {entry for entry in settings.frozen if is_name(entry)}
    questions = [question for name in sorted(names) for question in wins_of(name)]
    questions += own_questions(settings.frozen, settings.checker)
    questions += general_questions() if settings.general else []
    unique = {question.key: question for question in reversed(questions)}  # of equal ones the first counts: a past win
    return [_prompt(-number, question, settings) for number, question in enumerate(reversed(unique.values()), 1)]


def freeze_wins(release: Release) -> int:
    """Make past wins of what this release answers rightly; return how many questions are new.

    Nothing is frozen where the release was not evaluated, its adapter changed since, nothing was checked, or its
    snapshot is gone.
    """
    path = release.folder / EVALUATION
    if not path.is_file():
        return 0
    evaluation = read_sealed(path)
    if evaluation.get("adapter_sha256") != release.adapter_sha256:
        return 0
    try:
        snapshot = open_snapshot(Path(read_record(release.folder).get("snapshot", "(not recorded)")))
    except UsageError:  # deleted since: the rows can't be read again
        return 0
    chosen = choose_wins(evaluation["answers"], len(wins_of(release.name)))
    return freeze(release.name, [win_of(snapshot.info(row["row"]), row["checker"], release.label) for row in chosen])


def _prompt(number: int, question: FrozenQuestion, settings: EvalConfig) -> Prompt:
    """Return a frozen question as a prompt. A function is of the config alone: the home must not name code to run."""
    is_function = (question.checker or {}).get("name") == "function"
    return Prompt(
        row=number,
        id=question.key,
        source=question.source,
        agent=question.agent,
        category=question.category,
        group=question.key,
        messages=tuple(template_message(message) for message in question.messages),
        tools=question.tools,
        checker=settings.checker if is_function else question.checker,
        said=last_question(question.messages),
        reference=question.reference,
        origin=question.origin,
    )
