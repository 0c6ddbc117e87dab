"""The command line in this process, which saves its imports, and those of its children where a fork server is open."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from hivetune.cli import main as cli
from hivetune.cli.output import MODE
from hivetune.process.stop import NUMBERS


def hivetune(
    *arguments: str | Path, stdin: str = "", cwd: Path | None = None, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run `hivetune ARGUMENTS` to its end, in the folder `cwd` and with these variables."""
    words = ["hivetune", *map(str, arguments)]
    streams = {"stdin": _stream(stdin), "stdout": _stream(), "stderr": _stream()}
    handlers = {number: signal.getsignal(number) for number in NUMBERS}
    umask = os.umask(0o077)
    try:
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.multiple(sys, argv=words, **streams),
            contextlib.chdir(cwd) if cwd else contextlib.nullcontext(),
            pytest.raises(SystemExit) as ended,
        ):
            cli.main()
    finally:
        MODE.json = MODE.is_done = False
        os.umask(umask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = (_text(streams[name]) for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), out, err)


def _stream(text: str = "") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8", write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
