"""The proof that this machine computes right: each set of backends runs in a child, and the best one is kept.

A set is one way to compute a step: precision, kernels, attention, library of matrix products. A run uses the first set
unless it is wrong or clearly slower than another one. Rates are measured first, because they show which precisions a
device multiplies natively. A child that crashes or hangs is a result too, and the next set is tried. Nothing here
imports torch.
"""

import itertools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home, read_json
from hivetune.base.journal import read_journal
from hivetune.base.paths import quoted
from hivetune.config import RunConfig
from hivetune.errors import UsageError
from hivetune.machine.doctor.findings import advised_variables, cards_in_question, visible_cards
from hivetune.machine.doctor.look import Look
from hivetune.machine.inventory import Card, CardKind, Machine
from hivetune.machine.knowledge.cards import known_model
from hivetune.machine.profile import WORTH_IT, Profile, Proof, ProvenSet, read_profile, write_profile
from hivetune.models.prepared import find_prepared
from hivetune.process.parent import FixedLimits, run_task
from hivetune.process.protocol import ChildError, MeasureRates, Outcome, Prove
from hivetune.records import Progress, silent
from hivetune.run.choices import Choices

# ROCBLAS_USE_HIPBLASLT is needed too: rocBLAS itself prefers hipBLASLt on gfx12 (its environment variables).
LEAVE_HIPBLASLT = {
    "TORCH_BLAS_PREFER_HIPBLASLT": "0",
    "TORCH_BLAS_PREFER_CUBLASLT": "0",
    "ROCBLAS_USE_HIPBLASLT": "0",
}


@dataclass(frozen=True)
class BackendSet:
    """One way to compute: choices over the engine's defaults, with the precision, and environment variables."""

    name: str
    choices: Choices
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return self.choices.dtype or ""


@dataclass(frozen=True)
class SetResult:
    """The result of a set's proof. `why` says the problem with it, or why it could not be proven."""

    of: BackendSet
    status: Literal["right", "wrong", "crashed", "hung", "unavailable"]
    why: str = ""
    step_s: float = 0.0
    calls: int = 0
    products: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s by the sizes "MxNxK"."""

    @property
    def is_right(self) -> bool:
        return self.status == "right"


def sets_of(kind: CardKind, device: str, dtype: str) -> tuple[list[BackendSet], list[BackendSet]]:
    """Return (sets that are always proven, sets that are tried in order if none of the first is right)."""

    def backend_set(title: str, environment: Mapping[str, str] | None = None, **choices: Any) -> BackendSet:
        name = f"{dtype} on {device}, {title}"
        return BackendSet(name, Choices(device=device, dtype=dtype, **choices), environment or {})

    if kind == "cpu":
        plain = backend_set("plain kernels and attention", kernels="torch", attention="eager")
        return [backend_set("own kernels", kernels="native"), backend_set("plain kernels", kernels="torch")], [plain]
    plain_attention = backend_set("plain attention", attention="eager")
    always = [backend_set("defaults"), backend_set("own kernels", kernels="triton")]
    if kind == "cuda":
        return always, [plain_attention]
    return always, [
        backend_set("without hipBLASLt", LEAVE_HIPBLASLT),
        plain_attention,
        backend_set("without hipBLASLt, plain attention", LEAVE_HIPBLASLT, attention="eager"),
    ]


def judge_set(proven: BackendSet, outcome: Outcome, journal: Sequence[Mapping[str, Any]]) -> SetResult:
    """Judge a set by the end of its child and the child's journal. A death is attributed to the running part."""
    if outcome.status == "done":
        result = outcome.result
        if result["wrong"]:
            more = f"; and {len(result['wrong']) - 1} more" if len(result["wrong"]) > 1 else ""
            return SetResult(proven, "wrong", result["wrong"][0] + more, calls=result["calls"])
        return SetResult(proven, "right", "", result["step_s"], result["calls"], result["products"])
    begun = next((entry for entry in reversed(journal) if entry["event"] == "begin"), None)
    where = "its start" if begun is None else f"{begun['part']} of {begun['tokens']} tokens"
    if outcome.status == "hung":
        return SetResult(proven, "hung", f"no answer for {outcome.seconds:.0f} s in {where}")
    if outcome.error is not None and (outcome.error.exit_code != 1 or _is_memory(outcome.error)):
        # No compiler or no memory is no fault of the set.
        return SetResult(proven, "unavailable", outcome.error.message)
    wrong = [
        f"{entry['part']} of {entry['tokens']} tokens: {entry['problem']}" for entry in journal if entry.get("problem")
    ]
    if outcome.error is not None:
        ending = f"{outcome.error.type}: {outcome.error.message.splitlines()[0] if outcome.error.message else ''}"
    elif outcome.signal is not None:
        ending = f"ended by {signal.Signals(outcome.signal).name}"
    else:
        ending = f"ended with exit code {outcome.returncode}"
    return SetResult(proven, "crashed", "; ".join([f"{ending} in {where}", *wrong]))


