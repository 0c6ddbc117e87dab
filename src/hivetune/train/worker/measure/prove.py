"""The proof of one set of backends at a job's shapes: right results, the same each time, and speed. One child a set.

Matrix products of whole numbers must be exact (canary.py). Every other part of a step must be as near to float64 as its
precision allows (parts.py). Each is then repeated, as some faults come once in a thousand calls. A crash or a hang ends
this process; its journal says in which part.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hivetune.base.journal import Journal
from hivetune.models.architecture import Architecture, parse_architecture
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Prove
from hivetune.run.choices import Choices
from hivetune.train.worker.device import complete, start_with
from hivetune.train.worker.measure.canary import Product, cut_outputs, wrong_products
from hivetune.train.worker.measure.parts import A_LAYER, PARTS, Compute, Sizes, make, reference
from hivetune.train.worker.measure.rates import best_s
from hivetune.train.worker.model.fast.computing import Computing, backend_of
from hivetune.train.worker.model.fast.spec import ModelSpec, spec_from_config
from hivetune.train.worker.model.fast.weights.read import RANK_COLUMNS_MULTIPLE
from hivetune.train.worker.model.memory import INNER_BLOCK

# Largest distance from float64, relative to the value and the root mean square of its tensor. Right backends stay below
# a third of it (tests/train/worker/measure/test_prove_backends.py); zeros, NaN and other answers are off by 1 and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
MEMORY_SHARE = 0.9
ROUNDS = 5
# Of one part's repetitions: a slow part is repeated less often, and how often is told.
REPEAT_S = 1.0
# Repetition is about the calls, not about the work: with so many tokens, and so few logits, a call takes 0.1 ms.
REPEATED_TOKENS, REPEATED_VOCABULARY = 8, 2048
Transposed = Literal["nn", "nt", "tn"]
"""Which factor of a product is stored transposed: forward nt, a gradient of the input nn, of a weight tn."""


@dataclass(frozen=True)
class StepPart:
    """A part at one number of tokens, with its right result."""

    name: str
    run: Compute
    truth: tuple[Tensor, ...]

    def problem(self, dtype: torch.dtype) -> str:
        """Compute the part and return the problem with the answer; empty: nothing."""
        results = self.run()
        for number, (tensor, truth) in enumerate(zip(results, self.truth, strict=True)):
            off = distance(tensor, truth)
            if not off <= TOLERANCE[dtype]:  # false for NaN too
                return f"result {number + 1} of {len(results)} is {off:.2g} away from float64"
        _spoil(results)
        return ""


@dataclass
class Proving:
    """The state of a proof. `wrong`: sentences, in the order in which they were found."""

    task: Prove
    architecture: Architecture
    backend: Computing
    journal: Journal
    heartbeat: Heartbeat
    wrong: list[str]
    calls: int = 0

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.task.model)

    def sizes(self, tokens: int) -> Sizes:
        return Sizes(self.spec, self.task.rank, tokens)

    def note(self, name: str, tokens: int, work: Callable[[], str]) -> None:
        """Run one check; journal its begin, and its end with the problem."""
        where = f"{name} of {tokens} tokens"
        self.journal.append("begin", part=name, tokens=tokens)
        self.heartbeat.beat(Beat.ITEM)
        started = time.perf_counter()
        problem = work()
        self.journal.append(
            "end", part=name, tokens=tokens, problem=problem, seconds=round(time.perf_counter() - started, 6)
        )
        if problem:
            self.wrong.append(f"{where}: {problem}")


def main(
    task: Prove,
    heartbeat: Heartbeat,
    *,
    backend_for: Callable[[Choices, torch.device, torch.dtype], tuple[Computing, str]] = backend_of,
) -> dict[str, Any]:
    """Prove the backends of `task`. `backend_for`: tests put broken backends in."""
    settled = complete(task.choices.device or "auto", task.choices.dtype or "auto", task.choices)
    device, dtype = start_with(settled, MEMORY_SHARE)
    heartbeat.beat(Beat.PREPARING)
    backend, kernels = backend_for(settled, device, dtype)
    architecture = parse_architecture(task.model, "the job's model")
    proving = Proving(task, architecture, backend, Journal(task.journal), heartbeat, [])
    for tokens in task.tokens:
        check_products(proving, tokens)
        for part in parts_at(proving, tokens):
            proving.note(part.name, tokens, lambda part=part: part.problem(dtype))  # type: ignore[misc]
    repeat(proving)
    if task.soak_s and not proving.wrong:
        soak(proving)
    step_s, gemm = (0.0, {}) if proving.wrong else time_step(proving)
    return {
        "wrong": proving.wrong,
        "kernels": kernels,
        "calls": proving.calls,
        "step_s": step_s,
        "tokens": task.tokens[-1],
        "products": gemm,
    }


def parts_at(proving: Proving, tokens: int) -> Iterator[StepPart]:
    """Yield each part with its truth; one at a time, as both take memory."""
    sizes, rounded = proving.sizes(tokens), proving.backend.dtype
    for name in PARTS:
        truth = make(name, reference(), sizes, rounded)()
        yield StepPart(name, make(name, proving.backend, sizes, rounded), truth)


def check_products(proving: Proving, tokens: int) -> None:
    """Check the job's products, each laid out as steps lay it out."""
    backend = proving.backend
    for layout, sliced, products in products_of(proving, tokens):

        def problem(layout: Transposed = layout, sliced: bool = sliced, products: Sequence[Product] = products) -> str:
            wrong = wrong_products(
                products,
                dtype=backend.dtype,
                device=backend.device,
                multiply=lambda a, b: backend.multiply(*_laid_out(a, b, layout, sliced=sliced)),
            )
            proving.calls += len(products)
            if not wrong:
                return ""
            (m, n, k), fault = wrong[0].product, wrong[0].what
            return f"m {m} n {n} k {k}: {fault}; {len(wrong)} of {len(products)} products are wrong"

        proving.note(f"product ({layout}{', of a slice' if sliced else ''})", tokens, problem)


