"""JSON Lines logs: what is read, what waits, what is refused, and identity through every way that logs are rotated."""

import gzip
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from collecting import collect_now, line, query, stored_numbers, total
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.base.database import open_database
from hivetune.data.files import rows as file_rows
from hivetune.data.intake import logs
from hivetune.data.intake.interactions import commit_batch
from hivetune.data.intake.logs import FileReader
from hivetune.data.intake.reader import Batches


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "chat.jsonl"


def write(log: Path, text: str) -> None:
    log.parent.mkdir(exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        file.write(text)


def append(log: Path, *numbers: int) -> None:
    write(log, "".join(map(line, numbers)))


def test_each_line_is_one_interaction_with_its_place_and_its_columns(log: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b", "session_id": "s", "user_id": 7, "timestamp": "2026-01-02T03:04:05Z"},
        {"prompt": "c", "completion": "d", "agent": "ops", "success": "false", "feedback": "up"},
    ]
    write(log, "\n".join(map(json.dumps, rows)) + "\n\n")
    assert total(str(log)) == (2, 0, 0, 0)
    found = query("SELECT source, session, user, agent, time, success, feedback, row FROM interactions ORDER BY rowid")
    assert found[0][:5] == (f"{log}:1", "s", "7", None, 1767323045.0)
    assert found[1][:-1] == (f"{log}:2", None, None, "ops", None, 0, 1.0)
    assert [json.loads(columns[-1]) for columns in found] == rows


def test_equal_rows_are_one_interaction_wherever_they_turn_up(log: Path) -> None:
    append(log, 1, 1)
    append(log.with_name("copy.jsonl"), 1)
    os.link(log, log.with_name("same.jsonl"))  # read once
    assert total(str(log.parent)) == (1, 2, 0, 0)


BAD = {
    b"{oops": "bad-json",
    b"[1]": "bad-json",
    b'"x"': "bad-json",
    b'{"a": "\xff"}': "bad-characters",
    b'{"a": "\0"}': "bad-characters",
    b'{"a": NaN}': "bad-json",
    b'{"a":' + b"[" * 100_000 + b"}": "bad-json",
}


def test_bad_lines_are_kept_aside_with_place_and_reason(log: Path) -> None:
    log.parent.mkdir()
    log.write_bytes(line(0).encode() + b"".join(text + b"\n" for text in BAD) + line(1).encode())
    collected = collect_now(str(log)).total()
    assert (collected.stored, collected.refused) == (2, len(BAD))
    found = query("SELECT source, reason, raw FROM refused ORDER BY rowid")
    assert [(place, reason) for place, reason, _ in found] == [
        (f"{log}:{number}", reason) for number, reason in enumerate(BAD.values(), 2)
    ]
    assert [raw for _, _, raw in found] == [text[:4096] for text in BAD]
    assert query("SELECT stored, refused FROM intake") == [(2, len(BAD))]
    assert total(str(log)) == (0, 0, 0, 0)


def drain(batches: Batches, database: sqlite3.Connection) -> int:
    """The number of rows until there is nothing new."""
    count = 0
    while batch := next(batches):
        count += commit_batch(database, batch).stored
    return count


def test_a_last_row_without_line_feed_is_taken_once(log: Path) -> None:
    """So is one behind a hole, which truncating a log under its writer leaves."""
    write(log, "\0" * 5000 + line(1) + line(2).rstrip("\n"))
    assert total(str(log)) == (2, 0, 0, 0)
    write(log, "\n" + line(3))
    assert total(str(log)) == (1, 0, 0, 0)
    assert query("SELECT source FROM interactions ORDER BY rowid") == [f"{log}:{number}" for number in (1, 2, 3)]


def test_a_line_larger_than_any_row_is_refused_once_and_passed_over(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_rows, "MAX_ROW_BYTES", 50_000)
    monkeypatch.setattr(logs, "_BATCH_BYTES", 1_000)
    append(log, 1)
    write(log, '{"a": "' + "x" * 200_000 + '"}\n')
    append(log, 2)
    for size in (50_000, 50_001):
        file = log.with_name(f"{size}.jsonl")
        file.write_text('{"prompt": "%s"}\n' % ("x" * (size - len('{"prompt": ""}'))))
        assert total(str(file)) == ((1, 0, 0, 0) if size == 50_000 else (0, 0, 1, 0))
        file.unlink()
    assert total(str(log)) == (2, 0, 1, 0)
    assert query("SELECT source, reason FROM refused")[1:] == [(f"{log}:2", "too-long")]
    assert query("SELECT source FROM interactions")[1:] == [f"{log}:1", f"{log}:3"]


def copy_and_truncate(log: Path) -> None:
    shutil.copy2(log, log.with_name("chat.jsonl.1"))
    log.write_bytes(b"")


def packed_as(suffix: str, compress: Callable[[bytes], bytes], log: Path) -> None:
    log.with_name(f"chat.jsonl.1{suffix}").write_bytes(compress(log.read_bytes()))
    log.unlink()


ROTATIONS: dict[str, Callable[[Path], object]] = {
    "renamed": lambda log: log.rename(log.with_name("chat.jsonl.1")),
    "renamed with its date": lambda log: log.rename(log.with_name("chat-20260102.jsonl")),
    "copied and truncated": copy_and_truncate,
    "packed by gzip": lambda log: packed_as(".gz", gzip.compress, log),
    "packed by zstd": lambda log: packed_as(".zst", pytest.importorskip("zstandard").compress, log),
}


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("seen", [0, 1, 40])
@pytest.mark.parametrize("pattern", ["chat.jsonl", "*"])
def test_the_rest_of_a_rotated_log_is_read(log: Path, rotation: str, seen: int, pattern: str) -> None:
    """Rows written after the last collection and before the rotation are found under the new name."""
    append(log, *range(seen))
    name = str(log.with_name(pattern))
    assert total(name) == (seen, 0, 0, 0)
    append(log, *range(seen, 100))
    ROTATIONS[rotation](log)
    append(log, 100, 101)
    assert total(name)[0] == 102 - seen
    assert total(name) == (0, 0, 0, 0)
    assert stored_numbers() == list(range(102))


def collect_while(log: Path, monkeypatch: pytest.MonkeyPatch, when: int, act: Callable[[], object]) -> int:
    """Collect twice; return the steps of the first time: looks at the folder and at files, and reading them. `act` is
    done in front of step `when`."""
    steps = 0

    def counted(step: Callable[..., object]) -> Callable[..., object]:
        def stepping(*arguments: object) -> object:
            nonlocal steps
            steps += 1
            if steps == when:
                act()
            return step(*arguments)

        return stepping

    with monkeypatch.context() as patched:
        for name in ("_rotations", "_status", "blocks_of", "_tail"):
            patched.setattr(logs, name, counted(getattr(logs, name)))
        patched.setattr(FileReader, "_logs", counted(FileReader._logs))
        collect_now(str(log))
    collect_now(str(log))
    return steps


@pytest.mark.parametrize("when", range(1, 10))
def test_a_log_that_is_copied_and_truncated_during_the_first_collection_loses_nothing(
    log: Path, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are in the copy alone, which was taken for one from before the first collection."""
    append(log, *range(30))
    steps = collect_while(log, monkeypatch, when, lambda: (copy_and_truncate(log), append(log, 30)))
    assert stored_numbers() == list(range(31 if steps >= when else 30))


def shift(log: Path) -> None:
    """As logrotate: .2 to .3, .1 to .2, the log to .1, and a new log with one more row."""
    numbers = sorted(int(path.suffix[1:]) for path in log.parent.glob("chat.jsonl.*"))
    for number in reversed(numbers):
        log.with_name(f"chat.jsonl.{number}").rename(log.with_name(f"chat.jsonl.{number + 1}"))
    log.rename(log.with_name("chat.jsonl.1"))
    append(log, 100 + len(numbers))


@pytest.mark.parametrize("when", range(1, 10))
def test_logs_that_are_renamed_while_somebody_looks_are_read_once(
    log: Path, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotation falls between any two steps: a look at the folder, at a file, or reading it."""
    append(log, 0, 1)
    collect_now(str(log))
    shift(log)
    append(log, 2)
    collect_now(str(log))
    append(log, 3)
    steps = collect_while(log, monkeypatch, when, lambda: shift(log))
    assert steps >= when
    assert stored_numbers() == [0, 1, 2, 3, 100, 101]


@pytest.mark.parametrize("rows", [1, 30])
def test_a_log_that_was_written_anew_is_read_from_its_start(log: Path, rows: int) -> None:
    """By a writer that cuts it off, and by an editor that writes another file in its place."""
    append(log, *range(10))
    collect_now(str(log))
    log.write_text("".join(map(line, range(10, 10 + rows))))
    assert total(str(log)) == (rows, 0, 0, 0)
    fresh = log.with_name("fresh")
    fresh.write_text(log.read_text() + line(50))
    fresh.replace(log)
    assert total(str(log)) == (1, rows, 0, 0)


def test_following_waits_for_half_a_line_and_goes_through_a_rotation(log: Path) -> None:
    append(log, 1)
    reader = FileReader(str(log))
    with closing(open_database()) as database:
        batches = reader.batches(database, True)
        write(log, line(2)[:20])
        assert (drain(batches, database), reader.waiting) == (1, [f"{log}:2"])
        write(log, line(2)[20:])
        log.rename(log.with_name("chat.jsonl.1"))
        append(log, 3)
        assert drain(batches, database) == 2
        write(log.with_name("chat.jsonl.1"), line(4))  # the writer still held it open
        assert drain(batches, database) == 1
    assert (reader.notes, stored_numbers()) == ([], [1, 2, 3, 4])


def test_a_torn_last_line_of_a_rotated_log_is_refused_when_it_is_silent(log: Path) -> None:
    append(log, 1)
    collect_now(str(log))
    write(log, '{"prompt": "ne')
    log.rename(log.with_name("chat.jsonl.1"))
    append(log, 2)
    assert total(str(log)) == (1, 0, 0, 0)
    os.utime(log.with_name("chat.jsonl.1"), (1, 1))
    assert total(str(log)) == (0, 0, 1, 0)
    assert query("SELECT source, reason FROM refused") == [(f"{log}.1:2", "bad-json")]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_archive_gives_what_it_has_and_says_so(log: Path, suffix: str) -> None:
    log.parent.mkdir()
    compress = gzip.compress if suffix == ".gz" else pytest.importorskip("zstandard").compress
    packed = compress("".join(map(line, range(5000))).encode())
    path = log.with_name(f"old.jsonl{suffix}")
    path.write_bytes(packed[: len(packed) // 2])
    stored, _, refused, _ = total(str(path))
    assert (0 < stored < 5000, refused) == (True, 1)
    assert query("SELECT reason FROM refused") == ["broken-file"]
    path.write_bytes(packed)
    collect_now(str(path))
    assert stored_numbers() == list(range(5000))


def test_a_folder_brings_all_its_logs_and_says_what_is_none(log: Path) -> None:
    append(log, 1)
    append(log.with_name("b.ndjson"), 2)
    log.with_name("d.csv").write_text("prompt,completion\nquestion 5,answer 5\n")
    log.with_name("readme.txt").write_text("no rows")
    collected = collect_now(str(log.parent))
    assert collected.total().stored == 2
    [note] = collected.readers[0].notes
    assert note.startswith(f"{log.with_name('d.csv')} is a complete file, and is not collected")


OPERATIONS = st.lists(
    st.sampled_from(["row", "row", "row", "bad", "half", "collect", "collect", "rename", "copytruncate"]), max_size=40
)


def replay(folder: Path, operations: list[str]) -> tuple[tuple[list[int], int], tuple[list[int], int]]:
    """Write, rotate and collect in this order. Return what was found and what was written: the rows in order, and the
    number of bad lines."""
    log = folder / "chat.jsonl"
    log.touch()
    rows, bad = 0, 0
    for number, operation in enumerate(operations):
        text, rotated = line(rows), folder / f"chat.jsonl.{number}"
        if operation == "row":
            append(log, rows)
        elif operation == "bad":
            write(log, f"{{bad {bad}\n")
        elif operation == "half":  # the writer is interrupted and goes on
            write(log, text[:10])
            collect_now(str(log))
            write(log, text[10:])
        elif operation in ("collect", "folder"):
            collect_now(str(log if operation == "collect" else folder))
        elif operation == "rename":
            log.rename(rotated)
            log.touch()
        else:
            shutil.copyfile(log, rotated)
            log.write_bytes(b"")
        rows, bad = rows + (operation in ("row", "half")), bad + (operation == "bad")
        os.utime(log, (2_000_000_000 + number, 2_000_000_000 + number))
    collect_now(str(log))
    [refused] = query("SELECT count(*) FROM refused")
    return (stored_numbers(), refused), (list(range(rows)), bad)


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param("row collect row rename row rename row", id="generations that came and went between two looks"),
        pytest.param("row rename row collect row", id="a rotation before the first collection"),
        pytest.param("row collect row rename row folder folder", id="by name, and then its folder"),
        pytest.param("half rename row rename row", id="a first look at half a line, and rotations"),
        pytest.param("row folder row rename folder", id="renamed, and not written again"),
    ],
)
def test_histories_that_once_lost_a_row(tmp_path: Path, operations: str) -> None:
    (tmp_path / "logs").mkdir()
    found, written = replay(tmp_path / "logs", operations.split())
    assert found == written


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("HIVETUNE_EXAMPLES", "40")), deadline=None)
@given(OPERATIONS)
def test_any_history_of_a_log_is_read_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, operations: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("history")
    os.environ["HIVETUNE_HOME"] = str(folder / "home")
    (folder / "logs").mkdir()
    found, written = replay(folder / "logs", operations)
    assert found == written