def fastest(judged: Sequence[SetResult]) -> dict[str, ProvenSet]:
    """Return the best right set by dtype: the first one, unless another is clearly faster."""
    best: dict[str, ProvenSet] = {}
    for result in judged:
        holder = best.get(result.of.dtype)
        if result.is_right and (holder is None or result.step_s * WORTH_IT < holder.step_s):
            # Defaults are left out, so that a run does not insist on a compiler.
            made = result.of.choices.made()
            choices = {name: made[name] for name in ("kernels", "attention") if made.get(name, "native") != "native"}
            best[result.of.dtype] = ProvenSet(result.step_s, choices, result.of.environment)
    return best


def fastest_dtype(best: Mapping[str, ProvenSet]) -> str | None:
    """Return float32, or bfloat16 if its speed is worth the rounding, or None if no precision is right.

    float16 is never chosen: its range is too small for a run without loss scaling.
    """
    half, full = best.get("bfloat16"), best.get("float32")
    if full is None or (half is not None and half.step_s * WORTH_IT < full.step_s):
        return "bfloat16" if half is not None else next(iter(best), None)
    return "float32"


def proof_of(judged: Sequence[SetResult], job: str, now_s: float) -> Proof:
    """Return the proof for the profile."""
    best = fastest(judged)
    rejected = {result.of.name: result.why for result in judged if result.status in ("wrong", "crashed", "hung")}
    return Proof(round(now_s, 3), job, fastest_dtype(best), best, rejected)


def rates_of_products(judged: Sequence[SetResult]) -> dict[str, Mapping[str, float]]:
    """Return dtype -> sizes -> best FLOP/s of a product."""
    rates: dict[str, dict[str, float]] = {}
    for result in judged:
        of_dtype = rates.setdefault(result.of.dtype, {})
        for shape, rate in result.products.items():
            of_dtype[shape] = max(rate, of_dtype.get(shape, 0.0))
    return {dtype: product_rates for dtype, product_rates in rates.items() if product_rates}


def _is_memory(error: ChildError) -> bool:
    texts = ("can't allocate memory", "out of memory")
    return error.type in ("MemoryError", "OutOfMemoryError") or any(word in error.message.lower() for word in texts)


# A fault that occurs once in a thousand calls is met with a probability of 95 %; --soak is for rarer ones.
REPEATED_CALLS = 3000
# START_S allows for torch on a cold disk. The slowest part takes a second or two.
START_S, PART_S = 180.0, 90.0
# Above this share of the free memory an allocation of the child fails, before the machine freezes.
FREE_SHARE = 0.8


# Sizes of micro-batches: a short row, usual rows, and on a card as many as the processor can check in seconds.
CPU_TOKENS, CARD_TOKENS, TOKEN_STEP = (64, 512), (64, 512, 2048), 64


