"""`watch` draws a run on a terminal; `top` tells who uses the machine."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from dashboard.shown import make_run

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
        terminal = Terminal("watch", "mine")
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
    command = [sys.executable, "-m", "hivetune", "watch", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [line] = done.stdout.splitlines()
    assert json.loads(line)["step"] == 8
    assert "·" not in done.stderr
    plain = subprocess.run(command[:-1], capture_output=True, text=True, check=True)
    assert "step 8 of 20, loss 2.200" in plain.stdout and plain.stderr == ""


def test_top_names_the_run_that_goes_on_with_its_process(tmp_path: Path) -> None:
    run = make(tmp_path)
    command = [sys.executable, "-m", "hivetune", "top", "--json"]
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["processes"] == []
    with hold_run(run):
        told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        plain = subprocess.run(command[:-1], capture_output=True, text=True, check=True).stdout
    [process] = told["processes"]
    assert (process["what"], process["name"], process["pid"]) == ("training", "mine-abc", os.getpid())
    assert process["resident_bytes"] > 1 << 20
    assert told["cores"] == os.cpu_count()
    assert "cores busy" in plain
    assert "training\tmine-abc" in plain


@pytest.mark.parametrize("words", ["report nothing", "report all --to nowhere", "report all --to grafana"])
def test_a_report_that_can_not_be_says_what_to_write(words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hivetune", *words.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "hint: " in done.stderr


def test_a_report_of_all_runs_skips_one_that_cannot_be_read(own_home: Path, tmp_path: Path) -> None:
    good, bad = (make_run(name, steps=4, done=4) for name in ("good", "bad"))
    (bad / "config.resolved.yaml").write_text("config: [")
    command = [sys.executable, "-m", "hivetune", "report", "all", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [report["run"] for report in json.loads(done.stdout)["reports"]] == [str(good)]
    assert "bad: skipped: " in done.stderr
