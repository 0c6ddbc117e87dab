"""The proof that this machine computes right: each set of backends runs in a child, and the best one is kept.

Rates are measured first, because they show which precisions a device multiplies natively. A child that crashes or hangs
is a result too, and the next set is tried. Nothing here imports torch.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, read_json
from hivetune.base.journal import read_journal
from hivetune.config import RunConfig
from hivetune.errors import UsageError
from hivetune.machine.doctor.backends import (
    BackendSet,
    SetResult,
    judge_set,
    proof_of,
    rates_of_products,
    sets_of,
)
from hivetune.machine.doctor.findings import visible_cards
from hivetune.machine.doctor.look import Look
from hivetune.machine.doctor.observe import cards_in_question
from hivetune.machine.doctor.variables import advised_variables
from hivetune.machine.inventory import Card, CardKind, Machine
from hivetune.machine.knowledge.cards import known_model
from hivetune.machine.profile import Profile, Proof, read_profile, write_profile
from hivetune.models.prepared import find_prepared
from hivetune.process.limits import FixedLimits
from hivetune.process.parent import run_task
from hivetune.process.protocol import Beat, MeasureRates, Outcome, Prove
from hivetune.records import Progress, silent

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
        raise UsageError(f"the sizes of model {model} are not known yet", hint=f"get it first: hivetune fetch {model}")
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
    judged = [r for dtype in gemm for r in _prove_dtype(kind, device, dtype, job, folder, limits, run)]
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

    def on_beat(beat: Beat) -> None:
        progress(next(beats), None)

    def run(task: object, folder: Path, of: BackendSet | None) -> Outcome:
        return run_task(
            task,
            folder,
            module=module if of is not None else None,
            limits=FixedLimits(start_s=limits.start_s, item_s=limits.part_s),
            environment={**limits.environment, **(of.environment if of is not None else {})},
            on_beat=on_beat,
            memory_limit_bytes=limits.memory_bytes if kind == "cpu" else None,
        )

    return run


def _prove_dtype(
    kind: CardKind, device: str, dtype: str, job: ProofJob, folder: Path, limits: ProofLimits, run: Prover
) -> list[SetResult]:
    always, otherwise = sets_of(kind, device, dtype)
    judged = [_prove_set(backend_set, job, folder, limits, run) for backend_set in always]
    for backend_set in otherwise:
        if any(result.is_right for result in judged):
            break
        judged.append(_prove_set(backend_set, job, folder, limits, run))
    return judged


def _prove_set(
    of: BackendSet, job: ProofJob, folder: Path, limits: ProofLimits, run: Prover, soak_s: float = 0.0
) -> SetResult:
    set_folder = folder / of.name.replace(" ", "-").replace(",", "").replace(":", "-")
    journal = set_folder / "parts.jsonl"
    journal.unlink(missing_ok=True)
    outcome = run(Prove(job.model, job.rank, job.tokens, of.choices, journal, limits.calls, soak_s), set_folder, of)
    return judge_set(of, outcome, list(read_journal(journal)) if journal.exists() else [])
