"""Rows of no known layout: read where names and values leave no doubt, else refused with the line that reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from data.rows.find.parcel_talk import ANSWERED, ASKED, PAIR, TALK, said, turns

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.find.nest import place_name, place_of_rows, split_record

CALL = {
    "req": {"model": "m", "messages": [{"role": "user", "content": ASKED}]},
    "res": {"choices": [{"message": {"role": "assistant", "content": ANSWERED}, "finish_reason": "stop"}]},
}


@pytest.mark.parametrize(
    "row",
    [
        {"utterances": turns("speaker", "text", "USR", "SYSTEM")},
        {"events": turns("author", "body", "customer", "support_agent")},
        {"log": turns("is_user", "mes", True, False)},
        {"session": {"history": turns("sender_type", "utterance", "ROLE_USER", "ROLE_ASSISTANT")}},
        {"dialogue": turns("turn", "utterance", "driver", "assistant")},
        {"steps": [{"who": {"type": role}, "payload": {"text": text}} for role, text in TALK]},
        {"original": [["customer" if role == "user" else "agent", text] for role, text in TALK]},
        {"transcript": [f"{'Customer' if role == 'user' else 'Agent'}: {text}" for role, text in TALK]},
        {"exchanges": [{"user utterance": a[1], "system response": b[1]} for a, b in (TALK[:2], TALK[2:])]},
        {"payload": json.dumps({"thread": turns("role", "content", "human", "ai")})},
    ],
)
def test_turns_under_any_name(row: dict[str, Any]) -> None:
    assert said(row) == TALK


@pytest.mark.parametrize(
    "row",
    [
        {"ticket": {"customer_message": ASKED, "agent_reply": ANSWERED}, "region": "EU"},
        {"query": ASKED, "response": {"answer": ANSWERED, "sources": ["a.md"]}, "label": "parcels"},
        {"user": ASKED, "agent": ANSWERED, "intent": "parcels"},
        {"question": ASKED, "rag_answer": "I do not know, sorry.", "expected_answer": ANSWERED},
        {"scenario": "post_office", "question": ASKED, "truth": ANSWERED},
        {"query": ASKED, "gt_answer": ANSWERED, "response": "I do not know, sorry."},
        {"chat": [{"咨询者": ASKED, "LawBot7": ANSWERED}], "plugins": []},
        {"question": ASKED, "gen_alpha_reply": ANSWERED},
        {"Câu hỏi": ASKED, "Trả lời": ANSWERED},
        {"prompt_utilisateur": ASKED, "réponse": ANSWERED},
        {"คำถาม": ASKED, "คำตอบ": ANSWERED},
        {"question": ASKED, "truth": ANSWERED},
        {"question": ASKED, "standard_answer": ANSWERED, "model_output": "I do not know, sorry."},
        {"toy_input": ASKED, "toy_output": ANSWERED},
        {"userQuestion": ASKED, "finalAnswer": {"text": ANSWERED}},
        {"call": CALL},
    ],
)
def test_the_only_question_and_answer(row: dict[str, Any]) -> None:
    assert said(row) == PAIR


def test_of_two_unknown_parties_the_one_who_offers_help_answers() -> None:
    offers = ("assistant", "Hello, how can I help you?")
    talk = [{"sender": {"user": "A", "assistant": "B"}[who], "text": text} for who, text in (offers, *TALK)]
    assert said({"dialog": talk}) == TALK
    with pytest.raises(RowRefused):
        said({"dialog": talk[1:]})


@pytest.mark.parametrize(
    "row",
    [
        {"messages": turns("senderWorkerId", "text", 0, 1)},  # two parties, and nobody knows which is which
        {"talk": turns("name", "text", "Ann", "Bob")},
        {"turns": ["Write a story about it.", "Now write it in verse."]},  # two questions
        {"dialogue": ["Ann: Hi, how are you?", "Bob: Fine, and you?"]},
        {"question": ASKED, "correct": ANSWERED, "answer": "It is lost, I fear."},  # two answers
        {"query": ASKED, "extra": {"deep": {"reply": ANSWERED}}},  # of different things
        {"user_input": '{"prompt": "Where is it?"}', "bot_reply": ANSWERED},  # an object as text
        {"user_word": "basin", "bot_reply": ANSWERED},  # one word is no question
        {"a": turns("speaker", "text", "user", "agent"), "b": turns("speaker", "text", "user", "agent")[1:], "c": CALL},
        {"question": ASKED, "outputs_list": [ANSWERED, "It is lost."]},  # lines of one answer, or two answers
        {"log": turns("speaker", "text", "user", "agent"), "persona": "You are a rude clerk."},
        {"log": turns("speaker", "text", "user", "agent"), "image": "cat.png"},
        {"input": ASKED, "output": {"text": {"thing": "the parcel"}}},  # a part of an answer
        {"class": "post", "prompt": "You are a judge. Give a mark from 0 to 1."},  # what a prompt is about
        {"prompt": ASKED, "completion": f"{ANSWERED}\n### Human: And when?\n### Assistant: Now."},
        {"review_id": "r", "answer1_id": "a", "answer2_id": "b", "text": "Both answers are right."},
    ],
)
def test_doubt_is_a_refusal(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused):
        read_conversation(row)


def test_a_question_by_name_may_be_one_word() -> None:
    assert said({"question": "Parcel?", "truth": ANSWERED}) == [("user", "Parcel?"), PAIR[1]]


def test_what_was_written_about_an_answer_in_a_script_without_spaces_is_left_out() -> None:
    row = {
        "question": "荷物はどこですか？",
        "truth": "倉庫の二階に置いてあります。",
        "focus": "否定の質問は検索では見つからない。",
    }
    found = read_conversation(row)
    assert [m.content for m in found.messages] == [row["question"], row["truth"]]
    assert found.changed == ("left-out-columns",)


def test_messages_in_a_table_become_conversations(tmp_path: Path) -> None:
    lines = ["ticket_id,sender,seq,body"]
    for number, (role, text) in enumerate(TALK):
        lines += [f"{ticket},{'customer' if role == 'user' else 'agent'},{number},{text}" for ticket in (1, 2)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    report = check(DataConfig(path=str(tmp_path / "log.csv"))).document
    assert (report["rows_in"], report["usable"], report["duplicates"]) == (2, 1, 1)


def test_deep_and_large_rows_do_not_stop_the_look_at_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    deep = '{"a": ' * 700 + "1" + "}" * 700
    large = json.dumps({"messages": [{"role": r, "content": t} for r, t in TALK], "meta": {"n": ["x"] * 30_000}})
    path.write_text(f'{deep}\n{{"x": {deep}}}\n{large}\n')
    report = check(DataConfig(path=str(path))).document
    assert (report["rows_in"], report["usable"]) == (3, 1)


def test_the_report_says_what_was_understood(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"ticket": {"customer_message": ASKED, "agent_reply": ANSWERED}, "scribble": "Somebody wrote this by hand."}
    path.write_text(json.dumps(row) + "\n")
    assert check(DataConfig(path=str(path))).document["understood"] == {str(path): []}  # what nobody knows: refused
    del row["scribble"]
    path.write_text(json.dumps(row) + "\n")
    (kind,) = check(DataConfig(path=str(path))).document["understood"][str(path)]
    assert (kind["layout"], kind["question"]) == ("structure", ["ticket.customer_message"])
    assert (kind["answer"], kind["left_out"]) == (["ticket.agent_reply"], [])


def test_calls_thoughts_and_results_are_told_as_read(tmp_path: Path) -> None:
    """What is trained must not stand under "not read": arguments of calls, thoughts, and what a tool gave back."""
    asked = {"role": "user", "content": ASKED}
    written = json.dumps({"to": "the whole team", "text": "Come to the big room\nat noon please"})
    call = {"id": "c1", "type": "function", "function": {"name": "send", "arguments": written}}
    turns = [
        {"role": "assistant", "content": "", "reasoning_content": "They want to meet soon.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": {"state": 'it was "sent" to all of them'}},
        {"role": "assistant", "content": ANSWERED},
    ]
    tool = {"type": "function", "function": {"name": "send", "description": "Sends a text to somebody."}}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [asked, *turns], "tools": [tool], "note": "written by the night shift"}))
    (kind,) = check(DataConfig(path=str(path))).document["understood"][str(path)]
    called = "messages[].tool_calls[].function.arguments"
    assert {f"{called}.to", f"{called}.text", "messages[].reasoning_content"} <= set(kind["answer"])
    assert "messages[].content.state" in kind["question"]
    assert kind["tools"] == ["tools[].function.description"]
    assert kind["left_out"] == ["note"]


def test_a_helpdesk_export_is_read_ticket_by_ticket() -> None:
    """A title and who people are stand beside what they said, and are no part of it."""
    ticket = {
        "id": 1000,
        "subject": "Question about my parcel",
        "status": "solved",
        "requester": {"name": "Ada of the first floor", "email": "ada@example.com"},
        "comments": [
            {"author": who, "body": text} for who, text in zip(("customer", "agent"), (ASKED, ANSWERED), strict=True)
        ],
    }
    export = {"exported_at": "2026-06-01", "tickets": [ticket, ticket]}
    assert place_of_rows([export]) == ("tickets", "[]")
    assert said(split_record(export, ("tickets", "[]"))[0]) == PAIR
    ticket["requester"] = {"name": "Ada", "complaint": "Nobody has answered me for a week now, and I paid for it"}
    with pytest.raises(RowRefused) as refused:
        said(ticket)
    assert refused.value.reason == "unknown-layout"


@pytest.mark.parametrize(
    ("asked", "answered"), [("Frage", "Antwort"), ("pregunta", "respuesta"), ("vraag", "antwoord")]
)
def test_a_sheet_is_read_in_its_peoples_language(asked: str, answered: str) -> None:
    assert said({"Nr": "1", asked: ASKED, answered: ANSWERED, "Geprüft von": "Jörg"}) == PAIR


@pytest.mark.parametrize(
    "answer",
    [{"gold_answers": []}, {"gold_sql": None}, {"answers": {"text": [], "answer_start": []}}],
)
def test_an_answer_that_is_missing_is_no_unknown_layout(answer: dict[str, Any]) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation({"id": "q1", "question": ASKED, "answerable": False, **answer})
    assert refused.value.reason == "empty-answer"


def test_several_true_answers_are_ways_to_say_one() -> None:
    assert said({"query": ASKED, "generation_gt": [ANSWERED, "Nobody has told."]}) == PAIR


INTENT = {"tag": "depot", "patterns": [ASKED, "Where's my parcel?"], "responses": [ANSWERED, "Look at the depot."]}


def test_each_way_to_ask_is_a_row_with_the_first_of_the_answers() -> None:
    other = {"tag": "hours", "patterns": ["When do you open?"], "responses": ["At nine."], "context": [""]}
    record = {"intents": [INTENT, other]}
    place = place_of_rows([record])
    assert place_name(place) == "intents[].{phrasings}"
    rows = split_record(record, place)
    assert [said(row) for row in rows] == [
        [("user", ASKED), ("assistant", ANSWERED)],
        [("user", "Where's my parcel?"), ("assistant", ANSWERED)],
        [("user", "When do you open?"), ("assistant", "At nine.")],
    ]
    assert read_conversation(rows[0]).changed == ("other-answers",)


def test_an_unknown_party_that_answers_each_turn_of_a_known_one_is_learned() -> None:
    parties = [("human", ASKED), ("talkie", ANSWERED), ("human", "And when?"), ("talkie", "Tomorrow.")]
    row = {"conversations": [{"from": who, "value": text} for who, text in parties]}
    assert [role for role, _ in said(row)] == ["user", "assistant"] * 2
    for wrong in (parties[1:], [parties[0], parties[1], parties[3]]):
        with pytest.raises(RowRefused):
            read_conversation({"conversations": [{"from": who, "value": text} for who, text in wrong]})


def test_json_text_under_a_name_that_says_answer() -> None:
    answer = '{"intent": "find", "actions": [{"tool": "depots", "args": {"text": "the town of my parcel"}}]}'
    assert said({"user_q": ASKED, "target_json": answer}) == [("user", ASKED), ("assistant", answer)]


def test_words_to_both_sides_in_front_of_a_written_conversation() -> None:
    text = f"An assistant answers questions.\nUser: {ASKED}\nAssistant: {ANSWERED}\nUser: When?\nAssistant: Today."
    assert [role for role, _ in said({"conversation": text})] == ["system", "user", "assistant", "user", "assistant"]
    with pytest.raises(RowRefused):
        read_conversation({"note_of_it": text})


def test_a_text_none_of_whose_parts_has_a_label() -> None:
    with pytest.raises(RowRefused):
        read_conversation({"text": "The depot stands in the town.", "entities": []})


def test_a_part_that_speaks_first() -> None:
    text = f"System: You are the depot.\n\nAssistant: Hello there.\n\nUser: {ASKED}\n\nAssistant: {ANSWERED}"
    found = read_conversation({"text": text})
    assert [m.role for m in found.messages] == ["system", "user", "assistant"]
    assert "leading-answer" in found.changed


@pytest.mark.parametrize(
    "names", [("better_response", "worse_response"), ("selected", "rejected"), ("preferred", "dispreferred")]
)
def test_two_answers_of_which_one_is_better(names: tuple[str, str]) -> None:
    with pytest.raises(RowRefused) as refused:
        read_conversation({"prompt": ASKED, names[0]: ANSWERED, names[1]: "No."})
    assert refused.value.reason == "preference-row"


def test_the_class_of_a_conversation_is_no_turn_of_it() -> None:
    """A dialogue that ends with the one who asks, beside what it is: not the last answer."""
    turns = [("customer", "My parcel is lost."), ("agent", "I look it up."), ("customer", "Thank you very much.")]
    row = {"label": "complaint", "dialogue": [{"speaker": who, "text": text} for who, text in turns]}
    for label in ("complaint", "parcel"):  # the second is one of its words, too
        with pytest.raises(RowRefused):
            read_conversation({**row, "label": label})


@pytest.mark.parametrize("name", ["raw_anwser", "Anser", "reponse", "ans", "respones"])
def test_a_name_with_one_slip_or_cut_short(name: str) -> None:
    assert said({"quesiton": ASKED, name: ANSWERED, "department": "parcels"}) == PAIR


def test_a_longer_word_is_no_slip() -> None:
    with pytest.raises(RowRefused):
        said({"question": ASKED, "questioned": ANSWERED})


def test_a_question_that_holds_the_other_is_said_once() -> None:
    longer = f"{ASKED}\nTell it in one sentence."
    assert said({"prompt": ASKED, "instruction": longer, "code": "def tell(): return 1"})[0] == ("user", longer)


def test_an_answer_in_a_list_of_one_text() -> None:
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ASKED}]
    assert said({"messages": turns, "output": [ANSWERED]}) == [("system", "Be kind."), *PAIR]


@pytest.mark.parametrize("name", ["[]", "", ".", "\0"])
def test_a_column_may_have_any_name(name: str) -> None:
    """`[]` ended the check as a bug: so the paths of what is in lists are written."""
    row = {name: ASKED, "context": "The depot in the harbour opens at seven.", "response": ANSWERED}
    with pytest.raises(RowRefused):
        read_conversation(row)
