"""`show --follow` draws a run on a terminal."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import write_json
from hivetune.base.journal import Journal
from hivetune.run.status import hold_run


def make(folder: Path) -> Path:
    run = folder / "mine-abc"
    run.mkdir(parents=True)
    write_json(run / "run.json", {"schema": 1, "name": "mine", "created": 5.0, "status": "new"})
    write_json(run / "plan.json", {"schema": 1, "steps": 20})
    make_steps(run, 1, 8)
    with Journal(run / "events.jsonl") as events:
        events.append("supervisor_started")
    with open_database() as database:
        database.execute("INSERT INTO runs VALUES (?, 'mine', 5.0, 'h')", (str(run),))
    return run


def make_steps(run: Path, first: int, last: int) -> None:
    with Journal(run / "metrics.jsonl") as metrics:
        for step in range(first, last + 1):
            metrics.append("step", step=step, loss=3.0 - step / 10, tokens=100, seconds=0.5)


class Terminal:
    """A program on a terminal of 90 columns, and all that it has written."""

    def __init__(self, *arguments: str):
        self.text = ""
        self._end, other = os.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "40"}
        command = [sys.executable, "-m", "hivetune", *arguments]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)

    def read_until(self, words: str, timeout_s: float = 30.0) -> str:
        """What was written up to `words`; the rest waits for the next call."""
        deadline = time.monotonic() + timeout_s
        while words not in self.text:
            assert time.monotonic() < deadline, f"no {words!r} in {self.text!r}"
            if select.select([self._end], [], [], 0.5)[0]:
                self.text += os.read(self._end, 65536).decode()
        before, _, self.text = self.text.partition(words)
        return before + words

    def wait(self) -> int:
        """Its exit code. It may still write, and its end of the terminal is gone when it has ended."""
        with contextlib.suppress(OSError):
            while os.read(self._end, 65536):
                pass
        os.close(self._end)
        return self.process.wait(30)


def test_watch_draws_the_curve_as_it_grows_and_ends_with_the_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    with ExitStack() as held:
        held.enter_context(hold_run(run))
        terminal = Terminal("show", "mine", "--follow")
        assert "step 8 of 20, loss 2.200" in terminal.read_until("nats per token")
        make_steps(run, 9, 12)
        with Journal(run / "events.jsonl") as events:
            events.append("failure", step=12, words="the card hung", fault="device-hang")
            events.append("sample", available_bytes=1, disk_free_bytes=1, cards=[{"watts": 301.0}])
        terminal.read_until("step 12 of 20, loss 1.800")
        screen = terminal.read_until("fault in step 12: the card hung")
        assert "·" in screen and "│" in screen
        assert "card 0: 301 W" in screen
        held.close()
        assert terminal.wait() == 0


def test_watch_into_a_pipe_writes_lines(tmp_path: Path) -> None:
    run = make(tmp_path)
    command = [sys.executable, "-m", "hivetune", "show", str(run), "--follow", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [line] = done.stdout.splitlines()
    assert json.loads(line)["step"] == 8
    assert "·" not in done.stderr
    plain = subprocess.run(command[:-1], capture_output=True, text=True, check=True)
    assert "step 8 of 20, loss 2.200" in plain.stdout and plain.stderr == ""
