"""The proof of an export: the exported file is measured, to show that it computes what was trained.

At some positions in held-out conversations, the trained model (adapter on its base, float32) and the exported one
return the log-probabilities of the actual token and of the most likely tokens. The proof requires, and states the
bounds:

  logits   The mean difference of log-probabilities is within the bound of the number type. For a quantized file the
           bound is larger, by twice the difference that quantizing the base alone causes.
  loss     The mean log-probability of the actual tokens differs by no more than the same bound.
  effect   The slope of the adapter's effect in the export (over the base of the same type) against its effect in
           training is 1, within a tenth and what its standard error allows.

The result is stored next to the export as `proof.json`, and holds for exactly these bytes. Before the first training on
a base, the base is proven in the same way, on conversations of our own. So a model that llama.cpp can't serve is known
before hours of work.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from hivetune.base.disk import MANIFEST, home, lock, read_json, scratch_folder, sha256_bytes, sha256_file, write_json
from hivetune.base.documents import read_document
from hivetune.data.render.dialect import template_message
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.snapshot import Snapshot
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, UsageError
from hivetune.llama.backend import Backend, ServerSettings, find_engine, open_backend
from hivetune.models.gguf_header import read_header
from hivetune.process.parent import start_child, wait_for_outcome
from hivetune.process.protocol import Passage, ScorePassages
from hivetune.records import Example, Message, Progress, Split, silent
from hivetune.release.export import Exported
from hivetune.release.gguf import CONVERTER, QUANTS, SERVED_QUANT, base_gguf, weights_bytes
from hivetune.release.prune import TOLD
from hivetune.run.checkpoints import steps
from hivetune.run.folder import ADAPTER, CHECKING, PROOF, adapter_hash
from hivetune.train.open import Run, load_run

HELD_OUT_FIRST: tuple[Split, ...] = ("test", "validation", "train")
PASSAGES, POSITIONS = 8, 12
TOP = 16  # likeliest tokens at each place
MAX_PASSAGE_TOKENS = 2048
# How much log-probabilities may differ on average, in nats: those of the trained model in types of 16 bits and more,
# of the base alone in the others. Seen with SmolLM2-135M: f16 0.003, bf16 and merged (rounded to bf16's 8 bits) 0.04;
# with tiny random models, which suffer most, 0.06 in q8_0, of which three times are allowed, and twice as much for
# each bit less. Another model differs by whole nats.
BOUNDS = {
    **{"f32": 0.03, "f16": 0.03, "bf16": 0.1, "merged": 0.1},
    **{"q8_0": 0.2, "q6_k": 0.4, "q5_1": 0.8, "q5_0": 0.8, "q5_k_m": 0.8},
}
COARSEST_BOUND = 1.2
QUANTIZED_BOUND, QUANTIZED_FACTOR = 0.03, 2.0
EFFECT_BOUND, EFFECT_ERRORS = 0.1, 3.0
# What a base is asked: plain questions of one and two turns, which any chat template renders.
CONVERSATIONS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name three colours.", "Red, green and blue."),
    ("What is 12 + 30?", "It is 42.", "And twice as much?", "That is 84."),
    ("How do I list files in a shell?", "Use ls, or ls -l for their sizes and dates."),
)
CHECKED_PROMPTS, SHOWN_TOKENS = 50, 6
_FORCING_BIAS = 1000.0  # nats: far above any logit
_SERVER = ServerSettings(slots=4, context_tokens=4096)

# By passage and place: [log-probability of the token there, [[token, log-probability], ...]], as JSON holds it; None
# where llama.cpp reports nothing, as for a token that is a part of a character.
Scores = Sequence[Sequence[Any]]
Sides = Mapping[str, Scores]  # of "base" and "tuned", the base with the adapter
_TokenScores = Mapping[int, float]  # token -> log-probability; the token that is there has the key _ACTUAL
_ACTUAL = -1


# Passages.


def choose_passages(snapshot: Snapshot, context_tokens: int | None = None) -> list[Passage]:
    """Return passages from some rows, held-out rows first: the first tokens of the last answer, and its end token.

    Rows longer than `context_tokens`, the context of the export, are left out. Raises DataRefused if every row is
    longer than that or than `MAX_PASSAGE_TOKENS`.
    """
    longest = min(MAX_PASSAGE_TOKENS, context_tokens or MAX_PASSAGE_TOKENS)
    rows = (row for split in HELD_OUT_FIRST for row in snapshot.rows(split) if snapshot.length(row) <= longest)
    chosen = itertools.islice(rows, PASSAGES)
    passages = [_passage(snapshot.tokens(row), snapshot.trained(row)) for row in chosen]
    if not passages:
        raise DataRefused(f"every row is longer than {longest:,} tokens, so it can't be compared: use --no-check")
    return passages


def _passage(tokens: Sequence[int], trained: Sequence[int]) -> Passage:
    end = max(i for i, is_trained in enumerate(trained) if is_trained) + 1
    start = end
    while trained[start - 1]:
        start -= 1
    positions = sorted({*range(start, min(start + POSITIONS, end)), end - 1})
    return Passage(tuple(int(token) for token in tokens[:end]), tuple(positions))


# The comparison.


def compare_scores(kind: str, trained: Sides, exported: Sides) -> dict[str, Any]:
    """Return a document: whether the export `holds`, its `problems` in words, and the measurements.

    `kind`: a GGUF number type, or "merged". `exported` has only "base" before any training, only "tuned" if numbers are
    not quantized, else both.
    """
    base, its_base = trained["base"], exported.get("base", trained["base"])
    sides = (base, trained["tuned"] if "tuned" in exported else base, its_base, exported.get("tuned", its_base))
    places = [scores for passages in zip(*sides, strict=True) for scores in zip(*passages, strict=True)]
    aligned: list[tuple[_TokenScores, ...]] = [
        tuple({**{token: logprob for token, logprob in side[1]}, _ACTUAL: side[0]} for side in scores)
        for scores in places
        if all(scores)
    ]
    if not aligned:
        return {"places": 0, "holds": False, "problems": ["llama.cpp reported no log-probability at all"]}
    columns, bound, of_base = list(zip(*aligned, strict=True)), BOUNDS.get(kind, COARSEST_BOUND), dict[str, float]()
    losses = [-fmean(scores[_ACTUAL] for scores in columns[side]) for side in (1, 3)]
    typical, (effect, error) = _distance(columns[1], columns[3]), _effect(aligned)
    problems = []
    if "base" in exported:
        of_base["base_typical"] = of = _distance(columns[0], columns[2])
        # All are written so that NaN is a problem too.
        if not of <= bound:
            problems.append(f"the base alone differs by {of:.3f} nats on average, at most {bound:g} in {kind}")
        bound = QUANTIZED_BOUND + QUANTIZED_FACTOR * of
    if not typical <= bound:
        problems.append(f"log-probabilities differ by {typical:.3f} nats on average, at most {bound:.3f} expected")
    if "tuned" in exported and not abs(losses[1] - losses[0]) <= bound:
        problems.append(f"the loss is {losses[1]:.3f} instead of {losses[0]:.3f}, at most {bound:.3f} apart expected")
    if effect is not None and error is not None and not abs(effect - 1) <= EFFECT_BOUND + EFFECT_ERRORS * error:
        problems.append(f"{effect:.2f} times the adapter's effect arrived instead of once")
    measured = {"places": len(aligned), "unreported": len(places) - len(aligned), "typical": typical, **of_base}
    measured |= {"bound": bound, "loss_trained": losses[0], "loss_exported": losses[1]}
    return {**measured, "effect": effect, "effect_error": error, "holds": not problems, "problems": problems}


def _distance(first: Sequence[_TokenScores], second: Sequence[_TokenScores]) -> float:
    """Return the mean absolute difference of log-probabilities over the tokens that both sides report."""
    pairs = zip(first, second, strict=True)
    return fmean(abs(a[token] - b[token]) for a, b in pairs for token in sorted(a.keys() & b.keys()))


def _effect(aligned: Sequence[Sequence[_TokenScores]]) -> tuple[float | None, float | None]:
    """Return (slope through zero of the exported change over the trained one, its standard error); None for each if the
    adapter changes nothing.
    """
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


# The prompts of a server. llama.cpp has its own Jinja, its own tokenizer and its own rules for first tokens. Where a
# model is right in the trainer and wrong when served, it is most often here (ggml-org/llama.cpp#7062,
# ollama/ollama#6823).


def check_prompts(backend: Backend, model: Path, snapshot: Snapshot) -> int:
    """Compare the server's token ids of conversations with the trained ones, held-out conversations first. Return the
    number of conversations compared.

    Raises HivetuneError if one differs, because the server would then ask the model in another form than it was trained
    on.
    """
    rows = [row for split in HELD_OUT_FIRST for row in snapshot.rows(split)]
    infos = [snapshot.info(row) for row in rows[:CHECKED_PROMPTS]]
    examples = [Example(info.id, info.source, tuple(info.messages), tools=tuple(info.tools)) for info in infos]
    if differences := compare_prompts(backend, load_renderer(model), examples):
        differ = f"{len(differences)} of {len(examples)} conversations"
        raise HivetuneError(
            f"llama.cpp builds prompts that differ from training for {differ}: {differences[0]}",
            hint="please report it with the model's name; hivetune export --no-check keeps the file",
        )
    return len(examples)


def compare_prompts(backend: Backend, renderer: Renderer, examples: Sequence[Example]) -> list[str]:
    """Return a description of each conversation whose prompt differs. Raises RenderError."""
    differences = []
    for example in examples:
        answers = [i for i, message in enumerate(example.messages) if message.role == "assistant"]
        prompt = example.messages[: max(answers, default=None)]
        trained = renderer.prompt(prompt, example.tools)
        served = backend.prompt_ids([template_message(message) for message in prompt], example.tools)
        if trained != served:
            equal = (one == other for one, other in zip(trained, served, strict=False))
            at = len(list(itertools.takewhile(bool, equal)))
            was, now = (renderer.decode(ids[at : at + SHOWN_TOKENS]) for ids in (trained, served))
            differences.append(f"{example.source}, token {at}: trained {was!r}, served {now!r}")
    return differences


# What a served file says of given tokens.


def score_passages(
    backend: Backend, passages: Sequence[Passage], *, slots: int = 1, adapter: int | None = None
) -> tuple[list[list[Any]], int]:
    """Return the scores at each position of each passage, and the number of passages whose end ended the answer.

    `slots`: number of slots of the server. `adapter`: the adapter that is applied, None for the base alone. Raises
    HivetuneError if the server is gone or reports no scores.
    """
    scales = [{"id": lora["id"], "scale": float(lora["id"] == adapter)} for lora in backend.lora]
    free = list(range(slots))

    def score(passage: Passage) -> list[tuple[Any, bool]]:
        slot = free.pop()  # a passage stays in one slot, where its beginning is cached
        found = [_score_place(backend, passage, place, slot, scales) for place in passage.places]
        free.append(slot)
        return found

    with ThreadPoolExecutor(slots) as pool:
        scored = list(pool.map(score, passages))
    return [[scores for scores, _ in places] for places in scored], sum(places[-1][1] for places in scored)


def _score_place(
    backend: Backend, passage: Passage, place: int, slot: int, scales: Sequence[dict[str, Any]]
) -> tuple[Any, bool]:
    # llama.cpp is made to write the tokens in order: a bias that no other token can outdo forces the next one, and the
    # server reports the log-probabilities from before the bias.
    body = {
        "prompt": list(passage.tokens[:place]),
        "n_predict": 1,
        "temperature": 0,
        "n_probs": TOP,
        "logit_bias": [[passage.tokens[place], _FORCING_BIAS]],
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
        raise HivetuneError(f"llama.cpp reports no probabilities; use another build: {str(reported)[:200]}") from None
    if written != passage.tokens[place]:
        raise HivetuneError(f"llama.cpp returned the token {written} instead of the forced {passage.tokens[place]}")
    return [logprob, likeliest], ended


# The proof of an export.


def prove_export(folder: Path, exported: Exported, progress: Progress = silent) -> dict[str, Any]:
    """Return the proof that an export computes what the run in `folder` trained: the one stored beside it, or a new
    one.

    Raises HivetuneError that names the difference; the file and its proof are kept for inspection. Raises MachineNotFit
    if a GGUF can't be loaded on this machine, DoesNotFit without the memory to compare, and UsageError if the run's
    model or data are gone.
    """
    artefact = sha256_file(exported.folder / MANIFEST)
    path = exported.folder / PROOF
    proof: dict[str, Any] = read_document(path) if path.is_file() else {}
    if proof.get("manifest_sha256") != artefact:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Busy):  # the lock tells `status` of it; another check may go on beside this one
                stack.enter_context(lock(folder / CHECKING))
            measured = _measure(load_run(folder), exported, progress)
        proof = {"schema": 1, "to": exported.to, "manifest_sha256": artefact, **measured}
        write_json(path, proof)
    if not proof["holds"]:
        raise HivetuneError(
            f"{exported.path} differs from the trained model: {'; '.join(proof['problems'])}",
            hint=f"do not serve it; please report it with {path}",
        )
    return proof


def describe_proof(proof: Mapping[str, Any]) -> str:
    """Return a proof as one line of text."""
    if "typical" not in proof:
        return "the adapter's bytes are those that were trained"
    text = f"log-probabilities differ by {proof['typical']:.3f} nats on average, at most {proof['bound']:.3f} expected"
    if proof["effect"] is not None:
        text += f"; {proof['effect']:.2f} of the adapter's effect arrived"
    if proof.get("dtype") == "float32":
        text += "; in float32, since the base's own type rounds away what was trained"
    if "ended" in proof:
        text += f"; {proof['conversations']} conversations have the trained token ids, {proof['ended']} answers ended"
    return text


def _measure(run: Run, exported: Exported, progress: Progress) -> dict[str, Any]:
    if exported.to == "adapter":
        same = sha256_file(exported.folder / ADAPTER) == adapter_hash(run.folder)
        return {"holds": same, "problems": [] if same else ["its weights are not those that were trained"]}
    manifest = read_json(exported.folder / MANIFEST)
    if exported.to == "merged":
        passages = choose_passages(run.snapshot)
        trained, _ = _by_engine(run.model, run.folder, passages, progress)
        merged, _ = _by_engine(exported.folder, None, passages, progress)
        kind = "f32" if manifest["dtype"] == "float32" else "merged"
        return compare_scores(kind, trained, {"tuned": merged["base"]}) | {"dtype": manifest["dtype"]}
    beside = exported.to == "gguf-adapter"
    quant = SERVED_QUANT if beside else str(manifest["quant"])
    model, adapter = (base_of(run, quant), exported.path) if beside else (exported.path, None)
    settings = read_header(model).settings
    passages = choose_passages(run.snapshot, settings.get(f"{settings.get('general.architecture')}.context_length"))

    def ask() -> tuple[Sides, dict[str, Any]]:
        served, facts = _by_server(model, adapter, passages, lambda each: check_prompts(each, run.model, run.snapshot))
        if beside:
            return served, facts
        merged = {"tuned": served["base"]}
        if QUANTS[quant] >= 16:
            return merged, facts
        # Its base at the same type, once for the exports of all its adapters.
        path = _cached("base", sha256_file(run.model / MANIFEST), quant, passages)
        if not path.is_file():
            write_json(path, _by_server(base_of(run, quant), None, passages)[0])
        return {**merged, **read_json(path)}, facts

    trained, (served, facts) = _by_engine(run.model, run.folder, passages, progress, ask)
    proof = compare_scores(quant, trained, served)
    if lacking := len(passages) - facts["ended"]:
        proof["problems"].append(f"{lacking} of {len(passages)} trained ends do not end an answer")
    return {**proof, **facts, "quant": quant, "passages": len(passages), "holds": not proof["problems"]}


def base_of(run: Run, quant: str = SERVED_QUANT) -> Path:
    """Return the GGUF file of a run's base. Raises as `base_gguf`."""
    return base_gguf(run.config.model, sha256_file(run.model / MANIFEST), quant)


