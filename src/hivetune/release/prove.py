"""The proof of an export: what is shipped is what was trained, measured on the exported file.

At some places of held-out conversations the trained model (adapter beside base, float32) and the exported one report
the log-probability of the token there and of the likeliest ones. Three things must hold, and the proof states the
bounds:

logits   The mean difference of log-probabilities is within the bound of the number type. A quantized file may differ
         by twice as much as its base does at the same type.
loss     The mean over the tokens that are there differs by no more than the same bound.
effect   What the adapter changes in the export, over the base at the same type, is what it changed when it was trained:
         the slope of the one over the other is 1, within a tenth and what its standard error allows.

The result is next to the export as `proof.json` and holds for these bytes only. A base is proven alike before the first
training on it, on conversations of our own, so that a family that llama.cpp can't serve is known before hours of work.
"""

import itertools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from hivetune.base.disk import MANIFEST, home, lock, read_json, sha256_bytes, sha256_file, write_json
from hivetune.base.documents import read_document
from hivetune.base.typed import to_plain
from hivetune.data.render.folder import load_renderer
from hivetune.data.snapshot import Snapshot
from hivetune.errors import DataRefused, DoesNotFit, HivetuneError, MachineNotFit, UsageError
from hivetune.llama.backend import Backend, ServerSettings, find_engine, open_backend
from hivetune.llama.prompts import HELD_OUT_FIRST, check_prompts, compare_prompts
from hivetune.models.gguf_header import read_header
from hivetune.process.parent import see_off, start_child
from hivetune.process.protocol import Passage, ScorePassages
from hivetune.records import Example, Message, Progress, silent
from hivetune.release.export import Exported, MergedType, export_run, merged_type
from hivetune.release.gguf import (
    CONVERTER,
    QUANTS,
    SERVED_QUANT,
    TESTED_SERVER,
    base_gguf,
    find_converter,
    find_quant,
    weights_bytes,
)
from hivetune.release.prune import TOLD
from hivetune.run.checkpoints import steps
from hivetune.run.folder import ADAPTER, PROOF, adapter_hash
from hivetune.train.open import Run, load_run

PASSAGES, POSITIONS = 8, 12
TOP = 16  # likeliest tokens at each place
MAX_PASSAGE_TOKENS = 2048
# Mean differences in nats. Seen with SmolLM2-135M: f16 0.003, bf16 and merged (rounded to bf16's 8 bits) 0.04.
FLOAT_BOUNDS = {"f32": 0.03, "f16": 0.03, "bf16": 0.1, "merged": 0.1}
# How much the base itself may differ in a quantized type: three times what tiny random models, which suffer most, do in
# q8_0 (0.06 at most), and twice as much for each bit less. Another model differs by whole nats.
BASE_BOUNDS = {"q8_0": 0.2, "q6_k": 0.4, "q5_1": 0.8, "q5_0": 0.8, "q5_k_m": 0.8}
COARSEST_BOUND = 1.2
QUANTIZED_BOUND, QUANTIZED_FACTOR = 0.03, 2.0
EFFECT_BOUND, EFFECT_ERRORS = 0.1, 3.0
MERGED_TYPES: tuple[MergedType, ...] = ("source", "float16", "float32")
# What a base is asked: plain questions of one and two turns, which any chat template renders.
CONVERSATIONS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name three colours.", "Red, green and blue."),
    ("What is 12 + 30?", "It is 42.", "And twice as much?", "That is 84."),
    ("How do I list files in a shell?", "Use ls, or ls -l for their sizes and dates."),
)
# Of an adapter's proof a few passages are kept with its release, and asked again before it is served. Nats: the same
# files on another processor or build differ by hundredths, another adapter by 0.5 and more.
RECORDED_PASSAGES, RECORDED_BOUND = 3, 0.25
_FORCING_BIAS = 1000.0  # nats: far above any logit
_SLOTS = 4
_CONTEXT_TOKENS = 4096
_MEMORY_SHARE = 0.75  # of the free memory, for both sides at once

