"""Held-out rows: which of them are scored and answered, their losses, and eval.json from what the engine found.

All test rows count for the loss; a stratified choice of them is answered by base and tuned model. Both models get the
same rows, so every comparison is paired. Scores lie below the home by what they depend on.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, home, lock, read_json, sha256_file, write_json
from hivetune.base.journal import DAMAGED, Journal, read_journal
from hivetune.checkers.find import Checking, row_checker
from hivetune.config import EvalConfig
from hivetune.data.checks.dedupe import Rows, near_copies, sketch
from hivetune.data.checks.lessons import lesson_of
from hivetune.data.snapshot import RowInfo, Snapshot
from hivetune.errors import MachineNotFit, UsageError
from hivetune.judge.artefacts import Artefact
from hivetune.judge.statistics import merge_groups, noise_of
from hivetune.models.sides import SIDES
from hivetune.process.parent import count_items, see_off, start_child
from hivetune.process.protocol import Generate, Score
from hivetune.records import Message, Progress
from hivetune.run.folder import ADAPTER, CONFIG, SCORES, read_resolved
from hivetune.train.open import Run, check_eval

SAME_ROW = 0.85  # likeness from which two held-out rows are one piece of evidence, as data.near_duplicates has it
SLOTS = 8  # answers generated at the same time
_KEYS = {"loss": "nll", "answer": "answer"}  # the events of scores.jsonl that are about a row
EMPTY_ANSWER: Mapping[str, Any] = dict.fromkeys(("answer", "ended", "seconds", "new_tokens", "block", "success"))


def plan_evaluation(snapshot: Snapshot, config: EvalConfig) -> tuple[tuple[int, ...], Generate]:
    """Return the rows to score, and the rows to answer. Raises UsageError for a broken checker in the config."""
    check_eval(config)
    rows = snapshot.rows("test")
    chosen = choose_prompts([snapshot.info(row) for row in rows], config.prompts)
    return tuple(rows), Generate(tuple(chosen), config.tokens, SLOTS)


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


def last_question(messages: Sequence[Message]) -> str:
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


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
    """Return eval.json's `rows`, one for each test row. `lines`: (side, "nll", row) -> {"nll", "tokens"}."""
    infos = [snapshot.info(row) for row in snapshot.rows("test")]
    groups, rows = evidence_groups(infos), []
    for info in infos:
        row = {**_identity(info, groups[info.row]), "tokens": None, "base": None, "tuned": None}
        for side in SIDES:
            if (line := lines.get((side, "nll", info.row))) is not None:
                nll = line["nll"]
                finite = isinstance(nll, int | float) and math.isfinite(nll)
                row |= {"tokens": int(line["tokens"]), side: float(nll) if finite else "not finite"}
        rows.append(row)
    return rows


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
        "prompt": last_question(info.messages),
        "reference": last.content if last.role == "assistant" else None,
    }
    for side in SIDES:
        line = lines_of.get((side, "answer", info.row), EMPTY_ANSWER)
        add_answer(row, side, {key: line.get(key) for key in EMPTY_ANSWER}, problems, checking)
    return row


def add_answer(
    row: dict[str, Any], side: str, answer: dict[str, Any], problems: list[dict[str, Any]], checking: Checking
) -> None:
    """Add a side's answer to a row of `answers`, with its success. A missing one, or a failed checker, is a problem."""
    row[side], problem = answer, ""
    if answer["answer"] is None:
        problem = "no answer"
    elif row["checker"] is not None:
        try:
            ended = bool(answer["ended"])
            answer["success"] = checking.succeeds(answer["answer"], row["checker"], ended=ended, row=row)
        except (UsageError, MachineNotFit) as error:
            problem = error.message
    if problem:
        problems.append({"row": row["row"], "source": row["source"], "model": side, "problem": problem})


def _identity(info: RowInfo, group: str) -> dict[str, Any]:
    return {**{key: getattr(info, key) for key in ("row", "id", "source", "agent", "category")}, "group": group}


def _rank(row: RowInfo) -> bytes:
    return hashlib.blake2b(f"prompts/{row.id}".encode(), digest_size=8).digest()


