"""Folders travel as one file: what is packed is unpacked, and nothing that was made by hand gets out of its folder."""

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.cluster import parcel as packing
from hivetune.cluster.parcel import pack, replace_folder, unpack


def make_parcel(path: Path, *members: tarfile.TarInfo | str) -> None:
    """A parcel with its hash, made by hand; each file has one byte."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for each in members:
            member = tarfile.TarInfo(each) if isinstance(each, str) else each
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    path.write_bytes(path.read_bytes() + hashlib.sha256(path.read_bytes()).digest())


def member_of(kind: bytes, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo("run/other")
    member.type = kind
    for name, value in fields.items():
        setattr(member, name, value)
    return member


def test_what_is_packed_is_unpacked_without_what_is_hidden(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints/000010").mkdir(parents=True)
    (run / "checkpoints/.000011.tmp").mkdir()
    (run / "empty").mkdir()
    for name in ("a", ".lock", "left", "checkpoints/000010/state", "checkpoints/.000011.tmp/state"):
        (run / name).write_text(f"content of {name}")
    (run / "nothing").touch()
    size = pack({"run": run, "more": tmp_path / "run/checkpoints"}, tmp_path / "parcel", leave_out=("run/left",))
    assert size == (tmp_path / "parcel").stat().st_size
    unpack(tmp_path / "parcel", tmp_path / "there")
    there = {str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*") if path.is_file()}
    assert there == {"run/a", "run/nothing", "run/checkpoints/000010/state", "more/000010/state"}
    assert (tmp_path / "there/run/a").read_text() == "content of a"
    assert (tmp_path / "there/run/a").stat().st_mode & 0o077 == 0


def test_a_link_in_a_run_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/key").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic link"):
        pack({"run": tmp_path / "run"}, tmp_path / "parcel")


@pytest.mark.parametrize(
    "name", ["../out", "run/../../out", "/etc/passwd", "run//a", ".", "run/.lock", "run\\a", "x" * 300]
)
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    make_parcel(tmp_path / "parcel", "run/good", name)
    with pytest.raises(ValueError, match="not its own"):
        unpack(tmp_path / "parcel", tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["parcel"]


@pytest.mark.parametrize(
    "member",
    [
        member_of(tarfile.SYMTYPE, linkname="/etc/passwd"),
        member_of(tarfile.LNKTYPE, linkname="run/good"),
        member_of(tarfile.FIFOTYPE),
        member_of(tarfile.CHRTYPE, devmajor=1, devminor=3),
        member_of(tarfile.DIRTYPE),
        member_of(tarfile.REGTYPE, pax_headers={"GNU.sparse.size": "1152921504606846976", "GNU.sparse.map": "0,1"}),
    ],
    ids=["link", "hard link", "pipe", "device", "folder", "sparse file"],
)
def test_what_is_no_ordinary_file_is_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    make_parcel(tmp_path / "parcel", "run/good", member)
    with pytest.raises(ValueError, match="not its own"):
        unpack(tmp_path / "parcel", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    make_parcel(tmp_path / "parcel", "run/a", "run/a")
    with pytest.raises(ValueError, match="twice"):
        unpack(tmp_path / "parcel", tmp_path / "there")


@pytest.mark.parametrize("content", [b"", b"x" * 31, bytes(32), b"x" * 4096], ids=len)
def test_what_is_no_parcel_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "parcel").write_bytes(content)
    with pytest.raises(ValueError, match="is not a parcel"):
        unpack(tmp_path / "parcel", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_hash_over_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "parcel").write_bytes(b"no archive" + hashlib.sha256(b"no archive").digest())
    with pytest.raises(ValueError, match="can't be unpacked"):
        unpack(tmp_path / "parcel", tmp_path / "there")


def test_a_file_in_the_place_of_a_folder_is_an_error_of_the_disk(tmp_path: Path) -> None:
    make_parcel(tmp_path / "parcel", "a", "a/b")
    with pytest.raises(OSError):
        unpack(tmp_path / "parcel", tmp_path / "there")
    assert not (tmp_path / "there").exists()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_parcel_with_any_byte_changed_or_cut_is_refused_or_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("parcel")
    (folder / "run").mkdir()
    (folder / "run/a").write_bytes(b"content")
    pack({"run": folder / "run"}, folder / "parcel")
    content = bytearray((folder / "parcel").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(0, 255))
    (folder / "parcel").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        unpack(folder / "parcel", folder / "there")
    except (ValueError, OSError):
        assert not (folder / "there").exists()
    else:
        found = [path for path in (folder / "there").rglob("*") if path.is_file()]
        assert [path.read_bytes() for path in found] == [b"content"]


@pytest.mark.parametrize("exchanged", [True, False])
def test_a_folder_takes_the_name_of_another(tmp_path: Path, exchanged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "is").write_text(name)
    if not exchanged:  # a file system, or a system, that can't
        monkeypatch.setattr(packing, "_RENAME_EXCHANGE", 1 << 20)
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert {path.name: (path / "is").read_text() for path in tmp_path.iterdir()} == {"old": "new", "new": "old"}
    with pytest.raises(OSError):
        replace_folder(tmp_path / "missing", tmp_path / "old")
    assert os.listdir(tmp_path / "old") == ["is"]