# By passage and place: [log-probability of the token there, [[token, log-probability], ...]], as JSON holds it; None
# where llama.cpp reports nothing, as for a token that is a part of a character.
Scores = Sequence[Sequence[Any]]
_TokenScores = Mapping[int, float]  # token -> log-probability; the token that is there has the key _ACTUAL
_ACTUAL = -1


# What is compared.


def choose_passages(snapshot: Snapshot, context_tokens: int | None = None) -> list[Passage]:
    """Return the first tokens of the last answer of some rows, and the one that ends it; held-out rows come first.

    Rows that are longer than `context_tokens`, the context of the export, are left out. Raises DataRefused when every
    row is longer than that, or than `MAX_PASSAGE_TOKENS`.
    """
    longest = min(MAX_PASSAGE_TOKENS, context_tokens or MAX_PASSAGE_TOKENS)
    rows = (row for split in HELD_OUT_FIRST for row in snapshot.rows(split) if snapshot.length(row) <= longest)
    chosen = itertools.islice(rows, PASSAGES)
    passages = [_passage(snapshot.tokens(row), snapshot.trained(row)) for row in chosen]
    if not passages:
        raise DataRefused(f"every row is longer than {longest:,} tokens, so nothing can be compared")
    return passages


def _passage(tokens: Sequence[int], trained: Sequence[int]) -> Passage:
    end = max(i for i, is_trained in enumerate(trained) if is_trained) + 1
    start = end
    while trained[start - 1]:
        start -= 1
    positions = sorted({*range(start, min(start + POSITIONS, end)), end - 1})
    return Passage(tuple(int(token) for token in tokens[:end]), tuple(positions))


def compare_scores(kind: str, trained: Mapping[str, Scores], exported: Mapping[str, Scores]) -> dict[str, Any]:
    """Return `holds`, `problems` in words, and the measurements behind them.

    `kind`: a number type of GGUF, or "merged". `trained` has "base" and "tuned". `exported` has "base" alone before any
    training, "tuned" alone where numbers are not quantized, else both.
    """
    nothing = {"places": 0, "holds": False, "problems": ["llama.cpp reported no log-probability at all"]}
    measured, problems, bound = dict[str, Any](), list[str](), FLOAT_BOUNDS.get(kind, math.nan)
    if "base" in exported:
        aligned, _ = _align(trained["base"], exported["base"])
        if not aligned:
            return nothing
        typical, base_bound = _distance(*zip(*aligned, strict=True))[0], BASE_BOUNDS.get(kind, COARSEST_BOUND)
        measured["base_typical"], bound = typical, QUANTIZED_BOUND + QUANTIZED_FACTOR * typical
        if not typical <= base_bound:
            problems.append(
                f"the base alone differs by {typical:.3f} nats on average, at most {base_bound:g} in {kind}"
            )
    if "tuned" in exported:
        base = exported.get("base", trained["base"])
        aligned, unreported = _align(trained["base"], trained["tuned"], base, exported["tuned"])
        if not aligned:
            return nothing
        _, tuned, _, its = zip(*aligned, strict=True)
        typical, largest = _distance(its, tuned)
        losses = [-fmean([scores[_ACTUAL] for scores in side]) for side in (tuned, its)]
        slope, error = _effect(aligned)
        measured |= {"places": len(aligned), "unreported": unreported, "typical": typical, "largest": largest}
        measured |= {"bound": bound, "loss_trained": losses[0], "loss_exported": losses[1]}
        measured |= {"effect": slope, "effect_error": error}
        if not typical <= bound:  # written so that NaN is a problem too
            problems.append(f"log-probabilities differ by {typical:.3f} nats on average, at most {bound:.3f} expected")
        if not abs(losses[1] - losses[0]) <= bound:
            problems.append(
                f"the loss is {losses[1]:.3f} instead of {losses[0]:.3f}, at most {bound:.3f} apart expected"
            )
        if slope is not None and error is not None and not abs(slope - 1) <= EFFECT_BOUND + EFFECT_ERRORS * error:
            problems.append(f"{slope:.2f} times the adapter's effect arrived instead of once")
    return {**measured, "holds": not problems, "problems": problems}


