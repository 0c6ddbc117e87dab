"""Whether the files of a release are as they were registered, asked four times a second while others change them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hivetune.release.registry import Release
from hivetune.serve.swap.wanted import Checks


def test_a_folder_that_is_replaced_while_it_is_looked_at_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the loop would end, and the gateway would return to the champion before."""
    (tmp_path / "adapter").write_text("x")
    hashed: list[str] = []
    release = SimpleNamespace(label="a@1", folder=tmp_path, check=lambda: hashed.append("once"))
    plain, gone = Path.rglob, [tmp_path / "gone"]

    def replaced(path: Path, pattern: str) -> Iterator[Path]:
        return iter([gone.pop()]) if gone else plain(path, pattern)

    monkeypatch.setattr(Path, "rglob", replaced)
    checks = Checks()
    for _ in range(3):
        checks.check(cast(Release, release))
    assert hashed == ["once"]
