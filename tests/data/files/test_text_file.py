"""Plain text: conversations a line or between blank lines, questions behind their marks; anything else is no rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused

WHERE, THERE, WHO, SHE = "Where is the depot?", "It is in Bonn.", "Who runs it?", "My aunt does."
PAIRS = [[("user", WHERE), ("assistant", THERE)], [("user", WHO), ("assistant", SHE)]]
WHOLE = [PAIRS[0] + PAIRS[1]]


def talks(path: Path, text: str) -> list[list[tuple[str, str]]]:
    path.write_text(text, encoding="utf-8")
    found = []
    for raw in rows_of_files(str(path)):
        found.append([(m.role, m.content) for m in example_of(raw).messages])
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Q: {WHERE}\nA: {THERE}\n\nQ: {WHO}\nA: {SHE}\n", PAIRS),
        (f"Question 1: {WHERE}\nAnswer 1: {THERE}\nQuestion 2: {WHO}\nAnswer 2: {SHE}", PAIRS),
        (f"问：{WHERE}\n答：{THERE}\n问：{WHO}\n答：{SHE}\n", PAIRS),
        (f"Вопрос: {WHERE}\r\nОтвет: {THERE}\r\nВопрос: {WHO}\r\nОтвет: {SHE}\r\n", PAIRS),
        (f"User: {WHERE}\nBot: {THERE}\n\nUser: {WHO}\nBot: {SHE}\n", PAIRS),
        (f"Customer: {WHERE}\nAgent: {THERE}\nCustomer: {WHO}\nAgent: {SHE}\n", WHOLE),
        (f"# About a depot.\n\nQ: {WHERE}\nA: {THERE}\n\nQ: {WHO}\nA: {SHE}\n", PAIRS),
        (f"س: {WHERE}\nج: {THERE}\n---\nس: {WHO}\nج: {SHE}\n---\n", PAIRS),
        (f"User: {WHERE}\n\nBot: {THERE}\n\nUser: {WHO}\n\nBot: {SHE}\n", WHOLE),
        (f"{WHERE} <EOS> {THERE} <EOS>\n{WHO} <EOS> {SHE} <EOS>\n", PAIRS),
        (f"{WHERE} __eou__ {THERE} __eou__\n{WHO} __eou__ {SHE} __eou__\n", PAIRS),
        ("".join(f"{WHERE}\t{THERE}\n{WHO}\t{SHE}\n" for _ in range(2)), PAIRS + PAIRS),
    ],
)
def test_conversations_of_a_text_file(tmp_path: Path, text: str, expected: list[Any]) -> None:
    assert talks(tmp_path / "talks.txt", text) == expected


@pytest.mark.parametrize("name", ["train.jsonl", "train.txt", "train"])
def test_conversations_as_a_template_wrote_them(tmp_path: Path, name: str) -> None:
    begin, header, end = "<|begin_of_text|>", "<|start_header_id|>{}<|end_header_id|>", "<|eot_id|>"
    rows = [
        begin + "".join(f"{header.format(turn[0])}\n{turn[1]}\n\nSo it is.{end}" for turn in pair) for pair in PAIRS
    ]
    assert talks(tmp_path / name, "\n".join(rows)) == [
        [(role, f"{said}\n\nSo it is.") for role, said in pair] for pair in PAIRS
    ]


def test_an_answer_of_several_lines(tmp_path: Path) -> None:
    text = f"Q: {WHERE}\nA: {THERE}\n\nBut not for long.\nQ: {WHO}\nA: {SHE}\n"
    assert talks(tmp_path / "faq.txt", text)[0][1] == ("assistant", f"{THERE}\n\nBut not for long.")
    assert [raw.source.rpartition(":")[2] for raw in rows_of_files(str(tmp_path / "faq.txt"))] == ["1", "5"]


@pytest.mark.parametrize(
    "text",
    [
        "It was a dark night.\nNobody spoke.\n",
        f"1 {WHERE}\t{THERE}\n2 {WHO}\t{SHE}\n1 {WHO}\t{SHE}\n",
        f"Q: {WHERE}\nQ: {WHO}\nA: {SHE}\n",
        f"Note: {WHERE}\nAlso: {THERE}\n",
    ],
)
def test_other_texts_are_no_rows(tmp_path: Path, text: str) -> None:
    with pytest.raises(RowRefused):
        talks(tmp_path / "book.txt", text)


def test_weights_of_turns(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    first = f"1.0 0 0 {WHERE}  EOS 1.0 1 1 [Told] {THERE} \r\n"
    second = f"0.0 0 0 {WHERE} EOS 0.0 1 1 {THERE} EOS 0.0 0 2 {WHO} EOS 1.0 1 3 {SHE}\r\n"
    assert talks(path, first + second) == [[("user", WHERE), ("assistant", f"[Told] {THERE}")], *WHOLE]
    last = [example_of(raw) for raw in rows_of_files(str(path))][-1]
    assert [m.weight for m in last.messages if m.role == "assistant"] == [0, 1]
    twice = f"0.0 0 0 {WHERE} EOS 0.0 1 1 {THERE} EOS 1.0 1 2 {SHE}\n"
    assert talks(path, twice * 2)[0][1] == ("assistant", f"{THERE}\n\n{SHE}")
    assert talks(path, f"0.0 {WHERE} EOS 0.0 {THERE} EOS 0.0 {WHO}\t1.0 {SHE}\n0.0 {WHO}\t1.0 {SHE}\n") == [
        *WHOLE,
        PAIRS[1],
    ]
    assert json.loads(next(iter(rows_of_files(str(path)))).payload).keys() == {"text"}