def products_of(proving: Proving, tokens: int) -> list[tuple[Transposed, bool, list[Product]]]:
    """Return the products of the linear layers, forward and backward, and of both factors of their adapters, by layout.

    Those of the vocabulary are among them at the smallest size only, where they cost less than a step. The second value
    says that the left factor is columns of a wider buffer, whatever lies in the other columns: so are the adapters' own
    and, with dropout, the base's backward (fast/ops.py).
    """
    architecture, rank = proving.architecture, proving.task.rank
    sizes = {(linear.inputs, linear.outputs) for linear in architecture.linears}
    whole = sizes | ({(architecture.hidden, architecture.vocabulary)} if tokens == proving.task.tokens[0] else set())
    forward = {Product(tokens, cut_outputs(n, k), k) for k, n in whole} | {Product(tokens, rank, k) for k, _ in sizes}
    ups = {Product(tokens, n, rank) for _, n in sizes}
    backward = {Product(tokens, k, cut_outputs(n, k)) for k, n in whole}
    # Other slices read no further than their rows.
    inside = {Product(tokens, k, cut_outputs(n, k)) for k, n in sizes if n % INNER_BLOCK}
    ds = {Product(tokens, rank, n) for _, n in sizes}
    weights = {Product(rank, k, tokens) for k, _ in sizes} | {Product(n, rank, tokens) for _, n in sizes}
    return [
        ("nt", False, sorted(forward)),
        ("nn", False, sorted(backward | ups)),
        ("tn", False, sorted(weights)),
        ("nn", True, sorted(inside | ups)),
        ("nt", True, sorted(ds)),
        ("tn", True, sorted(weights)),
    ]


def repeat(proving: Proving) -> None:
    """Compute every part, a thin product and a square one, again and again: nothing may ever change."""
    task, backend, hidden = proving.task, proving.backend, proving.architecture.hidden
    spec = replace(proving.spec, vocab=min(proving.spec.vocab, REPEATED_VOCABULARY))
    sizes = Sizes(spec, task.rank, REPEATED_TOKENS)
    runs = {name: make(name, backend, sizes, backend.dtype) for name in PARTS}
    for inner in (task.rank, hidden):
        generator = torch.Generator().manual_seed(inner)
        a_TK, b_KN = (
            torch.randint(-1, 2, shape, generator=generator).to(backend.device, backend.dtype)
            for shape in ((REPEATED_TOKENS, inner), (inner, hidden))
        )
        runs[f"product of {inner} channels"] = lambda a=a_TK, b=b_KN: (backend.multiply(a, b),)  # type: ignore[misc]
    for name, run in runs.items():
        proving.note(f"{name}, repeated", REPEATED_TOKENS, lambda run=run: _repeat(proving, run))  # type: ignore[misc]


def soak(proving: Proving) -> None:
    """Compute all parts at all sizes in turn until the time is over."""
    until = time.monotonic() + proving.task.soak_s
    dtype = proving.backend.dtype
    parts = [(tokens, part) for tokens in proving.task.tokens for part in parts_at(proving, tokens)]
    for number in itertools.count():
        for tokens, part in parts:
            if time.monotonic() > until or proving.wrong:
                return
            proving.note(f"{part.name}, round {number}", tokens, lambda part=part: part.problem(dtype))  # type: ignore[misc]
            proving.calls += 1
        check_products(proving, proving.task.tokens[number % len(proving.task.tokens)])


