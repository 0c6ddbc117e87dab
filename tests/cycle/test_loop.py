"""The loop as users run it: from new rows to a promoted release, with a tiny real model."""

from pathlib import Path

import pytest
from cycle.small import append_rows, cycle, make_config, make_rows

pytestmark = pytest.mark.slow


def test_from_new_rows_to_a_promoted_release(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    append_rows(tmp_path / "rows.jsonl", make_rows(0, 30))
    assert cycle(str(config), "--once")["action"]["reason"] == "30 of 40 new groups"
    append_rows(tmp_path / "rows.jsonl", make_rows(30, 90))
    document = cycle(str(config), "--once")
    print(document["told"])
    assert document["cycles"][0]["end"] == "promoted"