def _align(*sides: Scores) -> tuple[list[tuple[_TokenScores, ...]], int]:
    """Return the scores of each side at each place, and how many places were left out as one side reports nothing."""
    aligned: list[tuple[_TokenScores, ...]] = []
    unreported = 0
    for passages in zip(*sides, strict=True):
        for scores in zip(*passages, strict=True):
            reported = [{**{token: logprob for token, logprob in side[1]}, _ACTUAL: side[0]} for side in scores if side]
            if len(reported) == len(scores):
                aligned.append(tuple(reported))
            else:
                unreported += 1
    return aligned, unreported


def _distance(first: Sequence[_TokenScores], second: Sequence[_TokenScores]) -> tuple[float, float]:
    """Return the mean and largest absolute difference over the tokens that both sides report."""
    differences = [
        abs(a[token] - b[token]) for a, b in zip(first, second, strict=True) for token in sorted(a.keys() & b.keys())
    ]
    return fmean(differences), max(differences)


def _effect(aligned: Sequence[Sequence[_TokenScores]]) -> tuple[float | None, float | None]:
    """Return the slope through zero of the exported change over the trained one, and its standard error; None without
    a change."""
    # The tokens of a place share their error (one sum of all exponentials, the same rounded weights), so places are the
    # clusters of the error (Liang and Zeger 1986). Tokens taken one by one would claim a third of it.
    clusters = []
    for a, b, c, d in aligned:
        shared = sorted(a.keys() & b.keys() & c.keys() & d.keys())
        clusters.append([(b[token] - a[token], d[token] - c[token]) for token in shared])
    squares = math.fsum(x * x for pairs in clusters for x, _ in pairs)
    if squares == 0 or len(clusters) < 2:
        return None, None
    slope = math.fsum(x * y for pairs in clusters for x, y in pairs) / squares
    residual = math.fsum(math.fsum(x * (y - slope * x) for x, y in pairs) ** 2 for pairs in clusters)
    return slope, math.sqrt(residual * len(clusters) / (len(clusters) - 1)) / squares


# What a served file says of given tokens.


def score_passages(
    backend: Backend, passages: Sequence[Passage], *, slots: int = 1, adapter: int | None = None
) -> tuple[list[list[Any]], list[bool]]:
    """Return the scores of each passage at each of its places, and whether its last token ended the answer.

    `slots`: of the server. `adapter`: the only one that is applied; with None none is. Raises HivetuneError when the
    server is gone or reports nothing.
    """
    # llama.cpp is made to write the tokens in order. A bias that no other token can outdo forces the next one; the
    # server reports the log-probabilities from before the bias. A passage stays in one slot, where its beginning is
    # cached.
    scales = [{"id": lora["id"], "scale": float(lora["id"] == adapter)} for lora in backend.lora]

    def score_slot(slot: int) -> list[list[tuple[Any, bool]]]:
        numbers = range(slot, len(passages), slots)
        return [
            [_score_position(backend, passages[number], position, slot, scales) for position in passages[number].places]
            for number in numbers
        ]

    scored: list[list[tuple[Any, bool]]] = [[] for _ in passages]
    with ThreadPoolExecutor(slots) as pool:
        for slot, of_slot in enumerate(pool.map(score_slot, range(slots))):
            scored[slot::slots] = of_slot
    return [[scores for scores, _ in passage] for passage in scored], [passage[-1][1] for passage in scored]


def _score_position(
    backend: Backend, passage: Passage, position: int, slot: int, scales: Sequence[dict[str, Any]]
) -> tuple[Any, bool]:
    body = {
        "prompt": list(passage.tokens[:position]),
        "n_predict": 1,
        "temperature": 0,
        "n_probs": TOP,
        "logit_bias": [[passage.tokens[position], _FORCING_BIAS]],
        "cache_prompt": True,  # of this slot alone: the one in host memory is off (llama/backend.py)
        "id_slot": slot,
        "return_tokens": True,
    }
    document = backend.request("/completion", {**body, "lora": list(scales)} if scales else body)
    reported: Any = document.get("completion_probabilities")
    ended = document.get("stop_type") == "eos"
    if not reported:
        return None, ended
    try:
        likeliest = [[int(candidate["id"]), float(candidate["logprob"])] for candidate in reported[0]["top_logprobs"]]
        written, logprob = int(reported[0]["id"]), float(reported[0]["logprob"])
    except (TypeError, LookupError, ValueError):
        raise HivetuneError(f"llama.cpp reports no probabilities: {str(reported)[:200]}") from None
    if written != passage.tokens[position]:
        raise HivetuneError(f"llama.cpp wrote the token {written} where {passage.tokens[position]} was forced")
    return [logprob, likeliest], ended


