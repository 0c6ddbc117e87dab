"""The stations `eval` and `compare`: two sides answer the same prompts, and one document says how they did.

The prompts are a run's held-out rows, or the rows of any file that `data check` reads. The first side is `base` in the
document, the second `tuned`. The answers come from answers.py, or of `eval` from the engine.
"""

import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, lock
from hivetune.base.journal import read_journal
from hivetune.base.paths import quoted
from hivetune.base.sealed import write_sealed
from hivetune.checkers.find import Checking, row_checker
from hivetune.config import EvalConfig
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.read import content_id
from hivetune.data.reasons import RowRefused
from hivetune.data.render.dialect import template_message
from hivetune.data.snapshot import RowInfo
from hivetune.errors import DataRefused, DoesNotFit, UsageError
from hivetune.judge.answers import (
    TIMES,
    Prompt,
    PromptAnswer,
    ask_all,
    continued,
    counter,
    doubt_times,
    others_share_of,
    stored_side,
    time_in_turns,
)
from hivetune.judge.artefacts import Artefact, check_memory, find_artefact, open_artefact
from hivetune.judge.findings import thresholds_of
from hivetune.judge.frozen import frozen_prompts
from hivetune.judge.gate import judge, verdict_document
from hivetune.judge.held_out import (
    EMPTY_ANSWER,
    NO_ANSWERS,
    SLOTS,
    add_answer,
    choose_prompts,
    compared_losses,
    evaluation_document,
    evidence_groups,
    last_question,
    noise_fields,
    plan_evaluation,
    scored,
)
from hivetune.judge.page import write_evaluation_page
from hivetune.llama.backend import CONTEXT_TOKENS, Backend, ServerSettings
from hivetune.llama.prompts import prompt_of
from hivetune.models.sides import BASELINE, SIDES
from hivetune.records import Example, Progress, silent
from hivetune.release.dry_export import dry_export
from hivetune.release.gguf import SERVED_QUANT
from hivetune.run.folder import EVALUATION, adapter_hash, require_adapter
from hivetune.run.status import refuse_older_adapter
from hivetune.train.open import Run, check_eval


def prompts_of_run(run: Run, config: EvalConfig) -> list[Prompt]:
    """Return the held-out rows that `hivetune eval` answers. Raises DataRefused when nothing is held out."""
    _, generate = plan_evaluation(run.snapshot, config)
    if not generate.rows:
        sides = f"{run.config.eval.baseline} {quoted(run.folder)}"
        hint = f"answer rows of your own: hivetune compare {sides} --rows FILE"
        raise DataRefused(f"{run.folder} has no held-out rows", hint=hint)
    groups = evidence_groups([run.snapshot.info(row) for row in run.snapshot.rows("test")])
    return [_prompt(run.snapshot.info(row), groups[row], config.checker) for row in generate.rows]


def prompts_of_rows(paths: Sequence[str], config: EvalConfig) -> tuple[list[Prompt], dict[str, int]]:
    """Return at most `config.prompts` of the rows in files, and how many rows could not be read, by reason.

    A row needs an answer of its own only for people to see; one that ends with the user is asked as it is. Raises
    DataRefused when no row is left, UsageError for files that are not there.
    """
    check_eval(config)
    rows: list[RowInfo] = []
    refused: dict[str, int] = {}
    for raw in rows_of_files(paths):
        try:
            rows.append(_info(len(rows), example_of(raw)))
        except RowRefused as error:
            refused[error.reason] = refused.get(error.reason, 0) + 1
    if not rows:
        raise DataRefused(f"{', '.join(paths)} has no questions", hint=f"see why: hivetune check {quoted(paths[0])}")
    chosen = set(choose_prompts(rows, config.prompts))
    groups = evidence_groups(rows)
    return [_prompt(info, groups[info.row], config.checker) for info in rows if info.row in chosen], refused


