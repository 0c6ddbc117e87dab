"""A run is carried to a machine and home again, while machines die and refuse. Agents are called here, without Ray; the
run on a machine is a real process, `guest_run.py`."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data.models import make_sized_model

from hivetune.base.disk import MANIFEST, lock_holder, manifest_problems, write_manifest
from hivetune.base.journal import read_journal
from hivetune.cluster import carry, host
from hivetune.cluster.carry import bring_home, carry_run, check_carried
from hivetune.config import parse_config
from hivetune.errors import DoesNotFit, HivetuneError, MachineNotFit, Stopped, UsageError
from hivetune.machine.cluster import DEVICE, Membership, write_membership
from hivetune.run.checkpoints import newest_good
from hivetune.run.folder import EVENTS, METRICS, read_record
from hivetune.run.status import run_status
from hivetune.train import start as open_station
from hivetune.train.open import Run, load_run
from hivetune.train.start import open_run

GUEST = Path(__file__).with_name("guest_run.py")


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception):
        self.cause = cause


class Ray:
    """Of Ray what carries a run: machines by name, each with a home of its own, called at once and in this process.

    `before_look` is told the machine before each look of an agent.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, folder: Path, *names: str):
        self.homes = {name: folder / name for name in names}
        self.before_look: Callable[[str], None] = lambda name: None
        self.used: list[str] = []
        self.busy = False
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{GUEST}" "$@"\n')
        python.chmod(0o700)
        for home in self.homes.values():
            with at(home):
                write_membership(Membership("127.0.0.1:6479", False, str(python), ("cpu",)))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": True, "Resources": {DEVICE: 1}} for name in self.homes]

    def remote(self, *, label_selector: dict[str, str], **options: Any) -> Any:
        avoided = label_selector.get("ray.io/node-id", "!in()")[4:-1].split(",")
        name = next(name for name in self.homes if name not in avoided)
        self.used.append(name)
        return lambda kind: Made(lambda: Actor(self, name, kind()))

    def lose(self, name: str) -> None:
        del self.homes[name]

    def kill(self, actor: "Actor") -> None:
        """Its process ends, and by that the run that it started; what it kept on its disk stays."""
        if hasattr(actor.host, "_process"):
            actor.host._end()

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        if self.busy:
            os.kill(os.getpid(), signal.SIGTERM)
            return [], calls
        return calls, []

    def get(self, call: Callable[[], Any]) -> Any:
        return call()


class Made:
    def __init__(self, remote: Callable[[], "Actor"]):
        self.remote = remote


class Actor:
    def __init__(self, ray: Ray, name: str, host: Any):
        self.ray, self.name, self.host = ray, name, host

    def __getattr__(self, method: str) -> Made:
        def call(*arguments: Any) -> Any:
            if method == "look":
                self.ray.before_look(self.name)
            if self.name not in self.ray.homes:
                raise RayError("gone")
            if method == "where":
                return self.name
            try:
                with at(self.ray.homes[self.name]):
                    return getattr(self.host, method)(*arguments)
            except Exception as error:
                raise RayTaskError(error) from error

        return Made(lambda *arguments: lambda: call(*arguments))  # type: ignore[arg-type,return-value]


@contextlib.contextmanager
def at(home: Path) -> Iterator[None]:
    """In the home of another machine."""
    before = os.environ["HIVETUNE_HOME"]
    os.environ["HIVETUNE_HOME"] = str(home)
    try:
        yield
    finally:
        os.environ["HIVETUNE_HOME"] = before


