"""A file of a manifest is read again only when it was written since the last reading."""

import os
from pathlib import Path

import pytest

from hivetune.base import disk
from hivetune.base.disk import MANIFEST, manifest_problems, named_problems, problems_once, sha256_file, write_manifest

LATER_NS = 10_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files that were read long after they were written."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 64)
    write_manifest(tmp_path)
    read_later(tmp_path)
    return tmp_path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read, in order."""
    names: list[str] = []

    def read(path: Path) -> str:
        names.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(disk, "sha256_file", read)
    return names


def read_later(folder: Path) -> None:
    time_ns = (folder / "b").stat().st_ctime_ns + LATER_NS
    os.utime(folder / MANIFEST, ns=(time_ns, time_ns))


def flip(path: Path) -> None:
    """One bit, with the time of the content as it was; the inode's time tells of it."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    manifest = path.parent / MANIFEST
    os.utime(manifest, ns=(before.st_mtime_ns, before.st_mtime_ns))


def test_what_was_read_is_not_read_again(folder: Path, hashed: list[str]) -> None:
    assert problems_once(folder) == named_problems(folder, ["a"]) == [] and hashed == []
    assert manifest_problems(folder) == [] and hashed == ["a", "b"]


def test_what_was_written_since_is_read_and_then_known(folder: Path, hashed: list[str]) -> None:
    """A copied home reads its models once more."""
    os.utime(folder / MANIFEST, ns=(0, 0))
    assert problems_once(folder) == [] and hashed == ["a", "b"]
    assert (folder / MANIFEST).stat().st_mtime_ns > 0


def test_damage_is_named(folder: Path) -> None:
    flip(folder / "b")
    assert problems_once(folder) == ["b: its hash is not the recorded one"]
    assert named_problems(folder, ["a"]) == [] and named_problems(folder, ["b"]) == problems_once(folder)
    (folder / "b").write_bytes(b"short")
    read_later(folder)
    assert problems_once(folder) == ["b: 5 bytes instead of 64"]
    (folder / MANIFEST).unlink()
    assert named_problems(folder, ["b"]) == [] and problems_once(folder) != []
