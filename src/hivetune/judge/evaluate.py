"""The evaluation behind `eval` and `compare`: two sides answer the same prompts, and one document contains all
measurements.

The prompts are a run's held-out rows, or the rows of any file that `check` reads. The first side is `base` in the
document, the second `tuned`. llama.cpp answers, as for a served release; the training engine computes losses. A model
that llama.cpp can't serve is judged by its loss alone, and the verdict mentions it.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from hivetune.base.disk import lock, write_json
from hivetune.base.documents import read_document
from hivetune.base.typed import from_plain, to_plain
from hivetune.checkers import Checking
from hivetune.config import EvalConfig
from hivetune.data.render.folder import load_renderer
from hivetune.errors import Busy, DataRefused, HivetuneError, MachineNotFit, UsageError
from hivetune.judge import statistics as stats
from hivetune.judge.answers import (
    Answerer,
    Artefact,
    StoredAnswers,
    Times,
    ask_all,
    build_name,
    find_artefact,
    note_rate,
    open_artefact,
    stored_answers,
    time_in_turns,
)
from hivetune.judge.losses import compared_losses, row_identity, scored
from hivetune.judge.page import write_evaluation_page
from hivetune.judge.rows import Prompt, frozen_prompts, prompts_of_rows, prompts_of_run
from hivetune.judge.verdict import KINDS, OF_ANSWERS, TIMED_PROMPTS, judge
from hivetune.llama.ask import Answer
from hivetune.llama.backend import CONTEXT_TOKENS, Backend, ServerSettings
from hivetune.models.sides import BASELINE, SIDES
from hivetune.records import Progress, Verdict, silent
from hivetune.release.gguf import SERVED_QUANT
from hivetune.release.prove import base_problem
from hivetune.run.folder import EVALUATING, EVALUATION, adapter_hash, require_adapter
from hivetune.run.status import refuse_older_adapter, shortest_name
from hivetune.train.open import Run

ANOTHER_SIDE = "name another run, release, GGUF file or endpoint"
# Answers at the same time. On 2 cores eight make 2.5 times the tokens of one, and each takes longer: no times.
SLOTS = 8
# Times that straddle their limit are taken again a little later, for a load that has gone by then.
MAX_TIMINGS, AGAIN_AFTER_S = 3, 20.0
VERDICT_FIELDS = ("verdict", "reasons", "decisive", "metrics")


@dataclass(frozen=True)
class SideAnswers:
    """The answers of one side of a comparison, and some of their times in seconds, both by prompt key.
    `peak_memory_bytes` is None for a server that was already running."""

    label: str
    kind: str
    answers: Mapping[str, Answer] = field(default_factory=dict)
    times: Times = field(default_factory=dict)
    peak_memory_bytes: int | None = None


def compare_pair(
    first: str,
    second: str,
    settings: EvalConfig,
    *,
    run: Run | None = None,
    rows: Sequence[str] = (),
    max_timings: int = 1,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return the comparison of both sides on `rows`, or on the held-out rows of `run` (one of the two is given): the
    measurements of eval.json, with the first side as `base` and the second as `tuned`.

    The base model and the adapter files that a side may name are those of `run`. `max_timings`: how often times are
    measured at most while their interval includes the limit.

    Raises UsageError for sides that are missing, damaged or the same; HivetuneError if one fails half-way: its answers
    are kept and not asked again.
    """
    sides = [find_artefact(text, run) for text in (first, second)]
    if sides[0].identity == sides[1].identity:
        raise UsageError(f"{first} and {second} are the same model: there is nothing to compare", hint=ANOTHER_SIDE)
    prompts, refused = prompts_of_rows(rows, settings) if rows or run is None else (prompts_of_run(run, settings), {})
    prompts += frozen_prompts(settings, (first, second), None if run is None else run.config.cycle.name)
    if any(message.tool_calls for prompt in prompts for message in prompt.info.messages):
        # A snapshot's rows have the ids that its model's template requires, those of a file their own.
        models = [*(side.trained[0] for side in sides if side.trained), *([run.model] if run else ())]
        for as_sent in [load_renderer(model).as_sent for model in dict.fromkeys(models)]:
            infos = [prompt.info for prompt in prompts]
            sent = [replace(info, messages=tuple(as_sent(info.messages, info.tools))) for info in infos]
            prompts = [replace(prompt, info=info) for prompt, info in zip(prompts, sent, strict=True)]
    answered = _answer(sides, prompts, settings, run, max_timings, progress)
    owner = None if rows else run
    losses = compared_losses(owner, sides, progress)
    facts = _facts(owner, settings, f"{build_name() or 'endpoints'}, {SERVED_QUANT}")
    named = {"rows_from": ", ".join(rows), "rows_refused": refused} if rows else {}
    return comparison_document(prompts, answered, losses, facts | named)


