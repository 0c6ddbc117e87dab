"""What a proof is judged by: which sets are tried, what a death means, and which right set wins. No child, no torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import parse_config
from hivetune.errors import UsageError
from hivetune.machine.doctor import prove
from hivetune.machine.doctor.findings import Judgement
from hivetune.machine.doctor.prove import (
    LEAVE_HIPBLASLT,
    BackendSet,
    ProofJob,
    ProofLimits,
    SetResult,
    fastest,
    fastest_dtype,
    judge_set,
    proof_of,
    prove_device,
    rates_of_products,
    sets_of,
    with_proven,
)
from hivetune.machine.doctor.report import proof_as_text, proof_document, with_proof
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import Profile, ProvenSet, read_profile, write_profile
from hivetune.process.protocol import ChildError, MeasureRates, Outcome, Prove
from hivetune.run.choices import Choices

JOB = ProofJob("tiny", {"model_type": "llama"})
BEGUN = [
    {"event": "begin", "part": "norm", "tokens": 64},
    {"event": "end", "part": "norm", "tokens": 64, "problem": ""},
    {"event": "begin", "part": "attention", "tokens": 512},
]


def named(name: str, dtype: str = "float32", **choices: Any) -> BackendSet:
    return BackendSet(name, Choices(dtype=dtype, **choices))


def right(name: str, step_s: float, dtype: str = "float32", **choices: Any) -> SetResult:
    return SetResult(named(name, dtype, **choices), "right", step_s=step_s, products={f"{name}": 1 / step_s})


def ended(**changes: Any) -> Outcome:
    return replace(Outcome("died", 1, None, 90.0, {}, ""), **changes)


def done(wrong: list[str], step_s: float = 1.0) -> Outcome:
    return Outcome("done", 0, None, 1.0, {"wrong": wrong, "step_s": step_s, "calls": 7, "products": {}}, "")


@pytest.mark.parametrize(
    ("outcome", "status", "why"),
    [
        (done([]), "right", ""),
        (done(["norm of 64 tokens: off"]), "wrong", "norm of 64 tokens: off"),
        (done(["first", "second", "third"]), "wrong", "first; and 2 more"),
        (ended(signal=11), "crashed", "ended by SIGSEGV in attention of 512 tokens"),
        (ended(signal=6), "crashed", "ended by SIGABRT in attention of 512 tokens"),
        (ended(returncode=3), "crashed", "ended with exit code 3 in attention of 512 tokens"),
        (ended(status="hung"), "hung", "no answer for 90 s in attention of 512 tokens"),
        (
            ended(status="failed", error=ChildError("RuntimeError", "HIP error: illegal\nmore", "", 1, "")),
            "crashed",
            "RuntimeError: HIP error: illegal in attention of 512 tokens",
        ),
        (
            ended(status="failed", error=ChildError("MachineNotFit", "cannot build the kernels", "", 4, "")),
            "unavailable",
            "cannot build the kernels",
        ),
        (
            ended(status="failed", error=ChildError("RuntimeError", "can't allocate memory: 9 bytes", "", 1, "")),
            "unavailable",
            "can't allocate memory: 9 bytes",
        ),
    ],
)  # fmt: skip
def test_how_a_child_ended_is_the_answer(outcome: Outcome, status: str, why: str) -> None:
    judged = judge_set(named("one"), outcome, BEGUN)
    assert (judged.status, judged.why) == (status, why)


def test_what_was_wrong_before_a_crash_is_told_too() -> None:
    journal = [{"event": "end", "part": "loss", "tokens": 64, "problem": "off"}, *BEGUN]
    judged = judge_set(named("one"), ended(signal=11), journal)
    assert judged.why == "ended by SIGSEGV in attention of 512 tokens; loss of 64 tokens: off"


def test_a_child_that_died_while_it_was_loading() -> None:
    assert judge_set(named("one"), ended(signal=4), []).why == "ended by SIGILL in its start"


def test_the_first_set_stands_unless_another_is_clearly_faster() -> None:
    first, plain = right("own", 1.0), right("plain", 0.9, kernels="torch")
    assert fastest([first, plain])["float32"] == ProvenSet(1.0)
    plain = right("plain", 0.7, kernels="torch")
    assert fastest([first, plain])["float32"] == ProvenSet(0.7, {"kernels": "torch"})


def test_a_set_that_is_not_right_never_wins() -> None:
    wrong = SetResult(named("own"), "wrong", "off", step_s=0.1)
    assert fastest([wrong, right("plain", 5.0, kernels="torch")])["float32"].choices == {"kernels": "torch"}
    assert fastest([wrong]) == {}


@pytest.mark.parametrize(
    ("best", "dtype"),
    [
        ({"float32": 1.0, "bfloat16": 0.5}, "bfloat16"),
        ({"float32": 1.0, "bfloat16": 0.9}, "float32"),  # not worth its rounding
        ({"float32": 1.0, "float16": 0.1}, "float32"),
        ({"bfloat16": 3.0, "float16": 1.0}, "bfloat16"),
        ({"float16": 1.0}, "float16"),
        ({}, None),
    ],
)
def test_the_fastest_precision_that_is_worth_its_rounding(best: dict[str, float], dtype: str | None) -> None:
    assert fastest_dtype({name: ProvenSet(seconds) for name, seconds in best.items()}) == dtype


def test_rates_of_products_are_the_best_of_right_sets() -> None:
    slow, fast = (SetResult(named("x"), "right", products={"1x2x3": rate}) for rate in (1.0, 4.0))
    assert rates_of_products([slow, fast]) == {"float32": {"1x2x3": 4.0}}


def test_every_device_has_a_last_resort() -> None:
    for kind in ("cpu", "cuda", "rocm"):
        always, otherwise = sets_of(kind, "cuda:0", "bfloat16")  # type: ignore[arg-type]
        names = [each.name for each in (*always, *otherwise)]
        assert len(set(names)) == len(names) and otherwise[-1].choices.attention == "eager"
        assert {each.dtype for each in (*always, *otherwise)} == {"bfloat16"}
    amd = sets_of("rocm", "cuda:0", "bfloat16")[1]
    assert amd[0].environment == LEAVE_HIPBLASLT and amd[0].choices.attention is None


class Children:
    """Answers instead of children: `broken` says which sets fail, and how."""

    def __init__(self, gemm: dict[str, float], broken: dict[str, Outcome] | None = None):
        self.gemm, self.broken, self.asked = gemm, broken or {}, []

    def __call__(self, task: object, folder: Path, of: BackendSet | None) -> Outcome:
        if isinstance(task, MeasureRates):
            return Outcome("done", 0, None, 1.0, {"gemm": self.gemm, "other": {"bandwidth": 2e10}}, "")
        assert isinstance(task, Prove) and of is not None
        words = of.name.rpartition(", ")[2] if "hipBLASLt" not in of.name else of.name.partition(", ")[2]
        self.asked.append((of.dtype, words, task.soak_s))
        step_s = 0.4 if of.dtype == "bfloat16" else 1.0
        return self.broken.get(words, done([], step_s))


def test_an_amd_card_leaves_hipblaslt_only_where_it_has_to() -> None:
    healthy = Children({"float32": 1e13, "bfloat16": 1e14})
    proven = prove_device("cuda:0", "rocm", JOB, run=healthy)
    sets = ("defaults", "own kernels")
    assert healthy.asked == [(dtype, words, 0.0) for dtype in ("float32", "bfloat16") for words in sets]
    assert proven.proof is not None and proven.proof.dtype == "bfloat16" and not proven.proof.rejected

    faulty = Children({"bfloat16": 1e14}, {words: ended(signal=6) for words in sets})
    proven = prove_device("cuda:0", "rocm", JOB, run=faulty)
    assert [words for _, words, _ in faulty.asked] == [*sets, "without hipBLASLt"]
    assert proven.proof is not None
    assert proven.proof.best["bfloat16"] == ProvenSet(0.4, {}, LEAVE_HIPBLASLT)
    assert list(proven.proof.rejected) == [f"bfloat16 on cuda:0, {words}" for words in sets]


def test_a_device_on_which_nothing_is_right() -> None:
    broken = {words: done(["zeros"]) for words in ("own kernels", "plain kernels", "plain kernels and attention")}
    proven = prove_device("cpu", "cpu", JOB, run=Children({"float32": 1e11}, broken))
    assert proven.proof is not None and proven.proof.dtype is None and len(proven.proof.rejected) == 3


def test_a_device_that_can_not_even_be_measured() -> None:
    error = ChildError("MachineNotFit", "device cuda:0: no kernel image", "", 4, "")
    proven = prove_device("cuda:0", "rocm", JOB, run=lambda *_: ended(status="failed", error=error))
    assert proven.proof is None and proven.rates_why == "device cuda:0: no kernel image"
    assert with_proven(Profile("f"), proven) == Profile("f")


def test_the_soak_is_for_the_winner_alone_and_can_unseat_it() -> None:
    children = Children({"float32": 1e11, "bfloat16": 3e11})
    prove_device("cpu", "cpu", JOB, ProofLimits(soak_s=60.0), run=children)
    assert [asked for asked in children.asked if asked[2]] == [("bfloat16", "own kernels", 60.0)]

    class Tired(Children):
        def __call__(self, task: object, folder: Path, of: BackendSet | None) -> Outcome:
            answer = super().__call__(task, folder, of)
            return done(["gate, round 71 of 64 tokens: off"]) if isinstance(task, Prove) and task.soak_s else answer

    proven = prove_device("cpu", "cpu", JOB, ProofLimits(soak_s=60.0), run=Tired({"float32": 1e11}))
    assert proven.proof is not None and proven.proof.best["float32"].choices == {"kernels": "torch"}
    assert proven.proof.rejected == {"float32 on cpu, own kernels": "gate, round 71 of 64 tokens: off"}


def test_the_profile_keeps_what_was_proven() -> None:
    broken = {"own kernels": done(["zeros"]), "plain kernels": done(["zeros"])}
    proven = prove_device("cpu", "cpu", JOB, run=Children({"float32": 1e11, "bfloat16": 3e11}, broken))
    write_profile(with_proven(Profile("abc"), proven))
    profile = read_profile("abc")
    assert profile.proof("cpu") == proven.proof and profile.proof("cuda:0") is None
    assert profile.other_rates["cpu"] == {"bandwidth": 2e10} and profile.decided("dtypes", "cpu") == "bfloat16"


def test_a_precision_in_which_nothing_was_right_is_not_reckoned_with() -> None:
    profile = Profile("abc").with_rates("cpu", {"float32": 1e11, "bfloat16": 9e11})
    assert profile.right_rates("cpu") == profile.rates["cpu"]
    profile = profile.with_proof("cpu", proof_of([right("own", 1.0)], "job", 0.0))
    assert profile.right_rates("cpu") == {"float32": 1e11}
    assert profile.right_rates("cuda:0") is None


def test_a_proof_of_another_version_is_none() -> None:
    assert Profile("abc", proofs={"cpu": {"unheard": 1}}).proof("cpu") is None


def test_the_machine_is_proven_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the config's sizes to the profile, the findings and the lines of the report; answers instead of children."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = parse_config({"model": str(tmp_path), "data": {"path": "none"}, "max_length": 256, "lora": {"r": 4}})
    broken = {"own kernels": ended(signal=11)}
    monkeypatch.setattr(prove, "prover", lambda *_: Children({"float32": 1e11, "bfloat16": 3e11}, broken))
    machine = read_machine()
    proven = prove.prove_machine(machine, [], config, disk_bytes_per_s=1e9)
    profile = read_profile(machine.fingerprint)
    assert profile.other_rates["disk"] == {"write": 1e9}
    proof = profile.proof("cpu")
    assert proof is not None and proof.dtype == "bfloat16" and proof.job.endswith("rank 4, 64 tokens")

    judgement = with_proof(Judgement((), ()), proven)
    assert judgement.fit and {one.severity for one in judgement.findings} == {"note"}
    assert judgement.findings[0].title == "float32 on cpu, own kernels ends the process"
    text = proof_as_text(proven)
    assert "own kernels: crashed, ended by SIGSEGV in its start" in text and "cpu: bfloat16 (kernels torch)" in text
    (document,) = proof_document(proven)
    assert [one["status"] for one in document["sets"]] == ["crashed", "right"] * 2


def test_training_is_refused_where_nothing_computes_right(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("own kernels", "plain kernels", "plain kernels and attention")
    children = Children({"float32": 1e11}, {one: done(["zeros"]) for one in words})
    monkeypatch.setattr(prove, "prover", lambda *_: children)
    judgement = with_proof(Judgement((), ()), prove.prove_machine(read_machine(), [], None))
    assert not judgement.fit and judgement.findings[0].title == "no device of this machine computes right"


def test_what_could_not_be_asked_is_not_known_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ChildError("MemoryError", "no room", "", 1, "")
    no_room = ended(status="failed", error=error)
    words = ("own kernels", "plain kernels", "plain kernels and attention")
    monkeypatch.setattr(prove, "prover", lambda *_: Children({"float32": 1e11}, dict.fromkeys(words, no_room)))
    judgement = with_proof(Judgement((), ()), prove.prove_machine(read_machine(), [], None))
    assert judgement.fit and len(judgement.not_known) == 3


def test_a_model_whose_sizes_are_not_known() -> None:
    config = parse_config({"model": "some/unheard-of", "data": {"path": "none"}})
    with pytest.raises(UsageError, match="sizes of model some/unheard-of are not known"):
        prove.job_of(config, on_card=False)
