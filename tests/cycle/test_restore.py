"""A champion whose files are damaged is restored from its run, or makes way for the one before it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hivetune.cycle.acts.release
from hivetune.cycle.acts.release import restore_champion
from hivetune.errors import Busy, DoesNotFit, HivetuneError, MachineNotFit, UsageError


@pytest.fixture
def rolled_back(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons of the rollbacks that were made."""
    reasons: list[str] = []

    def rollback(_: Any, name: str, *, by: str, reason: str) -> tuple[Any, Any]:
        reasons.append(reason)
        return SimpleNamespace(label=f"{name}@1"), SimpleNamespace(label=f"{name}@2")

    monkeypatch.setattr(hivetune.cycle.acts.release, "rollback", rollback)
    return reasons


def restore(monkeypatch: pytest.MonkeyPatch, error: Exception) -> str:
    def register_run(*_: Any) -> None:
        raise error

    monkeypatch.setattr(hivetune.cycle.acts.release, "register_run", register_run)
    doing: Any = SimpleNamespace(name="demo", champion=lambda: SimpleNamespace(name="demo", label="demo@2", run="/run"))
    return restore_champion(doing)


@pytest.mark.parametrize(
    "error", [DoesNotFit("the disk is full"), Busy("locked"), MachineNotFit("no llama.cpp"), OSError(28, "no space")]
)
def test_what_is_no_damage_takes_nobody_s_place(
    rolled_back: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(type(error)):
        restore(monkeypatch, error)
    assert not rolled_back


@pytest.mark.parametrize("error", [HivetuneError("its adapter is damaged"), UsageError("its run is gone")])
def test_a_champion_that_is_lost_makes_way(
    rolled_back: list[str], monkeypatch: pytest.MonkeyPatch, error: HivetuneError
) -> None:
    assert restore(monkeypatch, error) == "demo@1 is the champion again: demo@2 is damaged"
    assert rolled_back == [f"it is damaged: {error.message}"]
