"""How long cycles may go on from one another before the next begins from the base again."""

import shutil
from pathlib import Path

import yaml

from hivetune.cycle.acts.data import trained_in_a_row
from hivetune.cycle.rows import MOST_IN_A_ROW, begins_from


def trained(folder: Path, start: Path | None) -> Path:
    """What a release keeps of its run's settings."""
    folder.mkdir()
    config = {"model": "tiny", "data": {"path": "rows.jsonl"}, "lora": {"start": None if start is None else str(start)}}
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump({"config": config, "choices": {}}))
    return folder


def test_five_in_a_row_then_from_the_base(tmp_path: Path) -> None:
    release, begun = trained(tmp_path / "0", None), []
    for number in range(1, 14):
        begun.append(begins_from("last", trained_in_a_row(release)))
        release = trained(tmp_path / str(number), release if begun[-1] == "last" else None)
    assert begun == (["last"] * MOST_IN_A_ROW + ["base"]) * 2 + ["last"]


def test_a_chain_with_a_missing_link_begins_from_the_base(tmp_path: Path) -> None:
    first = trained(tmp_path / "0", None)
    second = trained(tmp_path / "1", first)
    assert trained_in_a_row(second) == 1
    shutil.rmtree(first)
    assert trained_in_a_row(second) == MOST_IN_A_ROW
