"""Code of a model runs in a sandbox: no network, nobody's files, limits of time, memory, processes and output."""

from pathlib import Path

import psutil
import pytest
from programs import require_program

from hivetune.checkers.find import answer_succeeds
from hivetune.checkers.limited import TooSlow, run_limited
from hivetune.errors import MachineNotFit, UsageError

TRIES = """
def tries(work):
    try:
        work()
    except BaseException:
        return "refused"
    return "done"
"""


@pytest.fixture
def bwrap() -> None:
    require_program("bwrap", "bubblewrap")


def passes(answer: str, tests: str = "", timeout_s: float = 10) -> bool:
    return answer_succeeds(answer, {"name": "python_passes", "tests": tests, "timeout_s": timeout_s})


def test_code_passes_or_fails_by_its_tests(bwrap: None) -> None:
    answer = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."
    assert passes(answer, "assert add(1, 2) == 3")
    assert not passes(answer, "assert add(1, 2) == 4")
    assert not passes("```python\ndef add(a, b) return\n```", "assert add(1, 2) == 3")
    assert not passes("no code", "assert True")


def test_it_reaches_neither_network_nor_files_nor_others_processes(bwrap: None, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("private")
    tests = f"""
import os, socket
assert tries(lambda: socket.create_connection(("127.0.0.1", 22), 1)) == "refused"
assert tries(lambda: open({str(secret)!r})) == "refused"
assert tries(lambda: open("/usr/x", "w")) == "refused"
assert tries(lambda: os.kill({__import__("os").getpid()}, 0)) == "refused"
assert "HOME" not in os.environ
open("own.txt", "w").write("its own folder")
"""
    assert passes(TRIES, tests)
    assert secret.read_text() == "private"


def test_code_may_have_threads(bwrap: None) -> None:
    code = "import threading\nseen = []\nfor i in range(4):\n    threading.Thread(target=seen.append, args=[i]).start()"
    assert passes(code, "import time\nwhile len(seen) < 4: time.sleep(0.01)\nassert sorted(seen) == [0, 1, 2, 3]")


@pytest.mark.slow
def test_a_program_has_few_processes_whoever_runs_it(bwrap: None) -> None:
    """No limit holds for root: its fork bomb reached 2,743 processes before it was seen, and other tests had none."""
    code = "import os\nnumber = 0\ntry:\n    while os.fork() or os._exit(0) is None:\n        number += 1\n"
    assert passes(f"{code}except BlockingIOError:\n    pass", "assert 0 < number < 64")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "x = bytearray(4 << 30)",
        "import os\nwhile True: os.fork()",
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=[60]).start()",
        "while True: print('x' * 1000)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "import sys\nsys.exit(3)",
        "import os\nopen('large', 'wb').write(b'x' * (64 << 20))",
    ],
)
def test_hostile_code_fails_and_leaves_nothing(bwrap: None, code: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    assert not passes(code, "assert True", timeout_s=3)
    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=5)
    assert left == []


def test_without_bubblewrap_it_is_refused_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MachineNotFit, match="needs bubblewrap"):
        passes("x = 1", "assert x == 1")


def test_a_time_limit_is_plausible() -> None:
    with pytest.raises(UsageError, match="at most 300"):
        passes("x = 1", "", timeout_s=1e9)


def test_what_is_run_is_ended_in_time() -> None:
    with pytest.raises(TooSlow):
        run_limited(["sleep", "60"], "", 0.2)