@dataclass(frozen=True)
class ProofJob:
    """The shapes that are proven: fields of a config.json, and the tokens of micro-batches in rising order."""

    name: str
    model: Mapping[str, Any]
    rank: int = 8
    tokens: tuple[int, ...] = (64, 512)

    @property
    def words(self) -> str:
        """The job in words."""
        return f"{self.name}, rank {self.rank}, {' and '.join(map(str, self.tokens))} tokens"


@dataclass(frozen=True)
class ProofLimits:
    """The limits of a proof: calls of each part, `soak_s` more seconds of the winner, silence (`start_s`, `part_s`).

    `memory_bytes` limits a child on the processor. `environment` has further variables of the children (None: removed).
    """

    calls: int = REPEATED_CALLS
    soak_s: float = 0.0
    memory_bytes: int | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    start_s: float = START_S
    part_s: float = PART_S


@dataclass(frozen=True)
class ProvenDevice:
    """The result of one device. `rates_why` says why no rates could be measured, so that nothing was proven.

    `products`: dtype -> sizes -> FLOP/s.
    """

    device: str
    judged: tuple[SetResult, ...]
    proof: Proof | None
    gemm: Mapping[str, float]
    other: Mapping[str, float]
    products: Mapping[str, Mapping[str, float]]
    rates_why: str = ""


Prover = Callable[[object, Path, BackendSet | None], Outcome]
"""Runs the task of a set, or of the rates, to its end in a folder."""


def job_of(config: RunConfig | None, *, on_card: bool) -> ProofJob:
    """Return the shapes of a config's run, by default of a small model that people train on such a device.

    Raise UsageError if the sizes of the config's model are unknown.
    """
    most = CARD_TOKENS if on_card else CPU_TOKENS
    if config is None:
        name = "Qwen/Qwen2.5-0.5B-Instruct" if on_card else "smollm2-135m"
        return ProofJob(name, _fields(name), tokens=most)
    longest = -(-config.max_length // TOKEN_STEP) * TOKEN_STEP
    return ProofJob(
        config.model, _fields(config.model), config.lora.r, tuple(n for n in most if n <= longest) or most[:1]
    )


def prove_machine(
    machine: Machine,
    cards: Sequence[Card],
    config: RunConfig | None,
    *,
    soak_s: float = 0.0,
    environment: Mapping[str, str | None] | None = None,
    disk_bytes_per_s: float | None = None,
    progress: Progress = silent,
) -> tuple[ProvenDevice, ...]:
    """Prove `cards` and the processor, to which recovery falls back, and write the machine's profile.

    Raise UsageError as `job_of` does.
    """
    limits = ProofLimits(
        soak_s=soak_s, environment=environment or {}, memory_bytes=round(FREE_SHARE * machine.available_bytes)
    )
    devices: list[tuple[str, CardKind]] = [(f"cuda:{number}", card.kind) for number, card in enumerate(cards)]
    devices.append(("cpu", "cpu"))
    jobs = {kind: job_of(config, on_card=kind != "cpu") for _, kind in devices}
    proven = tuple(prove_device(device, kind, jobs[kind], limits, progress=progress) for device, kind in devices)
    profile = read_profile(machine.fingerprint)
    if disk_bytes_per_s is not None:
        profile = replace(profile, other_rates={**profile.other_rates, "disk": {"write": disk_bytes_per_s}})
    for proven_device in proven:
        profile = with_proven(profile, proven_device)
    write_profile(profile)
    return proven


def prove_look(
    look: Look, config: RunConfig | None, *, soak_s: float = 0.0, progress: Progress = silent
) -> tuple[ProvenDevice, ...]:
    """Prove the cards that torch is built for, with the variables of a worker but without hidden cards or libraries.

    Raise UsageError as `job_of` does.
    """
    variables = [v for v in advised_variables(look, {}, keep_set=True) if v.name not in visible_cards(look)]
    return prove_machine(
        look.machine,
        [c.card for c in cards_in_question(look) if c.card.kind == look.software.torch.kind],
        config,
        soak_s=soak_s,
        environment={v.name: v.value for v in variables},
        disk_bytes_per_s=look.host.disk.write_bytes_s,
        progress=progress,
    )


def _fields(model: str) -> Mapping[str, Any]:
    """Return the sizes from the config.json of a model that is known by name or prepared."""
    listed = known_model(model)
    if listed is not None:
        return listed
    prepared = None if Path(model).is_dir() else find_prepared(model)
    folder = prepared.folder if prepared else Path(model)
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"the sizes of model {model} are not known yet", hint=f"get it first: hivetune fetch {quoted(model)}"
        )
    config_fields: Mapping[str, Any] = read_json(folder / "config.json")
    return config_fields


