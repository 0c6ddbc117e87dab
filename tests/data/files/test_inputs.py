"""Files of every format give the same rows, each with the place where a person finds it."""

import errno
import glob
import gzip
import io
import json
import os
import shlex
import sqlite3
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from data.conftest import chat

from hivetune.config import DataConfig
from hivetune.data.files import rows, unpack
from hivetune.data.files.find import check_storable, find_sources, matching_files
from hivetune.data.files.inputs import plan_inputs
from hivetune.data.prepare.prepare import check, report_full_disk
from hivetune.data.prepare.understand import understand
from hivetune.data.read import parse_row
from hivetune.errors import DataRefused, DoesNotFit, MachineNotFit, UsageError

ROWS = [{"question": f"what is {i}?", "answer": f"it is, so to say, the number\nafter {i - 1}"} for i in range(20)]


def places(path: Path, tmp_path: Path) -> list[tuple[int, Any]]:
    """(line, row) of everything in the file."""
    found = []
    for raw in plan_inputs(str(path), tmp_path).rows():
        assert raw.problem is None, raw
        found.append((int(raw.source.rpartition(":")[2]), parse_row(raw.payload)))
    return found


def as_csv(delimiter: str = ",") -> bytes:
    import csv

    text = io.StringIO()
    writer = csv.DictWriter(text, ["question", "answer"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def as_zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FILES = {
    "rows.jsonl": (JSONL, list(range(1, 21))),
    "bom.jsonl": (b"\xef\xbb\xbf" + JSONL, list(range(1, 21))),
    "windows.jsonl": (JSONL.replace(b"\n", b"\r\n"), list(range(1, 21))),
    "blank.jsonl": (JSONL.replace(b"\n", b"\n\n \n"), list(range(1, 61, 3))),
    "unended.jsonl": (JSONL.rstrip(), list(range(1, 21))),
    "rows.unknown": (JSONL, list(range(1, 21))),
    "rows.jsonl.gz": (gzip.compress(JSONL), list(range(1, 21))),
    "members.jsonl.gz": (gzip.compress(JSONL[:500]) + gzip.compress(JSONL[500:]), list(range(1, 21))),
    "rows.jsonl.zst": (as_zst(JSONL), list(range(1, 21))),
    "named_wrong.jsonl": (gzip.compress(JSONL), list(range(1, 21))),
    "array.json": (json.dumps(ROWS).encode(), [1] * 20),
    "pretty.json": (json.dumps(ROWS, indent=2).encode(), list(range(2, 82, 4))),
    "pretty.json.gz": (gzip.compress(json.dumps(ROWS, indent=2).encode()), list(range(2, 82, 4))),
    "objects.json": ("\n".join(json.dumps(row, indent=2) for row in ROWS).encode(), list(range(1, 81, 4))),
    "lines.json": (JSONL, list(range(1, 21))),
    "rows.csv": (as_csv(), list(range(2, 42, 2))),
    "semicolon.csv": (as_csv(";"), list(range(2, 42, 2))),
    "excel.csv": (b"sep=;\r\n" + as_csv(";"), list(range(3, 43, 2))),
    "late.csv": (b"\n\r\n" + as_csv(), list(range(4, 44, 2))),
    "rows.tsv": (as_csv("\t"), list(range(2, 42, 2))),
    "rows.csv.gz": (gzip.compress(as_csv()), list(range(2, 42, 2))),
}


@pytest.mark.parametrize("name", FILES)
def test_formats(name: str, tmp_path: Path) -> None:
    data, lines = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    assert places(path, tmp_path) == list(zip(lines, ROWS, strict=True))


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{**chat(f"q{i}", "a"), "score": float("nan")} for i in range(3)]
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    assert [(n, row["messages"]) for n, row in places(path, tmp_path)] == [
        (i + 1, rows[i]["messages"]) for i in range(3)
    ]


def test_a_picture_in_a_column_refuses_no_row(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{**row, "icon": b"\x89PNG\x00\xff"} for row in ROWS]), path)
    document = check(DataConfig(path=str(path))).document
    assert (document["usable"], document["rejected"]) == (20, {})
    refused = check(DataConfig(path=str(path), columns={"completion": "icon"}, ignore=["answer"])).document
    assert refused["rejected"] == {"bad-characters": 20}


def test_names_in_quotes_do_not_decide_what_separates_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('"question, short, or long";"answer"\n"what, and why?";"this, that"\n')
    assert places(path, tmp_path) == [(2, {"question, short, or long": "what, and why?", "answer": "this, that"})]


