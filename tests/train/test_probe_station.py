"""What is done beside the probe disturbs nothing that it times, and is done however the probe ends."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hivetune.config import parse_config
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile, write_profile
from hivetune.process.protocol import ENTRIES, Probe
from hivetune.run.choices import NO_CHOICES
from hivetune.run.folder import write_resolved
from hivetune.train.open import Run
from hivetune.train.probe import probe_run

# A probe without torch: it times until `timed` is there, and ends when `done` is.
PROBE = """
import sys, time
from pathlib import Path
from hivetune.process.child import run_child
from hivetune.process.protocol import Beat, Probe

def wait_for(name, folder):
    while not (folder / name).exists():
        time.sleep(0.01)

def main(task, heartbeat):
    heartbeat.beat(Beat.PREPARING)
    {timing}
    (task.run / "timed").touch()
    heartbeat.beat(Beat.MEASURED)
    wait_for("done", task.run)
    return {{}}

run_child(main, Probe)
"""


def probed(folder: Path, meanwhile: Callable[[Path], None], timing: str = "pass") -> Path:
    """The folder of a run whose probe is such a script."""
    run = folder / "run"
    run.mkdir()
    script = folder / "probe.py"
    script.write_text(PROBE.format(timing=timing))
    settings = {"model": "tiny", "data": {"path": "none"}, "device": "cpu"}
    write_resolved(run, parse_config(settings, "test"), NO_CHOICES)
    found = SimpleNamespace(folder=run, model=folder, snapshot=SimpleNamespace(folder=folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENTRIES, Probe, str(script))
        probe_run(cast(Run, found), meanwhile=functools.partial(meanwhile, run))
    return run


def test_on_a_new_machine_it_waits_until_nothing_is_timed(tmp_path: Path) -> None:
    def meanwhile(run: Path) -> None:
        assert (run / "timed").exists()
        (run / "done").touch()

    assert (probed(tmp_path, meanwhile) / "done").exists()


def test_on_a_machine_whose_rates_are_known_it_begins_at_once(tmp_path: Path) -> None:
    profile = read_profile(read_machine().fingerprint)
    write_profile(profile.with_rates("cpu", {"float32": 1e11}))

    def meanwhile(run: Path) -> None:
        assert not (run / "timed").exists()
        (run / "begun").touch()
        (run / "done").touch()

    assert (probed(tmp_path, meanwhile, timing='wait_for("begun", task.run)') / "done").exists()


@pytest.mark.parametrize("died", ["raise ValueError", "import os; os.abort()"])
def test_it_is_done_once_when_the_probe_dies_before(tmp_path: Path, died: str) -> None:
    done: list[Path] = []
    run = probed(tmp_path, done.append, timing=died)
    assert done == [run]