def prove_device(
    device: str,
    kind: CardKind,
    job: ProofJob,
    limits: ProofLimits = ProofLimits(),
    *,
    run: Prover | None = None,
    progress: Progress = silent,
) -> ProvenDevice:
    """Prove all precisions that a device multiplies natively. `run` is a `prover`."""
    run = run or prover(kind, limits, progress)
    folder = home() / "doctor" / device.replace(":", "-")
    measured = run(MeasureRates(device), folder / "rates", None)
    if measured.status != "done":
        reason = measured.error.message if measured.error else measured.ending()
        return ProvenDevice(device, (), None, {}, {}, {}, reason)
    gemm = measured.result["gemm"]
    judged: list[SetResult] = []
    for dtype in gemm:
        always, otherwise = sets_of(kind, device, dtype)
        of_dtype = [_prove_set(backend_set, job, folder, limits, run) for backend_set in always]
        while otherwise and not any(result.is_right for result in of_dtype):
            of_dtype.append(_prove_set(otherwise.pop(0), job, folder, limits, run))
        judged += of_dtype
    proof = proof_of(judged, job.words, time.time())
    if limits.soak_s and proof.dtype is not None:
        winner = next(result.of for result in judged if result.is_right and result.of.dtype == proof.dtype)
        soaked = _prove_set(winner, job, folder, limits, run, soak_s=limits.soak_s)
        judged = [soaked if result.of == winner else result for result in judged]
        proof = proof_of(judged, job.words, time.time())
    return ProvenDevice(device, tuple(judged), proof, gemm, measured.result["other"], rates_of_products(judged))


def with_proven(profile: Profile, proven: ProvenDevice) -> Profile:
    """Return the profile with the rates and the proof of a device."""
    if proven.proof is None:
        return profile
    profile = profile.with_rates(proven.device, proven.gemm)
    if proven.proof.best or proven.proof.rejected:  # else nothing could be proven, and an older proof stays
        profile = profile.with_proof(proven.device, proven.proof)
    return replace(profile, other_rates={**profile.other_rates, proven.device: dict(proven.other)})


def prover(kind: CardKind, limits: ProofLimits, progress: Progress = silent, module: str | None = None) -> Prover:
    """Return a prover that starts children. `module` replaces the engine's own in tests."""
    beats = itertools.count(1)

    def run(task: object, folder: Path, of: BackendSet | None) -> Outcome:
        return run_task(
            task,
            folder,
            module=module if of is not None else None,
            limits=FixedLimits(start_s=limits.start_s, item_s=limits.part_s),
            environment={**limits.environment, **(of.environment if of is not None else {})},
            on_beat=lambda _: progress(next(beats), None),
            memory_limit_bytes=limits.memory_bytes if kind == "cpu" else None,
        )

    return run


def _prove_set(
    of: BackendSet, job: ProofJob, folder: Path, limits: ProofLimits, run: Prover, soak_s: float = 0.0
) -> SetResult:
    set_folder = folder / of.name.replace(" ", "-").replace(",", "").replace(":", "-")
    journal = set_folder / "parts.jsonl"
    journal.unlink(missing_ok=True)
    outcome = run(Prove(job.model, job.rank, job.tokens, of.choices, journal, limits.calls, soak_s), set_folder, of)
    return judge_set(of, outcome, list(read_journal(journal)) if journal.exists() else [])
