"""CSV: a quote that is not closed costs the row that it is in, never those behind it."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.config import DataConfig
from hivetune.data.files.csv_table import csv_rows
from hivetune.data.pieces.logs import MAX_ROW_CHARS
from hivetune.data.prepare.prepare import check
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused

CELL = st.text(max_size=20) | st.text('ab ,;"\n\r\t', max_size=10)


class Text:
    problem = None

    def __init__(self, text: str):
        self._text = text

    def lines(self) -> Any:
        return iter(io.StringIO(self._text, newline="\n"))  # they end at line feeds alone, as those of files


def read(text: str) -> tuple[list[Any], list[tuple[int, str]]]:
    """(rows, [(line, problem)])"""
    found = list(csv_rows(Text(text), None))  # type: ignore[arg-type]
    rows = [dict(row) for _, row in found if isinstance(row, dict)]
    return rows, [(place, row.reason) for place, row in found if isinstance(row, RowRefused)]


def plain(number: int) -> dict[str, str]:
    return {"question": f"question {number}", "answer": f"answer {number}"}


def test_an_unclosed_quote_costs_its_row() -> None:
    for at in (0, 250, 498, 499):
        lines = [f"question {i},answer {i}\n" for i in range(500)]
        lines[at] = f'question {at},"answer {at}\n'
        rows, problems = read("question,answer\n" + "".join(lines))
        assert rows == [plain(i) for i in range(500) if i != at]
        assert problems == [(at + 2, "csv-quote")]


def test_no_column_hides_another_of_its_name(tmp_path: Path) -> None:
    """Two columns called `answer` are asked about; before, the last one was trained without a word."""
    header = "question,answer,answer,,\n"
    lines = [f"What is {n} and why?,It is {n} for a reason.,It was {n} for a reason.,,\n" for n in range(9)]
    rows, problems = read(header + lines[0] + header + lines[1])
    assert list(rows[0]) == ["question", "answer", "answer_3", "", "column_5"] and len(rows) == 2 and not problems
    assert list(read("a,a,a_2\n1,2,3\n")[0][0].items()) == [("a", "1"), ("a_3", "2"), ("a_2", "3")]
    path = tmp_path / "rows.csv"
    path.write_text(header + "".join(lines))
    assert check(DataConfig(path=str(path))).document["rejected"] == {"unexplained-column": 9}
    chosen = DataConfig(path=str(path), columns={"prompt": "question", "completion": "answer"})
    assert check(chosen).usable == 9


def test_unclosed_quotes_among_quoted_rows() -> None:
    lines = [f'"question {i}","answer {i}"\n' for i in range(50)]
    for at in (7, 8, 30):
        lines[at] = f'"question {at}","answer {at}\n'
    rows, problems = read("question,answer\n" + "".join(lines))
    assert rows == [plain(i) for i in range(50) if i not in (7, 8, 30)]
    assert problems == [(9, "csv-quote"), (10, "csv-quote"), (32, "csv-quote")]


def test_rows_of_several_lines_stay_whole() -> None:
    text = "question,answer\n" + "".join(f'"what\nis, {i}?","it is\n\n""{i}"", so\nto say"\n' for i in range(30))
    rows, problems = read(text)
    assert problems == []
    assert rows[3] == {"question": "what\nis, 3?", "answer": 'it is\n\n"3", so\nto say'}
    broken = text.replace('"what\nis, 7?"', '"what\nis, 7?', 1)
    rows, problems = read(broken)
    assert len(rows) == 29
    assert all(row["question"].startswith("what\nis, ") and row["answer"].endswith("say") for row in rows)
    assert problems[0] == (2 + 7 * 5, "csv-quote")


def test_quotes_within_a_field_without_quotes_are_text() -> None:
    rows, problems = read('question,answer\nhow large?,5" disk\n"a ""b"" c", "d" e\n"a "b" c",d\n')
    assert rows == [{"question": "how large?", "answer": '5" disk'}, {"question": 'a "b" c', "answer": ' "d" e'}]
    assert problems == [(4, "csv-quote")]


def test_prose_behind_a_wrong_quote_is_no_row() -> None:
    text = 'question,answer\nq1,a1\nq2,"he said "no" and left\nand then, finally, nothing"\n' + "".join(
        f"q{i},a{i}\n" for i in range(3, 9)
    )
    rows, problems = read(text)
    assert [row["question"] for row in rows] == ["q1", *(f"q{i}" for i in range(3, 9))]
    assert problems[0] == (3, "csv-quote")


def test_a_header_with_a_broken_quote_is_no_table() -> None:
    rows, problems = read('question,"answer\nq,a\n')
    assert (rows, problems) == ([], [(1, "csv-quote")])


def test_a_carriage_return_within_a_line_is_a_character() -> None:
    """It ended the check as a bug; pandas writes a field with one without quotes."""
    rows, problems = read('question,answer\nwhat\ris 1?,"it\ris, yes"\r\r\nquestion 2,answer 2\n')
    assert rows == [{"question": "what\ris 1?", "answer": "it\ris, yes"}, plain(2)]
    assert problems == []


def test_a_line_that_is_longer_than_any_row_costs_itself() -> None:
    rows, problems = read(f"question,answer\nquestion 1,{'a' * (MAX_ROW_CHARS + 1)}\nquestion 2,answer 2\n")
    assert (rows, problems) == ([plain(2)], [(2, "line-too-large")])


@settings(max_examples=200)
@given(st.lists(st.tuples(CELL, CELL), max_size=8), st.sampled_from(["\r\n", "\n"]))
def test_whatever_the_library_writes_is_read(pairs: list[tuple[str, str]], end: str) -> None:
    # A carriage return at the end of a line is part of the line break: before 3.13 the library does not quote it.
    pairs = [tuple(value.strip("\r").replace("\0", "") for value in pair) for pair in pairs]  # type: ignore[misc]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end)
    writer.writerows([("question", "answer"), *pairs])
    found = list(csv_rows(Text(text.getvalue()), None))  # type: ignore[arg-type]
    assert [row for _, row in found] == [
        {"question": q, "answer": a}
        for q, a in pairs
        if q or a  # a line of separators alone is a blank line, as spreadsheets leave them
    ]
    assert all(isinstance(row, dict) for _, row in found)


@settings(max_examples=200)
@given(st.text('",ab\n', max_size=80))
def test_any_line_costs_no_row_far_behind_it(noise: str) -> None:
    rows, _ = read(f"question,answer\nq,a\n{noise}\n" + "".join(f"question {i},answer {i}\n" for i in range(50)))
    assert rows[-40:] == [plain(i) for i in range(10, 50)]


def test_the_check_counts_and_refuses(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"question {i},answer {i}\n" for i in range(500)]
    lines[100] = 'question 100,"answer 100\n'
    path.write_text("question,answer\n" + "".join(lines))
    document = check(DataConfig(path=str(path))).document
    assert (document["usable"], document["rejected"]) == (499, {"csv-quote": 1})
    assert document["problems"][0]["source"] == f"{path}:102"
    lines = [line if i % 3 else line.replace(",", ',"') for i, line in enumerate(lines)]
    path.write_text("question,answer\n" + "".join(lines))
    with pytest.raises(DataRefused):
        check(DataConfig(path=str(path))).refuse(0.2)


@pytest.mark.parametrize("above", [["Our FAQ,,", ",,"], ["Our FAQ of 2026-01-12", ""], ["Our FAQ"]])
def test_a_title_above_the_header_is_no_row(above: list[str]) -> None:
    lines = [*above, "No,Question,Answer", "1,How is it?,Fine", ",,", "2,And you?,Fine too", ",,"]
    rows, problems = read("\n".join(lines) + "\n")
    assert rows == [
        {"No": "1", "Question": "How is it?", "Answer": "Fine"},
        {"No": "2", "Question": "And you?", "Answer": "Fine too"},
    ]
    assert problems == []
    placed = [place for place, *_ in csv_rows(Text("\n".join(lines)), None)]  # type: ignore[arg-type]
    assert placed == [len(above) + 2, len(above) + 4]


@pytest.mark.parametrize(
    "text",
    ["text\none, two, three\nfour, five, six\n", "question,,\nhow?,,\nwhy?,,\n", "question,\nhow?,so\nwhy?,so\n"],
)
def test_a_header_of_one_name_stays_the_header(text: str) -> None:
    found = list(csv_rows(Text(text), None))  # type: ignore[arg-type]
    assert [place for place, *_ in found] == [2, 3]


SAID = [
    ("Where is the depot?", "It is in Bonn today."),
    ("Who runs it now?", "A man from Aachen."),
    ("Why, then?", "Nobody"),
]
SAID += [(f"What is the price of part {i}?", f"It costs {i} euros.") for i in range(5)]


@pytest.mark.parametrize(
    ("records", "names"),
    [
        (SAID, ["question", "answer"]),
        ([(str(i), *pair) for i, pair in enumerate(SAID)], ["column_1", "question", "answer"]),
        ([(q, ("good", "bad")[i % 2]) for i, (q, _) in enumerate(SAID)], ["text", "label"]),
        ([(str(i % 2), q) for i, (q, _) in enumerate(SAID)], ["label", "text"]),
        ([(q, f"({'ABC'[i % 3]})", a) for i, (q, a) in enumerate(SAID)], ["column_1", "column_2", "column_3"]),
        ([(q, "a", "b", "AB"[i % 2]) for i, (q, _) in enumerate(SAID)], ["question", "A", "B", "answer"]),
        ([(f"2025-01-0{i % 2 + 1} 12:00", a) for i, (_, a) in enumerate(SAID)], ["column_1", "column_2"]),
        ([(f"wavs/{i}.wav", a) for i, (_, a) in enumerate(SAID)], ["column_1", "column_2"]),
        ([(q, a) for _, a in SAID for q in ("Where are they?",)][:6], ["question", "answer"]),
    ],
)
def test_a_table_without_a_header_keeps_its_first_row(records: list[tuple[str, ...]], names: list[str]) -> None:
    rows, problems = read("".join("\t".join(record) + "\n" for record in records))
    assert rows == [dict(zip(names, record, strict=True)) for record in records]
    assert problems == []


@pytest.mark.parametrize(
    "header",
    [
        "question\tanswer",
        "Word\tWhat it means",
        "pregunta\trespuesta",
        "Q1\tQ2",
        "How do you feel about us?\tanswer",
        "\t",
    ],
)
def test_a_header_of_names_is_no_row(header: str) -> None:
    rows, _ = read("\n".join([header, *("\t".join(pair) for pair in SAID)]))
    assert len(rows) == len(SAID)


def test_few_rows_keep_their_header() -> None:
    assert read("Where is it?\tIn Bonn today.\nWho are you?\tA man from there.\n")[0][0].keys() == {
        "Where is it?",
        "In Bonn today.",
    }


def test_a_header_that_comes_again_is_no_row() -> None:
    rows, problems = read("question,answer\nq1,a1\nquestion,answer\nq2,a2\n")
    assert ([row["question"] for row in rows], problems) == (["q1", "q2"], [])


def test_commas_of_sentences_that_nobody_quoted() -> None:
    rows, problems = read("question,answer\nhello, how are you?,I am well, thank you\nand,you,me\n")
    assert rows == [{"question": "hello, how are you?", "answer": "I am well, thank you"}]
    assert problems == [(3, "csv-columns")]


def test_a_space_behind_each_delimiter_is_no_part_of_the_values() -> None:
    rows, _ = read('"question", "answer", "note"\n"how, so?", "so, I think",  1\n')
    assert rows == [{"question": "how, so?", "answer": "so, I think", "note": "1"}]


def test_quotes_are_signs_where_tabs_delimit() -> None:
    lines = ['"Bonn" is where?\tIt is "there', '"Who\tA man', 'he said\t"no', "and\tyou"]
    rows, problems = read("question\tanswer\n" + "\n".join(lines) + "\n")
    assert [[row["question"], row["answer"]] for row in rows] == [line.split("\t") for line in lines]
    assert problems == []
    quoted = read('question\tanswer\nhow?\t"so\nand so"\n')
    assert quoted == ([{"question": "how?", "answer": "so\nand so"}], [])


def test_the_check_says_that_there_is_no_header(tmp_path: Path) -> None:
    path = tmp_path / "dialogs.tsv"
    path.write_text("".join("\t".join(pair) + "\n" for pair in SAID))
    document = check(DataConfig(path=str(path))).document
    assert (document["rows_in"], document["usable"], document["no_header"]) == (len(SAID), len(SAID), [str(path)])
