"""The process that runs a llama.cpp server: `python -m hivetune.llama.child`, with its settings as JSON on stdin.

It starts the server's program as its child, in a sandbox (process/sandbox.py) that can open the model, its adapters and
its socket. Both processes end when stdin is closed, which also happens when the process that started them dies. So no
server is left behind with a socket and gigabytes of memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from hivetune.base.private import keep_private
from hivetune.process.sandbox import DEVICES, SYSTEM, confine, die_with_parent

_GRACE_S = 5.0


def main() -> None:
    keep_private()
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    if settings["dies_with_parent"]:  # also while it is stopped, when it would not see stdin close
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's to handle

    def prepare() -> None:
        die_with_parent()
        _confine(settings)

    process = subprocess.Popen(
        settings["command"],
        stdin=subprocess.DEVNULL,
        # The key goes by the environment: every user of the machine can read arguments.
        env={**os.environ, "LLAMA_API_KEY": settings["token"]},
        preexec_fn=prepare,
        pass_fds=settings["lease_fds"],
    )
    stopped = threading.Event()
    threading.Thread(target=_end_with_stdin, args=(process, stopped), daemon=True).start()
    code = process.wait()
    if stopped.is_set():
        code = 0
    sys.exit(code if code >= 0 else 128 - code)  # a signal as shells report it


def _confine(settings: dict[str, Any]) -> None:
    """Deny the network, and all files but the model's and those that the program needs."""
    program = Path(settings["command"][0]).resolve()
    libraries = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    of_program = [str(program.parent), str(program.parent.parent / "lib"), *libraries]
    # A card's driver reads and caches in places of its own: with a card only writing is limited, to its usual places.
    devices = Path("/dev")
    cards = [] if settings["on_cpu"] else [*devices.glob("nvidia*"), *devices.glob("dri/*"), *devices.glob("kfd")]
    on_card = bool(cards)
    caches = [*cards, Path.home() / ".cache", Path.home() / ".nv", Path(tempfile.gettempdir())] if on_card else []
    confine(
        [*SYSTEM, *of_program, sys.prefix, sys.base_prefix, *sys.path[1:], *settings["files"]],
        [settings["folder"], *DEVICES, *caches],
        may_execute=True,
        read_all=on_card,
        data_bytes=None if on_card else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _end_with_stdin(server: "subprocess.Popen[bytes]", stopped: threading.Event) -> None:
    """End the server when stdin closes. It has no data to save."""
    while os.read(0, 4096):
        pass
    stopped.set()
    server.terminate()
    try:
        server.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()


if __name__ == "__main__":
    main()
