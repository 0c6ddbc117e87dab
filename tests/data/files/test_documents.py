"""JSON documents and tables: their rows with the line of each, and damage that refuses the file at its line."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from data.conftest import chat
from hypothesis import given
from hypothesis import strategies as st

from hivetune.config import DataConfig
from hivetune.data.files import rows, unpack
from hivetune.data.files.inputs import plan_inputs
from hivetune.data.prepare.prepare import check
from hivetune.data.read import parse_row
from hivetune.errors import DataRefused

ROWS = [{"prompt": f'question {n}: [1, {{2}}] and "quotes"\n', "completion": f"answer {n}, [{n}"} for n in range(9)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [dict(parse_row(raw.payload)) for raw in plan_inputs(str(path), path.parent).rows()]


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("form", ["array", "data", "records", "objects"])
def test_documents_of_rows(
    form: str, indent: int | None, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "array": json.dumps(ROWS, indent=indent),
        "data": json.dumps({"version": 1, "data": ROWS, "total": 9, "meta": {"page": 1}}, indent=indent),
        "records": json.dumps({"meta": {"page": "[1]"}, "records": ROWS, "more": None}, indent=indent),
        "objects": "\n".join(json.dumps(row, indent=indent) for row in ROWS),
    }
    path = tmp_path / "rows.json"
    path.write_text(texts[form])
    monkeypatch.setattr(unpack, "BLOCK_BYTES", block_bytes)
    assert rows_of(path) == ROWS


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text[:-1],
        lambda text: text.replace('"question', "question", 1),
        lambda text: text[:-1] + ",}",
        lambda _text: "oops",
        lambda text: text[: len(text) // 2],
        lambda text: text[:-1] + f', "id": {"9" * 5000}}}',
    ],
)
def test_a_broken_element_refuses_the_file_at_its_line(broken: Any, tmp_path: Path) -> None:
    texts = [json.dumps(row) for row in ROWS]
    texts[4] = broken(texts[4])
    path = tmp_path / "rows.json"
    path.write_text("[" + ",\n".join(texts) + "]")
    with pytest.raises(DataRefused, match=r"rows\.json:[56] is no JSON"):
        check(DataConfig(path=str(path)))


@pytest.mark.parametrize(
    ("head", "rest"),
    [("", rest) for rest in ("", ", 5", "] [", '], {"prompt": "a", "completion": "b"}', "] oops")]
    + [('{\n "data": ', rest) for rest in ("]", "]} {", '], "more": [{"prompt": "a"}]}', '], "more": {"rows": [1]}}')],
)
def test_what_stands_behind_the_rows_is_never_lost(head: str, rest: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(f"{head}[" + ", ".join(map(json.dumps, ROWS)) + rest)
    with pytest.raises(DataRefused, match="is no JSON"):
        rows_of(path)


def test_objects_over_many_lines_are_rows_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, indent=2) for row in ROWS))
    assert rows_of(path) == ROWS


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@given(pairs=st.lists(st.tuples(st.text('ab,;\t"\n ', min_size=1), st.text('ab,;\t"\n ', min_size=1)), max_size=6))
def test_whatever_the_library_writes_is_read(delimiter: str, pairs: list[tuple[str, str]]) -> None:
    import tempfile

    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([("prompt", "completion"), *pairs])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_bytes(out.getvalue().encode())
        found = [(row["prompt"], row["completion"]) for row in rows_of(path)]
    assert found == pairs


def test_a_wrong_quote_refuses_the_table_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for line in ('"open,b', '"a" b,c'):
        path.write_text(f"prompt,completion\nq,a\n{line}\nq2,a2\n")
        with pytest.raises(DataRefused, match=r"rows\.csv:3 is no CSV"):
            check(DataConfig(path=str(path)))


def test_each_column_has_one_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("answer,question,answer\n1,2,3\n")
    with pytest.raises(DataRefused, match="two columns are called 'answer'"):
        check(DataConfig(path=str(path)))
    path.write_text(",question,answer\n0,Where is it?,In the shed.\n")
    assert rows_of(path) == [{"column_1": "0", "question": "Where is it?", "answer": "In the shed."}]


def test_the_header_of_a_table_is_never_a_row(tmp_path: Path) -> None:
    """Forms ask in their headers, and joined files have a second one."""
    path = tmp_path / "form.csv"
    path.write_text("What is your question?,What was the answer?\nWhere is it?,In the shed.\n")
    assert check(DataConfig(path=str(path))).document["rejected"] == {"unknown-layout": 1}
    path.write_text("prompt,completion\na?,b\nprompt,completion\nc?,d\n,\n\n")
    assert [row["prompt"] for row in rows_of(path)] == ["a?", "c?"]


def test_arrow_as_datasets_save_it(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist([chat(f"what is {n}?", "a number") for n in range(5)])
    for name, new in (("stream.arrow", arrow.ipc.new_stream), ("file.arrow", arrow.ipc.new_file)):
        with new(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
        assert check(DataConfig(path=str(tmp_path / name))).usable == 5
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
        with pytest.raises(DataRefused, match="is damaged behind row"):
            check(DataConfig(path=str(tmp_path / name)))


def test_a_document_that_is_too_large_is_refused_with_the_command_that_divides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS))
    monkeypatch.setattr(rows, "MAX_DOCUMENT_CHARS", 100)
    with pytest.raises(DataRefused, match="one JSON document") as refused:
        rows_of(path)
    assert "jq -c '.[]'" in refused.value.hint
