"""The proof of an export: what is shipped is what was trained, measured on the exported file.

At some places of held-out conversations the trained model (adapter beside base, float32) and the exported one report
the log-probability of the token there and of the likeliest ones. Three things must hold, and the proof states the
bounds:

logits   The mean difference of log-probabilities is within the bound of the number type. A quantized file may differ
         by twice as much as its base does at the same type.
loss     The mean over the tokens that are there differs by no more than the same bound.
effect   What the adapter changes in the export, over the base at the same type, is what it changed when it was trained:
         the slope of the one over the other is 1, within a tenth and what its standard error allows.

The result is next to the export as `proof.json` and holds for these bytes only.
"""

import itertools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from hivetune.base.disk import MANIFEST, home, lock, read_json, sha256_bytes, sha256_file, write_json
from hivetune.base.documents import read_document
from hivetune.base.typed import to_plain
from hivetune.data.snapshot import Snapshot
from hivetune.errors import DataRefused, HivetuneError, MachineNotFit, UsageError
from hivetune.llama.backend import Backend, ServerSettings, find_engine, open_backend
from hivetune.llama.prompts import HELD_OUT_FIRST, check_prompts
from hivetune.models.gguf_header import read_header
from hivetune.process.parent import see_off, start_child
from hivetune.process.protocol import Passage, ScorePassages
from hivetune.records import Progress, silent
from hivetune.release.export import Exported, MergedType, export_run, merged_type
from hivetune.release.gguf import (
    QUANTS,
    SERVED_QUANT,
    base_gguf,
    find_converter,
    find_quant,
    server_name,
    untested_pair,
)
from hivetune.run.folder import ADAPTER, PROOF, adapter_hash
from hivetune.train.open import Run, load_run

PASSAGES, POSITIONS = 8, 12
TOP = 16  # likeliest tokens at each place
MAX_PASSAGE_TOKENS = 2048  # tokens
# Mean differences in nats. Seen with SmolLM2-135M: f16 0.003, bf16 and merged (rounded to bf16's 8 bits) 0.04.
FLOAT_BOUNDS = {"f32": 0.03, "f16": 0.03, "bf16": 0.1, "merged": 0.1}
# How much the base itself may differ in a quantized type: three times what tiny random models, which suffer most, do in
# q8_0 (0.06 at most), and twice as much for each bit less. Another model differs by whole nats.
BASE_BOUNDS = {"q8_0": 0.2, "q6_k": 0.4, "q5_1": 0.8, "q5_0": 0.8, "q5_k_m": 0.8}
COARSEST_BOUND = 1.2
QUANTIZED_BOUND, QUANTIZED_FACTOR = 0.03, 2.0
EFFECT_BOUND, EFFECT_ERRORS = 0.1, 3.0
MERGED_TYPES: tuple[MergedType, ...] = ("source", "float16", "float32")
_CACHE = "told"  # below the home: scores of trained models and of bases
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
    passages = []
    for row in itertools.islice(rows, PASSAGES):
        trained = snapshot.trained(row)
        end = max(i for i, is_trained in enumerate(trained) if is_trained) + 1
        start = end
        while trained[start - 1]:
            start -= 1
        positions = sorted({*range(start, min(start + POSITIONS, end)), end - 1})
        passages.append(Passage(tuple(int(token) for token in snapshot.tokens(row)[:end]), tuple(positions)))
    if not passages:
        raise DataRefused(f"every row is longer than {longest:,} tokens, so nothing can be compared")
    return passages


def compare_scores(
    kind: str, trained: Mapping[str, Scores], exported: Scores, exported_base: Scores | None
) -> dict[str, Any]:
    """Return `holds`, `problems` in words, and the measurements behind them.

    `kind`: a number type of GGUF, or "merged". `trained` has "base" and "tuned". `exported_base`: the base at the same
    type; None where numbers are not quantized, and the base itself is taken.
    """
    aligned, unreported = _align(trained["base"], trained["tuned"], exported_base or trained["base"], exported)
    if not aligned:
        return {"places": 0, "holds": False, "problems": ["llama.cpp reported no log-probability at all"]}
    base, tuned, its_base, its = zip(*aligned, strict=True)
    typical, largest = _distance(its, tuned)
    measured: dict[str, Any] = {"places": len(aligned), "unreported": unreported}
    measured |= {"typical": typical, "largest": largest}
    if exported_base is None:
        bound = FLOAT_BOUNDS[kind]
    else:
        measured["base_typical"] = _distance(its_base, base)[0]
        bound = QUANTIZED_BOUND + QUANTIZED_FACTOR * measured["base_typical"]
    losses = [-fmean([scores[_ACTUAL] for scores in side]) for side in (tuned, its)]
    slope, error = _effect(aligned)
    measured |= {"bound": bound, "loss_trained": losses[0], "loss_exported": losses[1]}
    measured |= {"effect": slope, "effect_error": error}
    problems = []
    base_bound = BASE_BOUNDS.get(kind, COARSEST_BOUND)
    if exported_base is not None and not measured["base_typical"] <= base_bound:
        problems.append(
            f"the base alone differs by {measured['base_typical']:.3f} nats on average,"
            f" at most {base_bound:g} in {kind}"
        )
    if not typical <= bound:
        problems.append(f"log-probabilities differ by {typical:.3f} nats on average, at most {bound:.3f} expected")
    if not abs(losses[1] - losses[0]) <= bound:
        problems.append(f"the loss is {losses[1]:.3f} instead of {losses[0]:.3f}, at most {bound:.3f} apart expected")
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
    a change.

    The tokens of a place share their error (one sum of all exponentials, the same rounded weights), so places are the
    clusters of the error (Liang and Zeger 1986). Tokens taken one by one would claim a third of it.
    """
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

    llama.cpp is made to write the tokens in order. A bias that no other token can outdo forces the next one;
    the server reports the log-probabilities from before the bias. `slots`: of the server; a passage stays in one, where
    its beginning is cached. `adapter`: the only one that is applied; with None none is. Raises HivetuneError when the
    server is gone or reports nothing.
    """
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
        if "quant" in proof:
            converter = find_converter().name
            problems += untested_pair(converter, server_name(find_engine("auto")))
        raise HivetuneError(
            f"{exported.path} differs from the trained model: {'; '.join(problems)}",
            hint=f"do not serve it; please report it with {path}",
        )
    return proof


