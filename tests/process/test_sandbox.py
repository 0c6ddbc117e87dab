"""The sandbox of a model server, tried from inside: a child gives everything up and then reaches for it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hivetune.process.sandbox import landlock_version

pytestmark = pytest.mark.slow

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
print(held > 0)
for call in (
    lambda: open(model).read(), listen, lambda: ran[0],
    lambda: open(secret).read(), lambda: open(secret, "w"), lambda: os.listdir("/root"),
    lambda: open(model, "w"), lambda: pathlib.Path(secret).parent.joinpath("new").touch(),
    lambda: os.execv("/bin/true", ["true"]),
    lambda: socket.create_connection(("127.0.0.1", 22)), lambda: socket.create_server(("127.0.0.1", 0)),
):
    print(tried(call))
"""


def test_nothing_is_reached_but_what_is_named(tmp_path: Path) -> None:
    if landlock_version() < 4:
        pytest.skip("this kernel has no Landlock for TCP")
    folder = tmp_path / "own"
    folder.mkdir()
    model, secret = tmp_path / "model", tmp_path / "secret"
    model.write_text("weights")
    secret.write_text("private")
    command = [sys.executable, "-c", TRIES, str(model), str(folder), str(secret)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[:4] == ["True", "done", "done", "done"], done
    assert len(lines) == 12 and all(line in ("EACCES", "EPERM") for line in lines[4:]), lines
    assert secret.read_text() == "private" and not (tmp_path / "new").exists()
