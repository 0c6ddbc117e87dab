"""The variables that a run was settled with reach each of its workers, and only them; the ladder's lie over them."""

import os
from pathlib import Path

import pytest
from scripted import make_run, supervise

from hivetune.base.journal import read_journal
from hivetune.run.choices import Choices
from hivetune.run.folder import EVENTS, read_resolved, write_resolved
from hivetune.train.supervise.attempt import worker_effects

POISON = "HSA_OVERRIDE_GFX_VERSION"
SETTLED = {"HSA_ENABLE_SDMA": "0", POISON: None}


def settle(run: Path, environment: dict[str, str | None]) -> None:
    config, choices = read_resolved(run)
    write_resolved(run, config, Choices(environment=environment).over(choices))


@pytest.mark.slow
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
    attempts = [entry for entry in read_journal(tmp_path / "run" / EVENTS) if entry["event"] == "attempt"]
    assert [entry["environment"] for entry in attempts] == [SETTLED, SETTLED]
    assert os.environ[POISON] == "10.3.0" and "HSA_ENABLE_SDMA" not in os.environ


def test_a_change_of_the_ladder_lies_over_them(tmp_path: Path) -> None:
    make_run(tmp_path, [])
    settle(tmp_path / "run", {"TORCH_BLAS_PREFER_HIPBLASLT": "1", POISON: None})
    environment, choices = worker_effects(tmp_path / "run", ("blas", "general"))
    assert environment["TORCH_BLAS_PREFER_HIPBLASLT"] == "0" and environment[POISON] is None
    assert choices == Choices(path="general")


def test_a_run_without_any_is_as_before(tmp_path: Path) -> None:
    make_run(tmp_path, [])
    assert worker_effects(tmp_path / "run", ()) == ({}, Choices())
