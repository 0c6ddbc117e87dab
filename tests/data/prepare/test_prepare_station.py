"""A second run on the same rows waits while the first prepares them."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from hivetune.base.disk import home, lock
from hivetune.config import parse_config
from hivetune.data.prepare.prepare import prepare_data
from hivetune.errors import Busy


def test_it_waits_for_who_prepares_the_same_rows(write_rows: Callable[..., Path], chatml: Path, own_home: Path) -> None:
    rows = [{"prompt": f"Which number follows {i}?", "completion": f"After {i} comes {i + 1}."} for i in range(40)]
    config = parse_config({"model": "m", "data": {"path": str(write_rows(rows)), "near_duplicates": 0}})
    made = prepare_data(config, chatml)
    shutil.rmtree(made.folder)
    with ExitStack() as other:
        other.enter_context(lock(home() / "snapshots" / f".work-{made.folder.name}"))
        with pytest.raises(Busy):
            prepare_data(config, chatml)
        waited: list[str] = []

        def wait(busy: Busy) -> None:
            waited.append(busy.message)
            other.close()

        assert prepare_data(config, chatml, on_busy=wait).hash == made.hash
    assert len(waited) == 1
    assert "is in use by process" in waited[0]
