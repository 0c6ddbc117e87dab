"""The stations `eval` and `compare`: two sides answer the same prompts, and one document says how they did.

The prompts are a run's held-out rows, or the rows of any file that `check` reads. The first side is `base` in the
document, the second `tuned`. llama.cpp answers, as a release is served; the training engine computes losses. A model
that llama.cpp can't serve is judged by its loss alone, and the verdict says so.
"""

import getpass
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, lock, write_json
from hivetune.base.documents import read_document
from hivetune.base.typed import from_plain, to_plain
from hivetune.checkers.find import Checking
from hivetune.config import EvalConfig
from hivetune.errors import Busy, DataRefused, HivetuneError, MachineNotFit, UsageError
from hivetune.judge import statistics as stats
from hivetune.judge.advice import advise, contradictory_rows, curve_document, read_curve
from hivetune.judge.answers import (
    PromptAnswer,
    Times,
    ask_all,
    build_name,
    continued,
    counter,
    stored_side,
    time_in_turns,
)
from hivetune.judge.artefacts import Artefact, check_memory, find_artefact, open_artefact
from hivetune.judge.frozen import frozen_prompts
from hivetune.judge.losses import compared_losses, scored
from hivetune.judge.page import write_evaluation_page
from hivetune.judge.rows import Prompt, prompts_of_rows, prompts_of_run, spread
from hivetune.judge.verdict import MAX_COST_RATIO, judge, refuse_not_finite
from hivetune.llama.backend import CONTEXT_TOKENS, Backend, ServerSettings
from hivetune.models.sides import BASELINE, SIDES
from hivetune.records import Progress, Verdict, silent
from hivetune.release.gguf import SERVED_QUANT
from hivetune.release.prove import base_problem
from hivetune.run.folder import EVALUATION, adapter_hash, require_adapter
from hivetune.run.status import refuse_older_adapter, shortest_name
from hivetune.train.open import Run

COMPARISONS = "comparisons"
ANOTHER_SIDE = "name another run, release, GGUF file or endpoint"
COSTS = ("peak_memory_bytes", "cold_start_s")
SLOTS = 8  # answers at the same time: on 2 cores 8 slots make 2.5 times the tokens of one
TIMED_PROMPTS = 50  # asked alone: enough to see a tenth of the time at the usual jitter
# Times that straddle their limit are taken again a little later, for a load that has gone by then.
MAX_TIMINGS, AGAIN_AFTER_S = 3, 20.0
EMPTY_ANSWER: Mapping[str, Any] = dict.fromkeys(
    ("answer", "ended", "new_tokens", "seconds", "first_token_s", "success")
)
# What only answers can say.
_OF_ANSWERS = ("success", "min_success", "ended", "latency_s", "max_seconds", "peak_memory_bytes", "max_gb")
VERDICT_FIELDS = ("verdict", "reasons", "decisive", "metrics", "advice")


@dataclass(frozen=True)
class SideAnswers:
    """One side of a comparison: its answers by the key of the prompt, and its costs."""

    label: str
    kind: str
    answers: Mapping[str, PromptAnswer]
    costs: Mapping[str, float | None]


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
    if sides[0].identity == sides[1].identity:
        raise UsageError(f"{first} and {second} are the same model: there is nothing to compare", hint=ANOTHER_SIDE)
    prompts, refused = prompts_of_rows(rows, settings) if rows or run is None else (prompts_of_run(run, settings), {})
    prompts += frozen_prompts(settings, (first, second), None if run is None else run.config.cycle.name)
    # What the times depend on: both sides and their llama.cpp, the prompts in their order, the settings.
    identities = [side.identity for side in sides]
    asked = [prompt.key for prompt in prompts]
    key = _hash([identities, build_name(), asked, settings.model_dump(mode="json")])
    folder = home() / COMPARISONS / key[:16]
    # A slot holds the longest row and the longest answer.
    context_tokens = max(CONTEXT_TOKENS, run.config.max_length + settings.tokens if run else 0)
    with lock(folder):
        answered = _answer(sides, prompts, settings, context_tokens, folder, progress)
    facts = {
        "snapshot": None if rows or run is None else run.snapshot.hash,
        "rows_from": ", ".join(rows) if rows or run is None else str(run.folder),
        "rows_refused": refused,
        "answered_by": f"{build_name() or 'endpoints'}, {quant}",
        "settings": settings.model_dump(mode="json"),
    }
    progress = continued(progress, num_answers(prompts))
    losses = compared_losses(None if rows else run, sides, progress)
    return Comparison(comparison_document(prompts, answered[0], answered[1], losses, facts), folder)


