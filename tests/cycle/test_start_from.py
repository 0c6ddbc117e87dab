"""Cycles that continue from one another: how long, and what forgetting means then."""

import shutil
from contextlib import closing
from pathlib import Path

import yaml

from hivetune.base.database import open_database
from hivetune.base.disk import home
from hivetune.cycle.acts.run import trained_in_a_row
from hivetune.cycle.observe import forgotten_behind
from hivetune.cycle.pool import MAX_IN_A_ROW, begins_from


def trained(folder: Path, start: Path | None) -> Path:
    """Return what a release keeps of its run's settings."""
    folder.mkdir(parents=True)
    config = {"model": "tiny", "data": {"path": "rows.jsonl"}, "lora": {"start": None if start is None else str(start)}}
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump({"config": config, "choices": {}}))
    return folder


def test_five_in_a_row_then_from_the_base(tmp_path: Path) -> None:
    release, begun = trained(tmp_path / "0", None), []
    for number in range(1, 14):
        begun.append(begins_from("last", trained_in_a_row(release)))
        release = trained(tmp_path / str(number), release if begun[-1] == "last" else None)
    assert begun == (["last"] * MAX_IN_A_ROW + ["base"]) * 2 + ["last"]


def test_a_chain_with_a_missing_link_begins_from_the_base(tmp_path: Path) -> None:
    first = trained(tmp_path / "0", None)
    second = trained(tmp_path / "1", first)
    assert trained_in_a_row(second) == 1
    shutil.rmtree(first)
    assert trained_in_a_row(second) == MAX_IN_A_ROW


def test_weights_remember_what_the_adapters_before_them_saw() -> None:
    """A row of the first snapshot was forgotten. The second lacks it, but its training continued from the first."""
    folders = [home() / "releases" / "demo" / str(version) for version in (1, 2, 3)]
    for folder, start in zip(folders, (None, folders[0], None), strict=True):
        trained(folder, start)
    with closing(open_database()) as database:
        for version in (1, 2, 3):
            database.execute(
                "INSERT INTO releases"
                " (name, version, run, model, model_sha256, adapter_sha256, snapshot, proof, created) VALUES"
                " ('demo', ?, '', '', '', '', ?, '{}', 0)",
                (version, f"snapshot {version}"),
            )
        database.execute("INSERT INTO tainted VALUES ('snapshot 1', 'user', 'x', 3, 0)")
        behind = [forgotten_behind(database, "demo", folders[n], f"snapshot {n + 1}") for n in range(3)]
    assert behind == [3, 3, 0]
