"""Whatever bytes come in: no crash, and every line is in exactly one place."""

import gzip
import json
import re
from pathlib import Path

from data.conftest import adds_up, chat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.errors import DataRefused, UsageError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
COLUMNS = (
    "messages conversations prompt completion instruction input output question answer text agent task tool command "
    "system history tools session_id success timestamp feedback checker weight role content metadata label"
)
KEYS = st.sampled_from(COLUMNS.split())
TURN = st.fixed_dictionaries(
    {}, optional={"role": PLAIN, "content": PLAIN, "from": PLAIN, "weight": PLAIN, "tool_calls": PLAIN}
)
ROW = st.dictionaries(KEYS, PLAIN | st.lists(TURN, max_size=4), max_size=6)
LINE = st.one_of(
    st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"")),
    ROW.map(lambda row: json.dumps(row).encode()),
    ROW.map(lambda row: json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.builds(lambda q, a: json.dumps(chat(q, a)).encode(), st.text(max_size=30), st.text(max_size=30)),
)
# What containers are made of; single bytes hardly ever meet.
PIECES = [b",", b";", b"\t", b'"', b"\n", b"\r", b"\r\n", b"\0", b"{", b"}", b"[", b"]", b":", b"\\", b" ", b"a", b"1"]
PIECES += [b'{"text": "', b"User: ", b"\xef\xbb\xbf", "ü".encode(), b"\xff\xfe", b"question,answer", b"- ", b"#"]
DATA = st.binary(max_size=300) | st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join)
SUFFIXES = st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".zst", ".txt"])
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(lines=st.lists(LINE, max_size=6), ends=st.booleans())
def test_lines_of_anything(lines: list[bytes], ends: bool, tmp_path: Path, chatml: Path) -> None:
    path = tmp_path / "rows.jsonl"
    # The first line keeps the file from being one JSON array.
    path.write_bytes(b"\n".join([b'{"text": "first"}', *lines]) + (b"\n" if ends else b""))
    try:
        report = check(DataConfig(path=str(path)), model_folder=chatml, clean=tmp_path / "clean.jsonl")
    except DataRefused as error:  # three lines or more are of another encoding
        assert "is not UTF-8" in error.message
        return
    assert adds_up(report)
    assert report.rows_in == 1 + sum(1 for line in lines if line.strip())
    json.dumps(report.document, allow_nan=False).encode()


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(
    data=DATA,
    suffix=SUFFIXES,
    magic=st.sampled_from([b"", b"PAR1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"["]),
)
def test_files_of_anything(data: bytes, suffix: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(magic + data)
    try:
        report = check(DataConfig(path=str(path)))
    except (UsageError, DataRefused) as error:  # nothing of it was read
        assert re.search(
            "not a file of rows|is neither JSON|is not valid |is damaged|is not UTF-8|two columns",
            error.message,
        )
    else:
        assert adds_up(report)


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(cut=st.integers(0, 10_000), suffix=st.sampled_from([".jsonl.gz", ".json", ".csv", ".json.gz"]))
def test_a_file_cut_anywhere_loses_no_row_in_silence(cut: int, suffix: str, tmp_path: Path) -> None:
    rows = [{"question": f"what is {i}?", "answer": f"number {i}"} for i in range(50)]
    if "csv" in suffix:
        text = "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows)
    elif suffix.startswith(".jsonl"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = json.dumps(rows, indent=1)
    data = gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode()
    data = data[: cut % (len(data) + 1)]
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(data)
    try:
        report = check(DataConfig(path=str(path)))
    except DataRefused as refused:
        assert "is damaged" in refused.message or "is not valid JSON" in refused.message
    else:
        assert adds_up(report)
        assert not data or report.usable == 50 or suffix == ".csv"  # cut between two rows it is a whole table
