"""An agent with real children, called as Ray calls it; no Ray."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from small_disk import fill

from hivetune.base.disk import MANIFEST, sha256_file, write_manifest
from hivetune.base.typed import from_plain, to_plain
from hivetune.cluster.agent import Agent
from hivetune.cluster.machine import Membership, claim_device, write_membership
from hivetune.config import SuperviseConfig
from hivetune.process.cluster import AgentSign, Order
from hivetune.process.protocol import Meeting

WORKER = str(Path(__file__).with_name("tiny_worker.py"))


def member(python: str, *devices: str) -> None:
    write_membership(Membership("127.0.0.1:6479", True, python, devices))


def order_of(folder: Path, number: int = 1, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_text("same")
    write_manifest(folder)
    order = Order(
        run="run",
        number=number,
        model="tiny",
        model_folder=folder,
        model_hash=sha256_file(folder / MANIFEST),
        supervise=SuperviseConfig().model_dump(mode="json"),
        meeting=Meeting("127.0.0.1:1", "token", mixed=True),
        module=WORKER,
    )
    return json.dumps(to_plain(order) | changes)


def sign_of(text: str) -> AgentSign:
    return from_plain(AgentSign, json.loads(text))


def ended(agent: Agent) -> AgentSign:
    deadline = time.monotonic() + 60
    while (sign := sign_of(agent.look())).outcome is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return sign


def program_of(pid: int) -> str:
    """The first word of its command line; the kernel shows none for a moment, behind the exec that Popen waits for."""
    deadline = time.monotonic() + 60
    while not (words := Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return words[0].decode()


@pytest.fixture
def python() -> str:
    import sys

    return sys.executable


def test_each_agent_has_a_device_of_its_own(tmp_path: Path, python: str) -> None:
    member(python, "cpu", "cpu")
    agents = [Agent(), Agent(), Agent()]
    signs = [sign_of(agent.start(order_of(tmp_path / "waits", number))) for number, agent in enumerate(agents, 1)]
    assert [sign.device for sign in signs] == ["cpu", "cpu", ""]
    assert signs[0].outcome is None and signs[0].pid > 0
    assert signs[2].outcome is not None and signs[2].outcome.error is not None
    assert "every device that" in signs[2].outcome.error.message
    for agent in agents[:2]:
        agent._child.kill()  # type: ignore[union-attr]
        assert ended(agent).outcome.signal == 9  # type: ignore[union-attr]


def test_how_a_worker_ended_is_told_once(tmp_path: Path, python: str) -> None:
    member(python, "cpu")
    agent = Agent()
    agent.start(order_of(tmp_path / "dies"))
    sign = ended(agent)
    assert sign.outcome is not None and (sign.outcome.status, sign.outcome.signal) == ("died", 9)
    assert sign_of(agent.look()).outcome is None


def test_other_bytes_of_the_model_are_refused_with_the_machine_named(tmp_path: Path, python: str) -> None:
    member(python, "cpu")
    sign = sign_of(Agent().start(order_of(tmp_path / "waits", model_hash="0" * 64)))
    assert sign.outcome is not None and sign.outcome.error is not None
    assert f"{sign.host} does not have the model tiny" in sign.outcome.error.message
    assert sign.outcome.error.exit_code == 4 and "hivetune fetch tiny" in sign.outcome.error.hint


def test_a_worker_of_another_environment(tmp_path: Path, python: str) -> None:
    """A virtual environment beside this one: another program, the same Hivetune by a path."""
    import subprocess
    import sys
    import sysconfig

    import hivetune

    subprocess.run([python, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True)
    site = next((tmp_path / "other/lib").glob("python*/site-packages"))
    paths = [sysconfig.get_path("purelib"), str(Path(hivetune.__file__).parents[1])]
    (site / "more.pth").write_text("\n".join(paths))
    other = str(tmp_path / "other/bin/python")
    member(other, "cpu")
    agent = Agent()
    sign = sign_of(agent.start(order_of(tmp_path / "waits")))
    assert program_of(sign.pid) == other != sys.executable
    agent._child.kill()  # type: ignore[union-attr]


def test_a_machine_that_is_in_no_cluster_starts_nothing(tmp_path: Path) -> None:
    sign = sign_of(Agent().start(order_of(tmp_path / "waits")))
    assert sign.outcome is not None and sign.outcome.error is not None


def test_a_full_disk_is_told_with_the_machine(
    tmp_path: Path, small_disk: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(small_disk))
    member(python, "cpu")
    claimed = claim_device(("cpu",))  # its folder is there
    assert claimed is not None
    os.close(claimed[1])
    fill(small_disk)
    sign = sign_of(Agent().start(order_of(tmp_path / "waits")))
    assert sign.host and sign.outcome is not None and sign.outcome.error is not None
    assert "No space left on device" in sign.outcome.error.message
