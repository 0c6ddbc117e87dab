"""What a machine offers, who holds it, and the token that it needs."""

import os
import tempfile
from pathlib import Path

import pytest

from hivetune.cluster import node
from hivetune.cluster.node import _ray_folder
from hivetune.errors import UsageError
from hivetune.machine.cluster import claim_device, make_token, need_token, offered_devices, token_path
from hivetune.machine.inventory import Card, Machine

CARD = Card("rocm", 0, "R9700", 32 << 30, 32 << 30, "6.0")


def machine(cores: int, cards: int) -> Machine:
    return Machine("cpu", (), cores, 1 << 36, 0, "machine", 0, (CARD,) * cards)


@pytest.mark.parametrize(
    ("wanted", "cores", "cards", "offered"),
    [
        ("auto", 16, 2, ("cuda:0", "cuda:1")),
        ("auto", 16, 0, ("cpu",) * 4),
        ("auto", 2, 0, ("cpu",) * 2),
        ("none", 16, 2, ()),
        ("cuda:1, cpu", 16, 2, ("cuda:1", "cpu")),
    ],
)
def test_devices_by_a_word_or_by_names(wanted: str, cores: int, cards: int, offered: tuple[str, ...]) -> None:
    assert offered_devices(wanted, machine(cores, cards)) == offered


@pytest.mark.parametrize(
    ("wanted", "why"), [("cuda:2", "this machine has cpu, cuda:0"), ("gpu", "unknown"), ("cuda:0,cuda:0", "twice")]
)
def test_devices_that_are_not_there(wanted: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        offered_devices(wanted, machine(4, 1))


def test_a_device_is_held_until_its_holder_lets_go() -> None:
    first, second = claim_device(("cpu", "cuda:0")), claim_device(("cpu", "cuda:0"))
    assert first is not None and second is not None
    assert (first[0], second[0]) == ("cpu", "cuda:0")
    assert claim_device(("cpu", "cuda:0")) is None
    os.close(second[1])
    assert claim_device(("cpu", "cuda:0"), "cpu") is None
    third = claim_device(("cpu", "cuda:0"), "cuda:0")
    assert third is not None
    os.close(first[1])
    os.close(third[1])


def test_the_token_is_private_and_needed() -> None:
    with pytest.raises(UsageError, match="lacks the cluster's token"):
        need_token()
    first = make_token().read_text()
    assert make_token().read_text() == first and len(first) == 64
    assert token_path().stat().st_mode & 0o077 == 0


def test_the_folder_of_ray_is_found_again_with_what_ray_left_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(node, "MAX_FOLDER_BYTES", 1000)
    folder = _ray_folder()
    assert folder.is_relative_to(tmp_path)
    assert folder.parent.stat().st_mode & 0o077 == 0
    folder.mkdir()
    (folder / "session_latest").symlink_to(folder)
    assert _ray_folder() == folder


@pytest.mark.parametrize("length", [4, 18, 90])
def test_ray_has_room_for_the_names_of_its_sockets(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def folder(name: str, below: Path | None) -> Path:
        asked.append((below or Path(tempfile.gettempdir())) / f"{name}-{os.geteuid()}")
        return asked[-1]

    monkeypatch.setattr(node, "temporary_folder", folder)
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (length - 1))
    socket = _ray_folder() / "session_2026-11-25_23-59-59_123456_4194304/sockets/plasma_store"
    assert len(str(socket)) <= 107
    assert str(asked[0]).startswith("/ttt") is (length <= 18)
