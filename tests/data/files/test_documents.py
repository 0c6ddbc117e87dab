"""Documents, tables and archives: their rows with the line of each, and damage that refuses the file at its place."""

import csv
import gzip
import io
import json
import tempfile
from collections.abc import Callable
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
LISTED = "[" + ", ".join(map(json.dumps, ROWS))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [dict(parse_row(raw.payload)) for raw in plan_inputs(str(path), path.parent).rows()]


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("form", ["array", "data", "records", "objects"])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_documents_of_rows(
    name: str, form: str, indent: int | None, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "array": json.dumps(ROWS, indent=indent),
        "data": json.dumps({"version": 1, "data": ROWS, "total": 9, "meta": {"page": 1}}, indent=indent),
        "records": json.dumps({"meta": {"page": "[1]"}, "records": ROWS, "more": None}, indent=indent),
        "objects": "\n".join(json.dumps(row, indent=indent) for row in ROWS),
    }
    path = tmp_path / name
    path.write_text(texts[form])
    monkeypatch.setattr(unpack, "BLOCK_BYTES", block_bytes)
    assert rows_of(path) == ROWS


def broken_row(change: Callable[[str], str]) -> bytes:
    texts = [json.dumps(row) for row in ROWS]
    texts[4] = change(texts[4])
    return ("[" + ",\n".join(texts) + "]").encode()


def as_zst(text: bytes) -> bytes:
    compressor = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True)  # as `zstd` does
    return bytes(compressor.compress(text))


def many(suffix: str) -> bytes:
    lines = [(f"what is {n}?", f"It is the number {n * 7919}.") for n in range(3000)]
    if suffix == "csv":
        return "\n".join(["prompt,completion", *map(",".join, lines), ""]).encode()
    return "".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in lines).encode()


def zeros_inside(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :]


# What a file is called, its content, and words of the refusal.
DAMAGED: list[tuple[str, Callable[[], bytes], str]] = [
    ("rows.csv", lambda: many("csv").replace(b"\n", b"\r"), r"rows\.csv:1 is not valid CSV: new-line"),
    *(
        ("rows.json", lambda change=change: broken_row(change), r"rows\.json:[56] is not valid JSON")
        for change in (
            lambda text: text[:-1],
            lambda text: text.replace('"question', "question", 1),
            lambda text: text[:-1] + ",}",
            lambda _text: "oops",
            lambda text: text[: len(text) // 2],
            lambda text: text[:-1] + f', "id": {"9" * 5000}}}',
        )
    ),
    *(
        ("rows.json", lambda rest=rest: (LISTED + rest).encode(), "is not valid JSON")
        for rest in ("", ", 5", "] [", '], {"prompt": "a", "completion": "b"}', "] oops")
    ),
    *(
        ("rows.json", lambda rest=rest: ('{\n "data": ' + LISTED + rest).encode(), "is not valid JSON")
        for rest in ("]", "]} {", '], "more": [{"prompt": "a"}]}', '], "more": {"rows": [1]}}')
    ),
    *(
        (
            "rows.csv",
            lambda line=line: f"prompt,completion\nq,a\n{line}\nq2,a2\n".encode(),
            r"rows\.csv:3 is not valid CSV",
        )
        for line in ('"open,b', '"a" b,c')
    ),
    ("rows.csv", lambda: b"answer,question,answer\n1,2,3\n", "two columns are called 'answer'"),
    *(
        (
            f"rows.{suffix}.{packed}",
            lambda suffix=suffix, pack=pack, damage=damage: damage(pack(many(suffix))),
            r"rows\..* is damaged within 1 MiB after unpacked byte [\d,]+",
        )
        for suffix in ("jsonl", "csv")
        for packed, pack in (("gz", gzip.compress), ("zst", as_zst))
        for damage in (zeros_inside, lambda data: data[: len(data) // 2])
    ),
]


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_damage_refuses_the_file_at_its_place(number: int, tmp_path: Path) -> None:
    """How many rows are lost behind it is unknown."""
    name, content, words = DAMAGED[number]
    (tmp_path / name).write_bytes(content())
    with pytest.raises(DataRefused, match=words):
        check(DataConfig(path=str(tmp_path / name), near_duplicates=0))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@given(pairs=st.lists(st.tuples(st.text('ab,;\t"\n ', min_size=1), st.text('ab,;\t"\n ', min_size=1)), max_size=6))
def test_whatever_the_library_writes_is_read(delimiter: str, pairs: list[tuple[str, str]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([("prompt", "completion"), *pairs])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_bytes(out.getvalue().encode())
        found = [(row["prompt"], row["completion"]) for row in rows_of(path)]
    assert found == pairs


def test_the_header_of_a_table_is_never_a_row(tmp_path: Path) -> None:
    """Forms ask in their headers, and joined files have a second one. A nameless column is called by its place."""
    path = tmp_path / "form.csv"
    path.write_text("What is your question?,What was the answer?\nWhere is it?,In the shed.\n")
    assert check(DataConfig(path=str(path))).document["rejected"] == {"unknown-layout": 1}
    path.write_text(",prompt,completion\n0,a?,b\n,prompt,completion\n1,c?,d\n,,\n\n")
    assert [(row["column_1"], row["prompt"]) for row in rows_of(path)] == [("0", "a?"), ("1", "c?")]


def test_arrow_as_datasets_save_it(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist([chat(f"what is {n}?", "a number") for n in range(5)])
    for name, new in (("stream.arrow", arrow.ipc.new_stream), ("file.arrow", arrow.ipc.new_file)):
        with new(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
        assert check(DataConfig(path=str(tmp_path / name))).usable == 5
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
        with pytest.raises(DataRefused, match="is damaged after row"):
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