# A release answers as it was proven.


def check_recorded(backend: Backend, proof: Mapping[str, Any], quant: str, adapter: int, label: str) -> None:
    """Raise HivetuneError when a loaded release gives the tokens of its proof's first passages other log-probabilities
    than it did then: a file was exchanged, the adapter is on another base, or the build of llama.cpp is broken."""
    # Of a number type that it was not proven in, nothing is known.
    recorded = proof.get("recorded", ()) if proof.get("quant") == quant else ()
    passages = [Passage(tuple(each["tokens"]), tuple(each["places"])) for each in recorded]
    scores, _ = score_passages(backend, passages, adapter=adapter)
    differences = [
        abs(now[0] - then)
        for places, each in zip(scores, recorded, strict=True)
        for now, then in zip(places, each["logprobs"], strict=True)
        if now is not None and then is not None
    ]
    if differences and not median(differences) <= RECORDED_BOUND:
        raise HivetuneError(
            f"{label} answers differently from when it was registered",
            hint="restore its files and its base from a backup, or register the run again",
        )


def _recorded(passages: Sequence[Passage], scores: Scores) -> list[dict[str, Any]]:
    return [
        {
            "tokens": list(passage.tokens),
            "places": list(passage.places),
            "logprobs": [place and place[0] for place in places],
        }
        for passage, places in list(zip(passages, scores, strict=True))[:RECORDED_PASSAGES]
    ]


# The station.


def prove_export(folder: Path, exported: Exported, progress: Progress = silent) -> dict[str, Any]:
    """Return the proof that an artefact is what the run in `folder` trained: the one beside it, or a new one.

    Raises HivetuneError naming what differs; the file and its proof stay for a look. Raises MachineNotFit when a GGUF
    can't be loaded here, and UsageError when the run's model or data are gone.
    """
    artefact = sha256_file(exported.folder / MANIFEST)
    path = exported.folder / PROOF
    proof: dict[str, Any] = read_document(path) if path.is_file() else {}
    if proof.get("manifest_sha256") != artefact:
        run = load_run(folder)
        proof = {"schema": 1, "to": exported.to, "manifest_sha256": artefact, **_measure(run, exported, progress)}
        write_json(path, proof)
    if not proof["holds"]:
        problems = list(proof["problems"])
        if "quant" in proof and (server := find_engine().build) != TESTED_SERVER:
            problems.append(f"the server is {server}; {CONVERTER} is tested with {TESTED_SERVER}")
        raise HivetuneError(
            f"{exported.path} differs from the trained model: {'; '.join(problems)}",
            hint=f"do not serve it; please report it with {path}",
        )
    return proof


def export_merged(folder: Path, progress: Progress = silent) -> tuple[Exported, dict[str, Any]]:
    """Export the merged model in the first number type that passes the proof: the base's own, float16 or float32.

    Raises as `export_run` and `prove_export` do.
    """
    # Rounding to bfloat16 can swallow what was trained lightly: 0.61 of an adapter's effect arrived.
    problem: HivetuneError | None = None
    for dtype in MERGED_TYPES:
        exported = export_run(folder, "merged", dtype=dtype, progress=progress)
        try:
            return exported, prove_export(folder, exported, progress)
        except (UsageError, MachineNotFit, DataRefused):
            raise
        except HivetuneError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def describe_proof(proof: Mapping[str, Any]) -> str:
    """Return a proof in one line, for people."""
    if "typical" not in proof:
        return "the adapter's bytes are those that were trained"
    text = f"log-probabilities differ by {proof['typical']:.3f} nats on average, at most {proof['bound']:.3f} expected"
    if proof["effect"] is not None:
        text += f"; {proof['effect']:.2f} of the adapter's effect arrived"
    if (dtype := proof.get("dtype", "source")) != "source":
        text += f"; in {dtype}, since the base's own type rounds away what was trained"
    if "ended" in proof:
        text += f"; {proof['conversations']} conversations have the trained token ids, {proof['ended']} answers ended"
    return text