def num_answers(prompts: Sequence[Prompt]) -> int:
    """Return how many answers are counted; a prompt that is timed counts once for both sides."""
    timed = len(_timed(prompts))
    return timed + 2 * (len({prompt.key for prompt in prompts}) - timed)


def _timed(prompts: Sequence[Prompt]) -> list[Prompt]:
    return spread([prompt for prompt in prompts if not prompt.origin], TIMED_PROMPTS)


def _answer(
    sides: Sequence[Artefact],
    prompts: Sequence[Prompt],
    settings: EvalConfig,
    context_tokens: int,
    folder: Path,
    progress: Progress,
) -> list[SideAnswers]:
    """Time single answers, both sides in turns; these count too. Then ask each side for the rest, many at once."""
    check_memory(sides)
    timed = _timed(prompts)
    server = ServerSettings(slots=SLOTS, context_tokens=context_tokens)
    unique = list({prompt.key: prompt for prompt in prompts}.values())  # a past win may be a held-out row too
    with ExitStack() as stack:
        stores = [stack.enter_context(stored_side(side, settings.tokens, SLOTS)) for side in sides]
        timed_keys = {prompt.key for prompt in timed}
        num_stored = sum(prompt.key in s.answers and prompt.key not in timed_keys for s in stores for prompt in unique)
        on_answer = counter(progress, num_answers(prompts), num_stored)
        opened = [stack.enter_context(open_artefact(side, server)) for side in sides]
        pairs = list(zip((answerer for answerer, _ in opened), stores, strict=True))
        groups = {prompt.key: prompt.group for prompt in timed}
        for attempt in range(MAX_TIMINGS):
            if attempt:
                time.sleep(AGAIN_AFTER_S)
            file = folder / f"times-{attempt + 1}.jsonl"
            times = time_in_turns(pairs, timed, file, new_tokens=settings.tokens, on_answer=on_answer)
            if times_decide(times, groups):
                break
        answered = []
        for side, (answerer, cold_start_s), store, of_side in zip(sides, opened, stores, times, strict=True):
            ask_all(answerer, store, unique, slots=SLOTS, new_tokens=settings.tokens, on_answer=on_answer)
            memory = answerer.peak_memory_bytes() if isinstance(answerer, Backend) else None
            store.note_served(cold_start_s=cold_start_s, peak_memory_bytes=memory)
            answers = dict(store.answers)
            for key, (seconds, first_token_s) in of_side.items():
                answers[key] = replace(answers[key], seconds=seconds, first_token_s=first_token_s)
            answered.append(SideAnswers(side.label, side.kind, answers, store.served))
        return answered


def times_decide(times: Sequence[Times], groups: Mapping[str, str]) -> bool:
    """Return whether more times would change nothing: their interval does not straddle MAX_COST_RATIO, or there are too
    few prompts for one."""
    keys = list(times[0])
    columns = stats.by_group([[side[key][0] for key in keys] for side in times], [groups[key] for key in keys])
    if len(columns[0]) < stats.MIN_UNITS:
        return True
    interval = stats.jackknife(columns, lambda sums: sums[1] / sums[0], positive=True).interval
    return interval is None or not interval[0] <= MAX_COST_RATIO < interval[1]


