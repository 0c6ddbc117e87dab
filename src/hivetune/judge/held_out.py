"""Held-out rows: which of them are scored and answered, and eval.json from what the engine found.

All test rows count for the loss; a stratified choice of them is answered by base and tuned model. Both models get the
same rows, so every comparison is paired.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hivetune.checkers.find import Checking, row_checker
from hivetune.config import EvalConfig
from hivetune.data.checks.dedupe import Rows, near_copies, sketch
from hivetune.data.checks.lessons import lesson_of
from hivetune.data.snapshot import RowInfo, Snapshot
from hivetune.errors import MachineNotFit, UsageError
from hivetune.judge.statistics import by_group, holm, jackknife, loss_difference, merge_groups, noise_of, p_value
from hivetune.process.protocol import Generate
from hivetune.train.open import check_eval

SIDES = ("base", "tuned")
SAME_ROW = 0.85  # likeness from which two held-out rows are one piece of evidence, as data.near_duplicates has it
_KEYS = {"loss": "nll", "answer": "answer"}  # the events of scores.jsonl that are about a row
EMPTY_ANSWER: Mapping[str, Any] = {
    "answer": None,
    "ended": None,
    "seconds": None,
    "new_tokens": None,
    "block": None,
    "success": None,
}


def plan_evaluation(snapshot: Snapshot, config: EvalConfig) -> tuple[tuple[int, ...], Generate]:
    """Return the rows to score, and the rows to answer.

    Raises UsageError for a broken checker in the config, before anything is loaded.
    """
    check_eval(config)
    rows = snapshot.rows("test")
    chosen = choose_prompts([snapshot.info(row) for row in rows], config.prompts)
    return tuple(rows), Generate(tuple(chosen), config.new_tokens, config.slots)


def choose_prompts(rows: Iterable[RowInfo], count: int) -> list[int]:
    """Choose at most `count` row numbers, ascending, with the shares of agents and categories in `rows`.

    Each of them comes at least once where there is room. The choice depends on the rows' contents only, so that runs on
    the same snapshot answer the same prompts.
    """
    strata: dict[tuple[str, str], list[RowInfo]] = defaultdict(list)
    for row in rows:
        strata[row.agent or "", row.category or ""].append(row)
    ranked = []
    for stratum in strata.values():
        ordered = sorted(stratum, key=lambda row: (_rank(row), row.row))
        ranked += [(position / len(ordered), _rank(row), row.row) for position, row in enumerate(ordered)]
    return sorted(row for _, _, row in sorted(ranked)[:count])


def evidence_groups(rows: Sequence[RowInfo]) -> dict[int, str]:
    """Return row number -> group: rows of one session, and near-duplicates, are one piece of evidence.

    A group has the name of the session, or else of the row, that comes first.
    """
    lessons = [lesson_of(row.messages) for row in rows]
    questions = [hash(tuple(lesson.question)) for lesson in lessons]
    compared = Rows(lessons.__getitem__, questions.__getitem__, lambda index: (index,))
    sketches = memoryview(b"".join(sketch(row.messages) for row in rows))
    same = list(range(len(rows)))
    for copy, original, _ in near_copies(sketches, SAME_ROW, compared).copies if rows else ():
        same[copy] = same[original]
    groups = merge_groups([row.session or row.id for row in rows], same)
    return {row.row: group for row, group in zip(rows, groups, strict=True)}


def evaluation_document(
    snapshot: Snapshot,
    config: EvalConfig,
    scores: Iterable[Mapping[str, Any]],
    outcome: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the document of eval.json (docs/formats.md) from the lines of scores.jsonl and the task's outcome.

    A row that the task did not score stays in the document with null, one that is not finite with "not finite": the
    gate counts both as failures. `facts` (model, run, versions) is kept beside the numbers. Problems with a row's own
    checker are listed and leave its success null.
    """
    lines: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for line in scores:
        if line["event"] in _KEYS:
            lines[line["model"], _KEYS[line["event"]], int(line["row"])] = line
    problems: list[dict[str, Any]] = []
    checking = Checking()
    _, generate = plan_evaluation(snapshot, config)
    rows = loss_rows(snapshot, lines)
    groups = {row["row"]: row["group"] for row in rows}
    answered = [(snapshot.info(row), groups[row]) for row in generate.rows]
    return {
        "schema": 1,
        "snapshot": snapshot.hash,
        **facts,
        "settings": config.model_dump(mode="json"),
        "rows": rows,
        "answers": [_answer_row(info, group, lines, config, problems, checking) for info, group in answered],
        **{side: dict(outcome.get(side) or {}) for side in SIDES},
        **noise_fields(outcome.get("probes_s") or ()),
        "kl_to_base": outcome.get("kl_to_base"),
        "problems": problems,
    }


