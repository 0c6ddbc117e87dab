"""The sets of backends of a device, the judgement of their proofs, and the choice of the best one. Pure functions.

A set is one way to compute a step: precision, kernels, attention, library of matrix products. A run uses the first set
unless it is wrong or clearly slower than another one.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hivetune.machine.inventory import CardKind
from hivetune.machine.profile import WORTH_IT, Proof, ProvenSet
from hivetune.process.protocol import ChildError, Outcome
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
    where = _under_way(journal)
    if outcome.status == "hung":
        return SetResult(proven, "hung", f"no answer for {outcome.seconds:.0f} s in {where}")
    if outcome.error is not None and (outcome.error.exit_code != 1 or _is_memory(outcome.error)):
        return SetResult(
            proven, "unavailable", outcome.error.message
        )  # no compiler or no memory is no fault of the set
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
    best: dict[str, SetResult] = {}
    for result in judged:
        holder = best.get(result.of.dtype)
        if result.is_right and (holder is None or result.step_s * WORTH_IT < holder.step_s):
            best[result.of.dtype] = result
    return {dtype: _proven(result) for dtype, result in best.items()}


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


def _proven(judged: SetResult) -> ProvenSet:
    """Return the set for the profile, without defaults so that a run does not insist on a compiler."""
    choices = judged.of.choices.made()
    not_default = {name: choices[name] for name in ("kernels", "attention") if choices.get(name, "native") != "native"}
    return ProvenSet(judged.step_s, not_default, judged.of.environment)


def _is_memory(error: ChildError) -> bool:
    texts = ("can't allocate memory", "out of memory")
    return error.type in ("MemoryError", "OutOfMemoryError") or any(word in error.message.lower() for word in texts)


def _under_way(journal: Sequence[Mapping[str, Any]]) -> str:
    begun: Iterator[Mapping[str, Any]] = (entry for entry in reversed(journal) if entry["event"] == "begin")
    entry = next(begun, None)
    return "its start" if entry is None else f"{entry['part']} of {entry['tokens']} tokens"
