"""A file is hashed once per identity, and every write makes another identity."""

import json
import os
import time
from pathlib import Path

import pytest

from hivetune.base import disk
from hivetune.base.disk import home, named_problems, problems_once, sha256_file, sha256_once, write_manifest


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read, in order; the clock is far ahead, so that no file is new."""
    names: list[str] = []

    def read(path: Path) -> str:
        names.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(disk, "sha256_file", read)
    monkeypatch.setattr(disk.time, "time_ns", lambda: time.monotonic_ns() + (1 << 62))
    disk._hashes.clear()
    return names


def flip(path: Path, *, keep_time: bool = True) -> None:
    """One bit, and the time of the content as it was."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_is_read_once_and_again_after_each_write(tmp_path: Path, hashed: list[str]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)
    assert sha256_once(path) == sha256_once(path) == sha256_file(path)
    assert hashed == ["weights"]
    flip(path)
    assert sha256_once(path) == sha256_file(path)
    assert hashed == ["weights"] * 2


def test_a_new_file_is_not_remembered(tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes within one tick of the file system's clock look like one."""
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    monkeypatch.setattr(disk.time, "time_ns", lambda: path.stat().st_ctime_ns + 1)
    sha256_once(path)
    sha256_once(path)
    assert hashed == ["weights"] * 2


@pytest.mark.parametrize("damage", [None, b"", b"[1]", b'{"x": 3', b"\xff"])
def test_other_processes_know_large_files_by_a_file_that_may_be_damaged(
    damage: bytes | None, tmp_path: Path, hashed: list[str]
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(disk.REMEMBERED_FROM_BYTES))
    sha256_once(path)
    disk._hashes.clear()  # another process
    cache = home() / disk.CACHE
    if damage is not None:
        cache.write_bytes(damage)
    assert sha256_once(path) == sha256_file(path)
    assert len(hashed) == (1 if damage is None else 2)
    assert list(json.loads(cache.read_text()).values()) == [sha256_file(path)]


def test_a_home_that_can_not_be_written_costs_nothing_else(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "file" / "home"))
    path = tmp_path / "weights"
    path.write_bytes(bytes(disk.REMEMBERED_FROM_BYTES))
    assert sha256_once(path) == sha256_file(path)


def test_a_folder_costs_its_sizes_only_the_second_time_and_tells_damage(tmp_path: Path, hashed: list[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 64)
    write_manifest(tmp_path)
    hashed.clear()
    assert problems_once(tmp_path) == problems_once(tmp_path) == []
    assert sorted(hashed) == ["a", "b"]
    flip(tmp_path / "b")
    assert problems_once(tmp_path) == ["b: its hash is not the recorded one"]
    assert named_problems(tmp_path, ["a"]) == [] and named_problems(tmp_path, ["b"]) == problems_once(tmp_path)
    (tmp_path / "manifest.json").unlink()
    assert named_problems(tmp_path, ["b"]) == [] and problems_once(tmp_path) != []