def export_merged(folder: Path, progress: Progress = silent) -> tuple[Exported, dict[str, Any]]:
    """Export the merged model in the first number type that passes the proof: the base's own, float16 or float32.

    Rounding to the base's own type can swallow what was trained. Raises as `export_run` and `prove_export` do.
    """
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


def _measure(run: Run, exported: Exported, progress: Progress) -> dict[str, Any]:
    if exported.to == "adapter":
        same = sha256_file(exported.folder / ADAPTER) == adapter_hash(run.folder)
        return {"holds": same, "problems": [] if same else ["its weights are not those that were trained"]}
    if exported.to == "merged":
        passages = choose_passages(run.snapshot)
        with lock(home() / _CACHE):
            trained = _engine_scores(run.model, run.folder, passages, progress)
            merged = _engine_scores(exported.folder, None, passages, progress)["base"]
        dtype = merged_type(exported.folder)
        return compare_scores("merged" if dtype == "source" else "f16", trained, merged, None) | {"dtype": dtype}
    quant = find_quant(str(read_json(exported.folder / MANIFEST)["quant"] or SERVED_QUANT))
    file = next(iter(sorted(exported.folder.glob("*.gguf"))))
    is_adapter = exported.to == "gguf-adapter"
    model = _base(run, quant) if is_adapter else file
    passages = choose_passages(run.snapshot, context_tokens(model))
    with lock(home() / _CACHE):
        return _measure_served(run, file if is_adapter else None, model, quant, passages, progress)


def _measure_served(
    run: Run, adapter: Path | None, model: Path, quant: str, passages: Sequence[Passage], progress: Progress
) -> dict[str, Any]:
    """Compare `model`, with `adapter` beside it, as llama.cpp serves them. llama.cpp is asked while the other side
    imports torch, where the memory holds both."""
    measured: dict[str, Any] = {}
    settings = ServerSettings(slots=_SLOTS, context_tokens=_CONTEXT_TOKENS)

    def ask_server() -> None:
        adapters = () if adapter is None else ((adapter, 0.0),)
        with open_backend(model, replace(settings, adapters=adapters)) as backend:
            measured["conversations"] = check_prompts(backend, run.model, run.snapshot)
            number = None if adapter is None else 0
            measured["tuned"], measured["ended"] = score_passages(backend, passages, slots=_SLOTS, adapter=number)
            measured["base"] = None if adapter is None else score_passages(backend, passages, slots=_SLOTS)[0]
        if adapter is None and QUANTS[quant] < 16:  # cached by content: all adapters have the same base
            path = _cached("base", sha256_file(run.model / MANIFEST), quant, TOP, to_plain(tuple(passages)))
            if not path.is_file():
                with open_backend(_base(run, quant), settings) as backend:
                    write_json(path, {"base": score_passages(backend, passages, slots=_SLOTS)[0]})
            measured["base"] = read_json(path)["base"]

    weights_bytes = 2 * sum(path.stat().st_size for path in run.model.glob("*.safetensors"))  # in float32
    needed = weights_bytes + max(model.stat().st_size, weights_bytes // 2)
    if needed <= _MEMORY_SHARE * psutil.virtual_memory().available:
        trained = _engine_scores(run.model, run.folder, passages, progress, ask_server)
    else:
        trained = _engine_scores(run.model, run.folder, passages, progress)
    if not measured:
        ask_server()
    proof = compare_scores(quant, trained, measured["tuned"], measured["base"])
    ended = measured["ended"].count(True)
    if ended < len(passages):
        proof["problems"].append(f"{len(passages) - ended} of {len(passages)} trained ends do not end an answer")
    counts = {"conversations": measured["conversations"], "passages": len(passages), "ended": ended}
    return {**proof, "quant": quant, **counts, "holds": not proof["problems"]}


def _base(run: Run, quant: str) -> Path:
    model_sha256 = sha256_file(run.model / MANIFEST)
    return base_gguf(run.config.model, model_sha256, quant)


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
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Scores]:
    """Return the engine's scores of the base and with the adapter. They are cached by content: all exports of a run are
    compared with them. `meanwhile` is done while it computes, if it has to."""
    adapter_sha256 = None if adapter is None else adapter_hash(adapter)
    path = _cached(TOP, sha256_file(model / MANIFEST), adapter_sha256, to_plain(tuple(passages)))
    if not path.is_file():
        task = path.with_suffix(".task")
        try:
            child = start_child(ScorePassages(model, adapter, tuple(passages), TOP), task)
            outcome = see_off(child, lambda beat: progress(0, None), meanwhile)
            result = outcome.check("comparing with what was trained")
        finally:
            shutil.rmtree(task, ignore_errors=True)
        write_json(path, {side: result[side] for side in ("base", "tuned") if side in result})
    scores: dict[str, Scores] = read_json(path)
    return scores


def _cached(*facts: object) -> Path:
    return home() / _CACHE / f"{sha256_bytes(repr(list(facts)).encode())[:16]}.json"