def unserved_base(run: Run, progress: Progress = silent) -> str:
    """Return before the first training of a run why llama.cpp can't serve its base, so that the run is judged by its
    loss alone; empty where it can, or the run has begun."""
    if steps(run.folder):
        return ""
    try:
        ensure_base_served(run.config.model, run.model, progress)
    except HivetuneError as error:
        return f"without answers from llama.cpp the run is judged by its loss alone: {error.message}; {error.hint}"
    return ""


def ensure_base_served(name: str, model: Path, progress: Progress = silent) -> None:
    """Convert the base `name`, prepared in `model`, and compare it as llama.cpp serves it with the training engine:
    token ids of prompts and log-probabilities. Done once for each base and build of llama.cpp.

    Raises HivetuneError with the reason why it can't be served as it is trained, MachineNotFit where llama.cpp is not
    here or can't load it, DoesNotFit where there is no room to compare.
    """
    path = _base_verdict(model)
    if not path.is_file():
        find_converter()
        try:
            problems = _base_problems(name, model, progress)
        except UsageError as error:  # what the converter can't write
            problems = [error.message]
        write_json(path, {"problems": problems})
    if problem := base_problem(model):
        raise HivetuneError(problem, hint="the family is not served by this llama.cpp; a newer one may know it")


def base_problem(model: Path) -> str:
    """Return why a base can't be served, as it was found before its first training; empty where it can, or nobody
    looked. Raises MachineNotFit without llama.cpp."""
    path = _base_verdict(model)
    return "; ".join(read_json(path)["problems"]) if path.is_file() else ""


def _base_verdict(model: Path) -> Path:
    served_by = (SERVED_QUANT, CONVERTER, find_engine().build)
    return _cached("base verdict", sha256_file(model / MANIFEST), *served_by)


def _base_problems(name: str, model: Path, progress: Progress) -> list[str]:
    if weights_bytes(model) > _MEMORY_SHARE * psutil.virtual_memory().available:
        raise DoesNotFit("too little memory is free to compare the base with its GGUF file")
    chats = [tuple(Message(("user", "assistant")[i % 2], said) for i, said in enumerate(c)) for c in CONVERSATIONS]
    examples = [Example(str(number), name, chat) for number, chat in enumerate(chats)]
    renderer = load_renderer(model)
    rendered = [renderer.render(example)[-1] for example in examples]
    passages = [_passage(each.tokens, each.trained) for each in rendered]
    problems, served = list[str](), dict[str, Scores]()

    def ask_server() -> None:
        file = base_gguf(name, sha256_file(model / MANIFEST), SERVED_QUANT)
        with open_backend(file, ServerSettings(slots=_SLOTS, context_tokens=_CONTEXT_TOKENS)) as backend:
            served["base"] = score_passages(backend, passages, slots=_SLOTS)[0]
            for each in compare_prompts(backend, renderer, examples)[1][:1]:
                problems.append(f"llama.cpp builds another prompt: {each}")

    trained = _engine_scores(model, None, passages, progress, ask_server, weights_bytes(model))
    return [*problems, *compare_scores(SERVED_QUANT, trained, served)["problems"]]


def _measure(run: Run, exported: Exported, progress: Progress) -> dict[str, Any]:
    if exported.to == "adapter":
        same = sha256_file(exported.folder / ADAPTER) == adapter_hash(run.folder)
        return {"holds": same, "problems": [] if same else ["its weights are not those that were trained"]}
    if exported.to == "merged":
        passages = choose_passages(run.snapshot)
        with lock(home() / TOLD):
            trained = _engine_scores(run.model, run.folder, passages, progress)
            tuned = _engine_scores(exported.folder, None, passages, progress)["base"]
        dtype = merged_type(exported.folder)
        return compare_scores("merged" if dtype == "source" else "f16", trained, {"tuned": tuned}) | {"dtype": dtype}
    quant = find_quant(str(read_json(exported.folder / MANIFEST)["quant"] or SERVED_QUANT))
    beside = exported.to == "gguf-adapter"
    model = _base(run, quant) if beside else exported.path
    passages = choose_passages(run.snapshot, context_tokens(model))
    with lock(home() / TOLD):
        return _measure_served(run, model, exported.path if beside else None, quant, passages, progress)


