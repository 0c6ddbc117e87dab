"""What was found of a model before a training is kept for the next one, and two that begin at once do not collide."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hivetune.base.disk import write_manifest
from hivetune.config import LoraConfig
from hivetune.records import Message
from hivetune.release import dry_export as dry
from hivetune.release.dry_export import DryExport


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No linear layers are read, and there is no converter and no server."""
    monkeypatch.setattr(dry, "read_architecture", lambda model: SimpleNamespace(adapted=lambda targets: []))
    monkeypatch.setattr(dry, "_server", lambda: "")
    monkeypatch.setattr(dry, "find_converter", lambda own: SimpleNamespace(name="c"))


def make_run(model: Path, *, weights: str = "w", rank: int = 16, text: str = "hi", tools: tuple[str, ...] = ()) -> Any:
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (model / "hivetune.json").write_text(json.dumps({"name": model.name}))
    (model / "model.safetensors").write_text(weights)
    write_manifest(model)
    info = SimpleNamespace(messages=[Message("user", text), Message("assistant", text)], tools=tools)
    snapshot = SimpleNamespace(
        rows=lambda split: [0] if split == "train" else [],
        info=lambda row: info,
        length=lambda row: 4,
        tokens=lambda row: memoryview(bytes(4)),
        trained=lambda row: memoryview(bytes((0, 0, 1, 1))),
    )
    config = SimpleNamespace(lora=LoraConfig(r=rank))
    return SimpleNamespace(config=config, model=model, snapshot=snapshot, folder=model)


def test_two_at_once_both_end(own_home: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one ended with Busy (75): both took one folder."""
    both, folders, results = threading.Barrier(2, timeout=30), set[Path](), list[DryExport]()

    def try_export(run: Any, linears: Any, converter: Any, passages: Any, work: Path) -> DryExport:
        folders.add(work)
        both.wait()
        return DryExport(conversations=3)

    monkeypatch.setattr(dry, "_try", try_export)
    run = make_run(tmp_path / "model")
    threads = [threading.Thread(target=lambda: results.append(dry.dry_export(run))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [DryExport(conversations=3)] * 2 and len(folders) == 2
    assert len(list((own_home / "dry-exports").glob("*.json"))) == 1


def test_a_second_run_of_such_a_model_costs_nothing(
    own_home: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights, rows and ranks change nothing that can fail; another template or rows with tools can."""
    tried: list[Path] = []

    def try_export(run: Any, *_: Any) -> DryExport:
        tried.append(run.model)
        return DryExport(conversations=3)

    monkeypatch.setattr(dry, "_try", try_export)
    first = make_run(tmp_path / "first")
    assert dry.dry_export(first) == dry.dry_export(first) == DryExport(conversations=3)
    assert dry.dry_export(make_run(tmp_path / "other", weights="v", rank=4, text="ho")).conversations == 3
    assert tried == [first.model]
    dry.dry_export(make_run(tmp_path / "tools", tools=("search",)))
    changed = make_run(tmp_path / "template")
    (changed.model / "chat_template.jinja").write_text("{{ messages }}")
    write_manifest(changed.model)
    dry.dry_export(changed)
    assert [model.name for model in tried] == ["first", "tools", "template"]
