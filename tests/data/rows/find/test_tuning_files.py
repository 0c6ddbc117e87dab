"""Training files as projects keep them beside their scripts: end marks in the turns, flat messages, JSON twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.checks.rules import check_messages
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import RawRow, read_example

ASK, SAY = "Where is the depot of the town?", "It stands on the left bank in Bonn."
TOLD = [("user", ASK), ("assistant", SAY)]


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    messages = read_example(RawRow("f:1", json.dumps(row).encode()), {}).example.messages
    return [(m.role, m.content) for m in messages]


def said_in(text: str, folder: Path, name: str = "rows.json") -> list[list[tuple[str, str]]]:
    path = folder / name
    path.write_text(text)
    found = [read_example(raw, {}).example.messages for raw in rows_of_files([str(path)])]
    return [[(m.role, m.content) for m in messages] for messages in found]


def turns(asked: str, answered: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]


@pytest.mark.parametrize("end", ["</s>", " <|im_end|>", "<|endoftext|>\n"])
def test_a_mark_that_ends_each_turn_is_no_word_of_it(end: str) -> None:
    assert said({"conversations": turns(ASK + end, SAY + end)}) == TOLD
    assert said({"conversations": turns(ASK, SAY + end)}) == TOLD
    assert said({"prompt": ASK + end, "completion": SAY + end}) == TOLD


def test_a_mark_that_the_turns_talk_about_stays() -> None:
    asked = "What does </s> mean in a text?"
    assert said({"conversations": turns(asked, "The text ends at </s>")})[1][1] == "The text ends at </s>"


@pytest.mark.parametrize("beside", [{"choices": ["3", "5", "8"]}, {"options": {"A": "3", "B": "5", "C": "8"}}])
def test_a_letter_that_no_choice_has_is_no_answer(beside: dict[str, Any]) -> None:
    assert said({"question": ASK, **beside, "answer": "C"})[1][1] == "C"
    with pytest.raises(RowRefused, match=r"unknown-layout|unexplained-column"):
        said({"question": ASK, **beside, "answer": "E"})


def test_a_letter_that_begins_a_choice_is_one() -> None:
    assert said({"question": ASK, "choices": ["True", "False"], "answer": "F"})[1][1] == "F"


def messages(count: int, *, system: bool = True) -> list[dict[str, str]]:
    first = [{"role": "system", "content": "You know all towns."}] if system else []
    one = [{"role": "user", "content": ASK}, {"role": "assistant", "content": SAY}]
    return [*first, *one] * count


@pytest.mark.parametrize("lines", [False, True])
def test_each_system_prompt_begins_a_conversation(lines: bool, tmp_path: Path) -> None:
    rows = messages(3)
    text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows)
    expected = [("system", "You know all towns."), *TOLD]
    assert said_in(text, tmp_path, "rows.jsonl" if lines else "rows.json") == [expected] * 3


def test_system_prompts_between_other_messages_begin_nothing(tmp_path: Path) -> None:
    rows = [*messages(2), {"role": "user", "content": "And who built it there?"}, *messages(1)]
    with pytest.raises(RowRefused, match="one-message"):
        said_in(json.dumps(rows), tmp_path)


def test_an_object_whose_first_line_ends_inside_it(tmp_path: Path) -> None:
    text = '{"data":\n[\n' + json.dumps({"question": ASK, "answer": SAY}) + "]}"
    assert said_in(text, tmp_path) == [TOLD]


def test_a_document_that_was_written_as_json_twice(tmp_path: Path) -> None:
    rows = [{"conversations": turns(ASK, SAY)}, {"conversations": turns(ASK, SAY)}]
    assert said_in(json.dumps(json.dumps(rows)), tmp_path) == [TOLD, TOLD]


@pytest.mark.parametrize("names", [("tool", "args"), ("function_name", "arguments"), ("tool_name", "tool_input")])
def test_a_tool_and_its_arguments_beside_a_question_are_a_call(names: tuple[str, str]) -> None:
    row = {"prompt": ASK, names[0]: "map", names[1]: {"town": "Bonn"}, "id": 4}
    message = read_example(RawRow("f:1", json.dumps(row).encode()), {}).example.messages[-1]
    [call] = message.tool_calls
    assert call["function"] == {"name": "map", "arguments": {"town": "Bonn"}}


def test_a_question_without_a_call_has_no_answer() -> None:
    with pytest.raises(RowRefused, match=r"unknown-layout|no-answer|empty-answer"):
        said({"prompt": ASK, "tool": None, "args": None, "is_refusal": True})


def test_the_calls_of_one_answer_are_no_rows(tmp_path: Path) -> None:
    calls = [{"tool_name": "map", "arguments": {"town": "Bonn"}}, {"tool_name": "bus", "arguments": {"day": 3}}]
    rows = [{"id": f"r{i}", "instruction": ASK, "status": "ok", "gold_steps": calls} for i in range(3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert len(list(rows_of_files([str(path)]))) == len(rows)


CHATML = "<|im_start|>{}\n{}<|im_end|>\n"


@pytest.mark.parametrize("names", [("prompt", "response"), ("input", "output"), ("question", "answer")])
def test_the_system_prompt_of_a_rendered_text_beside_its_question_and_answer(names: tuple[str, str]) -> None:
    parts = (("system", "You know all towns."), *TOLD)
    text = "".join(CHATML.format(*part) for part in parts)
    assert said({"text": text, names[0]: ASK, names[1]: SAY}) == list(parts)
    with pytest.raises(RowRefused, match="unexplained-column"):
        said({"text": text, names[0]: "Where is it?", names[1]: SAY})


@pytest.mark.parametrize("answer", ["output", "response", "completion"])
def test_a_text_beside_an_answer_was_asked(answer: str) -> None:
    text = "The old depot stands in Bonn, on the left bank of the river, and nobody pays for it."
    assert said({"id": 3, "text": text, answer: "A depot in Bonn."}) == [
        ("user", text),
        ("assistant", "A depot in Bonn."),
    ]
    wanted = {"town": "Bonn", "bank": "left"}
    assert json.loads(said({"id": 3, "text": text, answer: wanted})[1][1]) == wanted
    with pytest.raises(RowRefused):
        said({"id": 3, "text": f"### Instruction:\n{ASK}\n\n### Response:\n{SAY}", answer: "Another one."})


PAIRS = [[ASK, SAY], ["Who built it?", "A man from Aachen."]]


@pytest.mark.parametrize("rows", [{"0": PAIRS, "1": PAIRS[1:]}, {"faq": {"depots": PAIRS, "ships": PAIRS[1:]}}])
def test_pairs_of_a_question_and_its_answer_under_names(rows: dict[str, Any], tmp_path: Path) -> None:
    asked = ["How do I get there", "By bus, on each day."]
    found = said_in(
        json.dumps(rows).replace('"Who built it?", "A man from Aachen."', json.dumps(asked)[1:-1]), tmp_path
    )
    other = [("user", asked[0]), ("assistant", asked[1])]
    assert found == [TOLD, other, other]


def test_pairs_that_ask_nothing_are_no_rows(tmp_path: Path) -> None:
    with pytest.raises(RowRefused):
        said_in(json.dumps({"0": [["Bonn", "Aachen"], ["left", "right"]], "1": [["old", "new"]]}), tmp_path)


def test_an_object_over_several_lines_in_a_file_that_is_called_jsonl(tmp_path: Path) -> None:
    one = {"messages": [{"role": "user", "content": ASK}, {"role": "assistant", "content": SAY}]}
    text = '{"messages": [\n    ' + ",\n    ".join(map(json.dumps, one["messages"])) + "\n]}\n\n"
    assert said_in(text * 2, tmp_path, "rows.jsonl") == [TOLD, TOLD]


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        ("?? ????? ???? ????? ?? ??, and so on", True),
        ("What?? ??? Why? Oh ?? ??? no", False),
        ("The code is ?? ?? ?? ?? ?? ??", False),
        ("??? ? ??? ? ??? ? ?? is what the log shows for a while", True),
    ],
)
def test_words_of_question_marks_are_lost_letters(answer: str, lost: bool) -> None:
    found = read_example(RawRow("f:1", json.dumps({"question": ASK, "answer": answer}).encode()), {}).example
    if not lost:
        check_messages(found.messages)
        return
    with pytest.raises(RowRefused, match="replacement-character"):
        check_messages(found.messages)


@pytest.mark.parametrize("write", [json.dumps, repr])
def test_a_message_that_was_written_as_text_is_the_question(write: Any) -> None:
    text = write([{"content": ASK, "role": "user"}])
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": SAY}]
    assert said({"messages": turns}) == TOLD
    assert said({"messages": [{"role": "system", "content": "Judge this talk."}, *turns]})[1][1] == text
    several = write([{"content": ASK, "role": "user"}, {"content": SAY, "role": "assistant"}])
    assert said({"messages": [{"role": "user", "content": several}, turns[1]]})[0][1] == several


TALK = f"Human: {ASK}\n\nAssistant: {SAY}"


@pytest.mark.parametrize("told", ["You know the towns of the Rhine", "You know all towns.\n\nAnswer in one sentence."])
def test_words_in_front_of_the_speakers_of_a_text_are_its_system_prompt(told: str) -> None:
    told = told.replace("know all", "are asked about")
    assert said({"text": f"{told}\n\n{TALK}"}) == [("system", told), *TOLD]


def test_a_document_with_a_talk_in_it_stays_one() -> None:
    page = f"# How to ask\n\nWrite it as it is said:\n\n{TALK}"
    assert said({"text": page}) == [("assistant", page)]
    asked = f"The talk ends in a question.\n\n{TALK}\n\nHuman: And the other one?"
    assert said({"text": asked}) == [("assistant", asked)]


def test_texts_of_a_list_with_headers_are_read_as_texts(tmp_path: Path) -> None:
    texts = [f"Instruction: {ASK}\nResponse: {SAY}", f"Instruction: {ASK} Now.\nResponse: {SAY}"]
    assert said_in(json.dumps(texts), tmp_path) == [TOLD, [("user", f"{ASK} Now."), TOLD[1]]]
    with pytest.raises(RowRefused, match="not-an-object"):
        said_in(json.dumps([ASK, SAY]), tmp_path)
