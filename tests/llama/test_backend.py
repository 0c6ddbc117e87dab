"""The llama.cpp server as a child: asked, refused, killed, never left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from llama.hostile import TEXT, changed, gguf
from programs import write_program

from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.llama.backend import Backend, ServerSettings, _SocketConnection, find_engine, open_backend
from hivetune.process.sandbox import named_environment

SMALL = ServerSettings(context_tokens=256, slots=2, threads=1)
HELLO = [{"role": "user", "content": "hello"}]


def gone(pid: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_it_answers_streams_and_ends(tiny: Path) -> None:
    with open_backend(tiny, SMALL) as backend:
        answer = backend.complete(HELLO, max_tokens=5)
        assert 0 < answer.new_tokens <= 5 and answer.prompt_tokens > 0
        again = backend.complete(HELLO, max_tokens=5)
        assert (again.text, again.new_tokens) == (answer.text, answer.new_tokens)
        # A stream holds back bytes at its end that are no whole character; the whole answer shows them as U+FFFD.
        assert "".join(backend.stream(HELLO, max_tokens=5)).rstrip("\ufffd") == answer.text.rstrip("\ufffd")
        pid = backend.process.pid
    assert backend.process.returncode == 0
    assert gone(pid)
    with pytest.raises(HivetuneError, match="does not answer"):
        backend.complete(HELLO)


@pytest.fixture(scope="module", params=["xllamacpp", "llama-server"])
def served(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """A server of the wheel, and one of a program that stands in for the user's own."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # for its start alone
            patch.setenv("LLAMA_ARG_RPC", "127.0.0.1:1")  # which must not reach it
            if request.param == "llama-server":
                program = stand_in(tmp_path_factory.mktemp("program"))
                patch.setenv("PATH", f"{program}:{os.environ['PATH']}")
                assert find_engine().command == (str(program / "llama-server"),)
            backend = stack.enter_context(open_backend(tiny, SMALL))
        yield backend


def family_of(backend: Backend) -> list[psutil.Process]:
    server = psutil.Process(backend.process.pid)
    return [server, *server.children(recursive=True)]


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
    assert served.complete(HELLO, max_tokens=2).new_tokens
    server = family_of(served)[-1]
    assert "NoNewPrivs:\t1" in Path(f"/proc/{server.pid}/status").read_text()
    assert f"Max core file size        {0:<21}{0:<21}" in Path(f"/proc/{server.pid}/limits").read_text()
    names = {name for name in server.environ() if name.startswith("LLAMA_")}
    assert names == {"LLAMA_API_KEY"}


def test_a_folder_too_deep_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hivetune.llama.backend.check_files", lambda model, settings: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 90)))
    (tmp_path / ("x" * 90)).mkdir()
    with pytest.raises(MachineNotFit, match="too long") as caught, open_backend(tmp_path / "x.gguf"):
        pass
    assert "TMPDIR" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["xllamacpp", "llama-server"])
def test_no_orphan_is_left_when_its_parent_is_killed(tiny: Path, engine: str, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from hivetune.llama.backend import ServerSettings, open_backend\n"
        "settings = ServerSettings(context_tokens=256)\n"
        f"with open_backend(Path({str(tiny)!r}), settings) as backend:\n"
        "    print(backend.process.pid, flush=True)\n    sys.stdin.read()\n"
    )
    first = f"{stand_in(tmp_path)}:" if engine == "llama-server" else ""
    environment = {**os.environ, "PATH": f"{first}{os.environ['PATH']}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    served = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    assert len(served) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert all(gone(number) for number in served)


def stand_in(folder: Path) -> Path:
    """A `llama-server` that takes the real one's arguments and is xllamacpp inside: no package here has the program."""
    source = Path(__file__).with_name("llama_server.py").read_text(encoding="utf-8")
    return write_program(folder / "bin" / "llama-server", source).parent


@pytest.mark.slow
def test_a_server_that_never_gets_ready_is_given_up(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo version: 99999 && exit\necho loading for ever\nexec sleep 600\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = time.monotonic()
    with pytest.raises(MachineNotFit, match="was not ready after 1 s"), open_backend(tiny, SMALL, timeout_s=1.0):
        pass
    assert time.monotonic() - started < 8
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("echo 'llama_model_load: error loading model: unable to allocate CPU buffer'; exit 1", "unable to allocate"),
        (
            "echo '0.1 E f: failed to initialize the context: failed to allocate buffer for kv cache'; exit 1",
            "kv cache",
        ),
        ("kill -9 $$", "was killed while loading"),
    ],
)
def test_a_full_memory_is_named(
    end: str, said: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo version: 99999 && exit\n{end}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(MachineNotFit, match=said) as caught, open_backend(tiny, SMALL):
        pass
    assert caught.value.hint == "free some memory or choose a smaller --quant"


@pytest.mark.slow
def test_a_file_that_is_cut_is_refused_before_it_is_loaded(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-50_000])
    with pytest.raises(UsageError, match="truncated"), open_backend(cut, SMALL):
        pass


def test_what_can_not_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_text("no model")
    with pytest.raises(UsageError, match="not a GGUF"), open_backend(tmp_path / "x.gguf"):
        pass
    with pytest.raises(UsageError, match="cannot read"), open_backend(tmp_path / "y.gguf"):
        pass
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, problem: str | None
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho '{told}' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if problem is None:
        found = find_engine()
        assert found.command == (str(program),) and found.passed_over == ""
        assert told.split()[1].partition("-")[0] in found.build
        return
    wheel = find_engine()
    assert wheel.build.startswith("xllamacpp ") and wheel.command[-1] == "hivetune.llama.wheel"
    assert problem in wheel.passed_over and str(program) in wheel.passed_over
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineNotFit, match=problem):
        find_engine()


def test_what_a_shell_sets_for_llama_cpp_does_not_reach_it() -> None:
    """CVE-2026-43631 needs a server that sleeps; an RPC server gets the model; a backend path loads code."""
    own = {
        **{f"LLAMA_ARG_{name}": "1" for name in ("SLEEP_IDLE_SECONDS", "RPC", "HOST", "PORT", "LORA", "MODEL_URL")},
        **{name: "1" for name in ("LD_PRELOAD", "GGML_BACKEND_PATH", "GGML_RPC", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")},
        **{name: "1" for name in ("PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LC_ALL", "HIVETUNE_HOME")},
    }
    made = named_environment(own, OMP_WAIT_POLICY="PASSIVE")
    assert set(made) == {
        "PATH",
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "LC_ALL",
        "HIVETUNE_HOME",
        "OMP_WAIT_POLICY",
    }
