"""A good citizen: signals, two runs in one folder, a full disk, changed files and packages, a killed supervisor."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from forks import FORKS
from scripted import HOST, PACE, events, make_run, steps, supervise

from hivetune.base.disk import lock
from hivetune.base.journal import read_journal
from hivetune.errors import Busy, DoesNotFit, Stopped, UsageError
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.run.folder import read_resolved, write_resolved
from hivetune.run.status import run_status, stop_run
from hivetune.train.plan.steps import read_plan
from hivetune.train.supervise import attempt, supervisor
from hivetune.train.supervise.attempt import Terms, worker_effects

pytestmark = pytest.mark.slow  # processes are started, stopped and killed
SUPERVISOR = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from train.supervise.scripted import supervise
from hivetune.config import parse_config
folder = Path(sys.argv[1])
config = parse_config(json.loads((folder / "run/config.resolved.yaml").read_text())["config"])
outcome = supervise(folder, config)
sys.exit(0 if outcome.error is None else outcome.error.exit_code)
"""


def start(folder: Path) -> "subprocess.Popen[bytes]":
    with open(folder / "log", "ab") as log:
        return FORKS.start_script(SUPERVISOR, str(folder), log=log)


def wait_until(holds: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Busy waiting on what another process does; ends when that process does."""
    while not holds():
        assert process.poll() is None
        threading.Event().wait(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_after_a_checkpoint_and_it_goes_on_later(tmp_path: Path, number: int, code: int) -> None:
    config = make_run(tmp_path, [PACE])
    process = start(tmp_path)
    wait_until(lambda: steps(tmp_path) > 2, process)
    process.send_signal(number)
    assert process.wait() == code
    saved = checkpoints.newest_good(tmp_path / "run").step
    assert saved > 2 and events(tmp_path, "stop_requested")[0]["signal"] == number
    outcome = supervise(tmp_path, config).check()
    assert (outcome.status, outcome.restarts) == ("done", 0)
    started = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in started if entry["event"] == "started"][-1] == saved


def test_with_nohup_it_goes_on_when_the_terminal_closes(tmp_path: Path) -> None:
    make_run(tmp_path, [PACE])
    command = ["nohup", sys.executable, "-c", SUPERVISOR, str(tmp_path), str(Path(__file__).parents[2])]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: steps(tmp_path) > 2, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0
    assert not events(tmp_path, "stop_requested")


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    make_run(tmp_path, [{"do": "hold the GIL", "step": 3}], hang_floor_s=600)
    process = start(tmp_path)
    wait_until((tmp_path / "run/script.done").exists, process)  # three steps are made
    process.send_signal(signal.SIGINT)
    wait_until(lambda: bool(events(tmp_path, "stop_requested")), process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert checkpoints.newest_good(tmp_path / "run").step == 3  # from memory


def test_a_stop_while_loading_waits_for_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, [{"do": "hold the GIL", "step": -1}])
    process = start(tmp_path)
    wait_until(lambda: (tmp_path / "run/script.done").exists(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143


def test_a_killed_supervisor_is_replaced_by_the_next(tmp_path: Path) -> None:
    config = make_run(tmp_path, [PACE])
    process = start(tmp_path)
    wait_until(lambda: steps(tmp_path) > 6, process)
    process.kill()
    process.wait()
    record = {"schema": 1, "name": "n", "created": 0.0, "status": "new"}
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    assert run_status(tmp_path / "run").state == "interrupted"
    outcome = supervise(tmp_path, config)
    assert (outcome.status, outcome.restarts, outcome.faults) == ("done", 0, ())
    assert run_status(tmp_path / "run").state == "done"


def test_stop_from_another_process(tmp_path: Path) -> None:
    make_run(tmp_path, [PACE])
    (tmp_path / "run/run.json").write_text('{"schema": 1, "name": "n", "created": 0.0, "status": "new"}')
    assert not stop_run(tmp_path / "run", 1)
    process = start(tmp_path)
    wait_until(lambda: steps(tmp_path) > 2, process)
    assert run_status(tmp_path / "run").pid == process.pid
    reaper = threading.Thread(target=process.wait)
    reaper.start()
    assert stop_run(tmp_path / "run", 20)
    reaper.join()
    assert process.returncode == 143 and run_status(tmp_path / "run").state == "stopped"


def test_the_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    config = make_run(tmp_path, [])
    with lock(tmp_path / "run"), pytest.raises(Busy, match=f"process {os.getpid()}"):
        supervise(tmp_path, config)


@pytest.mark.parametrize("what", ["model/hivetune.json", "snapshot/tokens.u32"])
def test_a_changed_model_or_data_is_refused_by_name(tmp_path: Path, what: str) -> None:
    config = make_run(tmp_path, [])
    content = bytearray((tmp_path / what).read_bytes())
    content[0] ^= 1
    (tmp_path / what).write_bytes(content)
    with pytest.raises(UsageError, match=Path(what).name):
        supervise(tmp_path, config)


def test_changed_packages_are_said_and_it_goes_on(tmp_path: Path) -> None:
    config = make_run(tmp_path, [{"do": "kill", "step": 9}], attempts=1)
    assert supervise(tmp_path, config).status == "failed"
    (tmp_path / "run/script.json").write_text("[]")
    assert supervise(tmp_path, config, replace(HOST, versions={"torch": "2.8"})).status == "done"
    assert "torch 2.7 -> 2.8" in events(tmp_path, "warning")[-1]["text"]


def test_no_room_for_the_checkpoints_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path, [])
    free = 300_000
    monkeypatch.setattr(supervisor, "disk_free_bytes", lambda folder: free)
    with pytest.raises(DoesNotFit, match="needs 1 MB of disk space, and 300 kB are free"):
        supervise(tmp_path, config)
    free = 2_000_000  # enough for a small run: its checkpoints have a few kB
    assert supervise(tmp_path, config).check().status == "done"


def test_a_full_disk_is_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(tmp_path, [{"do": "raise", "text": "[Errno 28] No space left on device", "step": 8, "times": 1}])
    free = iter([1 << 40, 0, 0, 0])
    monkeypatch.setattr(supervisor, "disk_free_bytes", lambda folder: next(free, 1 << 40))
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    reasons: list[str] = []
    outcome = supervise(tmp_path, config, terms=Terms(on_wait=reasons.append)).check()
    assert (outcome.status, outcome.faults) == ("done", ("disk-full",))
    assert len(reasons) == 1 and reasons[0].startswith(f"the disk of {tmp_path / 'run'} is full: the run waits until")
    assert events(tmp_path, "disk_wait") and events(tmp_path, "disk_ready")


def test_a_stop_while_it_waits_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(tmp_path, [{"do": "raise", "text": "[Errno 28] No space left on device", "step": 8}])
    free = iter([1 << 40])

    def full(folder: Path) -> int:
        if (found := next(free, None)) is not None:
            return found
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(supervisor, "disk_free_bytes", full)
    outcome = supervise(tmp_path, config)
    assert outcome.status == "stopped"
    with pytest.raises(Stopped, match="step 8") as caught:
        outcome.check()
    assert (caught.value.exit_code, caught.value.signal_number) == (143, signal.SIGTERM)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_events_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    events = supervisor._Events(tmp_path / "events.jsonl")
    saved = os.dup(events._handle)
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), events._handle)
    events.append("one", number=1)
    events.append("two", number=2)
    os.dup2(saved, events._handle)
    os.close(saved)
    events.append("three", number=3)
    events.close()
    assert [event["number"] for event in read_journal(tmp_path / "events.jsonl")] == [1, 2, 3]


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[int] = []
    supervise(tmp_path, make_run(tmp_path, [PACE]), terms=Terms(told.append))
    assert told == sorted(told) and told[-1] == 24


def test_a_smaller_rank_and_a_sample_only_where_they_are_allowed(tmp_path: Path) -> None:
    faults = [{"do": "out of memory", "step": 4, "rank_above": 8}]
    config = make_run(tmp_path, faults, allow=["rank", "sample"], attempts=6)
    outcome = supervise(tmp_path, config).check()
    resolved = yaml.safe_load((tmp_path / "run/config.resolved.yaml").read_text())
    assert (
        outcome.rungs[-1] == "rank"
        and resolved["config"]["lora"] | {"r": 8, "alpha": 16.0} == resolved["config"]["lora"]
    )


def test_a_run_that_began_with_an_adapter_keeps_its_rank(tmp_path: Path) -> None:
    """Half of it would not fit the adapter, and every attempt after that would fail."""
    faults = [{"do": "out of memory", "step": 4, "rank_above": 8}]
    config = make_run(tmp_path, faults, allow=["rank"], attempts=6)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"start": "other"})})
    outcome = supervise(tmp_path, config)
    assert outcome.status != "done" and "rank" not in outcome.rungs


def test_a_sample_counts_as_not_reached(tmp_path: Path) -> None:
    make_run(tmp_path, [])
    supervisor.skip_half_of_remaining_rows(tmp_path / "run", tmp_path / "snapshot")
    plan = read_plan(tmp_path / "run")
    assert [plan.num_rows, *map(len, plan.rows_reached())] == [96, 48, 0]


def test_who_started_it_may_ask_for_its_end_without_a_signal(tmp_path: Path) -> None:
    config = make_run(tmp_path, [PACE])
    terms = Terms(ends=lambda: int(attempt.last_step(tmp_path / "run") >= 4))
    outcome = supervise(tmp_path, config, terms=terms)
    assert outcome.status == "stopped" and 4 <= outcome.steps < 24
    assert isinstance(outcome.error, Stopped) and outcome.error.signal_number is None
    assert supervise(tmp_path, config).steps == 24


# The variables that a run was settled with reach each of its workers, and only them; the ladder's lie over them.

POISON = "HSA_OVERRIDE_GFX_VERSION"
SETTLED = {"HSA_ENABLE_SDMA": "0", POISON: None}


def settle(run: Path, environment: dict[str, str | None]) -> None:
    config, choices = read_resolved(run)
    write_resolved(run, config, choices.updated(Choices(environment=environment)))


def test_a_worker_has_them_in_every_attempt_and_the_journal_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POISON, "10.3.0")
    faults = [
        {"do": "SIGSEGV", "step": 3, "times": 1},
        {"do": "SIGSEGV", "step": 5, "rung": {"HSA_ENABLE_SDMA": "0"}},  # of a worker without the variable
    ]
    config = make_run(tmp_path, faults)
    settle(tmp_path / "run", SETTLED)
    outcome = supervise(tmp_path, config).check()
    assert outcome.restarts == 1
    assert [entry["environment"] for entry in events(tmp_path, "attempt")] == [SETTLED, SETTLED]
    assert os.environ[POISON] == "10.3.0" and "HSA_ENABLE_SDMA" not in os.environ


def test_a_change_of_the_ladder_lies_over_them(tmp_path: Path) -> None:
    make_run(tmp_path, [])
    settle(tmp_path / "run", {"TORCH_BLAS_PREFER_HIPBLASLT": "1", POISON: None})
    environment, choices = worker_effects(tmp_path / "run", ("blas", "general"))
    assert environment["TORCH_BLAS_PREFER_HIPBLASLT"] == "0" and environment[POISON] is None
    assert choices == Choices(path="general")
    make_run(tmp_path / "none", [])
    assert worker_effects(tmp_path / "none/run", ()) == ({}, Choices())
