"""Which sets of backends a device offers, how the proof of one is judged, and which one wins. Pure.

A set is one way to compute a step: precision, kernels, attention, library of matrix products. The first set is what a
run takes unless it is told otherwise; another one displaces it when that is wrong, or clearly slower.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hivetune.machine.inventory import CardKind
from hivetune.machine.profile import WORTH_IT, Proof, ProvenSet
from hivetune.process.protocol import ChildError, Outcome
from hivetune.run.choices import Choices

# Both are needed: rocBLAS itself prefers hipBLASLt on gfx12 (rocBLAS environment variables, design notes).
LEAVE_HIPBLASLT = {
    "TORCH_BLAS_PREFER_HIPBLASLT": "0",
    "TORCH_BLAS_PREFER_CUBLASLT": "0",
    "ROCBLAS_USE_HIPBLASLT": "0",
}


@dataclass(frozen=True)
class BackendSet:
    """One way to compute. `choices`: over the engine's defaults, the precision included."""

    name: str
    choices: Choices
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return self.choices.dtype or ""


@dataclass(frozen=True)
class Judged:
    """How the proof of a set ended. `why`: what is wrong with it, or why it could not be asked."""

    of: BackendSet
    status: Literal["right", "wrong", "crashed", "hung", "unavailable"]
    why: str = ""
    step_s: float = 0.0
    calls: int = 0
    products: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s by "MxNxK"."""

    @property
    def is_right(self) -> bool:
        return self.status == "right"


def sets_of(kind: CardKind, device: str, dtype: str) -> tuple[list[BackendSet], list[BackendSet]]:
    """(always proven, tried in this order until one is right when none of the first are)."""

    def one(words: str, environment: Mapping[str, str] | None = None, **choices: Any) -> BackendSet:
        name = f"{dtype} on {device}, {words}"
        return BackendSet(name, Choices(device=device, dtype=dtype, **choices), environment or {})

    if kind == "cpu":
        plain = one("plain kernels and attention", kernels="torch", attention="eager")
        return [one("own kernels", kernels="native"), one("plain kernels", kernels="torch")], [plain]
    plain_attention = one("plain attention", attention="eager")
    always = [one("defaults"), one("own kernels", kernels="triton")]
    if kind == "cuda":
        return always, [plain_attention]
    return always, [
        one("without hipBLASLt", LEAVE_HIPBLASLT),
        plain_attention,
        one("without hipBLASLt, plain attention", LEAVE_HIPBLASLT, attention="eager"),
    ]


def judge_set(proven: BackendSet, outcome: Outcome, journal: Sequence[Mapping[str, Any]]) -> Judged:
    """From how the child ended and what it wrote down on the way. A death is put down to the part it was in."""
    if outcome.status == "done":
        result = outcome.result
        if result["wrong"]:
            more = f"; and {len(result['wrong']) - 1} more" if len(result["wrong"]) > 1 else ""
            return Judged(proven, "wrong", result["wrong"][0] + more, calls=result["calls"])
        return Judged(proven, "right", "", result["step_s"], result["calls"], result["products"])
    where = _under_way(journal)
    if outcome.status == "hung":
        return Judged(proven, "hung", f"no answer for {outcome.seconds:.0f} s in {where}")
    if outcome.error is not None and (outcome.error.exit_code != 1 or _is_memory(outcome.error)):
        return Judged(proven, "unavailable", outcome.error.message)  # no compiler, no room: a fact, not a fault
    wrong = [_sentence(entry) for entry in journal if entry.get("problem")]
    if outcome.error is not None:
        ending = f"{outcome.error.type}: {outcome.error.message.splitlines()[0] if outcome.error.message else ''}"
    elif outcome.signal is not None:
        ending = f"ended by {signal.Signals(outcome.signal).name}"
    else:
        ending = f"ended with exit code {outcome.returncode}"
    return Judged(proven, "crashed", "; ".join([f"{ending} in {where}", *wrong]))


def fastest(judged: Sequence[Judged]) -> dict[str, ProvenSet]:
    """By dtype the fastest right set; the first one stands unless another is clearly faster."""
    best: dict[str, Judged] = {}
    for each in judged:
        holder = best.get(each.of.dtype)
        if each.is_right and (holder is None or each.step_s * WORTH_IT < holder.step_s):
            best[each.of.dtype] = each
    return {dtype: _proven(each) for dtype, each in best.items()}


def fastest_dtype(best: Mapping[str, ProvenSet]) -> str | None:
    """float32, unless half precision is worth its rounding; of precisions that computed right. None: none did.

    float16 is for who asks for it: its range is too small for a run without care.
    """
    half, full = best.get("bfloat16"), best.get("float32")
    if full is None or (half is not None and half.step_s * WORTH_IT < full.step_s):
        return "bfloat16" if half is not None else next(iter(best), None)
    return "float32"


def proof_of(judged: Sequence[Judged], job: str, now_s: float) -> Proof:
    """What goes into the profile."""
    best = fastest(judged)
    rejected = {each.of.name: each.why for each in judged if each.status in ("wrong", "crashed", "hung")}
    return Proof(round(now_s, 3), job, fastest_dtype(best), best, rejected)


def rates_of_products(judged: Sequence[Judged]) -> dict[str, Mapping[str, float]]:
    """dtype -> FLOP/s of each product by its sizes, of the sets that were right; the best of each."""
    rates: dict[str, dict[str, float]] = {}
    for each in judged:
        of_dtype = rates.setdefault(each.of.dtype, {})
        for shape, rate in each.products.items():
            of_dtype[shape] = max(rate, of_dtype.get(shape, 0.0))
    return {dtype: found for dtype, found in rates.items() if found}


def _proven(judged: Judged) -> ProvenSet:
    """What a run takes anyway is left out: where a compiler is missing later, it must not insist on it."""
    made = judged.of.choices.made()
    kept = {name: made[name] for name in ("kernels", "attention") if made.get(name, "native") != "native"}
    return ProvenSet(judged.step_s, kept, judged.of.environment)


def _is_memory(error: ChildError) -> bool:
    words = ("can't allocate memory", "out of memory")
    return error.type in ("MemoryError", "OutOfMemoryError") or any(word in error.message.lower() for word in words)


def _under_way(journal: Sequence[Mapping[str, Any]]) -> str:
    begun: Iterator[Mapping[str, Any]] = (entry for entry in reversed(journal) if entry["event"] == "begin")
    entry = next(begun, None)
    return "its start" if entry is None else f"{entry['part']} of {entry['tokens']} tokens"


def _sentence(entry: Mapping[str, Any]) -> str:
    return f"{entry['part']} of {entry['tokens']} tokens: {entry['problem']}"
