"""Records that hold many rows give each of them; rows that have a list among their columns stay one row."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.formats import rows_inside
from hivetune.data.prepare.prepare import check
from hivetune.errors import DataRefused

PAIR = {"prompt": "Which river flows through Paris?", "completion": "The Seine."}
OTHER = {"prompt": "Which river flows through Cologne?", "completion": "The Rhine."}


SPAN = {"name": "chat", "spanId": "1", "attributes": [{"key": "gen_ai.system", "value": {"stringValue": "openai"}}]}
SHOP = {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]}
BOTH = {**SPAN, "attributes": {"service.name": "shop", "gen_ai.system": "openai"}}


@pytest.mark.parametrize(
    ("record", "rows"),
    [
        ({"version": "1", "data": [PAIR, OTHER]}, [PAIR, OTHER]),
        ({"rows": [{"row_idx": 0, "row": PAIR, "truncated_cells": []}]}, [PAIR]),
        ({"resourceSpans": [{"resource": SHOP, "scopeSpans": [{"scope": {}, "spans": [SPAN, SPAN]}]}]}, [BOTH, BOTH]),
        (
            {"id": "t", "sessionId": "s", "input": "q", "observations": [{"type": "GENERATION", "input": "q"}]},
            [{"session_id": "s", "type": "GENERATION", "input": "q"}],
        ),
        ({"data": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, None),
        ({**PAIR, "data": [{"note": "b"}]}, None),
        ({"messages": [], "data": [PAIR]}, None),
        ({"data": []}, None),
        ({"data": ["question", "answer"]}, None),
    ],
)
def test_rows_inside_of_a_record(record: dict[str, Any], rows: list[Any] | None) -> None:
    found = rows_inside(json.dumps(record).encode())
    assert (None if found is None else [json.loads(row) for row in found]) == rows


@pytest.mark.parametrize(("indent", "line"), [(None, 1), (1, 12)])
def test_a_file_with_one_object(tmp_path: Path, indent: int | None, line: int) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": "1.0", "data": [PAIR, OTHER, {"prompt": "x"}], "n": 3}, indent=indent))
    report = check(DataConfig(path=str(path))).document
    assert (report["rows_in"], report["usable"]) == (3, 2)
    assert report["problems"][0]["source"] == f"{path}:{line}"


def test_what_stands_behind_the_rows_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": [PAIR], "test": [OTHER]}, indent=1))
    with pytest.raises(DataRefused, match="what follows the list of rows was not read"):
        check(DataConfig(path=str(path)))
    path.write_text(json.dumps({"question": "Which?", "data": [{"a": 1}]}, indent=1))
    assert check(DataConfig(path=str(path))).document["rows_in"] == 1