def timed_first(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` of the prompts, spread over all of them: neighbours are often of one file or agent."""
    if count >= len(prompts):
        return list(prompts)
    return [prompts[number * len(prompts) // count] for number in range(count)]


def _info(row: int, example: Example) -> RowInfo:
    names = ("source", "agent", "category", "session", "time", "messages", "tools", "checker")
    fields: dict[str, Any] = {name: getattr(example, name) for name in names}
    identity = content_id(example.messages, example.tools)
    return RowInfo(row=row, id=identity, interaction_id=None, split="test", **fields)


def _prompt(info: RowInfo, group: str, checker: Mapping[str, Any] | None) -> Prompt:
    last = info.messages[-1]
    request = prompt_of(info.messages) if last.role == "assistant" else info.messages
    return Prompt(
        row=info.row,
        id=info.id,
        source=info.source,
        agent=info.agent,
        category=info.category,
        group=group,
        messages=tuple(template_message(message) for message in request),
        tools=tuple(info.tools),
        checker=row_checker(info.checker, checker),
        said=last_question(info.messages),
        reference=last.content if last.role == "assistant" else None,
    )


COMPARISONS = "comparisons"
ANOTHER_SIDE = "name another run, release, GGUF file or endpoint"
MIN_TIMED_TOKENS = 8
# Questions answered one at a time, both sides in turns, to measure latency; more of them take minutes on a CPU.
TIMED_PROMPTS = 12
COSTS = ("peak_memory_bytes", "cold_start_s")


@dataclass(frozen=True)
class SideAnswers:
    """One side of a comparison: its answers by the key of the prompt, its costs, and its recorded figures."""

    label: str
    kind: str
    answers: Mapping[str, PromptAnswer]
    costs: Mapping[str, float | None]
    figures: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Comparison:
    """The document of a comparison, and the folder below the home that belongs to it."""

    document: dict[str, Any]
    folder: Path


def compare_pair(
    first: str,
    second: str,
    settings: EvalConfig,
    *,
    run: Run | None = None,
    rows: Sequence[str] = (),
    quant: str = SERVED_QUANT,
    progress: Progress = silent,
) -> Comparison:
    """Compare both sides on `rows`, else on the held-out rows of `run`. The first is `base`, the second `tuned`.

    The base model and the adapter files that a side may name are those of `run`.

    Raises UsageError for sides that are not there, damaged or the same; HivetuneError when one fails half-way: its
    answers are kept and not asked again.
    """
    if run is None and not rows:
        raise UsageError("there are no rows to answer", hint="give --run RUN for its held-out rows, or --rows FILE")
    sides = [find_artefact(text, run, quant) for text in (first, second)]
    if all(side.figures is not None for side in sides):
        raise UsageError("both sides are recorded figures: there is nothing to measure", hint=ANOTHER_SIDE)
    if sides[0].identity and sides[0].identity == sides[1].identity:
        raise UsageError(f"{first} and {second} are the same model: there is nothing to compare", hint=ANOTHER_SIDE)
    prompts, refused = prompts_of_rows(rows, settings) if rows or run is None else (prompts_of_run(run, settings), {})
    prompts += frozen_prompts(settings, (first, second), None if run is None else run.config.cycle.name)
    # What the document depends on: both sides, the prompts in their order, the settings.
    figures = [dict(side.figures) if side.figures is not None else side.identity for side in sides]
    asked = hashlib.sha256("".join(prompt.key for prompt in prompts).encode()).hexdigest()
    identity = json.dumps([figures, asked, settings.model_dump(mode="json")], sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()
    folder = home() / COMPARISONS / key[:16]
    total = _num_answers(prompts, settings, sum(side.figures is None for side in sides))
    # A slot holds the longest row and the longest answer.
    context_tokens = max(CONTEXT_TOKENS, run.config.max_length + settings.tokens if run else 0)
    with lock(folder):
        answered = _answer(sides, prompts, settings, context_tokens, folder, progress)
    facts = {
        "comparison": key,
        "snapshot": None if rows or run is None else run.snapshot.hash,
        "rows_from": ", ".join(rows) if rows or run is None else str(run.folder),
        "rows_refused": refused,
        "quant": quant,
        "others_share": others_share_of(folder / TIMES),
        "settings": settings.model_dump(mode="json"),
    }
    progress = continued(progress, total)
    losses = compared_losses(None if rows else run, sides, progress)
    document = comparison_document(prompts, answered[0], answered[1], losses, facts)
    with lock(folder):
        doubt_times(folder / TIMES, document)
    return Comparison(document, folder)


def _num_answers(prompts: Sequence[Prompt], settings: EvalConfig, num_sides: int) -> int:
    """Count the answers; a prompt that is timed counts once for all sides."""
    timed = len(_timed(prompts, settings))
    return timed + num_sides * (len({prompt.key for prompt in prompts}) - timed)


def _timed(prompts: Sequence[Prompt], settings: EvalConfig) -> list[Prompt]:
    return timed_first([prompt for prompt in prompts if not prompt.origin], TIMED_PROMPTS)


def _answer(
    sides: Sequence[Artefact],
    prompts: Sequence[Prompt],
    settings: EvalConfig,
    context_tokens: int,
    folder: Path,
    progress: Progress,
) -> list[SideAnswers]:
    """Time single answers, both sides in turns; these count too. Then ask each side for the rest, many at once."""
    answering = [side for side in sides if side.figures is None]
    check_memory(answering)
    timed = _timed(prompts, settings)
    server = ServerSettings(slots=SLOTS, context_tokens=context_tokens)
    unique = list({prompt.key: prompt for prompt in prompts}.values())  # a past win may be a held-out row too
    with ExitStack() as stack:
        stores = [stack.enter_context(stored_side(side, settings.tokens, SLOTS)) for side in answering]
        timed_keys = {prompt.key for prompt in timed}
        num_stored = sum(prompt.key in s.answers and prompt.key not in timed_keys for s in stores for prompt in unique)
        on_answer = counter(progress, _num_answers(prompts, settings, len(answering)), num_stored)
        opened = [stack.enter_context(open_artefact(side, server)) for side in answering]
        pairs = list(zip((answerer for answerer, _ in opened), stores, strict=True))
        times = time_in_turns(pairs, timed, folder / TIMES, new_tokens=settings.tokens, on_answer=on_answer)
        for (answerer, cold_start_s), store in zip(opened, stores, strict=True):
            ask_all(answerer, store, unique, slots=SLOTS, new_tokens=settings.tokens, on_answer=on_answer)
            memory = answerer.peak_memory_bytes() if isinstance(answerer, Backend) else None
            store.note_served(cold_start_s=cold_start_s, peak_memory_bytes=memory)
        measured = iter(zip(stores, times, strict=True))
        answered = []
        for side in sides:
            if side.figures is not None:
                answered.append(SideAnswers(side.label, side.kind, {}, {}, side.figures))
            else:
                stored, times_of_side = next(measured)
                answers = dict(stored.answers)
                for key, (seconds, first_token_s) in times_of_side.items():
                    answers[key] = replace(answers[key], seconds=seconds, first_token_s=first_token_s)
                answered.append(SideAnswers(side.label, side.kind, answers, stored.served))
        return answered


def comparison_document(
    prompts: Sequence[Prompt],
    first: SideAnswers,
    second: SideAnswers,
    losses: Sequence[Mapping[str, Any]] | str,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the document of compare.json, and with a run as the second side that of eval.json (docs/formats.md).

    `losses`: the rows of eval.json, or why the losses of these two sides can't be compared.
    """
    problems: list[dict[str, Any]] = []
    checking = Checking()
    sides = dict(zip(SIDES, (first, second), strict=True))
    answers = [_answer_row(prompt, number, sides, problems, checking) for number, prompt in enumerate(prompts)]
    rows_asked, frozen = ([row for row in answers if bool(row["origin"]) == is_frozen] for is_frozen in (False, True))
    return {
        "schema": 1,
        **facts,
        "rows": [] if isinstance(losses, str) else list(losses),
        "answers": rows_asked,
        "frozen": frozen,
        **{name: _summary(side, name, rows_asked) for name, side in sides.items()},
        **noise_fields(_token_times(rows_asked)),
        "not_compared": _not_compared(sides, losses),
        "problems": problems,
    }


def _not_compared(sides: Mapping[str, SideAnswers], losses: Sequence[Mapping[str, Any]] | str) -> dict[str, str]:
    """Return the metrics that one side can't have, each with its reason, and none that was merely not measured."""
    missing = {"loss": losses} if isinstance(losses, str) else {}
    for side in sides.values():
        if side.kind == "endpoint":
            missing["peak_memory_bytes"] = f"the memory of {side.label} can't be seen from here"
        for metric in ("latency_s", "peak_memory_bytes"):
            if side.figures is not None and metric not in side.figures:
                missing[metric] = f"{side.label} has no such figure"
    return missing


def _answer_row(
    prompt: Prompt,
    number: int,
    sides: Mapping[str, SideAnswers],
    problems: list[dict[str, Any]],
    checking: Checking,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{key: getattr(prompt, key) for key in ("row", "id", "source", "agent", "category", "group", "origin")},
        "checker": None if prompt.checker is None else dict(prompt.checker),
        "prompt": prompt.said,
        "reference": prompt.reference,
    }
    for name, side in sides.items():
        given = {**EMPTY_ANSWER, "first_token_s": None}
        if (answer := side.answers.get(prompt.key)) is not None:
            block = None if answer.seconds is None else number
            given |= {**asdict(answer), "answer": answer.text, "block": block}
            del given["text"]
        if answer is not None or side.figures is None:
            add_answer(row, name, given, problems, checking)
        else:
            row[name] = given
    return row


def _summary(side: SideAnswers, name: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"label": side.label, "kind": side.kind, **{key: side.costs.get(key) for key in COSTS}}
    if side.figures is not None:
        return {**summary, **side.figures, "recorded": True}
    for key, short in (("seconds", "latency"), ("first_token_s", "first_token")):
        times = sorted(answer[name][key] for answer in answers if answer[name][key] is not None)
        for share in (50, 95):
            # The smallest value that at least this share of all values does not exceed.
            place = max(0, math.ceil(share / 100 * len(times)) - 1)
            summary[f"{short}_p{share}_s"] = times[place] if times else None
    summary["tokens_per_second"] = tokens_per_second(answers, name)
    written = [answer for answer in answers if answer[name]["answer"] is not None]
    return {**summary, "answers": len(written), "recorded": False}


def tokens_per_second(answers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the rate over the timed answers, which both sides gave in turns, in one sitting."""
    timed = [answer[name] for answer in answers if answer[name]["seconds"] and answer[name]["new_tokens"] is not None]
    seconds = math.fsum(row["seconds"] for row in timed)
    return sum(row["new_tokens"] for row in timed) / seconds if seconds else None


def _token_times(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return seconds for a token of each timed answer, in the order of time, each side divided by its own median.

    The first token is left out, since it pays for the prompt. So are answers of less than `MIN_TIMED_TOKENS`.
    """
    by_side: dict[str, list[float]] = {}
    for name in SIDES:
        timed = [answer[name] for answer in answers if answer[name]["first_token_s"] and answer[name]["seconds"]]
        times = [
            (answer["seconds"] - answer["first_token_s"]) / (answer["new_tokens"] - 1)
            if (answer["new_tokens"] or 0) >= MIN_TIMED_TOKENS
            else None
            for answer in timed
        ]
        measured = sorted(seconds for seconds in times if seconds)
        middle = measured[len(measured) // 2] if measured else 1.0
        by_side[name] = [seconds / middle if seconds else 0.0 for seconds in times]
    pairs = itertools.zip_longest(*by_side.values(), fillvalue=0.0)
    return [sum(pair) / sum(seconds > 0 for seconds in pair) for pair in pairs if any(pair)]


def evaluate_run(run: Run, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate baseline and tuned model on the held-out test rows; write `eval.json` and its page.

    Both answer as they are served, by llama.cpp. Where it is not installed or can't serve this model, the base is the
    baseline and the engine answers; `answered_by` says which, and why. Raises what `compare_pair` does, UsageError when
    nothing was trained, or more than the adapter has, and OSError when the folder can't be written to.
    """
    require_adapter(run.folder)
    refuse_older_adapter(run.folder)
    tempfile.TemporaryFile(dir=run.folder).close()  # raised now on a read-only disk, and not after hours of answers
    facts = {
        "run": str(run.folder),
        "model": run.config.model,
        "adapter_sha256": adapter_hash(run.folder),
        "nearest": run.snapshot.manifest.get("nearest"),  # how near test rows are to training rows
    }
    if run.config.eval.baseline == BASELINE:
        evaluation = _beside_base(run, facts, progress)
    else:
        evaluation = _as_served(run, facts, progress)
    write_sealed(run.folder / EVALUATION, evaluation)
    metrics = verdict_document(judge(evaluation, thresholds_of(run.config.gate)))["metrics"]
    write_evaluation_page(run.folder, evaluation, {"metrics": metrics})
    return evaluation


def _beside_base(run: Run, facts: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Evaluate by llama.cpp where it can serve the model, else by the engine: one model in memory, and no GGUF."""
    reason, settings = dry_export(run).problem, run.config.eval
    if not reason:
        try:
            return _as_served(run, facts, progress)
        except DoesNotFit as error:
            reason = error.message
    unused = "; eval.frozen: not asked, since that needs llama.cpp" if settings.frozen else ""
    _, generate = plan_evaluation(run.snapshot, settings)
    scores, result = scored(run, run.folder, generate, progress)
    facts = {**facts, "answered_by": f"the engine: {reason}{unused}", "rank": result.get("rank")}
    return evaluation_document(run.snapshot, settings, read_journal(scores), result, facts)


def _as_served(run: Run, facts: dict[str, Any], progress: Progress) -> dict[str, Any]:
    settings = run.config.eval
    if settings.baseline == BASELINE:
        # Losses first: the files for llama.cpp are one core's work, and so is the import of torch.
        def make_files() -> None:
            for side in (settings.baseline, str(run.folder)):
                find_artefact(side, run, SERVED_QUANT)

        sides = (settings.baseline, str(run.folder))
        prompts = prompts_of_run(run, settings) + frozen_prompts(settings, sides, run.config.cycle.name)
        answers = _num_answers(prompts, settings, 2)
        scored(run, run.folder, NO_ANSWERS, continued(progress, after=answers), make_files)
        progress = continued(progress, before=2 * len(run.snapshot.rows("test")))  # the losses of base and adapter
    document = compare_pair(settings.baseline, str(run.folder), settings, run=run, progress=progress).document
    result: Mapping[str, Any] = {}
    if "loss" not in document["not_compared"]:
        _, result = scored(run, run.folder, NO_ANSWERS, silent)  # found: the comparison has computed it
    measured = {key: result.get(key) for key in ("rank", "kl_to_base")}
    return {**document, **facts, **measured, "answered_by": f"llama.cpp, {document['quant']}"}
