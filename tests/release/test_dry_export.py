"""Two trainings that begin at the same time each try their export."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hivetune.config import ExportConfig, LoraConfig
from hivetune.release import dry_export as dry
from hivetune.release.dry_export import DryExport


def test_two_at_once_both_end(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one ended with Busy (75): both took one folder."""
    both, folders, found = threading.Barrier(2, timeout=30), set[Path](), list[DryExport]()

    def try_export(run: Any, linears: Any, converter: Any, work: Path) -> DryExport:
        folders.add(work)
        both.wait()
        return DryExport(conversations=3)

    monkeypatch.setattr(dry, "_try", try_export)
    monkeypatch.setattr(dry, "read_architecture", lambda model: SimpleNamespace(adapted=lambda targets: []))
    monkeypatch.setattr(dry, "sha256_file", lambda path: "")
    monkeypatch.setattr(dry, "_server", lambda: "")
    monkeypatch.setattr(dry, "find_converter", lambda own: SimpleNamespace(name="c"))
    run: Any = SimpleNamespace(
        config=SimpleNamespace(lora=LoraConfig(), export=ExportConfig()),
        model=own_home,
        snapshot=SimpleNamespace(hash="s"),
        folder=own_home,
    )
    threads = [threading.Thread(target=lambda: found.append(dry.dry_export(run))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DryExport(conversations=3)] * 2 and len(folders) == 2
    assert dry.dry_export(run) == found[0]  # kept: a third one would wait for the barrier in vain
    assert len(list((own_home / "dry-exports").glob("*.json"))) == 1
