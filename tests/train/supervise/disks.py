"""Disks that fail: at the n-th operation with an error, with a short write, or by a power cut that loses what was not
fsynced (the method of SQLite's crash tests)."""

import errno
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hivetune.base.disk import Disk


class CountingDisk(Disk):
    """Calls `before(number, operation)` with the number, from 0, of each operation. No real fsync: nobody pulls a plug
    here, and thousands of them take minutes on a busy disk."""

    def __init__(self, before: Callable[[int, str], None] = lambda number, operation: None):
        self.before = before
        self.operations: list[str] = []

    def _count(self, operation: str) -> None:
        self.operations.append(operation)
        self.before(len(self.operations) - 1, operation)

    def write(self, path: Path, data: bytes | memoryview) -> None:
        self._count("write")
        super().write(path, data)

    def sync(self, path: Path) -> None:
        self._count("sync")

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count("remove")
        super().remove(path)


class FailingDisk(CountingDisk):
    """The n-th operation fails; with `lasting` all later ones too, except removals."""

    def __init__(self, fail_at: int, error: int, *, lasting: bool = False):
        def before(number: int, operation: str) -> None:
            if number == fail_at or (lasting and number > fail_at and operation != "remove"):
                raise OSError(error, errno.errorcode[error])

        super().__init__(before)


class ShortDisk(CountingDisk):
    """The n-th operation, if it is a write, stores the first half and reports success."""

    def __init__(self, fail_at: int):
        super().__init__()
        self.fail_at = fail_at

    def write(self, path: Path, data: bytes | memoryview) -> None:
        short = len(self.operations) == self.fail_at
        super().write(path, data[: len(data) // 2] if short else data)


class PowerCut(BaseException):
    """Not an OSError: nothing of ours runs after a power cut."""


@dataclass
class Node:
    """A file or folder as the kernel holds it, and as it is on the platter."""

    data: bytes = b""
    synced: bytes | None = None
    names: "dict[str, Node] | None" = None
    synced_names: "dict[str, Node]" = field(default_factory=dict)


class PowerCutDisk(CountingDisk):
    """The machine loses power just before the n-th operation. `restart` then leaves what a file system may keep.

    What is below `root` when the disk is made counts as fsynced.
    """

    def __init__(self, root: Path, cut_at: int):
        def before(number: int, operation: str) -> None:
            if number == cut_at:
                self._look_for_folders(self.root, self.root_node)
                raise PowerCut

        super().__init__(before)
        self.root = root
        self.root_node = _read(root)

    def write(self, path: Path, data: bytes | memoryview) -> None:
        super().write(path, data)
        self._folder(path.parent).setdefault(path.name, Node()).data = bytes(data)

    def sync(self, path: Path) -> None:
        super().sync(path)
        if path.is_dir():
            node = self.root_node if path == self.root else self._folder(path.parent)[path.name]
            node.synced_names = dict(self._folder(path))
        else:
            node = self._folder(path.parent)[path.name]
            node.synced = node.data

    def rename(self, source: Path, target: Path) -> None:
        node = self._folder(source.parent)[source.name]
        super().rename(source, target)
        del self._folder(source.parent, look=False)[source.name]
        self._folder(target.parent, look=False)[target.name] = node

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._folder(path.parent, look=False).pop(path.name, None)

    def restart(self, names_kept: Callable[[], bool], data_kept: Callable[[], str]) -> None:
        """Whether each folder's unsynced names were kept; unsynced data: "all", "empty" or "zeros"."""
        shutil.rmtree(self.root)
        _restore(self.root, self.root_node, names_kept, data_kept)

    def _folder(self, path: Path, *, look: bool = True) -> dict[str, Node]:
        if look:
            self._look_for_folders(self.root, self.root_node)
        node = self.root_node
        for name in path.relative_to(self.root).parts:
            assert node.names is not None
            node = node.names[name]
        assert node.names is not None
        return node.names

    def _look_for_folders(self, path: Path, node: Node) -> None:
        """Folders are made without the disk's knowledge; they are found here."""
        assert node.names is not None
        for child in path.iterdir():
            if child.is_dir():
                self._look_for_folders(child, node.names.setdefault(child.name, Node(names={})))


def survivals(seed: int) -> list[tuple[Callable[[], bool], Callable[[], str]]]:
    """The extreme answers of a file system, and two random mixtures."""
    numbers = random.Random(seed)
    return [
        (lambda: False, lambda: "empty"),
        (lambda: True, lambda: "empty"),
        (lambda: True, lambda: "zeros"),
        (lambda: False, lambda: "all"),
        (lambda: True, lambda: "all"),
        (lambda: numbers.random() < 0.5, lambda: numbers.choice(["all", "empty", "zeros"])),
        (lambda: numbers.random() < 0.5, lambda: numbers.choice(["all", "empty", "zeros"])),
    ]


def _read(path: Path) -> Node:
    if not path.is_dir():
        data = path.read_bytes()
        return Node(data, data)
    names = {child.name: _read(child) for child in path.iterdir()}
    return Node(names=names, synced_names=dict(names))


def _restore(path: Path, node: Node, names_kept: Callable[[], bool], data_kept: Callable[[], str]) -> None:
    if node.names is None:
        kept = data_kept() if node.synced != node.data else "all"
        lost = node.synced if node.synced is not None else b"" if kept == "empty" else bytes(len(node.data))
        path.write_bytes(node.data if kept == "all" else lost)
        return
    path.mkdir()
    for name, child in (node.names if names_kept() else node.synced_names).items():
        _restore(path / name, child, names_kept, data_kept)
