"""A champion whose files are damaged is restored from its run, or replaced by the one before it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hivetune.cycle.acts.release
from hivetune.cycle.acts.release import restore_champion, return_to_previous
from hivetune.errors import Busy, DoesNotFit, HivetuneError, MachineNotFit, UsageError


@pytest.fixture
def rolled_back(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the reasons of the rollbacks."""
    reasons: list[str] = []

    def rollback(_: Any, label: str, *, by: str, reason: str) -> tuple[Any, Any]:
        assert label == "demo@2"
        reasons.append(reason)
        return SimpleNamespace(label="demo@1"), SimpleNamespace(label=label)

    monkeypatch.setattr(hivetune.cycle.acts.release, "rollback", rollback)
    return reasons


def restore(monkeypatch: pytest.MonkeyPatch, error: Exception) -> str:
    def register_run(*_: Any) -> None:
        raise error

    monkeypatch.setattr(hivetune.cycle.acts.release, "register_run", register_run)
    context: Any = SimpleNamespace(
        name="demo", champion=lambda: SimpleNamespace(name="demo", label="demo@2", run="/run"), details={}
    )
    return restore_champion(context)


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


def test_a_run_that_holds_another_model_now_restores_nothing(
    rolled_back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registering it as another release would go on without end."""
    other = SimpleNamespace(label="demo@3", check=lambda: None)
    monkeypatch.setattr(hivetune.cycle.acts.release, "register_run", lambda *_: (other, True))
    context: Any = SimpleNamespace(
        name="demo", champion=lambda: SimpleNamespace(name="demo", label="demo@2", run="/run"), details={}
    )
    assert restore_champion(context) == "demo@1 is the champion again: demo@2 is damaged"
    assert rolled_back == ["it is damaged: its run now has another adapter: /run"]


def test_a_champion_that_is_whole_and_can_t_be_served_is_not_restored(
    rolled_back: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person deployed it without a GGUF adapter. It was once reported as restored, and restored again for ever."""
    whole = SimpleNamespace(name="demo", label="demo@2", run="/run", folder=tmp_path, proof={}, check=lambda: None)
    monkeypatch.setattr(hivetune.cycle.acts.release, "register_run", lambda *_: (whole, False))
    context: Any = SimpleNamespace(name="demo", champion=lambda: whole)
    with pytest.raises(UsageError, match="demo@2 has no GGUF adapter"):
        restore_champion(context)
    assert not rolled_back


@pytest.mark.parametrize(("champion", "reasons"), [("demo@2", ["it is slow"]), ("demo@1", [])])
def test_what_the_gateway_has_rolled_back_already_is_left_alone(
    rolled_back: list[str], champion: str, reasons: list[str]
) -> None:
    now = SimpleNamespace(label=champion)
    observed = SimpleNamespace(desired="demo@2")
    context: Any = SimpleNamespace(name="demo", reason="it is slow", observed=observed, champion=lambda: now)
    said = return_to_previous(context)
    assert rolled_back == reasons and said.startswith("demo@1 is" if reasons else "demo@2 is no longer the champion")
