"""The catalogue against real error texts: the right class, and the right answer to "may another attempt help?"."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hivetune.machine.facts import catalogue
from hivetune.process.protocol import ChildError, Outcome
from hivetune.train.supervise.diagnose import Evidence, diagnose, evidence_of

CORPUS = yaml.safe_load(Path(__file__).with_name("corpus.yaml").read_text())
EXCEPTION = re.compile(r"^[A-Z]\w+(Error|Exception): ", re.MULTILINE)
HARMLESS = "\n".join(yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text())["harmless"])
TORCH_ADDS = """{0} kernel errors might be asynchronously reported at some other API call.
For debugging consider passing {0}_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_{0}_DSA` to enable device-side assertions.
"""


def found(case: dict[str, Any]) -> tuple[str, bool]:
    facts = {"always", f"signal:{case['signal']}" if "signal" in case else "exit:1"}
    facts |= {"oom"} if case.get("oom") else set()
    if case.get("kernel"):
        evidence = Evidence(kernel=case["text"], facts=frozenset(facts))
    else:
        evidence = Evidence(log=case["text"], facts=frozenset(facts))
    fault = diagnose(evidence).fault
    return fault.id, fault.retry


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case["url"].partition("//")[2])
def test_texts_of_the_field(case: dict[str, Any]) -> None:
    assert found(case) == (case.get("told", case["fault"]), case["retry"])


@pytest.mark.parametrize("api", ["CUDA", "HIP"])
def test_what_torch_adds_to_every_error_of_the_card_changes_nothing(api: str) -> None:
    for case in CORPUS:
        assert found({**case, "text": f"{case['text']}\n{TORCH_ADDS.format(api)}"}) == found(case)


def test_lines_that_mean_nothing_change_nothing_before_an_exception() -> None:
    cases = [case for case in CORPUS if EXCEPTION.search(case["text"])]
    for case in cases:
        assert found({**case, "text": f"{HARMLESS}\nTraceback (most recent call last):\n{case['text']}"}) == found(case)
    assert len(cases) > 150


def test_every_text_has_a_public_source_and_a_known_class() -> None:
    known = {fault.id for fault in catalogue()}
    assert all(case["url"].startswith("https://") and case["fault"] in known for case in CORPUS)
    assert len({case["url"] for case in CORPUS}) == len(CORPUS) >= 60
    assert sum("told" in case for case in CORPUS) <= 3


def outcome(**changes: Any) -> Outcome:
    plain: dict[str, Any] = {"status": "died", "returncode": -changes.pop("signal", -1), "seconds": 1.0, "result": {}}
    return Outcome(**{**plain, "stderr_tail": "", **changes})


def error(kind: str, message: str, exit_code: int = 1) -> ChildError:
    return ChildError(kind, message, "", exit_code, "")


@pytest.mark.parametrize(
    ("ended", "more", "expected"),
    [
        (outcome(signal=9), {}, "killed"),
        (outcome(signal=9), {"oom": True}, "host-out-of-memory"),
        (outcome(signal=9, status="hung", state="T"), {}, "hang"),
        (outcome(signal=9, status="hung", state="D"), {}, "hang"),
        (outcome(signal=9, status="hung", state="S"), {}, "hang"),
        (outcome(signal=9, status="hung", stderr_tail="InterruptSignal::WaitRelaxed"), {}, "hang"),
        (outcome(signal=6), {}, "crashed"),
        (outcome(signal=7), {}, "crashed"),
        (outcome(signal=15), {}, "killed"),
        (outcome(returncode=0), {}, "program-error"),
        (outcome(status="failed", error=error("KeyError", "'x'")), {}, "program-error"),
        (outcome(status="failed", error=error("UsageError", "no", 2)), {}, "refused"),
        (outcome(status="failed", error=error("CanaryFailed", "product 1 x 2 is wrong")), {}, "wrong-numbers"),
        (outcome(status="failed", error=error("StepNotFinite", "step 3")), {}, "not-finite"),
        (outcome(status="failed", error=error("LossDiverged", "up")), {}, "loss-diverged"),
    ],
)
def test_facts(ended: Outcome, more: dict[str, Any], expected: str) -> None:
    assert diagnose(evidence_of(ended, **more)).fault.id == expected


def test_the_errors_own_words_count_more_than_an_older_warning() -> None:
    log = "UserWarning: Cannot allocate memory for the cache, going on without"
    ended = outcome(status="failed", stderr_tail=log, error=error("RuntimeError", "HIP error: invalid device function"))
    assert diagnose(evidence_of(ended)).fault.id == "device-kernels-missing"


def test_a_fall_back_that_was_only_announced_is_no_fault() -> None:
    log = "UserWarning: Attempting to use hipBLASLt on an unsupported architecture! Overriding blas backend to hipblas"
    assert diagnose(evidence_of(outcome(signal=11, stderr_tail=log))).fault.id == "crashed"


def test_the_words_name_cause_quote_and_shape() -> None:
    text = "RuntimeError: HIPBLAS_STATUS_INTERNAL_ERROR when calling hipblasLtMatmul with m 8 n 412 k 896\nmore"
    diagnosis = diagnose(Evidence(log=f"first\n{text}"))
    assert diagnosis.shape == (8, 412, 896)
    assert "m=8, n=412, k=896" in diagnosis.words and "HIPBLAS_STATUS_INTERNAL_ERROR" in diagnosis.words
    assert "more" not in diagnosis.words