def time_step(proving: Proving) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step of the largest size by its parts, and each product's FLOP/s by its sizes."""
    tokens, backend, architecture = proving.task.tokens[-1], proving.backend, proving.architecture
    sizes, layers = proving.sizes(tokens), architecture.layers
    total_s, gemm = 0.0, {}
    for name in PARTS:
        if name != "copy":
            seconds = best_s(make(name, backend, sizes, backend.dtype), backend.device, ROUNDS)
            total_s += seconds * layers * A_LAYER.get(name, 1 / layers if name == "loss" else 1)
            proving.heartbeat.beat(Beat.ITEM)
    linears = [(linear.inputs, linear.outputs, layers) for linear in architecture.linears]
    for inputs, outputs, count in [*linears, (architecture.hidden, architecture.vocabulary, 1)]:
        rows = tokens if count > 1 else max(1, tokens // 2)
        pairs: tuple[tuple[Transposed, Product], ...] = (
            ("nt", Product(rows, outputs, inputs)),
            ("nn", Product(rows, inputs, outputs)),
        )
        for layout, (m, n, k) in pairs:
            a_MK = torch.ones(m, k, dtype=backend.dtype, device=backend.device)
            laid_a, laid_b = _laid_out(a_MK, torch.ones(k, n, dtype=backend.dtype, device=backend.device), layout)
            seconds = best_s(lambda a=laid_a, b=laid_b: backend.multiply(a, b), backend.device, ROUNDS)  # type: ignore[misc]
            gemm[f"{m}x{n}x{k}"] = 2.0 * m * n * k / seconds
            total_s += seconds * count
        proving.heartbeat.beat(Beat.ITEM)
    return total_s, gemm


def distance(result: Tensor, truth: Tensor) -> float:
    """Return the largest |result - truth| / (|truth| + root mean square of the truth); not finite where one is not."""
    result, truth = result.to("cpu", torch.float64), truth.to(torch.float64)
    scale = truth.abs() + truth.square().mean().sqrt().clamp_min(1e-30)
    return float(((result - truth).abs() / scale).max())


def _repeat(proving: Proving, run: Compute) -> str:
    """Return what differed between calls: they give the same numbers each time, up to rounding of sums in any order.

    They are compared on the device.
    """
    results = run()
    first = [tensor.clone() for tensor in results]
    _spoil(results)
    tolerance = TOLERANCE[proving.backend.dtype]
    allowed = [tolerance * (t.abs() + t.float().square().mean().sqrt().to(t.dtype)) for t in first]
    bad = torch.zeros((), dtype=torch.int64, device=first[0].device)
    until, calls = time.monotonic() + REPEAT_S, 0
    while calls < proving.task.calls and (time.monotonic() < until or calls == 0):
        results = run()
        same = [((now - then).abs() <= most).all() for now, then, most in zip(results, first, allowed, strict=True)]
        bad += ~torch.stack(same).all()
        _spoil(results)
        calls += 1
    proving.calls += calls
    count = int(bad)
    return f"{count} of {calls} calls gave another answer than the first" if count else ""


def _spoil(results: Sequence[Tensor]) -> None:
    """Write NaN over results that were compared.

    Otherwise a kernel that writes nothing would pass with the previous call's result (unslothai/unsloth#11614).
    """
    for tensor in results:
        tensor.fill_(torch.nan)


def _laid_out(a_MK: Tensor, b_KN: Tensor, layout: Transposed, *, sliced: bool = False) -> tuple[Tensor, Tensor]:
    """Return the same factors, with the second ("nt") or the first ("tn") stored transposed.

    `sliced`: the first as columns of a wider buffer that holds NaN everywhere else.
    """
    if layout == "nt":
        b_KN = b_KN.t().contiguous().t()
    if layout == "tn":
        return _columns(a_MK.t(), sliced=sliced).t(), b_KN
    return _columns(a_MK, sliced=sliced), b_KN


def _columns(x_TN: Tensor, *, sliced: bool) -> Tensor:
    if not sliced:
        return x_TN.contiguous()
    rows, columns = x_TN.shape
    wider = x_TN.new_full((rows, columns + RANK_COLUMNS_MULTIPLE), torch.nan)
    wider[:, :columns] = x_TN
    return wider[:, :columns]


if __name__ == "__main__":
    run_child(main, Prove)
