"""The time zone of the machine, as people set it."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from hivetune.cycle.window import local_zone, read_clocks


def offset(text: str) -> timedelta | None:
    return datetime.fromisoformat(text).replace(tzinfo=local_zone()).utcoffset()


@pytest.mark.parametrize("name", ["Europe/Berlin", ":Europe/Berlin", "/usr/share/zoneinfo/Europe/Berlin"])
def test_a_named_zone_knows_summer_and_winter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name.startswith("/") and not Path(name).exists():
        pytest.skip("no zone files on this machine")
    monkeypatch.setenv("TZ", name)
    assert (offset("2026-01-01"), offset("2026-07-01")) == (timedelta(hours=1), timedelta(hours=2))


def test_without_a_name_the_machine_says() -> None:
    now = datetime.now().replace(microsecond=0)
    assert offset(now.isoformat()) == now.astimezone().utcoffset()


def test_a_zone_that_does_not_exist_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Nowhere/At-All")
    assert offset("2026-01-01") is not None


def test_clocks_go_on() -> None:
    first, then = read_clocks(), read_clocks()
    assert then.awake_s >= first.awake_s
    assert then.boot_s >= first.boot_s
    assert first.boot_s >= first.awake_s - 0.01
