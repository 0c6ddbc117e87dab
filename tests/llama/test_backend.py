"""The llama.cpp server as a child: asked, refused, killed, never left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from llama.hostile import TEXT, changed, gguf

from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.llama.backend import Backend, ServerSettings, _SocketConnection, find_engine, open_backend

SMALL = ServerSettings(context_tokens=256, slots=2, threads=1)
HELLO = [{"role": "user", "content": "hello"}]
FULL_MEMORY = "free some memory or choose a smaller --quant"


def gone(pid: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a `llama-server` on PATH that reports `version`, and otherwise runs `script`."""

    def write(script: str, version: str = "version: 99999") -> Path:
        program = tmp_path / "llama-server"
        program.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo '{version}' >&2 && exit\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return program

    return write


# One server for all that is asked of one.


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Backend]:
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # for its start alone
            patch.setenv("LLAMA_ARG_RPC", "127.0.0.1:1")  # which must not reach it
            backend = stack.enter_context(open_backend(tiny, SMALL))
        family = family_of(backend)
        yield backend
    assert backend.process.returncode == 0
    assert all(gone(process.pid) for process in family)
    with pytest.raises(HivetuneError, match="does not answer"):
        backend.complete(HELLO)


def family_of(backend: Backend) -> list[psutil.Process]:
    server = psutil.Process(backend.process.pid)
    return [server, *server.children(recursive=True)]


@pytest.mark.slow
def test_it_answers_and_streams(served: Backend) -> None:
    answer = served.complete(HELLO, max_tokens=5)
    assert answer.new_tokens is not None and 0 < answer.new_tokens <= 5 and answer.prompt_tokens
    again = served.complete(HELLO, max_tokens=5)
    assert (again.text, again.new_tokens) == (answer.text, answer.new_tokens)
    # A stream holds back bytes at its end that are no whole character; the whole answer shows them as U+FFFD.
    assert "".join(served.stream(HELLO, max_tokens=5)).rstrip("\ufffd") == answer.text.rstrip("\ufffd")
    assert served.peak_memory_bytes() > 10e6


@pytest.mark.slow
def test_nobody_else_can_be_asked_or_ask(served: Backend) -> None:
    """No port, which another user could listen on first; a socket in a folder that only its user enters; a token."""
    assert [connection for process in family_of(served) for connection in process.net_connections("inet")] == []
    assert served.socket_path.parent.stat().st_mode & 0o077 == 0
    assert served.socket_path.stat().st_mode & 0o077 == 0
    with contextlib.closing(_SocketConnection(served.socket_path, 10.0)) as stranger:
        stranger.request("POST", "/v1/chat/completions", json.dumps({"messages": HELLO}))
        assert stranger.getresponse().status == 401
    assert not any(served.token in word for process in family_of(served) for word in process.cmdline())
    with pytest.raises(UsageError, match="answered 400"):
        served.request("/v1/chat/completions", {"messages": "no list"})


@pytest.mark.slow
def test_the_server_is_in_a_sandbox_with_the_made_environment(served: Backend) -> None:
    server = family_of(served)[-1]
    assert "NoNewPrivs:\t1" in Path(f"/proc/{server.pid}/status").read_text()
    assert f"Max core file size        {0:<21}{0:<21}" in Path(f"/proc/{server.pid}/limits").read_text()
    assert {name for name in server.environ() if name.startswith("LLAMA_")} == {"LLAMA_API_KEY"}


@pytest.mark.slow
def test_no_orphan_is_left_when_its_parent_is_killed(tiny: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from hivetune.llama.backend import ServerSettings, open_backend\n"
        "settings = ServerSettings(context_tokens=256)\n"
        f"with open_backend(Path({str(tiny)!r}), settings) as backend:\n"
        "    print(backend.process.pid, flush=True)\n    sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    served = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    assert len(served) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert all(gone(number) for number in served)


# What does not start.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said", "hint"),
    [
        ("echo loading for ever\nexec sleep 600", "was not ready after 1 s", "try again when less is running here"),
        ("echo 'x: error loading model: unable to allocate CPU buffer'; exit 1", "unable to allocate", FULL_MEMORY),
        (
            "echo '0.1 E f: failed to initialize the context: failed to allocate buffer for kv cache'; exit 1",
            "kv cache",
            FULL_MEMORY,
        ),
        ("kill -9 $$", "was killed while loading", FULL_MEMORY),
    ],
)
def test_a_server_that_does_not_get_ready_says_why(
    script: str, said: str, hint: str, tiny: Path, own_program: Callable[[str], Path]
) -> None:
    own_program(script)
    started = time.monotonic()
    with pytest.raises(MachineNotFit, match=said) as caught, open_backend(tiny, SMALL, timeout_s=1.0):
        pass
    assert caught.value.hint.startswith(hint) and time.monotonic() - started < 8
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "said"),
    [("nomodel", "unknown model architecture: 'nomodel'"), ("llama", "key not found in model: llama.context_length")],
)
def test_a_model_that_llama_cpp_can_not_load_is_not_a_full_memory(architecture: str, said: str, tmp_path: Path) -> None:
    """Nothing is freed or made smaller for what another model, export or llama.cpp would solve."""
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(changed("general.architecture", TEXT, architecture)))
    refused = pytest.raises(MachineNotFit, match=f"llama.cpp can't load .*model.gguf: .*{said}")
    with refused as caught, open_backend(file, SMALL):
        pass
    assert caught.value.hint == "export it again if it is damaged; a newer llama.cpp may know this model"


def test_what_can_not_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_text("no model")
    (tmp_path / "cut.gguf").write_bytes(gguf()[:-100])
    for name, said in (("x", "not a GGUF"), ("y", "cannot read"), ("cut", "truncated")):
        with pytest.raises(UsageError, match=said), open_backend(tmp_path / f"{name}.gguf"):
            pass
    (tmp_path / "good.gguf").write_bytes(gguf())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 90)))
    (tmp_path / ("x" * 90)).mkdir()
    with pytest.raises(MachineNotFit, match="too long") as caught, open_backend(tmp_path / "good.gguf"):
        pass
    assert "TMPDIR" in caught.value.hint
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineNotFit, match=r"llama\.cpp is not installed"):
        find_engine()


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ("version: 4735 (73e2ed3c)", "is build 4735"),
        ("version: 8952 (0123abc)", "CVE-2026-21869"),
        ("version: 8953 (4567def)", None),
        ("version: 0.4.0-dev", None),
        ("version: 0 (unknown)", "is build 0"),
        ("no such option", "does not tell its version"),
    ],
)
def test_a_build_with_known_holes_is_not_used(
    own_program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, told: str, problem: str | None
) -> None:
    program = own_program("", told)
    found = find_engine()
    if problem is None:
        assert found.command == (str(program),) and found.passed_over == ""
        assert told.split()[1].partition("-")[0] in found.build
        return
    assert found.build.startswith("xllamacpp ") and found.command[-1] == "hivetune.llama.wheel"
    assert problem in found.passed_over and str(program) in found.passed_over
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineNotFit, match=problem):
        find_engine()
