"""Whether the files of a release are as they were registered, asked four times a second while others change them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hivetune.base.database import open_database
from hivetune.errors import UsageError
from hivetune.release.registry import Release
from hivetune.serve.swap.wanted import Checks, wanted


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


def test_a_version_is_no_name_to_serve(own_home: Path) -> None:
    """The gateway started, and served nothing for ever."""
    with closing(open_database()) as database, pytest.raises(UsageError, match="names with all their") as refused:
        wanted(database, ("helpdesk@1",))
    assert refused.value.hint == "serve helpdesk, and ask for the model helpdesk@1"
