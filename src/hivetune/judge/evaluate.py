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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, lock, write_json
from hivetune.base.documents import read_document
from hivetune.base.journal import read_journal
from hivetune.base.typed import from_plain, to_plain
from hivetune.checkers.find import Checking
from hivetune.config import EvalConfig
from hivetune.errors import Busy, DataRefused, HivetuneError, MachineNotFit, UsageError
from hivetune.judge import statistics as stats
from hivetune.judge.answers import (
    PromptAnswer,
    StoredAnswers,
    Times,
    ask_all,
    build_name,
    continued,
    counter,
    note_rate,
    stored_side,
    time_in_turns,
)
from hivetune.judge.artefacts import Artefact, check_memory, find_artefact, open_artefact
from hivetune.judge.frozen import frozen_prompts
from hivetune.judge.losses import compared_losses, scored
from hivetune.judge.page import write_evaluation_page
from hivetune.judge.rows import Prompt, prompts_of_rows, prompts_of_run
from hivetune.judge.verdict import KINDS, OF_ANSWERS, Curve, advise, judge
from hivetune.llama.backend import CONTEXT_TOKENS, Backend, ServerSettings
from hivetune.models.sides import BASELINE, SIDES
from hivetune.records import Progress, Verdict, silent
from hivetune.release.gguf import SERVED_QUANT
from hivetune.release.prove import base_problem
from hivetune.run.folder import EVALUATION, METRICS, adapter_hash, require_adapter
from hivetune.run.status import refuse_older_adapter, shortest_name
from hivetune.train.open import Run

COMPARISONS = "comparisons"
ANOTHER_SIDE = "name another run, release, GGUF file or endpoint"
SLOTS = 8  # answers at the same time
TIMED_PROMPTS = 50  # asked alone: enough to see a tenth of the time at the usual jitter
# Times that straddle their limit are taken again a little later, for a load that has gone by then.
MAX_TIMINGS, AGAIN_AFTER_S = 3, 20.0
EMPTY_ANSWER = dict.fromkeys(("answer", "ended", "new_tokens", "seconds", "first_token_s", "success"))
VERDICT_FIELDS = ("verdict", "reasons", "decisive", "metrics", "advice")


@dataclass(frozen=True)
class SideAnswers:
    """One side of a comparison: its answers by the key of the prompt, and its costs: `cold_start_s` and
    `peak_memory_bytes`, None where it was not started here."""

    label: str
    kind: str
    answers: Mapping[str, PromptAnswer] = field(default_factory=dict)
    costs: Mapping[str, float | None] = field(default_factory=dict)


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
    max_timings: int = 1,
    progress: Progress = silent,
) -> Comparison:
    """Compare both sides on `rows`, else on the held-out rows of `run`. The first is `base`, the second `tuned`.

    The base model and the adapter files that a side may name are those of `run`. `max_timings`: how often times may be
    taken that straddle their limit, where they decide.

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
    with lock(folder):
        answered = _answer(sides, prompts, settings, run, folder, max_timings, progress)
    facts = _facts(None if rows else run, settings, f"{build_name() or 'endpoints'}, {quant}")
    if rows:
        facts |= {"rows_from": ", ".join(rows), "rows_refused": refused}
    progress = continued(progress, num_answers(prompts))
    losses = compared_losses(None if rows else run, sides, progress)
    return Comparison(comparison_document(prompts, answered[0], answered[1], losses, facts), folder)


def _facts(run: Run | None, settings: EvalConfig, answered_by: str) -> dict[str, Any]:
    """Return where an evaluation's rows and answers come from; `run` owns the rows, if one does."""
    return {
        "snapshot": run.snapshot.hash if run else None,
        "rows_from": str(run.folder) if run else "",
        "rows_refused": {},
        "answered_by": answered_by,
        "settings": settings.model_dump(mode="json"),
    }


def num_answers(prompts: Sequence[Prompt]) -> int:
    """Return how many answers are counted; a prompt that is timed counts once for both sides."""
    return 2 * len({prompt.key for prompt in prompts}) - len(timed_prompts(prompts))