def test_a_giant_line_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 1000)
    giant = json.dumps({"text": "x" * 3000}).encode()
    good = [json.dumps({"text": f"row {i}"}).encode() for i in range(4)]
    path = tmp_path / "rows.jsonl"
    for lines in ([*good[:2], giant, *good[2:]], [giant, *good], [*good, giant]):
        for end in (b"\n", b""):
            path.write_bytes(b"\n".join(lines) + end)
            report = check(DataConfig(path=str(path)))
            assert report.document["rejected"] == {"too-long": 1}
            assert report.document["problems"][0]["source"] == f"{path}:{lines.index(giant) + 1}"
            assert report.usable == 4


def test_a_csv_row_with_too_many_fields_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n"two\nlines",a\nq,a,b\nlast,one\n')
    report = check(DataConfig(path=str(path)))
    assert [(p["source"], p["reason"]) for p in report.document["problems"]] == [(f"{path}:4", "csv-columns")]
    assert report.usable == 2


def test_the_sample_of_a_file_is_held_no_longer_than_it_is_looked_at(tmp_path: Path) -> None:
    """Those of all files were held together."""
    peaks = []
    for number in range(24):
        (tmp_path / f"{number}.jsonl").write_bytes(JSONL * 20)
        if number in (2, 23):
            inputs = plan_inputs(str(tmp_path), tmp_path)
            tracemalloc.start()
            understand(inputs)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_folders_globs_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.csv", "notes.md", ".hidden.jsonl", "deep/d.jsonl.gz", ".cache/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert find_sources(".") == ["a.jsonl", "b.jsonl", "deep/c.csv", "deep/d.jsonl.gz"]
    assert find_sources("*.jsonl") == ["a.jsonl", "b.jsonl"]
    monkeypatch.setenv("HOME", str(tmp_path))  # as YAML names a file: no shell has read the `~`
    assert find_sources("~/a.jsonl") == [str(tmp_path / "a.jsonl")]
    assert find_sources(["b.jsonl", "./b.jsonl", str(tmp_path / "b.jsonl")]) == ["b.jsonl"]
    for missing in ("no.jsonl", "no*.jsonl", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UsageError):
            find_sources(missing)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(as_zst(JSONL) if "zstandard" not in sys.modules else b"\x28\xb5\x2f\xfd")
    with pytest.raises(MachineNotFit) as refused:
        plan_inputs(str(path), tmp_path)
    assert "[zst]" in refused.value.hint


def test_a_file_name_that_is_no_utf_8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    Path(os.fsdecode(path)).write_text('{"text": "fine"}\nbroken\n')
    report = check(DataConfig(path=str(tmp_path)), clean=tmp_path / "out" / "clean.jsonl")
    assert (report.usable, sum(report.document["rejected"].values())) == (1, 1)
    assert report.document["problems"][0]["source"].endswith("caf\\udce9.jsonl:2")
    assert [f"{name}:2" for name in report.document["understood"]] == [report.document["problems"][0]["source"]]


