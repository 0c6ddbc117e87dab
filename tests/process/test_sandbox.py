"""The sandbox of a model server, tried from inside: a child gives everything up and then reaches for it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hivetune.process.sandbox import available, call_filter

TRIES = r"""
import errno, os, pathlib, socket, sys, threading
from hivetune.process.sandbox import confine
model, folder, secret = sys.argv[1:4]
held = confine([*sys.path[1:], sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/proc", model], [folder])
def tried(call):
    try:
        call()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
def listen():
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(folder + "/s")
ran = []
thread = threading.Thread(target=lambda: ran.append(1)); thread.start(); thread.join()
print(held.landlock > 0, held.seccomp)
for call in (
    lambda: open(model).read(), listen, lambda: ran[0],
    lambda: open(secret).read(), lambda: open(secret, "w"), lambda: os.listdir("/root"),
    lambda: open(model, "w"), lambda: pathlib.Path(secret).parent.joinpath("new").touch(),
    lambda: socket.socket(socket.AF_INET), lambda: socket.socket(socket.AF_INET6),
    lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    os.fork, lambda: os.execv("/bin/true", ["true"]), lambda: os.system("true") and None,
):
    print(tried(call))
"""


def test_nothing_is_reached_but_what_is_named(tmp_path: Path) -> None:
    held = available()
    if not (held.landlock and held.seccomp):
        pytest.skip(f"this kernel offers less: {held.words}")
    folder = tmp_path / "own"
    folder.mkdir()
    model, secret = tmp_path / "model", tmp_path / "secret"
    model.write_text("weights")
    secret.write_text("private")
    command = [sys.executable, "-c", TRIES, str(model), str(folder), str(secret)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[:4] == ["True True", "done", "done", "done"], done
    assert all(line in ("EACCES", "EPERM", "EAFNOSUPPORT") for line in lines[4:-1]), lines
    assert secret.read_text() == "private" and not (tmp_path / "new").exists()


def test_a_processor_whose_calls_are_unknown_has_no_filter() -> None:
    assert call_filter(may_execute=False, machine="riscv64") is None
    for machine in ("x86_64", "aarch64"):
        program = call_filter(may_execute=True, machine=machine)
        assert program is not None and len(program) % 8 == 0
        assert len(call_filter(may_execute=False, machine=machine) or b"") == len(program) + 32
