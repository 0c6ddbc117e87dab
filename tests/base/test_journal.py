"""Journals after a crash, on a damaged disk, and on a full one."""

import errno
import os
from pathlib import Path

import pytest

from hivetune.base.journal import TAIL_BYTES, Journal, read_journal, read_tail


def write(path: Path, *numbers: int) -> None:
    with Journal(path) as journal:
        for number in numbers:
            journal.append("step", step=number, words="ä\udc80\u2028")


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "j", 1)
    [entry] = read_journal(tmp_path / "j")
    assert entry.pop("time") > 1e9
    assert entry == {"event": "step", "step": 1, "words": "ä\udc80\u2028"}


def test_a_line_without_what_its_readers_take_is_damaged(tmp_path: Path) -> None:
    with Journal(tmp_path / "metrics.jsonl") as journal:
        journal.append("step", step=1)
        journal.append("step", step="2", loss=1.0)
        journal.append("step", step=3, loss=None)
    assert [entry["event"] for entry in read_journal(tmp_path / "metrics.jsonl")] == ["damaged", "damaged", "step"]


def test_a_sparse_file_of_a_terabyte_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hivetune.base.journal.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "j").touch()
    os.truncate(tmp_path / "j", 1 << 40)
    with pytest.raises(OSError, match="a line of more than"):
        list(read_journal(tmp_path / "j"))


@pytest.mark.parametrize("line", ["not JSON", "[]", "7", '{"time": 1}', "[" * 100_000, '{"event": 3}'])
def test_a_bad_line_stops_nobody_and_is_told(line: str, tmp_path: Path) -> None:
    write(tmp_path / "j", 1, 2)
    lines = (tmp_path / "j").read_text().split("\n")
    (tmp_path / "j").write_text("\n".join([lines[0], line, lines[1]]) + "\n")
    first, bad, last = read_journal(tmp_path / "j")
    assert (first["step"], last["step"]) == (1, 2)
    assert bad == {"event": "damaged", "time": 0.0}


@pytest.mark.parametrize("torn", ["{", '{"event": "torn"' + "x" * 3 * TAIL_BYTES])
def test_a_torn_line_goes_when_the_next_writer_comes(torn: str, tmp_path: Path) -> None:
    write(tmp_path / "j", 1)
    with open(tmp_path / "j", "a") as file:
        file.write(torn)
    write(tmp_path / "j", 2)
    assert [entry["step"] for entry in read_journal(tmp_path / "j")] == [1, 2]
    (tmp_path / "k").write_text(torn)
    write(tmp_path / "k", 3)
    assert [entry["step"] for entry in read_journal(tmp_path / "k")] == [3]


def test_what_a_full_disk_refused_comes_first_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some bytes of the first line still go through, as on a real disk; no line is lost, doubled or torn."""
    write_all, room = os.write, [10]

    def full(handle: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write_all(handle, data[: room[0]])
        room[0] -= taken
        return taken

    journal = Journal(tmp_path / "j")
    monkeypatch.setattr("hivetune.base.journal.os.write", full)
    for number in (1, 2):
        with pytest.raises(OSError, match="space"):
            journal.append("step", step=number)
    room[0] = 1 << 20
    journal.append("step", step=3)
    journal.close()
    assert [entry["step"] for entry in read_journal(tmp_path / "j")] == [1, 2, 3]


def test_the_tail_has_the_newest_events_however_long_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_tail(path) == []
    journal = Journal(path)
    for number in range(5000):
        journal.append("step", step=number)
    journal.close()
    steps = [entry["step"] for entry in read_tail(path)]
    assert steps == list(range(5000))[-len(steps) :]
    assert 100 < len(steps) < 5000
    with path.open("ab") as file:
        file.write(b'{"event": "torn')
    assert [entry["step"] for entry in read_tail(path)][-1] == 4999


def test_a_journal_goes_on_after_lines_were_taken_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    for step in range(4):
        journal.append("step", step=step)
    journal.replace([entry for entry in read_journal(tmp_path / "j") if entry["step"] <= 1])
    journal.append("again", step=2)
    journal.close()
    assert [entry["step"] for entry in read_journal(tmp_path / "j")] == [0, 1, 2]