@pytest.mark.slow
def test_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hivetune", "check", "-", "--json"]
    finished = subprocess.run(command, input=gzip.compress(json.dumps(ROWS).encode()), capture_output=True, check=True)
    document = json.loads(finished.stdout)
    assert (document["rows_in"], document["usable"]) == (20, 20)


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was passed over, and its rows were missing without a word. Tests may run as root, who reads everything."""
    (tmp_path / "logs" / "private").mkdir(parents=True)
    (tmp_path / "logs" / "rows.jsonl").write_text(json.dumps({"prompt": "a?", "completion": "b"}) + "\n")
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("private"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for pattern in (tmp_path / "logs", tmp_path / "logs" / "**" / "*.jsonl"):
        with pytest.raises(UsageError, match=r"cannot read the folder .*private: Permission denied"):
            find_sources(str(pattern))


def test_links_in_a_circle_are_walked_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "rows.jsonl").write_bytes(JSONL)
    for number in range(3):  # with two or more, each way round doubles the next
        (tmp_path / "a" / "b" / f"up{number}").symlink_to(tmp_path / "a")
    assert find_sources(str(tmp_path)) == [str(tmp_path / "a" / "rows.jsonl")]
    assert find_sources(str(tmp_path / "**" / "*.jsonl")) == [str(tmp_path / "a" / "rows.jsonl")]


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "rows.jsonl")
    with pytest.raises(UsageError, match="a broken link"):
        find_sources(str(tmp_path / "rows.jsonl"))


def test_globs_find_what_a_shell_finds(tmp_path: Path) -> None:
    names = "a.jsonl b.jsonl .hidden.jsonl x/c.jsonl x/y/d.jsonl x/.z/e.jsonl x/y/d.csv w[1].jsonl"
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(JSONL)
    for pattern in [
        "*.jsonl",
        "**/*.jsonl",
        "x/*/*.jsonl",
        "?.jsonl",
        "[!a].jsonl",
        "[ab].jsonl",
        "x/**",
        "*/c*",
        "w[[]1].jsonl",
    ]:
        found = {str(Path(name).relative_to(tmp_path)) for name in matching_files(str(tmp_path / pattern))}
        shell = {name for name in glob.glob(pattern, root_dir=tmp_path, recursive=True) if (tmp_path / name).is_file()}
        assert found == shell or (pattern == "x/**" and found < shell), pattern


def test_each_file_of_a_channel_is_hashed_and_the_names_of_its_users_too(tmp_path: Path) -> None:
    (tmp_path / "general").mkdir()
    said = [{"type": "message", "user": "U1", "ts": "1767323045.0", "text": "Where is it?"}]
    for path, content in {"users.json": [], "general/2026-01-02.json": said, "general/2026-01-03.json": said}.items():
        (tmp_path / path).write_text(json.dumps(content))
    inputs = plan_inputs(str(tmp_path / "general"), tmp_path)
    assert [source.kind for source in inputs.sources] == ["slack"]
    assert inputs.changed() is None
    for path in ("users.json", "general/2026-01-03.json"):
        before = plan_inputs(str(tmp_path / "general"), tmp_path)
        (tmp_path / path).write_text("[ ]" if path == "users.json" else json.dumps([*said, *said]).replace("it", "he"))
        assert before.changed() == str(tmp_path / path)
        assert plan_inputs(str(tmp_path / "general"), tmp_path).digest != before.digest


def test_a_named_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is a pipe, a device or a socket") as refused:
        find_sources(str(pipe))
    assert f"cat {pipe} |" in refused.value.hint
    with pytest.raises(UsageError, match="a device"):
        find_sources("/dev/zero")


def test_a_command_in_the_place_of_a_file(tmp_path: Path) -> None:
    """As a shell gives it: hivetune check <(zcat rows.gz)"""
    reading, writing = os.pipe()
    os.write(writing, JSONL)
    os.close(writing)
    try:
        inputs = plan_inputs(f"/dev/fd/{reading}", tmp_path)
    finally:
        os.close(reading)
    assert sum(1 for _ in inputs.rows()) == len(ROWS)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.gz", "rows.json.gz", "rows.jsonl.zst"])
def test_a_file_that_unpacks_to_fill_the_disk_is_cut_off(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "ALWAYS_UNPACKED_BYTES", 1 << 16)
    zeros = (b"[" if ".json." in name else b"") + b" " * (8 << 20)
    (tmp_path / name).write_bytes(as_zst(zeros) if name.endswith("zst") else gzip.compress(zeros))
    (tmp_path / "spill").mkdir()
    with pytest.raises(DataRefused, match="unpacks to more than 300 times its size"):
        check(DataConfig(path=str(tmp_path / name)))


def test_a_full_disk_is_told_in_plain_words(tmp_path: Path) -> None:
    with (
        pytest.raises(DoesNotFit, match="is full"),
        report_full_disk(tmp_path, "set TMPDIR"),
        open("/dev/full", "w") as file,
    ):
        file.write("x" * 100_000)
    with pytest.raises(DoesNotFit, match="is full"), report_full_disk(tmp_path, "set TMPDIR"):
        raise sqlite3.OperationalError("database or disk is full")
    with pytest.raises(ValueError, match="other"), report_full_disk(tmp_path, "set TMPDIR"):
        raise ValueError("other")


def test_a_name_that_the_locale_can_not_read_is_told_from_one_that_is_no_utf_8() -> None:
    """In a C locale the name \u00fc.jsonl was called "not UTF-8"."""
    for name, hint in (("\udcc3\udcbc.jsonl", "PYTHONUTF8=1"), ("\udcff.jsonl", "rename it")):
        with pytest.raises(UsageError) as refused:
            check_storable(name)
        assert hint in refused.value.hint
    check_storable("\u00fc.jsonl")


def test_a_folder_whose_rows_are_all_hidden_says_where_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a log" / ".claude" / "projects"
    folder.mkdir(parents=True)
    (folder / "one.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="contains no files of rows") as refused:
        find_sources(str(tmp_path / "a log"))
    assert shlex.quote(str(folder.parent)) in refused.value.hint
    assert find_sources(str(folder.parent)) == [str(folder / "one.jsonl")]