def _facts(run: Run | None, settings: EvalConfig, answered_by: str) -> dict[str, Any]:
    """Return the origin of an evaluation's rows and answers. `run`: the owner of the rows, or None."""
    return {
        "snapshot": run.snapshot.hash if run else None,
        "rows_from": str(run.folder) if run else "",
        "rows_refused": {},
        "answered_by": answered_by,
        "settings": settings.model_dump(mode="json"),
    }


def timed_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return TIMED_PROMPTS of the prompts, at equal distances in their order."""
    # Neighbours are often of one file or agent, and as long as each other.
    held_out = [prompt for prompt in prompts if not prompt.origin]
    count = min(TIMED_PROMPTS, len(held_out))
    return [held_out[number * len(held_out) // count] for number in range(count)]


def _answer(
    sides: Sequence[Artefact],
    prompts: Sequence[Prompt],
    settings: EvalConfig,
    run: Run | None,
    max_timings: int,
    progress: Progress,
) -> list[SideAnswers]:
    """Return the answers of both sides: first single timed answers in turns, then all others."""
    # Both servers run at once, so that a busy moment of the machine meets both. What was timed counts as an answer too.
    # A slot holds the longest row and the longest answer.
    context_tokens = max(CONTEXT_TOKENS, run.config.max_length + settings.tokens if run else 0)
    server = ServerSettings(slots=SLOTS, context_tokens=context_tokens)
    unique = {prompt.key: prompt for prompt in prompts}
    with ExitStack() as stack:
        stores = [stack.enter_context(stored_answers(side, settings.tokens, SLOTS)) for side in sides]
        new_tokens, pairs = 0, []
        times: list[Times] = []

        def on_answer(answer: Answer) -> None:
            nonlocal new_tokens
            new_tokens += answer.new_tokens or 0
            if times:  # what is timed is counted by its prompts: it may be asked again
                progress(sum(key in store.answers for store in stores for key in unique), 2 * len(unique))

        for side, store in zip(sides, stores, strict=True):
            store.on_answer = on_answer
            pairs.append((stack.enter_context(open_artefact(side, server)), store))
        started = time.monotonic()
        times = time_until_decided(pairs, timed_prompts(prompts), settings.tokens, max_timings, progress)
        for answerer, store in pairs:
            ask_all(answerer, store, list(unique.values()), slots=SLOTS, new_tokens=settings.tokens)
        if run is not None:
            note_rate(run.config.model, new_tokens, time.monotonic() - started)
        memory = [answerer.peak_memory_bytes() if isinstance(answerer, Backend) else None for answerer, _ in pairs]
        return [
            SideAnswers(side.label, side.kind, store.answers, of_side, peak)
            for side, store, of_side, peak in zip(sides, stores, times, memory, strict=True)
        ]


def time_until_decided(
    sides: Sequence[tuple[Answerer, StoredAnswers]],
    prompts: Sequence[Prompt],
    new_tokens: int,
    most: int,
    progress: Progress = silent,
) -> list[Times]:
    """Return the times of each side. While their interval includes the limit they are measured again a little later, at
    most `most` times in all.
    """
    groups, limit = [prompt.group for prompt in prompts], KINDS["latency_s"].limit or math.inf
    for attempt in range(most):
        time.sleep(AGAIN_AFTER_S if attempt else 0.0)
        times = time_in_turns(sides, prompts, new_tokens=new_tokens, progress=progress)
        base, tuned = ([side[prompt.key] for prompt in prompts] for side in times)
        interval = stats.time_ratio(base, tuned, groups).interval
        if interval is None or not interval[0] <= limit < interval[1]:
            break
    return times


def comparison_document(
    prompts: Sequence[Prompt],
    answered: Sequence[SideAnswers],
    losses: Sequence[Mapping[str, Any]] | str,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the measurements of eval.json (docs/formats.md). `losses`: its `rows`, or the reason why the losses of the
    two sides can't be compared.
    """
    problems: list[dict[str, Any]] = []
    checking, sides = Checking(), dict(zip(SIDES, answered, strict=True))
    answers = [_answer_row(prompt, sides, problems, checking) for prompt in prompts]
    held_out = [row for row in answers if not row["origin"]]
    not_compared = {"loss": losses} if isinstance(losses, str) else {}
    for side in answered:
        if side.kind == "endpoint":
            not_compared["peak_memory_bytes"] = f"the memory of {side.label} can't be seen from here"
    return {
        "schema": 1,
        **facts,
        "rows": [] if isinstance(losses, str) else list(losses),
        "answers": held_out,
        "frozen": [row for row in answers if row["origin"]],
        **{
            name: {"label": s.label, "kind": s.kind, "peak_memory_bytes": s.peak_memory_bytes}
            for name, s in sides.items()
        },
        "not_compared": not_compared,
        "problems": problems,
    }