NO_ANSWERS = Generate((), 0, 0)  # only the losses
WHOLE = "whole.json"  # written last: without it a folder of scores is begun again


def compared_losses(run: Run | None, sides: Sequence[Artefact], progress: Progress) -> list[dict[str, Any]] | str:
    """Return the `rows` of eval.json, or why these two can't be compared by their loss.

    llama.cpp's server and the chat API do not say how likely a given text is, so a GGUF file and an endpoint have no
    loss.
    """
    if run is None:
        return (
            "rows that are given as a file are not tokenized; without --rows the loss is that of a run's held-out rows"
        )
    for side in sides:
        if side.trained is None:
            return f"{side.label} is not an adapter on a base that is on this machine, so its loss is unknown"
    models = {sha256_file(side.trained[0] / MANIFEST) for side in sides if side.trained}
    if models != {sha256_file(run.model / MANIFEST)}:
        return "the sides have different base models, so their tokens differ"
    adapters = [side.trained[1] for side in sides if side.trained]
    shared = next((adapter for adapter in adapters if adapter is not None), None)
    lines: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for name, adapter in zip(SIDES, adapters, strict=True):
        # The base is scored beside an adapter, in the precision that the adapter was trained in.
        scores, _ = scored(run, adapter or shared, NO_ANSWERS, progress)
        kind = "base" if adapter is None else "tuned"
        for line in read_journal(scores):
            if line["event"] == "loss" and line["model"] == kind:
                lines[name, "nll", int(line["row"])] = line
    return loss_rows(run.snapshot, lines)


def scored(
    run: Run,
    adapter: Path | None,
    generate: Generate,
    progress: Progress,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Path, Mapping[str, Any]]:
    """Return scores.jsonl of the base and, where there is one, the adapter, with the task's result: found, or made.

    It lies below the home by what it depends on. So a task that failed half-way continues where it was, and the losses
    of a base are computed once for all adapters that were trained alike. `meanwhile` runs beside the task, if there is
    one.
    """
    choices = read_resolved(adapter)[1].made() if adapter and (adapter / CONFIG).is_file() else {}
    base = {
        "model": sha256_file(run.model / MANIFEST),
        "snapshot": run.snapshot.hash,
        "dtype": run.config.dtype,
        "device": run.config.device,
        "computed": {key: choices.get(key) for key in ("device", "dtype", "path", "kernels")},
    }
    pair = {
        **base,
        "adapter": None if adapter is None else sha256_file(adapter / ADAPTER),
        "generate": asdict(generate),
    }
    keys = [hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest() for identity in (pair, base)]
    folder, base_folder = (home() / "scores" / key[:16] for key in keys)
    rows = tuple(run.snapshot.rows("test"))
    with lock(folder), lock(base_folder):
        path = folder / SCORES
        if any(line["event"] == DAMAGED for line in read_journal(path)):
            path.unlink()
        if not (folder / WHOLE).is_file() or not path.is_file():
            _copy_losses(base_folder / SCORES, path)
            task = Score(
                run.model, adapter, run.snapshot.folder, path, rows, generate, run.config.dtype, run.config.device
            )
            total = (len(rows) + len(generate.rows)) * (1 if adapter is None else 2)
            num_done = sum(line["event"] in ("loss", "answer") for line in read_journal(path))
            # How far the models differ is computed beside the scoring, row by row: more items than `total`.
            child = start_child(task, folder)
            result = see_off(child, count_items(progress, total, num_done), meanwhile).check("scoring")
            write_json(folder / WHOLE, {**result, "about": pair})
            _copy_losses(path, base_folder / SCORES)
        return path, read_json(folder / WHOLE)


def _copy_losses(source: Path, target: Path) -> None:
    """Copy the lines of the base that `target` does not have yet."""
    lines = [line for line in read_journal(source) if line["event"] == "loss" and line["model"] == "base"]
    copied = {line["row"] for line in read_journal(target) if line["event"] == "loss" and line["model"] == "base"}
    missing = [line for line in lines if line["row"] not in copied]
    if missing:
        with Journal(target) as journal:
            for line in missing:
                journal.append("loss", **{key: line[key] for key in ("model", "row", "nll", "tokens")})
