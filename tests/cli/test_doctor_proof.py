"""The whole doctor by its command, at full counts; train/worker/measure and machine/doctor have the parts."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile

WHOLE_S = 60.0


def doctor(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "hivetune", "doctor", "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def assert_healthy(document: dict[str, Any]) -> None:
    """Every set right, none invented to be wrong."""
    assert document["fit"] and not [one for one in document["findings"] if one["id"].startswith("proof-")]
    (cpu,) = [one for one in document["proof"] if one["device"] == "cpu"]
    assert {one["status"] for one in cpu["sets"]} == {"right"}
    assert cpu["dtype"] in cpu["flops_per_s"] and cpu["rates"]["bandwidth"] > 0
    profile = read_profile(read_machine().fingerprint)
    proof = profile.proof("cpu")
    assert proof is not None and proof.dtype == cpu["dtype"] and not proof.rejected
    assert profile.rates["cpu"] == cpu["flops_per_s"]


@pytest.mark.proof
def test_the_whole_doctor_on_this_machine(record_property: Callable[[str, object], None]) -> None:
    """At its own shapes, within its minute, where nothing else uses the processor; nothing is found to be wrong."""
    started = time.monotonic()
    document = doctor()
    seconds = time.monotonic() - started
    assert_healthy(document)
    record_property("seconds", round(seconds, 1))
    record_property("sets", len(document["proof"][-1]["sets"]))
    record_property("calls", sum(one["calls"] for one in document["proof"][-1]["sets"]))
    assert seconds < WHOLE_S