# The proof of a base.


def unserved_base(run: Run, progress: Progress = silent) -> str:
    """Return, before the first training of a run, the reason why llama.cpp can't serve its base as training computes
    it, so that the run is judged by its loss alone; empty if it can, or if the run has begun.

    The base is converted and compared once for each base and build of llama.cpp: token ids of prompts and
    log-probabilities.
    """
    if steps(run.folder):
        return ""
    try:
        path = _base_verdict(run.model)
        if not path.is_file():
            write_json(path, {"problems": _base_problems(run, progress)})
        problem = base_problem(run.model)
    except HivetuneError as error:  # no llama.cpp, no memory, another process: nothing is known of the base
        problem = f"{error.message}; {error.hint}"
    return f"without answers from llama.cpp the run is judged by its loss alone: {problem}" if problem else ""


def base_problem(model: Path) -> str:
    """Return the reason why a base can't be served, found before its first training; empty if it can, or was not
    checked. Raises MachineNotFit without llama.cpp.
    """
    path = _base_verdict(model)
    return "; ".join(read_json(path)["problems"]) if path.is_file() else ""


def _base_verdict(model: Path) -> Path:
    return _cached("verdict", sha256_file(model / MANIFEST), SERVED_QUANT, CONVERTER, find_engine().build)


def _base_problems(run: Run, progress: Progress) -> list[str]:
    renderer = load_renderer(run.model)
    chats = [tuple(Message(("user", "assistant")[i % 2], said) for i, said in enumerate(c)) for c in CONVERSATIONS]
    examples = [Example(str(number), run.config.model, chat) for number, chat in enumerate(chats)]
    rendered = [renderer.render(example)[-1] for example in examples]
    passages = [_passage(each.tokens, each.trained) for each in rendered]

    def ask() -> tuple[Sides, dict[str, Any]]:
        base = base_of(run)
        return _by_server(base, None, passages, lambda each: compare_prompts(each, renderer, examples))

    try:
        trained, (served, facts) = _by_engine(run.model, None, passages, progress, ask)
    except UsageError as error:  # what the converter can't write
        return [error.message]
    differences = [f"llama.cpp builds another prompt: {each}" for each in facts["conversations"][:1]]
    return [*differences, *compare_scores(SERVED_QUANT, trained, served)["problems"]]