def _measure_served(
    run: Run, model: Path, adapter: Path | None, quant: str, passages: Sequence[Passage], progress: Progress
) -> dict[str, Any]:
    """Compare `model`, with `adapter` beside it, as llama.cpp serves them."""
    served, facts = dict[str, Scores](), dict[str, Any]({"quant": quant, "passages": len(passages)})
    adapters = () if adapter is None else ((adapter, 0.0),)

    def ask_server() -> None:
        settings = ServerSettings(adapters, slots=_SLOTS, context_tokens=_CONTEXT_TOKENS)
        with open_backend(model, settings) as backend:
            facts["conversations"] = check_prompts(backend, run.model, run.snapshot)
            number = None if adapter is None else 0
            served["tuned"], ends = score_passages(backend, passages, slots=_SLOTS, adapter=number)
            facts["ended"] = ends.count(True)
            if adapter is not None:
                served["base"] = score_passages(backend, passages, slots=_SLOTS)[0]
                facts["recorded"] = _recorded(passages, served["tuned"])
        if adapter is None and QUANTS[quant] < 16:
            # Cached by content: the exports of all adapters of a base have the same one.
            path = _cached("base", sha256_file(run.model / MANIFEST), quant, TOP, to_plain(tuple(passages)))
            if not path.is_file():
                with open_backend(_base(run, quant), settings) as backend:
                    write_json(path, {"base": score_passages(backend, passages, slots=_SLOTS)[0]})
            served["base"] = read_json(path)["base"]

    trained = _engine_scores(run.model, run.folder, passages, progress, ask_server, model.stat().st_size)
    proof = compare_scores(quant, trained, served)
    if facts["ended"] < len(passages):
        lacking = len(passages) - facts["ended"]
        proof["problems"].append(f"{lacking} of {len(passages)} trained ends do not end an answer")
    return {**proof, **facts, "holds": not proof["problems"]}


def _base(run: Run, quant: str) -> Path:
    return base_gguf(run.config.model, sha256_file(run.model / MANIFEST), quant)


def context_tokens(file: Path) -> int | None:
    """Return the longest context of a GGUF file, in tokens."""
    settings = read_header(file).settings
    length: int | None = settings.get(f"{settings.get('general.architecture')}.context_length")
    return length


def _engine_scores(
    model: Path,
    adapter: Path | None,
    passages: Sequence[Passage],
    progress: Progress,
    ask: Callable[[], None] = lambda: None,
    asked_bytes: int = 0,
) -> dict[str, Scores]:
    """Return the engine's scores of the base and with the adapter. `ask` is called once; it takes `asked_bytes` of
    memory."""
    # Cached by content: all exports of a run are compared with them. Where the memory holds both sides the server is
    # asked while the engine imports torch, which saves the time of the import.
    adapter_sha256 = None if adapter is None else adapter_hash(adapter)
    path = _cached(TOP, sha256_file(model / MANIFEST), adapter_sha256, to_plain(tuple(passages)))
    asks = [ask]
    if not path.is_file():
        task = path.with_suffix(".task")
        needed = 2 * weights_bytes(model) + asked_bytes  # the engine's in float32
        together = needed <= _MEMORY_SHARE * psutil.virtual_memory().available
        try:
            child = start_child(ScorePassages(model, adapter, tuple(passages), TOP), task)
            outcome = see_off(child, lambda beat: progress(0, None), asks.pop() if together else lambda: None)
            result = outcome.check("comparing with what was trained")
        finally:
            shutil.rmtree(task, ignore_errors=True)
        write_json(path, {side: result[side] for side in ("base", "tuned") if side in result})
    for each in asks:
        each()
    scores: dict[str, Scores] = read_json(path)
    return scores


def _cached(*facts: object) -> Path:
    return home() / TOLD / f"{sha256_bytes(repr(list(facts)).encode())[:16]}.json"