def comparison_document(
    prompts: Sequence[Prompt],
    first: SideAnswers,
    second: SideAnswers,
    losses: Sequence[Mapping[str, Any]] | str,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the measurements of eval.json and compare.json (docs/formats.md).

    `losses`: the rows of eval.json, or why the losses of these two sides can't be compared.
    """
    problems: list[dict[str, Any]] = []
    checking = Checking()
    sides = dict(zip(SIDES, (first, second), strict=True))
    answers = [_answer_row(prompt, sides, problems, checking) for prompt in prompts]
    rows_asked, frozen = ([row for row in answers if bool(row["origin"]) == is_frozen] for is_frozen in (False, True))
    missing = {"loss": losses} if isinstance(losses, str) else {}
    for side in sides.values():
        if side.kind == "endpoint":
            missing["peak_memory_bytes"] = f"the memory of {side.label} can't be seen from here"
    return {
        "schema": 1,
        **facts,
        "rows": [] if isinstance(losses, str) else list(losses),
        "answers": rows_asked,
        "frozen": frozen,
        **{name: _summary(side, name, rows_asked) for name, side in sides.items()},
        "not_compared": missing,
        "problems": problems,
    }


def _answer_row(
    prompt: Prompt, sides: Mapping[str, SideAnswers], problems: list[dict[str, Any]], checking: Checking
) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{key: getattr(prompt, key) for key in ("row", "id", "source", "agent", "category", "group", "origin")},
        "checker": None if prompt.checker is None else dict(prompt.checker),
        "prompt": prompt.said,
        "reference": prompt.reference,
    }
    for name, side in sides.items():
        row[name], problem = dict(EMPTY_ANSWER), ""
        answer = side.answers.get(prompt.key)
        if answer is None:
            problem = "no answer"
        else:
            fields = asdict(answer)
            row[name] |= {"answer": fields.pop("text"), **fields}
            if prompt.checker is not None:
                try:
                    row[name]["success"] = checking.succeeds(answer.text, prompt.checker, ended=answer.ended, row=row)
                except (UsageError, MachineNotFit) as error:
                    problem = error.message
        if problem:
            problems.append({"row": row["row"], "source": row["source"], "model": name, "problem": problem})
    return row


def _summary(side: SideAnswers, name: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"label": side.label, "kind": side.kind, **{key: side.costs.get(key) for key in COSTS}}
    for key, short in (("seconds", "latency"), ("first_token_s", "first_token")):
        times = sorted(answer[name][key] for answer in answers if answer[name][key] is not None)
        for share in (50, 95):
            # The smallest value that at least this share of all values does not exceed.
            place = max(0, math.ceil(share / 100 * len(times)) - 1)
            summary[f"{short}_p{share}_s"] = times[place] if times else None
    return {**summary, "answers": sum(answer[name]["answer"] is not None for answer in answers)}


def _hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# The station `eval`: measurements and verdict in eval.json.


def evaluate_run(run: Run, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate baseline and tuned model on the held-out test rows; write `eval.json` and its page, with the verdict.

    Raises what `compare_pair` does, UsageError when nothing was trained, or more than the adapter has, and OSError when
    the folder can't be written to.
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
    settings, sides = run.config.eval, (run.config.eval.baseline, str(run.folder))
    reason = ""
    if settings.baseline == BASELINE:
        # Losses first: the files for llama.cpp are one core's work, and so is the import of torch.
        prompts = prompts_of_run(run, settings) + frozen_prompts(settings, sides, run.config.cycle.name)

        reasons: list[str] = []

        def make_files() -> None:
            reasons.append(_unserved(run, sides))

        scored(run, run.folder, continued(progress, after=num_answers(prompts)), make_files)
        if not reasons:  # every loss was there before
            make_files()
        reason = reasons[0]
        progress = continued(progress, before=2 * len(run.snapshot.rows("test")))  # the losses of base and adapter
    if reason:
        evaluation = loss_alone(run, reason)
    else:
        evaluation = compare_pair(*sides, settings, run=run, progress=progress).document
    write_json(run.folder / EVALUATION, {**evaluation, **facts})
    judge_run(run)
    return read_document(run.folder / EVALUATION)


def _unserved(run: Run, sides: Sequence[str]) -> str:
    """Return why llama.cpp can't serve the base and the adapter of a run here; empty where it can.

    Its files are written, loaded once, and asked for the token ids of conversations.
    """
    try:
        if problem := base_problem(run.model):
            return f"llama.cpp can't serve this model here: {problem}"
        for side in sides:
            artefact = find_artefact(side, run, SERVED_QUANT)
        with open_artefact(artefact, ServerSettings(warm_up=False)):
            return ""
    except (Busy, DataRefused):
        raise
    except HivetuneError as error:
        return f"llama.cpp can't serve this model here: {error.message}"


def loss_alone(run: Run, reason: str) -> dict[str, Any]:
    """Return the measurements of a run whose model can't be asked."""
    sides = [
        Artefact(BASELINE, "base", trained=(run.model, None)),
        Artefact(run.folder.name, "run", trained=(run.model, run.folder)),
    ]
    losses = compared_losses(run, sides, silent)
    empty = [SideAnswers(side.label, side.kind, {}, {}) for side in sides]
    facts = {
        "snapshot": run.snapshot.hash,
        "rows_from": str(run.folder),
        "rows_refused": {},
        "answered_by": f"nothing: {reason}",
        "settings": run.config.eval.model_dump(mode="json"),
    }
    document = comparison_document([], empty[0], empty[1], losses, facts)
    return {**document, "not_compared": {**document["not_compared"], **dict.fromkeys(_OF_ANSWERS, reason)}}


def judge_run(run: Run) -> Verdict:
    """Judge `eval.json` by the config's thresholds, and write the verdict and the thresholds into it.

    A verdict by other thresholds stays in `earlier`. Raises UsageError without an evaluation of the present adapter.
    """
    evaluation = _evaluation_of(run)
    curve = read_curve(run)
    verdict = judge(evaluation, run.config.gate)
    advice = advise(curve, evaluation, contradictory_rows(run.snapshot), verdict.metrics)
    judged = {**verdict_document(replace(verdict, advice=advice)), "gate": run.config.gate.model_dump(mode="json")}
    earlier = list(evaluation.get("earlier") or ())
    if "verdict" in evaluation and evaluation["gate"] != judged["gate"]:
        earlier.append({key: evaluation[key] for key in ("verdict", "gate", "judged_by", "judged_at")})
    stamp = {"judged_by": _user(), "judged_at": round(time.time(), 3), "earlier": earlier}
    document = {**evaluation, **judged, **stamp, "curve": curve_document(curve)}
    write_json(run.folder / EVALUATION, document)
    write_evaluation_page(run.folder, document)
    return replace(verdict, advice=advice)


def stored_verdict(run: Run) -> dict[str, Any] | None:
    """Return the verdict on the present adapter, as `eval.json` has it with its thresholds; None where there is
    none."""
    try:
        evaluation = _evaluation_of(run)
    except UsageError:
        return None
    return {key: evaluation.get(key) for key in (*VERDICT_FIELDS, "gate", "judged_by", "judged_at", "earlier")}


def _evaluation_of(run: Run) -> dict[str, Any]:
    path = run.folder / EVALUATION
    evaluation = read_evaluation(path) if path.exists() else None
    if evaluation is None or evaluation.get("adapter_sha256") != adapter_hash(run.folder):
        name = shortest_name(run.folder)
        raise UsageError(f"the adapter of {name} was not evaluated", hint=f"evaluate it: hivetune eval {name}")
    return evaluation


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read an eval.json or a comparison of its form. Raises UsageError for a file that is missing or damaged,
    HivetuneError naming file and field for a number that is not finite.
    """
    evaluation = read_document(path)
    try:
        refuse_not_finite(evaluation)
    except HivetuneError as error:
        raise HivetuneError(f"{path}: {error.message}", hint=error.hint) from None
    return evaluation


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """Return the JSON of a verdict."""
    plain = to_plain(verdict)
    return {"schema": 1, **{key: plain[key] for key in VERDICT_FIELDS}}


def verdict_of(document: Mapping[str, Any]) -> Verdict:
    """Return the verdict of an eval.json."""
    return from_plain(Verdict, {key: document[key] for key in VERDICT_FIELDS})


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return "unknown"
