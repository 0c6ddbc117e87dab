"""Scripted cards: every solvable case is brought to its end with the right diagnosis, the unsolvable ones stop."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripted import BLAS, CARD, GPU_FAULT, HOST, events, make_run, supervise

from hivetune.errors import RecoveryExhausted
from hivetune.train.plan.steps import read_plan

pytestmark = pytest.mark.slow  # processes are started, stopped and killed

MOST_RESTARTS = 6


@dataclass(frozen=True)
class Case:
    """A script, and what must come of it."""

    name: str
    faults: list[dict[str, Any]]
    diagnosis: str
    rungs: tuple[str, ...] = ()
    device: str = "cpu"
    rows: list[int] = field(default_factory=list)


SOLVABLE = [
    Case("nothing", [], ""),
    Case("killed once", [{"do": "kill", "step": 7, "times": 1}], "killed"),
    Case("killed at scattered steps", [{"do": "kill", "step": s, "times": 1} for s in (3, 9, 15, 20)], "killed"),
    Case("segfault of a row", [{"do": "segv", "row": 41}], "crashed", rows=[41]),
    Case("segfault of two rows", [{"do": "segv", "row": 41}, {"do": "segv", "row": 7}], "crashed", rows=[7, 41]),
    Case("segfault of our kernels", [{"do": "segv", "step": 9, "rung": {"path": "general"}}], "crashed", ("general",)),
    Case(
        "GPU fault with one backend",
        [{"do": GPU_FAULT, "step": 11, "rung": {"ROCBLAS_USE_HIPBLASLT": "0"}}],
        "device-memory-fault",
        ("blas",),
        "cuda",
    ),
    Case("GPU fault of a row", [{"do": GPU_FAULT, "row": 50}], "device-memory-fault", device="cuda", rows=[50]),
    Case(
        "a GEMM shape that fails in the matrix library",
        [{"do": "raise", "text": BLAS, "step": 6, "rung": {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}}],
        "blas-failed",
        ("blas",),
        "cuda",
    ),
    Case(
        "a card that can't do it",
        [{"do": GPU_FAULT, "step": 2, "rung": {"device": "cpu"}}],
        "device-memory-fault",
        ("cpu",),
        "cuda",
    ),
    Case(
        "out of memory above n tokens",
        [{"do": "out of memory", "tokens_above": 20}],
        "device-out-of-memory",
        ("small",),
        "cuda",
    ),
    Case("hang by SIGSTOP", [{"do": "freeze", "step": 12, "times": 1}], "hang"),
    Case("hang that holds the GIL", [{"do": "hold the GIL", "step": 12, "times": 1}], "hang"),
    Case("hang of a row", [{"do": "hold the GIL", "row": 41}], "hang", rows=[41]),
    Case("NaN in one precision", [{"do": "nan", "step": 8, "rung": {"dtype": "float32"}}], "not-finite", ("float32",)),
    Case("NaN once", [{"do": "nan", "step": 8, "times": 1}], "not-finite"),
    Case("killed while loading", [{"do": "kill", "step": -1, "times": 2}], "killed"),
    Case(
        "a compiler that gives up",
        [
            {
                "do": "LLVM ERROR: Cannot select: intrinsic %llvm.amdgcn.fdot2.bf16",
                "step": -1,
                "rung": {"dtype": "float32"},
            }
        ],
        "compiler-abort",
        ("float32",),
        "cuda",
    ),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state in which a run without faults ends."""
    folder = tmp_path_factory.mktemp("clean")
    return str(supervise(folder, make_run(folder, [])).check().result["state"])


@pytest.mark.parametrize("case", SOLVABLE, ids=lambda case: case.name)
def test_solvable(tmp_path: Path, case: Case, undisturbed: str) -> None:
    config = make_run(tmp_path, case.faults, device=case.device)
    outcome = supervise(tmp_path, config, CARD if case.device == "cuda" else HOST).check()
    assert outcome.status == "done"
    assert outcome.restarts <= MOST_RESTARTS
    assert set(outcome.faults) == ({case.diagnosis} if case.diagnosis else set())
    assert outcome.rungs == case.rungs
    quarantined = [entry["row"] for entry in events(tmp_path, "quarantined")]
    assert sorted(quarantined) == case.rows
    assert all(entry["source"] == f"rows.jsonl:{entry['row'] + 1}" for entry in events(tmp_path, "quarantined"))
    plan = read_plan(tmp_path / "run")
    assert len(plan.rows_reached()[1]) == len(case.rows)
    if not case.rows and not case.rungs:  # what changed nothing of the arithmetic ends in the same state
        assert outcome.result["state"] == undisturbed


UNSOLVABLE = [
    Case("always at one step", [{"do": "kill", "step": 0}], "killed"),
    Case("always while loading", [{"do": GPU_FAULT, "step": -1}], "device-memory-fault", device="cuda"),
    Case("never enough memory", [{"do": "out of memory", "step": 0}], "device-out-of-memory", device="cuda"),
    Case(
        "no kernels for the card",
        [{"do": "rocBLAS error: Cannot read /x/TensileLibrary.dat: Illegal seek for GPU arch : gfx906", "step": -1}],
        "device-kernels-missing",
        device="cuda",
    ),
]


@pytest.mark.parametrize("case", UNSOLVABLE, ids=lambda case: case.name)
def test_unsolvable(tmp_path: Path, case: Case) -> None:
    config = make_run(tmp_path, case.faults, device=case.device)
    outcome = supervise(tmp_path, config, CARD if case.device == "cuda" else HOST)
    assert (outcome.status, set(outcome.faults)) == ("failed", {case.diagnosis})
    assert outcome.restarts <= 5  # never more than `attempts` without progress
    with pytest.raises(RecoveryExhausted, match="no adapter") as caught:
        outcome.check()
    assert caught.value.exit_code == 7 and "hivetune train" in caught.value.hint


def test_the_next_run_starts_where_this_one_learned(tmp_path: Path) -> None:
    faults = [{"do": GPU_FAULT, "step": 11, "rung": {"ROCBLAS_USE_HIPBLASLT": "0"}}]
    for name, restarts in (("first", 2), ("second", 0)):
        config = make_run(tmp_path / name, faults, device="cuda")
        outcome = supervise(tmp_path / name, config, CARD)
        assert (outcome.status, outcome.restarts, outcome.rungs) == ("done", restarts, ("blas",))


def test_the_words_name_cause_line_and_shape(tmp_path: Path) -> None:
    config = make_run(tmp_path, [{"do": "raise", "text": BLAS, "step": 6, "times": 1}], device="cuda")
    supervise(tmp_path, config, CARD)
    failure = events(tmp_path, "failure")[0]
    assert failure["shape"] == [8, 412, 896] and failure["step"] == 6
    assert "matrix library failed" in failure["words"] and "HIPBLAS_STATUS_INTERNAL_ERROR" in failure["words"]