def noise_fields(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return `noise` and `repeat_noise` of eval.json, from the times of equal work in their order."""
    return dict(zip(("noise", "repeat_noise"), noise_of(seconds) or (None, None), strict=True))


def loss_rows(snapshot: Snapshot, lines: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line of eval.json's `rows` for each held-out test row.

    `lines`: (side, "nll", row) -> {"nll", "tokens"}.
    """
    infos = [snapshot.info(row) for row in snapshot.rows("test")]
    groups = evidence_groups(infos)
    return [_loss_row(info, groups[info.row], lines) for info in infos]


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
    summaries = [{part: name or None, **_summary(rows[name], answers[name])} for name in names]
    adjusted = holm([summary.pop("p") for summary in summaries])
    return [{**summary, "p_holm": p} for summary, p in zip(summaries, adjusted, strict=True)]


def _summary(rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens = sum(row["tokens"] or 0 for row in rows)
    checked = [answer for answer in answers if all(answer[side]["success"] is not None for side in SIDES)]
    summary: dict[str, Any] = {"rows": len(rows), "answers": len(checked)}
    for side in SIDES:
        values = [row[side] for row in rows]
        usable = tokens > 0 and all(isinstance(value, float) for value in values)
        summary[f"{side}_loss"] = math.fsum(values) / tokens if usable else None
        summary[f"{side}_success"] = sum(a[side]["success"] for a in checked) / len(checked) if checked else None
    return {**summary, "p": _p_of(rows)}


def _p_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the two-sided p of "no difference in loss" on these rows, whole sessions together; 1 where a loss is
    missing.
    """
    if not rows or not all(isinstance(row[side], float) for row in rows for side in SIDES):
        return 1.0
    columns = by_group([[row[key] for row in rows] for key in (*SIDES, "tokens")], [row["group"] for row in rows])
    return p_value(jackknife(columns, loss_difference))


def _loss_row(info: RowInfo, group: str, lines_of: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> dict[str, Any]:
    lines = {side: lines_of.get((side, "nll", info.row)) for side in SIDES}
    tokens = next((int(line["tokens"]) for line in lines.values() if line is not None), None)
    return {**_identity(info, group), "tokens": tokens, **{side: _nll(line) for side, line in lines.items()}}


def _answer_row(
    info: RowInfo,
    group: str,
    lines_of: Mapping[tuple[str, str, int], Mapping[str, Any]],
    config: EvalConfig,
    problems: list[dict[str, Any]],
    checking: Checking,
) -> dict[str, Any]:
    checker = row_checker(info.checker, config.checker)
    last = info.messages[-1]
    row: dict[str, Any] = {
        **_identity(info, group),
        "checker": None if checker is None else dict(checker),
        "prompt": next((message.content for message in reversed(info.messages) if message.role == "user"), ""),
        "reference": last.content if last.role == "assistant" else None,
    }
    for side in SIDES:
        line = lines_of.get((side, "answer", info.row))
        if line is None:
            problems.append({"row": info.row, "source": info.source, "model": side, "problem": "no answer"})
            row[side] = dict(EMPTY_ANSWER)
            continue
        row[side] = {key: line.get(key) for key in EMPTY_ANSWER}
        try:
            ended = bool(line["ended"])
            success = None if checker is None else checking.succeeds(line["answer"], checker, ended=ended, row=row)
        except (UsageError, MachineNotFit) as error:
            problems.append({"row": info.row, "source": info.source, "model": side, "problem": error.message})
            success = None
        row[side]["success"] = success
    return row


def _identity(info: RowInfo, group: str) -> dict[str, Any]:
    return {
        "row": info.row,
        "id": info.id,
        "source": info.source,
        "agent": info.agent,
        "category": info.category,
        "group": group,
    }


def _nll(line: Mapping[str, Any] | None) -> float | str | None:
    if line is None:
        return None
    value = line["nll"]
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else "not finite"


def _rank(row: RowInfo) -> bytes:
    return hashlib.blake2b(f"prompts/{row.id}".encode(), digest_size=8).digest()