def timed_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return TIMED_PROMPTS held-out rows, spread over all of them."""
    # Neighbours are often of one file or agent, and as long as each other.
    held_out = [prompt for prompt in prompts if not prompt.origin]
    count = min(TIMED_PROMPTS, len(held_out))
    return [held_out[number * len(held_out) // count] for number in range(count)]


def _answer(
    sides: Sequence[Artefact],
    prompts: Sequence[Prompt],
    settings: EvalConfig,
    run: Run | None,
    folder: Path,
    max_timings: int,
    progress: Progress,
) -> list[SideAnswers]:
    """Time single answers, both sides in turns, then ask each side for the rest."""
    # Both servers run at once, so that a busy moment of the machine meets both. What was timed counts as an answer too.
    # Many at once give no times: on 2 cores eight slots make 2.5 times the tokens of one, and each answer takes longer.
    check_memory(sides)
    timed, tokens = timed_prompts(prompts), settings.tokens
    # A slot holds the longest row and the longest answer.
    context_tokens = max(CONTEXT_TOKENS, run.config.max_length + tokens if run else 0)
    server = ServerSettings(slots=SLOTS, context_tokens=context_tokens)
    unique = list({prompt.key: prompt for prompt in prompts}.values())  # a past win may be a held-out row too
    groups = {prompt.key: prompt.group for prompt in timed}
    with ExitStack() as stack:
        stores = [stack.enter_context(stored_side(side, tokens, SLOTS)) for side in sides]
        num_stored = sum(prompt.key in s.answers and prompt.key not in groups for s in stores for prompt in unique)
        on_answer = counter(progress, num_answers(prompts), num_stored)
        opened = [stack.enter_context(open_artefact(side, server)) for side in sides]
        pairs = list(zip((answerer for answerer, _ in opened), stores, strict=True))
        before, started = sum(map(_num_tokens, stores)), time.monotonic()
        times: list[Times] = []
        for attempt in range(max_timings):
            if attempt:
                time.sleep(AGAIN_AFTER_S)
            file = folder / f"times-{attempt + 1}.jsonl"
            times = time_in_turns(pairs, timed, file, new_tokens=tokens, on_answer=on_answer)
            if times_decide(times, groups):
                break
        for answerer, store in pairs:
            ask_all(answerer, store, unique, slots=SLOTS, new_tokens=tokens, on_answer=on_answer)
        if run is not None:
            note_rate(run.config.model, sum(map(_num_tokens, stores)) - before, time.monotonic() - started)
        answered = []
        for side, (answerer, cold_start_s), store, of_side in zip(sides, opened, stores, times, strict=True):
            memory = answerer.peak_memory_bytes() if isinstance(answerer, Backend) else None
            answers = dict(store.answers)
            for key, (seconds, first_token_s) in of_side.items():
                answers[key] = replace(answers[key], seconds=seconds, first_token_s=first_token_s)
            costs = {"cold_start_s": cold_start_s, "peak_memory_bytes": memory}
            answered.append(SideAnswers(side.label, side.kind, answers, costs))
        return answered


def _num_tokens(store: StoredAnswers) -> int:
    return sum(answer.new_tokens or 0 for answer in store.answers.values())


def times_decide(times: Sequence[Times], groups: Mapping[str, str]) -> bool:
    """Return whether more times would change nothing."""
    # They change something where the interval straddles its limit; with few prompts there is no interval at all.
    keys = list(times[0])
    columns = stats.by_group([[side[key][0] for key in keys] for side in times], [groups[key] for key in keys])
    if len(columns[0]) < stats.MIN_UNITS:
        return True
    interval = stats.jackknife(columns, lambda sums: sums[1] / sums[0], positive=True).interval
    limit = KINDS["latency_s"].limit
    return interval is None or limit is None or not interval[0] <= limit < interval[1]


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
    summary: dict[str, Any] = {"label": side.label, "kind": side.kind}
    summary |= {key: side.costs.get(key) for key in ("peak_memory_bytes", "cold_start_s")}
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
    reasons: list[str] = []
    if settings.baseline == BASELINE:
        # Losses first: the files for llama.cpp are one core's work, and so is the import of torch.
        prompts = prompts_of_run(run, settings) + frozen_prompts(settings, sides, run.config.cycle.name)
        part = continued(progress, after=num_answers(prompts))
        scored(run, run.folder, part, lambda: reasons.append(_unserved(run, sides)))
        if not reasons:  # every loss was there before
            reasons.append(_unserved(run, sides))
        progress = continued(progress, before=2 * len(run.snapshot.rows("test")))  # the losses of base and adapter
    if any(reasons):
        evaluation = loss_alone(run, reasons[0])
    else:
        evaluation = compare_pair(*sides, settings, run=run, max_timings=MAX_TIMINGS, progress=progress).document
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
    answered = [SideAnswers(side.label, side.kind) for side in sides]
    facts = _facts(run, run.config.eval, f"nothing: {reason}")
    document = comparison_document([], answered[0], answered[1], compared_losses(run, sides, silent), facts)
    return {**document, "not_compared": {**document["not_compared"], **dict.fromkeys(OF_ANSWERS, reason)}}


def judge_run(run: Run) -> Verdict:
    """Judge `eval.json` by the config's thresholds, and write the verdict and the thresholds into it.

    A verdict by other thresholds stays in `earlier`. Raises UsageError without an evaluation of the present adapter.
    """
    evaluation = _evaluation_of(run)
    verdict = judge(evaluation, run.config.gate)
    verdict = replace(verdict, advice=advise(read_curve(run), evaluation))
    judged = {**verdict_document(verdict), "gate": run.config.gate.model_dump(mode="json")}
    earlier = list(evaluation.get("earlier") or ())
    if "verdict" in evaluation and evaluation["gate"] != judged["gate"]:
        earlier.append({key: evaluation[key] for key in ("verdict", "gate", "judged_by", "judged_at")})
    stamp = {"judged_by": _user(), "judged_at": round(time.time(), 3), "earlier": earlier}
    document = {**evaluation, **judged, **stamp}
    write_json(run.folder / EVALUATION, document)
    write_evaluation_page(run.folder, document)
    return verdict


def read_curve(run: Run) -> Curve:
    """Return the losses of the validations in `metrics.jsonl`."""
    entries = [entry for entry in read_journal(run.folder / METRICS) if entry["event"] == "validation"]
    losses = [(int(entry["step"]), float(entry["loss"])) for entry in entries if entry["loss"] is not None]
    return Curve(losses, max(1.0, len(run.snapshot.rows("train")) / run.config.batch_size))


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
    evaluation = read_document(path) if path.exists() else None
    if evaluation is None or evaluation.get("adapter_sha256") != adapter_hash(run.folder):
        name = shortest_name(run.folder)
        raise UsageError(f"the adapter of {name} was not evaluated", hint=f"evaluate it: hivetune eval {name}")
    return evaluation


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """Return the JSON of a verdict."""
    return {"schema": 1, **to_plain(verdict)}


def verdict_of(document: Mapping[str, Any]) -> Verdict:
    """Return the verdict of an eval.json."""
    return from_plain(Verdict, {key: document[key] for key in VERDICT_FIELDS})


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return "unknown"
