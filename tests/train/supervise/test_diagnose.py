"""The catalogue against real error texts: the right class, and the right answer to "may another attempt help?".

corpus.yaml has reports of the field, phrases.yaml lines of the kernel and logs of several messages.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hivetune.machine.facts import catalogue
from hivetune.process.protocol import ChildError, Outcome
from hivetune.train.supervise.diagnose import Evidence, diagnose, evidence_of

CORPUS, PHRASES = (
    yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text()) for name in ("corpus", "phrases")
)
EXCEPTION = re.compile(r"^[A-Z]\w+(Error|Exception): ", re.MULTILINE)
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 3, in main\n'
TORCH_ADDS = """{0} kernel errors might be asynchronously reported at some other API call.
For debugging consider passing {0}_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_{0}_DSA` to enable device-side assertions.
"""


def told(log: str = "", kernel: str = "", *facts: str) -> str:
    return diagnose(Evidence(log=log, kernel=kernel, facts=frozenset(facts or ("always", "exit:1")))).fault.id


def found(case: dict[str, Any]) -> tuple[str, bool]:
    facts = {"always", f"signal:{case['signal']}" if "signal" in case else "exit:1"}
    facts |= {"oom"} if case.get("oom") else set()
    place = "kernel" if case.get("kernel") else "log"
    fault = diagnose(Evidence(**{place: case["text"]}, facts=frozenset(facts))).fault
    return fault.id, fault.retry


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case["url"].partition("//")[2])
def test_texts_of_the_field(case: dict[str, Any]) -> None:
    assert found(case) == (case.get("told", case["fault"]), case["retry"])


@pytest.mark.parametrize("api", ["CUDA", "HIP"])
def test_what_torch_adds_to_every_error_of_the_card_changes_nothing(api: str) -> None:
    for case in CORPUS:
        assert found({**case, "text": f"{case['text']}\n{TORCH_ADDS.format(api)}"}) == found(case)


def test_lines_that_mean_nothing_change_nothing_before_an_exception() -> None:
    before = "\n".join(PHRASES["harmless"]) + "\nTraceback (most recent call last):\n"
    cases = [case for case in CORPUS if EXCEPTION.search(case["text"])]
    for case in cases:
        assert found({**case, "text": before + case["text"]}) == found(case)
    assert len(cases) > 150


@pytest.mark.parametrize("line", PHRASES["harmless"])
def test_a_harmless_line_changes_nothing(line: str) -> None:
    log = f"starting\n{line}\nmore\n"
    assert told(log, "", "always", "signal:SIGSEGV") == "crashed"
    assert told(log, "", "always", "hung") == "hang"
    assert told(f"{log}{TRACEBACK}ValueError: the config is odd") == "program-error"
    ours = Evidence("RuntimeError: a reason", log, facts=frozenset({"always", "exit:1", "type:RuntimeError"}))
    assert diagnose(ours).fault.id == "program-error"


def test_every_text_has_a_public_source_and_a_known_class() -> None:
    known = {fault.id for fault in catalogue()}
    assert all(case["url"].startswith("https://") and case["fault"] in known for case in CORPUS)
    assert len({case["url"] for case in CORPUS}) == len(CORPUS) >= 60
    assert sum("told" in case for case in CORPUS) <= 3


@pytest.mark.parametrize(("fault", "line"), [(f, line) for f, lines in PHRASES["kernel"].items() for line in lines])
def test_lines_of_the_kernel(fault: str, line: str) -> None:
    assert told("", line, "always") == fault


@pytest.mark.parametrize("case", PHRASES["logs"], ids=lambda case: case["fault"])
def test_the_last_exception_then_the_log_then_what_only_wraps(case: dict[str, str]) -> None:
    assert told(case["log"].replace("TRACEBACK\n", TRACEBACK)) == case["fault"]


def test_what_the_kernel_says_comes_before_what_only_noticed_it() -> None:
    noticed = f"{TRACEBACK}torch.AcceleratorError: CUDA error: unspecified launch failure"
    assert told(noticed) == "device-memory-fault"
    assert told(noticed, "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.") == "device-lost"
    assert told(noticed, "amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:8)") == "device-memory-fault"


def test_an_exception_in_the_log_of_a_killed_process_is_not_its_end() -> None:
    log = f"{TRACEBACK}ImportError: cannot import name 'x' from 'y'\ngoing on without"
    assert told(log) == "library-mismatch"
    assert told(log, "", "always", "signal:SIGKILL") == "killed"


def outcome(**changes: Any) -> Outcome:
    plain: dict[str, Any] = {"status": "died", "returncode": -changes.pop("signal", -1), "seconds": 1.0, "result": {}}
    return Outcome(**{**plain, "stderr_tail": "", **changes})


def failed(kind: str, message: str, exit_code: int = 1, log: str = "") -> Outcome:
    return outcome(status="failed", stderr_tail=log, error=ChildError(kind, message, "", exit_code))


@pytest.mark.parametrize(
    ("ended", "more", "expected"),
    [
        (outcome(signal=9), {}, "killed"),
        (outcome(signal=9), {"oom": True}, "host-out-of-memory"),
        (outcome(signal=9, status="hung"), {}, "hang"),
        (outcome(signal=9, status="hung", stderr_tail="InterruptSignal::WaitRelaxed"), {}, "hang"),
        (outcome(signal=6), {}, "crashed"),
        (outcome(signal=7), {}, "crashed"),
        (outcome(signal=15), {}, "killed"),
        # A fall-back that was only announced is no fault.
        (
            outcome(signal=11, stderr_tail="UserWarning: hipBLASLt on an unsupported architecture! Overriding blas"),
            {},
            "crashed",
        ),
        (outcome(returncode=0), {}, "program-error"),
        (failed("KeyError", "'x'"), {}, "program-error"),
        (failed("UsageError", "no", 2), {}, "refused"),
        (failed("CanaryFailed", "product 1 x 2 is wrong"), {}, "wrong-numbers"),
        (failed("StepNotFinite", "step 3"), {}, "not-finite"),
        (failed("LossDiverged", "up"), {}, "loss-diverged"),
        (failed("RuntimeError", "CUDA error: GPU is lost. Reboot the system to recover this GPU"), {}, "device-lost"),
        (failed("RuntimeError", "No HIP GPUs are available"), {}, "device-lost"),
        (failed("RuntimeError", "HSA_STATUS_ERROR_RESOURCE_BUSY: the queue is taken"), {}, "device-lost"),
        (failed("OutOfMemoryError", "HIP out of memory. Tried to allocate 1.16 GiB"), {}, "device-out-of-memory"),
        (failed("CanaryFailed", "canary product in bfloat16 on cuda:0: 3 of 8 rows"), {}, "wrong-numbers"),
        (failed("RuntimeError", "HIP error: an illegal memory access was encountered"), {}, "device-memory-fault"),
        (
            failed("RuntimeError", "The NVIDIA driver on your system is too old (found version 11040)"),
            {},
            "device-kernels-missing",
        ),
        (failed("ImportError", "libtorch_cpu.so: failed to map segment from shared object"), {}, "library-mismatch"),
        # The error's own words count more than an older warning.
        (
            failed(
                "RuntimeError",
                "HIP error: invalid device function",
                log="UserWarning: Cannot allocate memory, going on",
            ),
            {},
            "device-kernels-missing",
        ),
    ],
)
def test_facts(ended: Outcome, more: dict[str, Any], expected: str) -> None:
    assert diagnose(evidence_of(ended, **more)).fault.id == expected


def test_the_words_name_cause_quote_and_shape() -> None:
    text = "RuntimeError: HIPBLAS_STATUS_INTERNAL_ERROR when calling hipblasLtMatmul with m 8 n 412 k 896\nmore"
    diagnosis = diagnose(Evidence(log=f"first\n{text}"))
    assert diagnosis.shape == (8, 412, 896)
    assert "m=8, n=412, k=896" in diagnosis.words and "HIPBLAS_STATUS_INTERNAL_ERROR" in diagnosis.words
    assert "more" not in diagnosis.words
