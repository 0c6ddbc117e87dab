"""JSON documents: what is broken costs the row that it is in, never those behind it."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.config import DataConfig
from hivetune.data.files.json_document import json_rows
from hivetune.data.pieces.logs import one_line
from hivetune.data.prepare.prepare import check
from hivetune.data.reasons import RowRefused
from hivetune.errors import DataRefused


class Text:
    """A text in pieces of a few characters."""

    problem = None

    def __init__(self, text: str, size: int = 1 << 20):
        self._file, self._size = io.StringIO(text), size
        self.ended = False

    def more(self) -> str:
        piece = self._file.read(self._size)
        self.ended = not piece
        return piece


def rows_of(text: str, size: int = 1 << 20) -> list[tuple[int, str, str]]:
    """(place, "r" and the row, or "p" and why there is none)"""
    found = json_rows(Text(text, size))  # type: ignore[arg-type]
    return [(at, "p", row.hint) if isinstance(row, RowRefused) else (at, "r", str(row)) for at, row in found]


def row(number: int) -> dict[str, object]:
    return {
        "prompt": f'question {number}: [1, {{2}}] and "quotes"\n',
        "messages": [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": '{"prompt": "x"}'}],
    }


ROWS = [row(number) for number in range(9)]
BREAKS = {
    "a brace is missing": lambda text: text[:-1],
    "a quote is missing": lambda text: text.replace('"question', "question", 1),
    "a quote is not closed": lambda text: text.replace('\\n", "messages"', '\\n, "messages"', 1),
    "a bracket too few": lambda text: text.replace("}]}", "}}", 1),
    "a comma at the end": lambda text: text[:-1] + ",}",
    "a name without quotes": lambda text: text.replace('"messages"', "messages", 1),
    "not JSON at all": lambda _text: "oops",
    "Python's names": lambda text: text[:-1] + ', "a": None}',
    "the row is cut": lambda text: text[: len(text) // 2],
}


@pytest.mark.parametrize("size", [7, 100, 1 << 20])
@pytest.mark.parametrize("at", [0, 4, 8])
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_element_costs_itself(name: str, at: int, size: int) -> None:
    texts = [json.dumps(one) for one in ROWS]
    texts[at] = BREAKS[name](texts[at])
    found = rows_of("[" + ",\n".join(texts) + "]", size)
    good = [json.loads(text) for place, mark, text in found if mark == "r" and place != at + 1]
    assert good == [one for number, one in enumerate(ROWS) if number != at]
    bad = [(place, text) for place, mark, text in found if mark == "r" and place == at + 1]
    assert len(bad) == 1
    with pytest.raises(ValueError):
        json.loads(bad[0][1])


def test_each_of_several_broken_elements_is_counted() -> None:
    texts = [json.dumps(one) for one in ROWS]
    for number in (2, 3, 6):
        texts[number] = texts[number][:-1]
    found = rows_of("[" + ",\n".join(texts) + "]")
    assert [place for place, _, _ in found] == list(range(1, 10))


def test_what_stands_behind_a_closed_array_is_read() -> None:
    texts = [json.dumps(one) for one in ROWS[:4]]
    found = rows_of(f"[{texts[0]}] [{texts[1]}], {texts[2]}\n{texts[3]} oops")
    assert [mark for _, mark, _ in found] == ["r"] * 4 + ["p"]
    assert [json.loads(text) for _, _, text in found[:4]] == ROWS[:4]


def test_a_file_that_breaks_off_says_so() -> None:
    found = rows_of(json.dumps(ROWS)[:-200])
    assert [mark for _, mark, _ in found] == ["r"] * 7 + ["p"]
    assert json.loads(found[6][2]) == ROWS[6]


@settings(max_examples=200)
@given(st.text('[]{}",:\\ \n' + "abn01", max_size=60), st.sampled_from([3, 1 << 20]))
def test_any_text_between_rows_costs_no_row_behind_it(noise: str, size: int) -> None:
    """Two rows, noise, two rows: the first two are read, the last one at least; nothing hangs or is read twice."""
    texts = [json.dumps(one) for one in ROWS[:4]]
    found = rows_of(f"[{texts[0]}, {texts[1]}, {noise}, {texts[2]}, {texts[3]}]", size)
    read = [text for _, mark, text in found if mark == "r" and text in texts]
    assert read[:2] == texts[:2]
    if noise.count('"') % 2 == 0 and "\\" not in noise:
        # The last elements of a list that the noise begins stay in it, and that the file breaks off is said.
        lists = [f"{noise[at:]}, {texts[2]}, {texts[3]}]" for at, sign in enumerate(noise) if sign == "["]
        in_list = found[-1][1] == "p" and any(text in map(one_line, lists) for _, _, text in found)
        assert read[-1] == texts[3] or in_list
    assert len(read) <= 4


def test_80_000_rows_behind_a_broken_one_are_read() -> None:
    texts = [json.dumps({"prompt": f"question {i}", "completion": f"answer {i}"}) for i in range(80_001)]
    texts[40_000] = texts[40_000].replace(", ", " ")
    found = rows_of("[" + ",\n".join(texts) + "]")
    assert found == [(number, "r", text) for number, text in enumerate(texts, 1)]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_number_of_more_digits_than_python_reads(name: str, tmp_path: Path) -> None:
    """In an array, or in a last line without a line break, it ended the check as a bug."""
    path = tmp_path / name
    texts = [json.dumps({"prompt": f"question {i}", "completion": f"answer {i}"}) for i in range(4)]
    texts[3] = f'{texts[3][:-1]}, "id": {"9" * 5000}}}'
    path.write_text(f"[{', '.join(texts)}]" if name.endswith(".json") else "\n".join(texts))
    document = check(DataConfig(path=str(path), near_duplicates=0)).document
    assert (document["usable"], document["rejected"]) == (3, {"bad-json": 1})
    assert document["problems"][0]["hint"] == "a number has more than 4,300 digits"


def test_too_many_broken_elements_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    texts = [json.dumps({"prompt": f"question {i}", "completion": f"answer {i}"}) for i in range(100)]
    path.write_text("[" + ",\n".join(text[:-1] if i % 4 == 0 else text for i, text in enumerate(texts)) + "]")
    report = check(DataConfig(path=str(path)))
    assert report.document["rejected"] == {"bad-json": 25}
    with pytest.raises(DataRefused, match="25 of 100 rows are rejected"):
        report.refuse(0.2)


def test_objects_over_many_lines_are_rows_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"Who is {n}?", "completion": "A man"}, indent=2) for n in range(5))
    )
    document = check(DataConfig(path=str(path), near_duplicates=0)).document
    assert (document["rows_in"], document["usable"]) == (5, 5)


@pytest.mark.parametrize("size", [7, 100, 1 << 20])
@pytest.mark.parametrize("key", ["conversations", "chats", "data"])
def test_conversations_below_a_key(key: str, size: int) -> None:
    talk = [{"title": "t", "messages": row(number)["messages"]} for number in range(3)]
    for indent in (None, 1):
        text = json.dumps({"version": 1, "user": {"name": "ann"}, key: talk, "total": 3}, indent=indent)
        assert [(json.loads(found), mark) for _, mark, found in rows_of(text, size)] == [(one, "r") for one in talk]


@pytest.mark.parametrize("size", [7, 1 << 20])
def test_turns_below_a_key_are_one_row(size: int) -> None:
    versions = [{"versions": row(1)["messages"]}, {"versions": row(2)["messages"]}]
    for document in ({"conversations": row(1)["messages"]}, {"id": "1", "messages": versions}, {"id": 1, "chats": []}):
        assert [json.loads(found) for _, _, found in rows_of(json.dumps(document), size)] == [document]