def test_lines_of_a_session_are_no_rows(tmp_path: Path) -> None:
    """They were counted as interactions, and none of them could be learned."""
    path = tmp_path / "session.jsonl"
    event = {"sessionId": "s", "timestamp": "2026-01-01T00:00:00Z"}
    asked = {**event, "type": "user", "uuid": "1", "message": {"role": "user", "content": "What is it?"}}
    path.write_text(json.dumps(asked) + "\n")
    tally = collect_now(str(path)).total()
    assert (tally.stored, tally.reasons) == (0, {"unknown-layout": 1})


def test_a_folder_is_followed_through_links_and_no_file_is_stored_twice(tmp_path: Path) -> None:
    """As `check` does. Files behind a link were passed over without a word."""
    (tmp_path / "elsewhere").mkdir()
    append(tmp_path / "elsewhere" / "b.jsonl", 2)
    append(tmp_path / "logs" / "a.jsonl", 1)
    (tmp_path / "logs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "logs" / "circle").symlink_to(tmp_path / "logs")
    (tmp_path / "alias.jsonl").symlink_to(tmp_path / "logs" / "a.jsonl")
    collected = collect_now(str(tmp_path / "logs"), str(tmp_path / "alias.jsonl")).total()
    assert (collected.stored, collected.refused) == (2, 0)
