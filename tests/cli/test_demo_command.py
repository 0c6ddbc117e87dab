"""`hivetune demo` says first what it lacks."""

from pathlib import Path

import pytest

from hivetune.cli.demo import demo
from hivetune.errors import MachineNotFit


def test_a_demo_without_the_converter_ends_before_it_trains(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVETUNE_CONVERTERS", str(own_home / "none"))
    with pytest.raises(MachineNotFit, match=r"converter .* is not installed") as caught:
        demo()
    assert caught.value.hint == "run hivetune fetch llama.cpp" and not (own_home / "demo").exists()