@pytest.fixture
def run(tmp_path: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Run:
    rows = write_rows([{"prompt": f"What comes after {i}?", "completion": f"It is {i + 1}."} for i in range(20)])
    model = make_sized_model(tmp_path / "model")
    write_manifest(model)
    monkeypatch.setattr(open_station, "fetch_model", lambda name, progress: model)
    data = {"path": str(rows), "near_duplicates": 0}
    return open_run(parse_config({"model": str(model), "data": data, "device": "cpu"}), "mine")


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    here = Ray(tmp_path, "one", "two")
    monkeypatch.setattr(carry, "connect_ray", lambda address: here)
    monkeypatch.setattr(carry, "FOLLOW_EVERY_S", 0.01)
    return here


def steps(run: Path) -> list[int]:
    return [entry["step"] for entry in read_journal(run / METRICS) if entry["event"] == "step"]


def nothing_is_left(ray: Ray, run: Run) -> bool:
    kept = [path for home in ray.homes.values() for path in (home / "cluster/runs").glob("*")]
    return not kept and not list(run.folder.parent.glob(".*"))


def test_a_run_goes_there_and_comes_back_whole(run: Run, ray: Ray) -> None:
    followed: list[int] = []
    told: list[str] = []

    def look(name: str) -> None:
        followed.append(len(steps(run.folder)))
        holder = lock_holder(run.folder)
        assert holder is not None and holder.pid == os.getpid()
        if followed[-1] == 20:
            (ray.homes["one"] / "finish").touch()

    ray.before_look = look
    (run.folder / "supervisor.log").write_text("before\n")
    document = carry_run(run, "10.0.0.5:6479", told.append)
    assert document["run"] == str(run.folder) and not document["already_done"]
    assert steps(run.folder) == list(range(1, 41)) and followed == sorted(followed) and 20 in followed
    record = load_run(run.folder).record
    assert record["status"] == "done" and record["snapshot"] == str(run.snapshot.folder)
    assert not manifest_problems(run.folder) and newest_good(run.folder).step == 20
    assert (run.folder / "supervisor.log").read_text() == "before\n"
    assert any("continues on" in text and "cpu" in text for text in told)
    assert lock_holder(run.folder) is None and nothing_is_left(ray, run)
    assert carry_run(run, "10.0.0.5:6479", told.append)["already_done"]


def test_a_machine_is_lost_and_another_goes_on_from_what_is_here(run: Run, ray: Ray) -> None:
    told: list[str] = []

    def look(name: str) -> None:
        if name == "one" and len(steps(run.folder)) >= 5:
            ray.lose("one")
        if name == "two":
            (ray.homes["two"] / "finish").touch()

    ray.before_look = look
    carry_run(run, "10.0.0.5:6479", told.append)
    assert ray.used == ["one", "two"] and any("is lost" in text for text in told)
    hosts = [entry["host"] for entry in read_journal(run.folder / EVENTS) if entry["event"] == "supervisor_started"]
    assert hosts == ["one", "two"] and steps(run.folder)[-1] == 40
    assert run_status(run.folder).state == "done"


def test_what_is_made_comes_home_now_and_then(run: Run, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine that is lost costs no more than that."""
    monkeypatch.setattr(carry, "HOME_EVERY_S", 0.0)
    monkeypatch.setattr(carry, "HOME_SHARE", 1e9)

    def look(name: str) -> None:
        if newest_good(run.folder).step == 20:
            ray.homes.clear()

    ray.before_look = look
    with pytest.raises(MachineNotFit, match="no device of the cluster at"):
        carry_run(run, "10.0.0.5:6479", lambda text: None)
    assert newest_good(run.folder).step == 20 and load_run(run.folder).record["model"] == str(run.model)
    assert len(steps(run.folder)) >= 20 and lock_holder(run.folder) is None


def test_a_machine_that_is_not_fit_is_given_up_and_named(run: Run, ray: Ray) -> None:
    (ray.homes["one"] / "refuses").write_text("4")
    (ray.homes["two"] / "finish").touch()
    told: list[str] = []
    carry_run(run, "10.0.0.5:6479", told.append)
    assert ray.used == ["one", "two"] and any("given up" in text and "exit code 4" in text for text in told)


def test_a_model_of_other_bytes_is_no_model(run: Run, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "sha256_file", lambda path: "0" * 64)
    with pytest.raises(MachineNotFit, match=r"does not have the model .*; .* does not have the model"):
        carry_run(run, "10.0.0.5:6479", lambda text: None)
    assert ray.used == ["one", "two"] and run_status(run.folder).state == "new" and nothing_is_left(ray, run)


def test_another_version_of_hivetune_is_not_fit(run: Run, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "__version__", "0.0.1")
    with pytest.raises(MachineNotFit, match=r"has Hivetune 0\.0\.1, the run's own machine"):
        carry_run(run, "10.0.0.5:6479", lambda text: None)


def test_a_signal_asks_for_the_clean_end_and_brings_the_run_home(run: Run, ray: Ray) -> None:
    asked: list[int] = []

    def look(name: str) -> None:
        if len(steps(run.folder)) >= 20 and not asked:
            asked.append(1)
            os.kill(os.getpid(), signal.SIGTERM)

    ray.before_look = look
    with pytest.raises(Stopped) as stopped:
        carry_run(run, "10.0.0.5:6479", lambda text: None)
    assert stopped.value.exit_code == 143
    assert run_status(run.folder).state == "stopped" and newest_good(run.folder).step == 20
    assert nothing_is_left(ray, run)


def test_who_waits_for_a_device_can_be_stopped(run: Run, ray: Ray) -> None:
    ray.busy = True
    with pytest.raises(Stopped, match="while waiting for a device"):
        carry_run(run, "10.0.0.5:6479", lambda text: None)


def test_a_full_disk_here_loses_nothing_that_was_made_there(
    run: Run, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ray.homes["one"] / "finish").touch()
    monkeypatch.setattr(carry, "COUNT_EVERY_S", 0.0)
    refused: list[Path] = []

    def unpack(parcel: Path, target: Path) -> None:
        if len(refused) < 3:
            refused.append(parcel)
            raise OSError(errno.ENOSPC, "no space")
        real(parcel, target)

    real = carry.unpack
    monkeypatch.setattr(carry, "unpack", unpack)
    told: list[str] = []
    carry_run(run, "10.0.0.5:6479", told.append)
    assert len(refused) == 3 and sum("is full" in text for text in told) == 1
    assert run.record["status"] == "done" and nothing_is_left(ray, run)


def test_a_run_that_fits_on_no_machine_says_so(run: Run, ray: Ray) -> None:
    for home in ray.homes.values():
        (home / "refuses").write_text("5")
    with pytest.raises(DoesNotFit, match=r"exit code 5; .*exit code 5"):
        carry_run(run, "10.0.0.5:6479", lambda text: None)


def test_another_run_does_not_take_its_place(run: Run, tmp_path: Path) -> None:
    came = tmp_path / "came"
    came.mkdir()
    record = read_record(run.folder)
    open_station.write_record(came, {**record, "identity": {**record["identity"], "snapshot": "other"}})
    with pytest.raises(HivetuneError, match="another run"):
        bring_home(came, run)
    assert read_record(run.folder) == record and not (run.folder / MANIFEST).exists()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"workers": 2}, "exclude each other"),
        ({"device": "cuda:1"}, "names one card"),
        ({"lora": {"start": "/runs/before"}}, "on this machine only"),
    ],
)
def test_what_is_bound_to_this_machine_is_refused(run: Run, settings: dict[str, Any], why: str) -> None:
    config = parse_config({**run.config.model_dump(mode="json", exclude={"cycle"}), **settings})
    with pytest.raises(UsageError, match=why):
        check_carried(Run(run.folder, config, run.model, run.snapshot, run.plan))
