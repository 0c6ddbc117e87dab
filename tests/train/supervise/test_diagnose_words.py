"""How the kernel words what went wrong, what means nothing, and which of several messages is the reason."""

from pathlib import Path

import pytest
import yaml

from hivetune.train.supervise.diagnose import Evidence, diagnose

PHRASES = yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text())
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 3, in main\n'
BY_ITSELF = frozenset({"always", "exit:1"})


def told(log: str = "", kernel: str = "", facts: frozenset[str] = BY_ITSELF) -> str:
    return diagnose(Evidence(log=log, kernel=kernel, facts=facts)).fault.id


@pytest.mark.parametrize(("fault", "line"), [(f, line) for f, lines in PHRASES["kernel"].items() for line in lines])
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


@pytest.mark.parametrize(
    ("log", "fault"),
    [
        ("Cannot allocate memory for a cache\nOSError: [Errno 24] Too many open files", "program-error"),
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
            "model-file-damaged",
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
