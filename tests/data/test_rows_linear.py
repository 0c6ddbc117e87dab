"""A row takes time in proportion to its text, whatever the text: no rule of the reading starts over at each place."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.render.answers import CLOSED_THOUGHT

# What a text begins with, what comes again and again in it, and what it ends with.
HOSTILE = [
    *((begin, blank, end) for blank in (" ", "\n") for begin, end in (("", ""), ("a", "a"))),
    *(("", piece, "") for piece in ("<", "[", "{", '"', "'", "#", "*", "a", "a ", "a.", "a: ", "\na: ", "</s>", "\\")),
    ("<|user|>a", " ", "b"),
    ("<|user|>a", "</s>", "b"),
    ("<|im_start|>assistant\n<think>", " ", "a"),
    ("[INST] a", " ", "b [/INST] c"),
    ("", "[INST] a ", ""),
    ("", "[INST] <<SYS>>\n", ""),
    ("<tool_response>a", " ", "b"),
    ("", "<tool_call>{", ""),
    ("", '<details type="reasoning"', ""),
    ("", '<details type="reasoning">', ""),
    ('<details type="reasoning"><summary>', "</summary>", "a"),
    ("", "<USER_REQUEST>", ""),
    ("<p>a<br", " ", "b"),
    ("<think>a", "\n", "b</think>"),
]


def rows(text: str) -> Iterator[dict[str, Any]]:
    yield {"question": text, "answer": "It is so because of this."}
    yield {"question": "What is it that we see here?", "answer": text}
    yield {"text": text}
    yield {"zork": text, "reply": "It is so because of this."}
    yield {"messages": [{"role": "user", "content": f"a {text}"}, {"role": "assistant", "content": f"b {text}"}]}
    yield {"messages": [{"role": "tool", "content": text}, {"role": "assistant", "content": "It is so."}]}
    yield {"ticket": {"subject": "The mill stands still", "comments": [{"author": "a", "body": text}]}}


def seconds(row: dict[str, Any]) -> float:
    raw = RawRow("f.jsonl:1", json.dumps(row).encode())
    started = time.process_time()
    with contextlib.suppress(RowRefused):
        read_example(raw, {})
    return time.process_time() - started


@pytest.mark.parametrize(("begin", "piece", "end"), HOSTILE)
def test_four_times_the_text_takes_about_four_times_as_long(begin: str, piece: str, end: str) -> None:
    """Sixteen times would be quadratic. The margins (two, and 20 ms) are for a busy machine."""
    short, long = (rows(begin + piece * (size // len(piece)) + end) for size in (2_000, 8_000))
    for one, other in zip(short, long, strict=True):
        times = [(seconds(one), seconds(other))]
        if times[0][1] > 8 * times[0][0] + 0.02:
            times += [(seconds(one), seconds(other)) for _ in range(2)]
        assert any(b <= 8 * a + 0.02 for a, b in times), (list(one), times)


# A part that reads, and of what it gets: the beginning, what comes again and again, and the end.
PARTS: list[tuple[Callable[[str], Any], str, str, str]] = [
    (CLOSED_THOUGHT.search, "<", "think", ""),
    (lambda text: seconds({f"question_{i}": "What is it?" for i in range(len(text) // 20)}), "", " ", ""),
]


@pytest.mark.parametrize(("part", "begin", "piece", "end"), PARTS)
def test_a_part_takes_time_in_proportion_to_its_text(
    part: Callable[[str], Any], begin: str, piece: str, end: str
) -> None:
    def took(size: int) -> float:
        text = begin + piece * (size // len(piece)) + end
        started = time.process_time()
        part(text)
        return time.process_time() - started

    times = [(took(5_000), took(20_000)) for _ in range(3)]
    assert any(b <= 8 * a + 0.002 for a, b in times), times
