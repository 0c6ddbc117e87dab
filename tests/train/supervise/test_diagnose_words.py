"""How libraries, drivers and the kernel word what went wrong: documented codes, wordings, and what means nothing."""

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from hivetune.machine.faults import catalogue, code_pattern
from hivetune.train.supervise.diagnose import Evidence, diagnose

PHRASES = yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text())
CODES = yaml.safe_load(resources.files("hivetune.machine").joinpath("knowledge/codes.yaml").read_text())
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 3, in main\n'
BY_ITSELF = frozenset({"always", "exit:1"})


def listed(part: str) -> list[tuple[str, str]]:
    return [(fault, phrase) for fault, phrases in PHRASES[part].items() for phrase in phrases]


def told(log: str = "", kernel: str = "", facts: frozenset[str] = BY_ITSELF) -> str:
    return diagnose(Evidence(log=log, kernel=kernel, facts=facts)).fault.id


def told_of_code(family: str, code: Any) -> list[str]:
    """The faults that name this code."""
    words = [
        (fault.id, sign.words.split(", "))
        for fault in catalogue()
        for sign in fault.patterns + fault.own + fault.symptoms + fault.wrappers
        if sign.words.startswith(f"{family} ")
    ]
    return [fault for fault, codes in words if str(code) in [codes[0].partition(" ")[2], *codes[1:]]]


@pytest.mark.parametrize(("fault", "phrase"), listed("said"))
def test_wordings_of_libraries(fault: str, phrase: str) -> None:
    assert told(TRACEBACK + phrase) == fault


@pytest.mark.parametrize(("fault", "line"), listed("kernel"))
def test_lines_of_the_kernel(fault: str, line: str) -> None:
    assert told(kernel=line, facts=frozenset({"always"})) == fault


@pytest.mark.parametrize("line", PHRASES["harmless"])
def test_a_harmless_line_changes_nothing(line: str) -> None:
    log = f"starting\n{line}\nmore\n"
    assert told(log, facts=frozenset({"always", "signal:SIGSEGV"})) == "crashed"
    assert told(log, facts=frozenset({"always", "hung", "state:S"})) == "hang"
    assert told(f"{log}{TRACEBACK}ValueError: the config is odd") == "program-error"
    ours = Evidence("RuntimeError: a reason", log, facts=BY_ITSELF | {"type:RuntimeError"})
    assert diagnose(ours).fault.id == "program-error"


@pytest.mark.parametrize("number", CODES["cuda"])
def test_a_code_of_the_card_means_one_fault_by_name_number_and_words(number: int) -> None:
    names, _, words = CODES["cuda"][number].partition(" | ")
    words = words.lstrip("~").replace("(CUDA|ROCm)", "CUDA")
    (fault,) = told_of_code("cuda", number)
    for name in names.split():
        text = f"CUDA_ERROR_{name}" if name.isupper() else f"hipError{name}"
        assert told(f"{TRACEBACK}RuntimeError: it said {text}") == fault
    assert told(f"{TRACEBACK}RuntimeError: HIP error: {words}") == fault
    if number >= 98:
        assert told(f"{TRACEBACK}RuntimeError: CUDA error {number} at x.cu:1") == fault


@pytest.mark.parametrize(("number", "name"), CODES["hsa"].items())
def test_a_status_of_the_runtime_means_one_fault(number: int, name: str) -> None:
    (fault,) = told_of_code("hsa", name)
    aborted = frozenset({"always", "signal:SIGABRT"})
    assert told(f"Queue 0x7f aborting with error : HSA_STATUS_ERROR_{name}: words", facts=aborted) == fault
    assert told(f":0:rocdevice.cpp: status: 0x{number:x}", facts=aborted) == fault


def test_a_code_that_nobody_documents_is_refused() -> None:
    for family, code in (("cuda", "77777"), ("hsa", "NO_SUCH"), ("errno", "ENOSUCH"), ("signal", "SIGNONE")):
        with pytest.raises(KeyError):
            code_pattern(family, code)


@pytest.mark.parametrize(
    ("log", "fault"),
    [
        ("Cannot allocate memory for a cache\nOSError: [Errno 24] Too many open files", "too-many-files"),
        ("OSError: [Errno 28] No space left on device\nDuring handling: \nKeyError: 'x'", "disk-full"),
        ("ptxas fatal   : x\ntorch._dynamo.exc.BackendCompilerFailed: backend raised", "compiler-abort"),
        ("oom-kill:constraint\nRuntimeError: DataLoader worker is killed by signal: Killed.", "host-out-of-memory"),
        ("RuntimeError: DataLoader worker (pid 3) is killed by signal: Segmentation fault.", "crashed"),
        (
            "THCudaCheck FAIL error=8 : invalid device function\nRuntimeError: CUDNN_STATUS_INTERNAL_ERROR",
            "device-kernels-missing",
        ),
        (
            f"HfHubHTTPError: 403\n\nThe above exception was the direct cause:\n\n{TRACEBACK}OSError: x",
            "network-unreachable",
        ),
        (f"HfHubHTTPError: 403, tried another\n{TRACEBACK}OSError: x", "program-error"),
        ("x.py:3: UserWarning: The NVIDIA driver on your system is too old\nbye", "device-kernels-missing"),
    ],
)
def test_the_last_exception_then_the_log_then_what_only_wraps(log: str, fault: str) -> None:
    assert told(log) == fault


def test_what_the_kernel_says_comes_before_what_only_noticed_it() -> None:
    noticed = f"{TRACEBACK}torch.AcceleratorError: CUDA error: unspecified launch failure"
    assert told(noticed) == "device-memory-fault"
    assert told(noticed, kernel="NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.") == "device-lost"
    assert told(noticed, kernel="amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:8)") == "device-memory-fault"


def test_an_exception_in_the_log_of_a_killed_process_is_not_its_end() -> None:
    log = f"{TRACEBACK}ImportError: cannot import name 'x' from 'y'\ngoing on without"
    assert told(log) == "library-mismatch"
    assert told(log, facts=frozenset({"always", "signal:SIGKILL"})) == "killed"
