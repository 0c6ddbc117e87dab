"""`hivetune bench` that is stopped leaves no process and no file; `hivetune demo` says first what it lacks."""

import sys
from pathlib import Path

import psutil
import pytest

from hivetune.cli.demo import _run, bench, demo
from hivetune.errors import MachineNotFit, UsageError

# As the benchmark: it writes into a temporary folder and starts a worker; then Ctrl-C comes.
HARNESS = """
import os, pathlib, signal, subprocess, sys, tempfile, time
made = pathlib.Path(tempfile.mkdtemp())
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{worker.pid} {made}")
os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""


def test_ctrl_c_ends_all_of_it(tmp_path: Path, own_home: Path) -> None:
    folder, told = tmp_path / "work", tmp_path / "told"
    folder.mkdir()
    half, whole = own_home / "bench" / "peer-1", own_home / "bench" / "peer-2"
    half.mkdir(parents=True)
    whole.mkdir()
    (whole / ".ready").touch()
    with pytest.raises(KeyboardInterrupt):
        _run([sys.executable, "-c", HARNESS, str(told)], folder)
    pid, made = told.read_text().split()
    assert Path(made).parent == folder
    worker = psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else None
    # Killed, and reaped by whoever adopts orphans here: on busy cores that takes a moment.
    assert worker is None or not psutil.wait_procs([worker], 10)[1] or worker.status() == psutil.STATUS_ZOMBIE
    assert (half.exists(), whole.exists()) == (False, True)


def test_its_exit_code_is_said(tmp_path: Path) -> None:
    assert _run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path) == 3


def test_unknown_rows_to_time_are_refused() -> None:
    """Nothing was timed, with the exit code 0."""
    with pytest.raises(UsageError, match="unknown --sets agnts"):
        bench(sets="short,agnts")


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended as a bug, behind a traceback."""
    monkeypatch.setattr("hivetune.cli.demo.find_spec", lambda name: None)
    with pytest.raises(MachineNotFit, match="torch is not installed") as caught:
        bench(sets="short")
    assert "pip install" in caught.value.hint


def test_a_demo_without_the_converter_ends_before_it_trains(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVETUNE_CONVERTERS", str(own_home / "none"))
    with pytest.raises(MachineNotFit, match=r"converter .* is not installed") as caught:
        demo()
    assert caught.value.hint == "run hivetune fetch llama.cpp" and not (own_home / "demo").exists()