# The two sides. What the engine computes is cached by content: all exports of a run are compared with it.


def _by_server(
    file: Path,
    adapter: Path | None,
    passages: Sequence[Passage],
    check: Callable[[Backend], Any] = lambda backend: None,
) -> tuple[Sides, dict[str, Any]]:
    """Return llama.cpp's scores of "base" and of "tuned" (the adapter beside it); and the number of answers that
    `ended`, with the result of `check` on its prompts.
    """
    adapters, scores = () if adapter is None else ((adapter, 0.0),), dict[str, Scores]()
    with open_backend(file, replace(_SERVER, adapters=adapters)) as backend:
        conversations = check(backend)
        scores["base"], ended = score_passages(backend, passages, slots=_SERVER.slots)
        if adapter is not None:
            scores["tuned"], ended = score_passages(backend, passages, slots=_SERVER.slots, adapter=0)
    return scores, {"conversations": conversations, "ended": ended}


def _by_engine(
    model: Path,
    adapter: Path | None,
    passages: Sequence[Passage],
    progress: Progress,
    meanwhile: Callable[[], Any] = lambda: None,
) -> tuple[Sides, Any]:
    """Return the engine's scores of "base" and of "tuned" (the base with the adapter), and the result of `meanwhile`.

    Raises DoesNotFit if the model does not fit into memory.
    """
    path = _cached(sha256_file(model / MANIFEST), adapter and adapter_hash(adapter), passages)
    asked = list[Any]()
    if not path.is_file():
        if weights_bytes(model) > psutil.virtual_memory().available:
            raise DoesNotFit("too little memory is free to compare with what was trained", hint="stop other programs")
        with scratch_folder(path.parent / ".tasks") as task:
            child = start_child(ScorePassages(model, adapter, tuple(passages), TOP), task)
            # The server is asked while the engine imports torch, which takes longer. Its file is mapped, so that it
            # takes only what is left of the memory.
            outcome = wait_for_outcome(child, lambda beat: progress(0, None), lambda: asked.append(meanwhile()))
            result = outcome.check("comparing with what was trained")
        write_json(path, {side: result[side] for side in ("base", "tuned") if side in result})
    return read_json(path), asked[0] if asked else meanwhile()


def _cached(*facts: object) -> Path:
    return home() / TOLD / f"{sha256_bytes(repr([TOP, *facts]).encode())[:16]}.json"
