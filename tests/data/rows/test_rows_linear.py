"""A row takes time in proportion to its text, whatever the text: no rule of the reading starts over at each place."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hivetune.data.checks.placeholders import LONGEST_CHARS, placeholder_in
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import RawRow, read_example

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
    ("", "### Instruction:\n", ""),
    ("### Instruction: a", " ", "b"),
    ("### Question: a\n### Answer: b", " ", "c"),
    ("", "[Round 1] ", ""),
    ("1.0 a", " ", "b"),
    ("<tool_response>a", " ", "b"),
    ("", "<tool_call>{", ""),
    ("", '<details type="reasoning"', ""),
    ("", '<details type="reasoning">', ""),
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


def test_the_longest_slot_is_looked_at_in_a_moment() -> None:
    """Its words may be joined by what words are made of, too: each way to divide them was tried."""
    started = time.process_time()
    assert placeholder_in("[" + "a_" * (LONGEST_CHARS // 2 - 1), ()) is None
    assert time.process_time() - started < 0.5
    assert placeholder_in("[the text of your_final_answer here]", ()) is not None
