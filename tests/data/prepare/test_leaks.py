"""Rows that a model has seen under other names, in other words or behind another question are not held out."""

import random
from collections.abc import Callable
from pathlib import Path

from data.conftest import chat
from data.prepare.faults import WORDS

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check

PLAIN = sorted({word.lower() for word in WORDS if word.isalpha() and len(word) > 2})
ASKED = "What does the document say about the delivery of the goods?"


def text(rng: random.Random, number: int) -> str:
    return " ".join(rng.choice(PLAIN) for _ in range(number))


def test_documents_in_the_system_prompt_are_no_duplicates(write_rows: Callable[..., Path]) -> None:
    """One question about 300 documents, with three short answers: what is asked and answered is all but equal."""
    rng = random.Random(1)
    rows = [
        chat(ASKED, f"It says that the goods are {answer}.", f"Answer from this document.\n\n{text(rng, 80)}")
        for answer in ("sent", "kept", "lost") * 100
    ]
    report = check(DataConfig(path=str(write_rows(rows)), validation=0, test=0.2))
    assert (report.document["near_duplicates"], report.usable) == (0, 300)


def test_one_document_twice_is_a_duplicate_still(write_rows: Callable[..., Path]) -> None:
    rng = random.Random(2)
    documents = [text(rng, 80).split() for _ in range(40)]
    rows = []
    for document in documents:
        answer = text(rng, 30)
        for word in ("so", "as"):
            rows.append(chat(ASKED, answer, " ".join([*document[:40], word, *document[41:]])))
    assert check(DataConfig(path=str(write_rows(rows)))).document["near_duplicates"] == 40


def test_short_questions_behind_one_long_system_prompt_are_kept(write_rows: Callable[..., Path]) -> None:
    rng = random.Random(3)
    system = text(rng, 200)
    rows = [chat(f"a {word} film", "good", system) for word in PLAIN[:12]]
    assert check(DataConfig(path=str(write_rows(rows)))).document["near_duplicates"] == 0


def test_the_same_question_with_other_tools_is_no_duplicate(write_rows: Callable[..., Path]) -> None:
    rng = random.Random(4)
    asked, answer = text(rng, 30), text(rng, 40)
    rows = [
        {
            **chat(asked, f"{answer} {word}"),
            "tools": [{"type": "function", "function": {"name": f"find_{word}", "parameters": {"type": "object"}}}],
        }
        for word in ("parcel", "invoice")
    ]
    assert check(DataConfig(path=str(write_rows(rows)))).document["near_duplicates"] == 0


def test_an_instruction_that_all_rows_share_ties_none(write_rows: Callable[..., Path]) -> None:
    """A long instruction in front of each question, and one long refusal as the answer of every tenth row."""
    rng = random.Random(9)
    instruction, refusal = text(rng, 90), text(rng, 24)
    rows = [
        chat(f"{instruction}\n\n{text(rng, 25)}", text(rng, 25) if i % 10 else refusal, session=f"s{i}")
        for i in range(300)
    ]
    counts = check(DataConfig(path=str(write_rows(rows)))).document["splits"]
    assert 15 < counts["test"] < 50
    assert 15 < counts["validation"] < 50
