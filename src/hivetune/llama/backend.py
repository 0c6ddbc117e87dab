"""A llama.cpp server for one GGUF model and its adapters: started, asked, stopped. It listens on a socket of its user,
not on a port.
"""

import contextlib
import functools
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hivetune.base.disk import problems_of_files, scratch_folder
from hivetune.base.paths import pip_install
from hivetune.data.render.template import thinking_arguments
from hivetune.errors import MachineNotFit, UsageError
from hivetune.llama.ask import TIMEOUT_S, Answer, Unanswered, chat_request, exchange, read_answer
from hivetune.models.gguf_header import read_header
from hivetune.process.launch import set_idle_priority
from hivetune.process.lease import serve_on
from hivetune.process.sandbox import named_environment

ApiMessages = Sequence[Mapping[str, Any]]

SERVER, CHAT = "the llama.cpp server", "/v1/chat/completions"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
CONTEXT_TOKENS = 4096
VERSION_TIMEOUT_S = 20.0
# The first packaged build with c78fb909b (ggml-org/llama.cpp#22267, 23 April 2026: CVE-2026-21869, a write before a
# block of the heap); b8146 has the last known hole of its GGUF reader (CVE-2026-27940).
MIN_BUILD = 8953
_VERSION = re.compile(rb"version:\s*b?(\d+(?:\.\d+)*)")
LOG_TAIL_LINES = 5
# How llama.cpp logs why a model, an adapter or the memory for its context can't be had (llama.cpp, llama-adapter.cpp
# and llama-context.cpp in its src). The lines after it only repeat that loading failed.
_REASON = re.compile(r": (?:error loading model|failed to apply lora adapter|failed to initialize the context): (.+)")
# "unable to allocate CPU buffer", "failed to allocate buffer for kv cache", "std::bad_alloc"
_NO_MEMORY = re.compile(r"\ballocate\b|bad_alloc")
_MEMORY_HINT = "free some memory or choose a smaller --quant"
_KILLED = 128 + signal.SIGKILL  # as the child reports its program's signal
_POLL_S = 0.05
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_LOOK_S, _IDLE_PERCENT = 0.1, 25.0  # how long, and how busy at most the cores may be, to count as idle
MAX_SOCKET_PATH_BYTES = 103  # bytes: 108 on Linux and 104 on macOS, with the zero at the end


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server.

    adapters: GGUF adapter files and their scales. context_tokens: per slot. device: cpu, a card (which is leased:
    process/lease.py), or empty for llama.cpp's own choice. warm_up: compute once on loading. batch_tokens: number of
    prompt tokens computed at once; between two batches other requests are computed.
    """

    adapters: tuple[tuple[Path, float], ...] = ()
    slots: int = 1
    context_tokens: int = CONTEXT_TOKENS
    threads: int | None = None
    device: str = ""
    warm_up: bool = True
    batch_tokens: int | None = None


@contextlib.contextmanager
def open_backend(
    model: Path, settings: ServerSettings | None = None, *, timeout_s: float = START_TIMEOUT_S
) -> Iterator["Backend"]:
    """Start a server of one GGUF file for the length of a `with` block.

    Raises UsageError for a file that is not GGUF, MachineNotFit if llama.cpp is missing or does not start, Busy if a
    run trains on the card.
    """
    settings = settings or ServerSettings()
    check_files(model, settings)
    engine, token = find_engine(), secrets.token_urlsafe(32)
    # The socket lies in a folder that only its user may enter, so nobody else can take its place and get token and
    # prompts, as with a port, which any user of the machine may listen on first.
    with scratch_folder() as scratch:
        log, socket_path = scratch / "server.log", scratch / "llama.sock"
        if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
            hint = "set TMPDIR to a shorter folder, such as /tmp"
            raise MachineNotFit(f"the path {socket_path} is too long for a socket", hint=hint)
        process = _start([*engine.command, *_arguments(model, settings, socket_path)], settings, model, token, log)
        scales = [{"id": number, "scale": scale} for number, (_, scale) in enumerate(settings.adapters)]
        backend = Backend(process, socket_path, token, scales)
        try:
            _wait_until_ready(backend, model, log, timeout_s)
            yield backend
        finally:
            backend.stop()


def check_files(model: Path, settings: ServerSettings) -> None:
    """Raise UsageError for a file that is not GGUF, is an adapter instead of a model, or differs from the manifest
    beside it.
    """
    for path in (model, *(path for path, _ in settings.adapters)):
        whole = path.resolve()
        problems = problems_of_files(whole.parent, (whole.name,))
        if problems:
            raise UsageError(
                f"{path.parent / problems[0]}: it is damaged",
                hint="delete it and make it again: hivetune export RUN, or restore it from a copy",
            )
        if read_header(path).is_adapter == (path is model):
            what, to = ("an adapter, not a model", "gguf") if path is model else ("not an adapter", "gguf-adapter")
            raise UsageError(f"{path} is {what}", hint=f"make one: hivetune export RUN --to {to}")


@dataclass(frozen=True)
class Engine:
    """llama.cpp on this machine.

    command: the beginning of the server's command line. build: the version, on which answers depend. passed_over: why
    the user's own `llama-server` is not used; empty if it is used, or if there is none.
    """

    command: tuple[str, ...]
    build: str
    passed_over: str = ""


def find_engine() -> Engine:
    """Return the user's own `llama-server`, which may support a card, or the one of xllamacpp if the first is too old
    or missing. Raises MachineNotFit if there is neither.
    """
    program = shutil.which("llama-server")
    problem = ""
    if program is not None:
        own = own_engine(program, os.stat(program).st_mtime_ns)
        if not own.passed_over:
            return own
        problem = own.passed_over
    if importlib.util.find_spec("xllamacpp") is not None:
        why = f"{problem}, so xllamacpp is used; to use your own, install a newer one" if problem else ""
        build = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        return Engine((sys.executable, "-m", "hivetune.llama.wheel"), build, why)
    hint = f"{pip_install()} xllamacpp, or put a new llama-server on PATH"
    raise MachineNotFit(problem or "llama.cpp is not installed", hint=hint)


@functools.lru_cache(maxsize=8)
def own_engine(program: str, changed_ns: int) -> Engine:
    """Return the user's `llama-server`; `passed_over` is the reason if it can't be used. `changed_ns`: modification
    time of the program, in ns, which becomes part of the build's name."""
    version = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command, environment = [program, "--version"], named_environment()
        told = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_TIMEOUT_S
        )
        match = _VERSION.search(told.stdout[:65536] + told.stderr[:65536])
        version = match[1].decode() if match else ""
    problem = ""
    if "." not in version and int(version or 0) < MIN_BUILD:  # numbers with points came in September 2026
        holes = f"is build {version}; builds before {MIN_BUILD} have CVE-2026-21869 or older holes"
        problem = f"{program} {holes if version else 'does not tell its version'}"
    # Builds of one version differ: by the card that they are for, and by the compiler.
    return Engine((program,), f"{program} {version} {changed_ns}", problem)


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float):
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@dataclass(frozen=True)
class Backend:
    """A client of one running server. Safe to call from several threads: each request has its own connection.

    `lora`: the scale of each adapter, in the form of the server's API.
    """

    process: "subprocess.Popen[bytes]"
    socket_path: Path
    token: str
    lora: Sequence[Mapping[str, float]] = ()

    def complete(
        self,
        messages: ApiMessages,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Answer:
        """Return one answer to a chat, as a served release gives it."""
        request, started = self._chat(messages, max_tokens, temperature, tools), time.perf_counter()
        with self._exchange(CHAT, request) as response:
            return read_answer(response, started, SERVER)

    def stream(
        self, messages: ApiMessages, *, max_tokens: int = 1024, temperature: float = 0.0
    ) -> Generator[str, None, str]:
        """Yield the answer piece by piece. Return the API's reason for its end."""
        finish = None
        with self._exchange(CHAT, {**self._chat(messages, max_tokens, temperature), "stream": True}) as lines:
            for line in lines:  # server-sent events, the last of which is no JSON: [DONE]
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    finish = choice.get("finish_reason") or finish
                    yield choice["delta"].get("content") or ""
        if finish is None:
            raise Unanswered(f"{SERVER} ended in the middle of an answer")
        return str(finish)

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of the server's processes in bytes, mapped pages of the model file included."""
        server = psutil.Process(self.process.pid)
        files = [Path(f"/proc/{each.pid}/status") for each in (server, *server.children(recursive=True))]
        peaks = [_PEAK.search(file.read_text(encoding="ascii", errors="replace")) for file in files]
        return sum(int(peak[1]) << 10 for peak in peaks if peak is not None)

    def prompt_ids(self, messages: ApiMessages, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return this server's token ids of a chat, up to the start of the answer."""
        text = self.request("/apply-template", chat_request(messages, 1, tools))["prompt"]
        body = {"content": text, "add_special": True, "parse_special": True}
        return tuple(self.request("/tokenize", body)["tokens"])

    def request(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """Exchange one JSON document and return the response's. Raises as `exchange`."""
        with self._exchange(path, body, timeout_s) as response:
            document = json.loads(response.read())
            if not isinstance(document, dict):
                raise TypeError(f"a JSON {type(document).__name__}")
            return document

    def stop(self) -> None:
        """End the server and wait for it. It may be called twice."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the server and its children, for a server that hangs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _chat(
        self, messages: ApiMessages, max_tokens: int, temperature: float, tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        request = {**chat_request(messages, max_tokens, tools), "temperature": temperature}
        request["reasoning_format"] = "none"  # thoughts stay in the text, as they were trained
        # A slot reuses the prefix shared with its previous prompt. That is safe: llama.cpp empties this cache when the
        # scales change (tests/llama/test_adapters.py).
        request["cache_prompt"] = True
        # A request that does not name the scale of every adapter gets the server's own scales, and so what another
        # adapter computed (ggml-org/llama.cpp#26207).
        return {**request, "lora": self.lora} if self.lora else request

    def _exchange(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float = TIMEOUT_S
    ) -> contextlib.AbstractContextManager[http.client.HTTPResponse]:
        return exchange(_SocketConnection(self.socket_path, timeout_s), path, body, self.token, SERVER)


def _start(
    command: Sequence[str], settings: ServerSettings, model: Path, token: str, log: Path
) -> "subprocess.Popen[bytes]":
    """Start the child that holds the server. Raises Busy if a run trains on the card."""
    whole = model.resolve()
    parts = whole.parent.glob(f"{whole.stem.rpartition('-of-')[0].rpartition('-')[0]}-*-of-*.gguf")
    adapters = [path.resolve() for path, _ in settings.adapters]
    leases = () if settings.device in ("", "cpu") else (serve_on(settings.device),)
    document = {
        "command": command,
        "token": token,
        "files": list(map(str, [whole, *(parts if "-of-" in whole.stem else ()), *adapters])),
        "folder": str(log.parent),
        "on_cpu": settings.device == "cpu",
        "lease_fds": leases,
        # The kernel ties it to the thread that starts it, of which only the first lives as long as its process.
        "dies_with_parent": threading.current_thread() is threading.main_thread(),
    }
    try:
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "hivetune.llama.child"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=leases,
                env=named_environment(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=_spins()),
                start_new_session=True,
            )
    finally:
        for descriptor in leases:  # the child holds them now
            os.close(descriptor)
    set_idle_priority(process.pid)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: its log tells why
        process.stdin.write(json.dumps(document).encode() + b"\n")
        process.stdin.flush()
    return process


def _arguments(model: Path, settings: ServerSettings, socket_path: Path) -> list[str]:
    """Return llama-server's arguments, which llama/wheel.py accepts too."""
    arguments = ["--model", str(model.resolve()), "--alias", model.stem, "--host", str(socket_path)]
    arguments += ["--parallel", str(settings.slots), "--ctx-size", str(settings.context_tokens * settings.slots)]
    # The cache in host memory is matched by tokens alone, before adapters are compared: a prompt under A, another under
    # B, and the first under B again reused 119 of 120 tokens of A.
    arguments += ["--cache-ram", "0", "--jinja", "--no-webui", "--no-slots", "--offline"]
    for path, _ in settings.adapters:
        arguments += ["--lora", str(path.resolve())]  # scales come with each request
    if template := thinking_arguments(str(read_header(model).settings.get("tokenizer.chat_template", ""))):
        arguments += ["--chat-template-kwargs", json.dumps(template)]
    if settings.threads:
        arguments += ["--threads", str(settings.threads)]
    if settings.batch_tokens:
        arguments += ["--batch-size", str(settings.batch_tokens)]
    if settings.device == "cpu":
        arguments += ["--n-gpu-layers", "0"]
    return arguments if settings.warm_up else [*arguments, "--no-warmup"]


def _spins() -> str:
    """Return how long llama.cpp's threads spin at a barrier before they sleep: long on idle cores, not at all beside
    other work. The user's own value of the variable has precedence.
    """
    # A token of a small model passes hundreds of barriers, and each sleep costs more than the work between two.
    # SmolLM2-135M q8_0 on 2 cores: idle, one request makes 31 tokens/s without spinning and 85 with it, 8 slots 125 and
    # 215. Beside two busy processes 8 slots make 79 without and 18 to 44 with it: a spinning thread takes the core of
    # the one that it waits for.
    if setting := os.environ.get("GOMP_SPINCOUNT"):
        return setting
    return "50000" if psutil.cpu_percent(interval=_LOOK_S) < _IDLE_PERCENT else "0"


def _wait_until_ready(backend: Backend, model: Path, log: Path, timeout_s: float) -> None:
    """Wait until the server answers, which means that its model is loaded.

    Raises MachineNotFit with llama.cpp's own reason; the message mentions memory only if that is the reason.
    """
    deadline = time.monotonic() + timeout_s
    while backend.process.poll() is None:
        with contextlib.suppress(Unanswered):  # it does not listen yet, or is loading (503)
            backend.request("/health", timeout_s=max(_POLL_S, deadline - time.monotonic()))
            return
        if time.monotonic() > deadline:
            backend.kill()
            raise MachineNotFit(
                f"the llama.cpp server was not ready after {timeout_s:.0f} s{_last_lines(log)}",
                hint="try again when less is running here, or choose a smaller --quant",
            )
        time.sleep(_POLL_S)
    if backend.process.returncode == _KILLED:  # as the kernel does when no memory is left
        raise MachineNotFit(f"the llama.cpp server was killed while loading{_last_lines(log)}", hint=_MEMORY_HINT)
    reasons = _REASON.findall(log.read_text(encoding="utf-8", errors="replace"))
    if not reasons:
        hint = "if the file is damaged, export it again"
        raise MachineNotFit(f"the llama.cpp server ended while loading{_last_lines(log)}", hint=hint)
    hint = "export it again if it is damaged; a newer llama.cpp may know this model"
    hint = _MEMORY_HINT if _NO_MEMORY.search(reasons[-1]) else hint
    raise MachineNotFit(f"llama.cpp can't load {model}: {reasons[-1]}", hint=hint)


def _last_lines(log: Path) -> str:
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "; its last lines:\n" + "\n".join(tail)
