"""Proof of backends: what is right passes; zeros above n rows, NaN once in a thousand calls, a crash and a hang each
end with that set rejected and another one chosen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from train.worker.measure import faulty_backend
from train.worker.over_read import AmxProducts

from hivetune.base.journal import read_journal
from hivetune.machine.doctor.prove import ProofJob, ProofLimits, ProvenDevice, prove_device, prover
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import MeasureRates, Outcome, Prove
from hivetune.run.choices import Choices
from hivetune.train.worker.measure import prove, rates
from hivetune.train.worker.measure.parts import PARTS, Sizes, make, reference
from hivetune.train.worker.model.fast.computing import Computing, backend_of
from hivetune.train.worker.model.fast.ops import TorchOps
from hivetune.train.worker.model.fast.spec import spec_from_config
from hivetune.train.worker.model.products import by_torch_anew

CPU = torch.device("cpu")
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
GEMMA = {**MODEL, "model_type": "gemma2", "head_dim": 12, "sliding_window": 16}
JOB = ProofJob("tiny", MODEL, rank=4, tokens=(32, 128))


def task(folder: Path, *, calls: int = 1200, soak_s: float = 0.0, model: dict = MODEL, **choices: object) -> Prove:
    chosen = Choices(device="cpu", threads=1, **{"dtype": "float32", "kernels": "torch", **choices})  # type: ignore[arg-type]
    return Prove(model, JOB.rank, JOB.tokens, chosen, folder / "parts.jsonl", calls, soak_s)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("model", [MODEL, GEMMA], ids=["llama", "gemma2"])
def test_right_backends_pass(tmp_path: Path, dtype: str, kernels: str, model: dict) -> None:
    told = prove.main(task(tmp_path, calls=5, model=model, dtype=dtype, kernels=kernels), Heartbeat(None))
    assert told["wrong"] == [] and told["kernels"] == kernels
    assert told["step_s"] > 0 and told["products"]["128x80x48"] > 0
    done = {entry["part"] for entry in read_journal(tmp_path / "parts.jsonl") if entry["event"] == "end"}
    assert {*PARTS, "product (nt)", "product (nn)", "product (tn)"} <= done


@pytest.mark.parametrize("part", sorted(PARTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_parts_are_far_inside_their_tolerance(part: str, dtype: torch.dtype) -> None:
    """A tolerance that right arithmetic nearly reaches would invent faults."""
    backend, _ = backend_of(Choices(kernels="torch"), CPU, dtype)
    sizes = Sizes(spec_from_config(MODEL), 4, 64)
    truth = make(part, reference(), sizes, dtype)()
    off = max(map(prove.distance, make(part, backend, sizes, dtype)(), truth))
    assert off < prove.TOLERANCE[dtype] / 3


@pytest.mark.parametrize("part", sorted(PARTS))
def test_one_number_off_in_any_part_is_seen(part: str) -> None:
    sizes = Sizes(spec_from_config(MODEL), 4, 64)
    truth = make(part, reference(), sizes, torch.float32)()
    right, _ = backend_of(Choices(kernels="torch"), CPU, torch.float32)
    run = make(part, right, sizes, torch.float32)
    for number in range(len(truth)):

        def broken(number: int = number) -> tuple[Tensor, ...]:
            found = [tensor.clone() for tensor in run()]
            found[number].view(-1)[-1] += 3.0
            return tuple(found)

        assert "away from float64" in prove.StepPart(part, broken, truth).problem(torch.float32)


def with_fault(**parts: object) -> Callable[..., tuple[Computing, str]]:
    """Plain float32 with one thing replaced."""
    right, name = backend_of(Choices(kernels="torch"), CPU, torch.float32)
    return lambda *_: (replace(right, **parts), name)


@pytest.mark.parametrize(("multiply", "wrong"), [(torch.mm, True), (by_torch_anew, False)])
def test_products_that_read_beside_a_slice_are_asked(tmp_path: Path, multiply: object, wrong: bool) -> None:
    """As on a processor with AMX: torch's own product fails beside NaN, the engine's does not."""
    right, name = backend_of(Choices(kernels="torch"), CPU, torch.bfloat16)
    backend = replace(right, multiply=multiply)  # type: ignore[arg-type]
    job = task(tmp_path, calls=2, dtype="bfloat16")
    with AmxProducts():
        told = prove.main(job, Heartbeat(None), backend_for=lambda *_: (backend, name))
    assert bool(told["wrong"]) == wrong
    assert all("of a slice" in problem and "not finite" in problem for problem in told["wrong"])


def test_zeros_above_some_rows_are_seen(tmp_path: Path) -> None:
    backend_for = with_fault(multiply=faulty_backend.zeros_above)
    told = prove.main(task(tmp_path, calls=2), Heartbeat(None), backend_for=backend_for)
    assert told["wrong"][0].startswith("product (nt) of 128 tokens: m 128") and told["step_s"] == 0.0
    assert "28 of 128 rows are wrong" in told["wrong"][0]


def test_zeros_above_some_rows_of_a_norm_are_seen(tmp_path: Path) -> None:
    told = prove.main(task(tmp_path, calls=2), Heartbeat(None), backend_for=with_fault(ops=faulty_backend.Zeros()))
    assert [line.partition(":")[0] for line in told["wrong"]] == ["norm of 128 tokens"]


def test_not_a_number_once_in_a_thousand_calls_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "PARTS", {})  # the products alone
    backend_for = with_fault(multiply=faulty_backend.nan_once(1000))
    told = prove.main(task(tmp_path), Heartbeat(None), backend_for=backend_for)
    assert any("1 of 1200 calls gave another answer" in line for line in told["wrong"])


def test_a_kernel_that_succeeds_and_writes_nothing_is_seen(tmp_path: Path) -> None:
    """The right answer of the call before lies in its buffer (unslothai/unsloth#11614)."""

    class Silent(TorchOps):
        calls = 0

        def glu(self, gate_up_TF: Tensor, h_TF: Tensor, activation: str) -> None:
            Silent.calls += 1
            if Silent.calls % 7:
                super().glu(gate_up_TF, h_TF, activation)

    told = prove.main(task(tmp_path, calls=20), Heartbeat(None), backend_for=with_fault(ops=Silent()))
    assert any(line.startswith("gate, repeated of 8 tokens") for line in told["wrong"])


def test_a_soak_finds_what_is_rarer(tmp_path: Path) -> None:
    """Found by the soak alone: the calls before it are too few."""

    class Rare(TorchOps):
        calls = 0

        def glu(self, gate_up_TF: Tensor, h_TF: Tensor, activation: str) -> None:
            super().glu(gate_up_TF, h_TF, activation)
            Rare.calls += 1
            if Rare.calls == 60:
                h_TF[0, 0] = torch.inf

    told = prove.main(task(tmp_path, calls=5, soak_s=60.0), Heartbeat(None), backend_for=with_fault(ops=Rare()))
    assert len(told["wrong"]) == 1 and told["wrong"][0].startswith("gate, round ")


def in_children(fault: str, monkeypatch: pytest.MonkeyPatch, **limits: float) -> ProvenDevice:
    """The device as the doctor proves it, with float32 alone. The first set is broken, in a child."""
    monkeypatch.setenv(faulty_backend.FAULT, fault)
    bounds = ProofLimits(calls=5, **limits)  # type: ignore[arg-type]
    child = prover("cpu", bounds, module=faulty_backend.__file__)

    def run(task: object, folder: Path, of: object) -> Outcome:
        if isinstance(task, MeasureRates):
            told = {"gemm": {"float32": 1e11}, "other": {}}
            return Outcome("done", 0, None, 0.0, told, "")
        if "own kernels" not in of.name:  # type: ignore[attr-defined]
            return Outcome("done", 0, None, 0.0, {"wrong": [], "step_s": 1.0, "calls": 1, "products": {}}, "")
        return child(task, folder, of)  # type: ignore[arg-type]

    return prove_device("cpu", "cpu", JOB, bounds, run=run)


@pytest.mark.slow
def test_a_backend_that_crashes_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    proven = in_children("crash", monkeypatch)
    assert [each.status for each in proven.judged] == ["crashed", "right"]
    assert proven.judged[0].why == "ended by SIGSEGV in product (nt) of 128 tokens"
    assert proven.proof is not None and proven.proof.best["float32"].choices == {"kernels": "torch"}
    assert proven.proof.rejected == {"float32 on cpu, own kernels": proven.judged[0].why}


@pytest.mark.slow
def test_a_backend_that_hangs_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    proven = in_children("hang", monkeypatch, part_s=2.0)
    assert [each.status for each in proven.judged] == ["hung", "right"]
    assert "product (nt) of 32 tokens" in proven.judged[0].why
    assert proven.proof is not None and proven.proof.dtype == "float32"


def test_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates.CANARY_SHAPE, "cpu", (128, 128, 128))
    monkeypatch.setitem(rates.COPY_BYTES, "cpu", 1 << 20)
    told = rates.main(MeasureRates("cpu"), Heartbeat(None))
    assert told["gemm"]["float32"] > 1e8
    assert 1e7 < told["other"]["bandwidth"] < 1e13 and 1e-8 < told["other"]["launch_s"] < 1e-2