def _answer_row(
    prompt: Prompt, sides: Mapping[str, SideAnswers], problems: list[dict[str, Any]], checking: Checking
) -> dict[str, Any]:
    row: dict[str, Any] = {
        **row_identity(prompt.info, prompt.group),
        "origin": prompt.origin,
        "checker": None if prompt.checker is None else dict(prompt.checker),
        "prompt": prompt.said,
        "reference": prompt.reference,
    }
    for name, side in sides.items():
        answer, success, problem = side.answers.get(prompt.key), None, ""
        if answer is None:
            problem = "no answer"
        elif prompt.checker is not None:
            try:
                success = checking.succeeds(answer.text, prompt.checker, ended=answer.ended, row=row)
            except (UsageError, MachineNotFit) as error:
                problem = error.message
        row[name] = {
            "answer": answer and answer.text,
            "ended": answer and answer.ended,
            "new_tokens": answer and answer.new_tokens,
            "seconds": side.times.get(prompt.key),
            "success": success,
        }
        if problem:
            problems.append({"row": prompt.info.row, "source": prompt.info.source, "model": name, "problem": problem})
    return row


# The station `eval`: measurements and verdict in eval.json.


def evaluate_run(run: Run, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate baseline and tuned model on the held-out test rows; write `eval.json` with the verdict, and its page.

    Raises as `compare_pair`; UsageError if nothing was trained, or if training went on after the adapter was written;
    Busy while another process evaluates the run; OSError if the folder can't be written to.
    """
    require_adapter(run.folder)
    refuse_older_adapter(run.folder)
    # For `status`; and a read-only disk is found now, not after hours of answers.
    with lock(run.folder / EVALUATING):
        facts = {
            "run": str(run.folder),
            "model": run.config.model,
            "adapter_sha256": adapter_hash(run.folder),
        }
        settings, sides = run.config.eval, (run.config.eval.baseline, str(run.folder))
        unserved: list[str] = []
        if settings.baseline == BASELINE:
            prompts_of_run(run, settings)  # raises what is wrong with the rows now, and not after the losses
            # Losses first: the files for llama.cpp are one core's work, and so is the import of torch.
            scored(run, run.folder, progress, lambda: unserved.append(_unserved(run, sides)))
        if any(unserved):
            evaluation = _by_loss_alone(run, unserved[0])
        else:
            evaluation = compare_pair(*sides, settings, run=run, max_timings=MAX_TIMINGS, progress=progress)
        write_json(run.folder / EVALUATION, {**evaluation, **facts})
        judge_run(run)
        return read_document(run.folder / EVALUATION)


def _unserved(run: Run, sides: Sequence[str]) -> str:
    """Return the reason why llama.cpp can't serve a run's base and adapter on this machine; empty if it can.

    To find out, the files are written, loaded once, and compared by the token ids of conversations.
    """
    try:
        if problem := base_problem(run.model):
            return f"llama.cpp can't serve this model here: {problem}"
        for side in sides:
            artefact = find_artefact(side, run)
        with open_artefact(artefact, ServerSettings(warm_up=False)):
            return ""
    except (Busy, DataRefused):
        raise
    except HivetuneError as error:
        return f"llama.cpp can't serve this model here: {error.message}"


def _by_loss_alone(run: Run, reason: str) -> dict[str, Any]:
    """Return the measurements of a run whose model can't be served."""
    sides = [
        Artefact(BASELINE, "base", trained=(run.model, None)),
        Artefact(run.folder.name, "run", trained=(run.model, run.folder)),
    ]
    losses, answered = compared_losses(run, sides, silent), [SideAnswers(side.label, side.kind) for side in sides]
    document = comparison_document([], answered, losses, _facts(run, run.config.eval, f"nothing: {reason}"))
    return {**document, "not_compared": {**document["not_compared"], **dict.fromkeys(OF_ANSWERS, reason)}}


def judge_run(run: Run) -> Verdict:
    """Return the verdict on `eval.json` by the config's thresholds, and write both into the file.

    An earlier verdict by other thresholds is kept in `earlier`. Raises UsageError without an evaluation of the present
    adapter.
    """
    evaluation = _evaluation_of(run)
    verdict = judge(evaluation, run.config.gate)
    judged = {**verdict_document(verdict), "gate": run.config.gate.model_dump(mode="json")}
    earlier = list(evaluation.get("earlier") or ())
    if "verdict" in evaluation and evaluation["gate"] != judged["gate"]:
        earlier.append({key: evaluation[key] for key in ("verdict", "gate", "judged_by", "judged_at")})
    stamp = {"judged_by": os.environ.get("USER") or str(os.getuid()), "judged_at": round(time.time(), 3)}
    document = {**evaluation, **judged, **stamp, "earlier": earlier}
    write_json(run.folder / EVALUATION, document)
    write_evaluation_page(run.folder, document)
    return verdict


def stored_verdict(run: Run) -> dict[str, Any] | None:
    """Return the verdict on the present adapter with its thresholds, from `eval.json`; None if there is none."""
    try:
        evaluation = _evaluation_of(run)
    except UsageError:
        return None
    return {key: evaluation.get(key) for key in (*VERDICT_FIELDS, "gate", "judged_by", "judged_at", "earlier")}


def _evaluation_of(run: Run) -> dict[str, Any]:
    path = run.folder / EVALUATION
    evaluation = read_document(path) if path.exists() else None
    if evaluation is None or evaluation.get("adapter_sha256") != adapter_hash(run.folder):
        name = shortest_name(run.folder)
        raise UsageError(f"the adapter of {name} was not evaluated", hint=f"evaluate it: hivetune eval {name}")
    return evaluation


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain values for JSON."""
    return {"schema": 1, **to_plain(verdict)}


def verdict_of(document: Mapping[str, Any]) -> Verdict:
    """Return the verdict in an eval.json document."""
    return from_plain(Verdict, {key: document[key] for key in VERDICT_FIELDS})
