"""The process that holds a llama.cpp server: `python -m hivetune.llama.child`, its settings as JSON on stdin.

It runs xllamacpp's server in itself, or a `llama-server` program as its own child, in a sandbox (process/sandbox.py)
that opens the model, its adapters and its socket. It listens on the socket that the settings name. It ends when stdin
closes, that is when whoever started it stops it or dies in any way: no
orphan keeps a socket and gigabytes.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from hivetune.base.private import keep_private
from hivetune.process.sandbox import DEVICES, SYSTEM, confine, die_with_parent, named_environment

_GRACE_S = 5.0


class SocketConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system."""

    def __init__(self, path: Path, timeout_s: float):
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def main() -> None:
    keep_private()
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    if settings["dies_with_parent"]:  # also while it stands still, when it would not see stdin close
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's to handle
    if settings["program"] is None:
        _run_xllamacpp(settings)
    else:
        _run_program(settings)


def _run_xllamacpp(settings: dict[str, Any]) -> None:
    import xllamacpp

    _confine(settings)
    threading.Thread(target=_end_with_stdin, daemon=True).start()  # before it loads, which may take minutes
    parameters = xllamacpp.CommonParams()
    parameters.model.path = settings["model"]
    parameters.model_alias = {settings["alias"]}
    parameters.hostnames = [settings["socket"]]
    parameters.api_keys = [settings["token"]]
    parameters.n_parallel = settings["slots"]
    parameters.n_ctx = settings["context_tokens"] * settings["slots"]
    parameters.ui = False
    parameters.endpoint_slots = False
    parameters.offline = True
    parameters.cors_origins = ""
    parameters.cache_prompt = False
    # The cache in host memory is matched by tokens alone, before adapters are compared: a prompt under A, another under
    # B, and the first under B again reused 119 of 120 tokens of A.
    parameters.cache_ram_mib = 0
    if settings["threads"]:
        parameters.cpuparams.n_threads = settings["threads"]
        parameters.cpuparams_batch.n_threads = settings["threads"]
    if settings["batch_tokens"]:
        parameters.n_batch = settings["batch_tokens"]
    if settings["on_cpu"]:
        parameters.n_gpu_layers = 0
    parameters.warmup = settings["warm_up"]
    parameters.default_template_kwargs = {name: json.dumps(value) for name, value in settings["template"].items()}
    parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 0.0) for path in settings["adapters"]]
    server = xllamacpp.Server(parameters)  # returns when the model is loaded; lives as long as it has a name
    threading.Event().wait()
    del server


def _confine(settings: dict[str, Any]) -> None:
    """Deny network, other programs, and all files but the model's and those that the programs need."""
    # A card's driver reads and caches in places of its own: with a card only writing is limited, to its usual places.
    model, program = Path(settings["model"]), settings["program"]
    split = model.parent.glob(f"{model.stem.rpartition('-of-')[0].rpartition('-')[0]}-*-of-*.gguf")
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [] if program is None else [Path(program).resolve().parent, Path(program).resolve().parent.parent / "lib"]
    files = [
        model,
        *(split if "-of-" in model.stem else ()),
        *settings["adapters"],
        *(path for path in libraries if path),
    ]
    devices = Path("/dev")
    cards = [] if settings["on_cpu"] else [*devices.glob("nvidia*"), *devices.glob("dri/*"), *devices.glob("kfd")]
    on_card = bool(cards)
    caches = [*cards, Path.home() / ".cache", Path.home() / ".nv", Path(tempfile.gettempdir())] if on_card else []
    confine(
        [*SYSTEM, sys.prefix, sys.base_prefix, *sys.path[1:], *folders, *files],
        [Path(settings["socket"]).parent, *DEVICES, *caches],
        may_execute=program is not None,
        read_all=on_card,
        data_bytes=None if on_card else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _end_with_stdin(server: "subprocess.Popen[bytes] | None" = None) -> None:
    """End this process, and the server's where it has one, when stdin closes. Neither holds what must be saved."""
    while os.read(0, 4096):
        pass
    if server is not None:
        server.terminate()
        try:
            server.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            server.kill()
    os._exit(0)


def _run_program(settings: dict[str, Any]) -> None:
    command = [settings["program"], "--model", settings["model"], "--alias", settings["alias"]]
    command += ["--host", settings["socket"], "--parallel", str(settings["slots"])]
    command += ["--ctx-size", str(settings["context_tokens"] * settings["slots"]), "--jinja", "--no-webui"]
    if settings["threads"]:
        command += ["--threads", str(settings["threads"])]
    if settings["batch_tokens"]:
        command += ["--batch-size", str(settings["batch_tokens"])]
    for path in settings["adapters"]:
        command += ["--lora", path]  # scales come with each request
    # The key goes by the environment, not by the arguments, which every user of the machine can read.
    # LLAMA_ARG_CACHE_RAM is --cache-ram, which older versions refuse as an argument; they have no such cache.
    environment = {**named_environment(), "LLAMA_API_KEY": settings["token"], "LLAMA_ARG_CACHE_RAM": "0"}
    if settings["on_cpu"]:
        environment["LLAMA_ARG_N_GPU_LAYERS"] = "0"
    if settings["template"]:
        command += ["--chat-template-kwargs", json.dumps(settings["template"])]
    if not settings["warm_up"]:
        command.append("--no-warmup")

    def prepare() -> None:
        die_with_parent()
        _confine(settings)

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=environment,
        preexec_fn=prepare,
        pass_fds=settings["lease_fds"],
    )
    threading.Thread(target=_end_with_stdin, args=(process,), daemon=True).start()
    code = process.wait()
    sys.exit(code if code >= 0 else 128 - code)  # a signal as shells report it


if __name__ == "__main__":
    main()
