"""Responses of the providers' APIs as logs hold them: whole, in pieces, cut off."""

import json
from pathlib import Path
from typing import Any

import pytest
from api_pieces import (
    ASKED,
    FIRST,
    MESSAGE,
    PLAIN,
    SECOND,
    STREAMS,
    WHOLE,
    A,
    Q,
    as_events,
    candidate,
    chunk,
    har,
    outcomes,
    refused,
    row,
    said,
)

from hivetune.data.chunks import RawRow
from hivetune.data.formats import rows_inside
from hivetune.data.read import read_example


@pytest.mark.parametrize("name", STREAMS)
def test_pieces_of_an_answer(name: str) -> None:
    """As a list, as the text of server-sent events and as lines of JSON; never the text of the events itself."""
    pieces = STREAMS[name]
    kept = [{"__type__": "a.Class", "__data__": piece} for piece in pieces]
    for response in (pieces, kept, {"body": kept}, as_events(pieces), "\n".join(map(json.dumps, pieces)) + "\n"):
        assert said({"request": ASKED, "response": response}) == PLAIN
    assert said({"prompt": Q, "response": as_events(pieces)}) == PLAIN
    broken = as_events(pieces[:-2] or pieces[:1])
    assert refused({"request": ASKED, "response": broken}) == "cut-off-answer"


OF_NOBODY = [
    [{"kind": "delta", "words": FIRST}, {"kind": "delta", "words": SECOND}, {"kind": "end"}],
    [{"words": FIRST, "finished": False}, {"words": SECOND, "finished": True}],
]


@pytest.mark.parametrize("pieces", OF_NOBODY)
def test_pieces_that_no_known_api_sends(pieces: list[dict[str, Any]], tmp_path: Path) -> None:
    """The text of a stream is never an answer; lines of JSON that somebody asked for are."""
    lines = "\n".join(map(json.dumps, pieces))
    for text in (lines, as_events(pieces), "data: Behind \ndata: the library.\n"):
        assert refused({"prompt": Q, "response": text}) == "unknown-layout"
        assert refused({"request": ASKED, "response": text}) == "unknown-layout"
        assert refused({"messages": [*ASKED["messages"], {"role": "assistant", "content": text}]}) == "unknown-layout"
        path = tmp_path / "calls.har"
        path.write_text(json.dumps(har({"status": 200, "content": {"text": text}})))
        assert outcomes(path) == ["not-a-model-call", "failed"]
    listed = '{"type": "rack", "place": "library"}\n{"type": "rack", "place": "station"}'
    for text in (listed, "data: behind the library", "id: 4\ndata: [1, 2]"):
        assert said({"prompt": Q, "completion": text})[-1] == ("assistant", text)
    path.write_text(json.dumps(har({"status": 200, "content": {"text": "<html><body>Sign in.</body></html>"}})))
    assert outcomes(path) == ["not-a-model-call"] * 2


def test_calls_of_cohere_in_pieces() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": ""}}
    pieces = [
        {"type": "message-start", "delta": {"message": {"role": "assistant", "content": []}}},
        {"type": "tool-plan-delta", "delta": {"message": {"tool_plan": "I look."}}},
        {"type": "tool-call-start", "index": 0, "delta": {"message": {"tool_calls": call}}},
        {
            "type": "tool-call-delta",
            "index": 0,
            "delta": {"message": {"tool_calls": {"function": {"arguments": "{}"}}}},
        },
        {"type": "message-end", "delta": {"finish_reason": "TOOL_CALL"}},
    ]
    answer = row({"request": ASKED, "response": pieces}).example.messages[-1]
    assert (answer.content, answer.tool_calls[0]["function"]) == ("I look.", {"name": "find", "arguments": {}})


def test_calls_and_thoughts_in_pieces() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "find", "arguments": ""}}
    openai = [
        chunk({"reasoning_content": "Not known."}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"what": '}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"racks"}'}}]}),
        chunk({}, "tool_calls"),
    ]
    anthropic = [
        {"type": "message_start", "message": {"role": "assistant"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Not known."}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "c", "name": "find"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"what":'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '"racks"}'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    ]
    bedrock = [
        {"messageStart": {"role": "assistant"}},
        {"contentBlockDelta": {"delta": {"reasoningContent": {"text": "Not "}}, "contentBlockIndex": 0}},
        {"contentBlockDelta": {"delta": {"reasoningContent": {"text": "known."}}, "contentBlockIndex": 0}},
        {"contentBlockStart": {"start": {"toolUse": {"toolUseId": "c", "name": "find"}}, "contentBlockIndex": 1}},
        {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"what": "racks"}'}}, "contentBlockIndex": 1}},
        {"messageStop": {"stopReason": "tool_use"}},
    ]
    for pieces in (openai, anthropic, bedrock):
        answer = row({"request": ASKED, "response": pieces}).example.messages[-1]
        assert (answer.content, answer.reasoning) == ("", "Not known.")
        (made,) = answer.tool_calls
        assert made["id"] == "c"
        assert made["function"] == {"name": "find", "arguments": {"what": "racks"}}


def test_answers_that_did_not_end_by_themselves() -> None:
    """Wherever it stands: in a response, in a stream, or beside the columns of a flat row."""
    for response in (
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": A}], "stop_reason": "pause_turn"},
        {"content": A, "stop": True, "stop_type": "limit"},
        {"generated_text": A, "details": {"finish_reason": "length"}},
        {"outputs": [{"text": A, "stop_reason": "length"}]},
    ):
        assert refused({"request": {"prompt": Q}, "response": response}) == "cut-off-answer"
    for told in ({"finish_reason": "MAX_TOKENS"}, {"generation_info": {"finish_reason": "length"}}):
        assert refused({"request": {"prompt": Q}, "response": {"generations": [{"text": A, **told}]}}) == (
            "cut-off-answer"
        )
    assert refused({"prompt": Q, "response": A, "done_reason": "length"}) == "cut-off-answer"
    assert refused({"prompt": Q, "completion": A, "finish_reason": "max_tokens"}) == "cut-off-answer"
    stopped = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": A}],
        "stop_reason": "refusal",
    }
    assert refused({"request": ASKED, "response": stopped}) == "failed"
    lost = [STREAMS["Anthropic"][0], {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}]
    assert refused({"request": ASKED, "response": lost}) == "failed"


def test_an_answer_that_a_guardrail_changed() -> None:
    """Bedrock says that the model ended its turn, and beside it that its words were masked."""
    masked = {"role": "assistant", "content": [{"text": "Behind {Street Name}."}]}
    whole = {"output": {"message": masked}, "stopReason": "end_turn"}
    pieces = [
        {"outputText": "Behind {Street", "completionReason": None},
        {"outputText": " Name}.", "completionReason": "FINISH"},
    ]
    for action, reason in (("INTERVENED", "failed"), ("NONE", None)):
        told = {"amazon-bedrock-guardrailAction": action}
        for response in ({**whole, **told}, [pieces[0], {**pieces[1], **told}]):
            record = {"request": ASKED, "response": response}
            if reason is None:
                assert said(record)[-1] == ("assistant", "Behind {Street Name}.")
            else:
                assert refused(record) == reason


def test_an_answer_that_rests_on_a_search_of_the_provider() -> None:
    """Nothing is learned from it; an answer behind it, to another question, is."""
    search = {"type": "file_search_call", "status": "completed", "queries": ["racks"]}
    first = {"request": {"input": Q}, "response": {**WHOLE, "output": [search, MESSAGE]}}
    assert refused(first) == "not-held"
    asked = [{"role": "user", "content": "Is it open?"}, search, {"role": "assistant", "content": "It is."}]
    record = {"request": {"input": [*asked, {"role": "user", "content": Q}]}, "response": WHOLE}
    assert [(m.content, m.weight) for m in row(record).example.messages if m.role == "assistant"] == [
        ("It is.", 0),
        (A, 1),
    ]


def test_an_answer_that_says_what_a_search_of_the_web_found() -> None:
    search = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "racks"}}
    assert said({"request": {"input": Q}, "response": {**WHOLE, "output": [search, MESSAGE]}}) == PLAIN
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "racks"}}
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"encrypted_content": "x"}]}
    tools = {"type": "server_tool_use", "id": "t", "name": "tool_search_tool_regex", "input": {"query": "rack"}}
    found = {"type": "tool_search_tool_result", "tool_use_id": "t", "content": {"tool_references": []}}
    content = [tools, found, use, result, {"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}]
    answer = {"type": "message", "role": "assistant", "content": content, "stop_reason": "end_turn"}
    assert said({"request": ASKED, "response": answer}) == PLAIN


def test_thoughts_beside_a_text_that_a_server_completed() -> None:
    response = {"response": A, "thinking": "Near books.", "done": True}
    answer = row({"request": {"prompt": Q}, "response": response}).example.messages[-1]
    assert (answer.content, answer.reasoning) == (A, "Near books.")


def test_a_text_that_a_server_completed() -> None:
    for response in (
        {"content": A, "stop": True, "stop_type": "eos", "prompt": f"<s>{Q}"},
        {"outputs": [{"text": f" {A}", "stop_reason": "stop"}]},
        {"generated_text": A, "details": {"finish_reason": "eos_token"}},
    ):
        assert said({"request": {"prompt": Q}, "response": response}) == PLAIN


def test_an_answer_whose_beginning_was_given() -> None:
    """Anthropic's API goes on right behind it."""
    given = {"messages": [*ASKED["messages"], {"role": "assistant", "content": FIRST}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": SECOND}]}
    assert said({"request": given, "response": {**answer, "stop_reason": "end_turn"}}) == PLAIN


def test_what_a_program_observed_is_not_the_models() -> None:
    """An agent that writes what its tools found into the turn of the assistant, which the model goes on with."""
    act, found, thought = "Thought: where?\nAction: look around", "Observation: a shed\nand a gate", "Thought: a shed"
    response = {"choices": [{"message": {"role": "assistant", "content": f"Final Answer: {A}"}}]}
    told = [("user", Q), ("assistant", act), ("user", found)]
    for pieces in ([f"{act}\n{found}\n"], [act, found]):
        turns = [{"role": "assistant", "content": piece} for piece in pieces]
        request = {"messages": [*ASKED["messages"], *turns]}
        assert said({"request": request, "response": response}) == [*told, ("assistant", f"Final Answer: {A}")]
    again = [{"role": "assistant", "content": f"{act}\n{found}\n{thought}"}, {"role": "user", "content": SECOND}]
    request = {"messages": [*ASKED["messages"], *again]}
    assert said({"request": request, "response": response}) == [
        *told,
        ("assistant", thought),
        ("user", SECOND),
        ("assistant", f"Final Answer: {A}"),
    ]


def test_a_call_of_responses_has_the_id_of_its_result() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "find", "arguments": "{}"}
    asked = [{"role": "user", "content": Q}, call, {"type": "function_call_output", "call_id": "call_1", "output": "x"}]
    messages = row({"request": {"input": asked}, "response": WHOLE}).example.messages
    assert messages[1].tool_calls[0]["id"] == messages[2].tool_call_id == "call_1"


def test_a_turn_that_says_nothing_between_a_call_and_its_result() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    asked = [{"role": "user", "content": Q}, call, {"role": "user", "content": ""}, result]
    assert [name for name, _ in said({"request": {"input": asked}, "response": WHOLE})][1:] == [
        *("assistant", "tool", "assistant"),
    ]
    assert refused({"request": {"input": [[]]}, "response": WHOLE}) == "no-messages"


def test_a_prompt_that_the_provider_keeps() -> None:
    assert refused({"request": {"prompt": {"id": "pmpt_1"}, "input": Q}, "response": WHOLE}) == "earlier-turns-missing"


@pytest.mark.parametrize(
    "answer",
    [
        {"response_text": A},
        {"response": {"content": A, "usage": {}}},
        {"raw_response": A, "parsed": {"place": 1}},
        {"output_text": A},
        {"assistant_message": A},
        {"result": {"content": A, "tool_calls": None}},
        {"response": {"status_code": 200, "body_raw": as_events(STREAMS["Anthropic"])}},
    ],
)
def test_a_list_of_messages_and_its_answer_as_a_text(answer: dict[str, Any]) -> None:
    """Beside the list, and beside an object that holds it."""
    assert said({**ASKED, "model": "m", **answer}) == PLAIN
    assert said({"request_body": {"model": "m", **ASKED}, "model": "m", **answer}) == PLAIN


def test_calls_and_thoughts_beside_the_text_of_an_answer() -> None:
    call = {"id": "c", "function": {"name": "find", "arguments": "{}"}}
    for said_with in ({"content": "I look."}, {"text": "I look."}):
        answer = row({"request": ASKED, "response": {**said_with, "tool_calls": [call]}}).example.messages[-1]
        assert answer.content == "I look."
        assert [made["id"] for made in answer.tool_calls] == ["c"]
    thought = row({**ASKED, "thinking": "Near books.", "response": A}).example.messages[-1]
    assert (thought.content, thought.reasoning) == (A, "Near books.")


def test_what_a_program_decided_about_a_question_is_no_answer() -> None:
    logged = {"ts": "2026-03-03T19:03:07Z", "type": "query", "query": Q, "intent": "faq"}
    assert refused({**logged, "tokens_in": 3, "latency_ms": 81.5}) == "unknown-layout"
    assert refused({"text": Q, "intent": "parking"}) == "unexplained-column"


def test_an_answer_that_its_judge_calls_wrong() -> None:
    judged = {"question": Q, "answer": A, "judge": {"correct": False, "reason": "It is in front."}}
    assert row(judged).example.success is False
    assert row({**judged, "judge": {"correct": True}}).example.success is None


def test_requests_of_gemini_as_its_pages_write_them() -> None:
    """A question without a role, one object in place of a list, a reason as Python writes it."""
    for contents in ([{"parts": [{"text": Q}]}], {"parts": [{"text": Q}]}, Q):
        assert said({"request": {"contents": contents}, "response": candidate(A, finishReason="STOP")}) == PLAIN
    cut = candidate(A, finish_reason="FinishReason.MAX_TOKENS")
    assert refused({"request": {"contents": Q}, "response": cut}) == "cut-off-answer"
    assert refused({"request": {"contents": Q}, "response": {"promptFeedback": {"blockReason": "OTHER"}}}) == "failed"


def test_calls_that_answer_nothing_are_not_learned() -> None:
    """What another kind of model gave back is no text, and not learned as JSON."""
    for asked, answered in (
        ({"prompt": Q}, {"embedding": [0.1, 0.2]}),
        ({"input": Q}, {"data": [{"object": "embedding", "embedding": [0.1]}]}),
        ({"input": Q}, {"results": [{"flagged": False, "categories": {}}]}),
        ({"query": Q, "documents": ["a rack", "a wall"]}, {"results": [{"index": 0, "relevance_score": 0.9}]}),
    ):
        assert refused({"request": asked, "response": answered}) in ("wrong-type", "unknown-layout")


def test_more_forms_of_responses() -> None:
    output = [{"type": "reasoning", "content": "Near books."}, {"type": "message", "content": A}]  # LM Studio's own API
    assert said({"request": {"input": Q}, "response": {"output": output}}) == PLAIN
    assert said({"request": {"text_input": Q}, "response": {"text_output": A}}) == PLAIN  # Triton
    assert said({"request": {"prompt": Q}, "response": {"text": [f"{Q} {A}"]}}) == PLAIN  # vLLM's own API
    custom = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    answer = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [custom]}}]}
    (call,) = row({"request": ASKED, "response": answer}).example.messages[-1].tool_calls
    assert call["function"] == {"name": "sql", "arguments": {"input": "select 1"}}


def test_a_page_of_messages_that_begins_with_the_newest() -> None:
    turns = [("assistant", A), ("user", Q), ("assistant", "Hi."), ("user", "Hello.")]
    listed = [{"role": role, "content": text, "created_at": 9 - i} for i, (role, text) in enumerate(turns)]
    (inside,) = rows_inside(json.dumps({"object": "list", "data": listed}).encode()) or []
    found = read_example(RawRow("f:1", inside), {}).example
    assert [(m.role, m.content) for m in found.messages] == turns[::-1]


def test_exports_of_chats() -> None:
    """A chat that was rated in Open WebUI, and an answer that was stopped in LM Studio."""
    nodes = {
        "1": {"id": "1", "parentId": None, "role": "user", "content": Q},
        "2": {"id": "2", "parentId": "1", "role": "assistant", "content": A, "done": True},
    }
    chat = {"id": "c", "chat": {"history": {"messages": nodes, "currentId": "2"}}}
    rated = {"id": "f", "type": "rating", "data": {"rating": -1, "model_id": "m"}, "snapshot": {"chat": chat}}
    (inside,) = rows_inside(json.dumps(rated).encode()) or []
    found = read_example(RawRow("f:1", inside), {}).example
    assert [(m.role, m.content) for m in found.messages] == PLAIN
    assert found.feedback == -1
    asked = {"role": "user", "content": [{"type": "text", "text": Q}]}
    step = {"type": "contentBlock", "content": [{"type": "text", "text": FIRST}]}
    stopped = {"role": "assistant", "steps": [{**step, "genInfo": {"stats": {"stopReason": "userStopped"}}}]}
    begun = [{"versions": [asked]}, {"versions": [stopped]}]
    assert refused({"messages": begun}) == "cut-off-answer"
    whole = {"versions": [{"role": "assistant", "steps": [{**step, "genInfo": {"stats": {"stopReason": "eosFound"}}}]}]}
    found = row({"messages": [*begun, {"versions": [asked]}, whole]}).example
    assert [message.weight for message in found.messages if message.role == "assistant"] == [0, 1]


def test_a_result_with_a_picture_and_one_with_a_document() -> None:
    asked = {"role": "user", "content": Q}
    call = {"functionCall": {"name": "look", "args": {}}}
    seen: dict[str, Any] = {"name": "look", "response": {"content": "Fetched it."}}
    picture = {**seen, "parts": [{"inline_data": {"mime_type": "image/png", "data": "aa"}}]}

    def contents(result: dict[str, Any]) -> dict[str, Any]:
        turns = [{"role": "user", "parts": [{"text": Q}]}, {"role": "model", "parts": [call]}]
        return {"contents": [*turns, {"role": "user", "parts": [{"functionResponse": result}]}]}

    answer = {"candidates": [{"content": {"role": "model", "parts": [{"text": A}]}}]}
    assert refused({"request": contents(picture), "response": answer}) == "unsupported-content"
    assert row({"request": contents(seen), "response": answer})
    document = {"type": "document", "document": {"id": "d", "data": {"text": "Wood floats."}}}
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [document]}
    turns = [asked, {"role": "assistant", "tool_calls": [called]}, result, {"role": "assistant", "content": A}]
    assert "Wood floats." in str(row({"messages": turns}))


def test_words_of_documents_and_of_sources() -> None:
    answer = {"role": "assistant", "content": [{"citationsContent": {"content": [{"text": A}], "citations": []}}]}
    documents: list[dict[str, Any]] = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Racks: yard."}},
        {"document": {"format": "txt", "name": "d", "source": {"text": "Racks: yard."}}},
    ]
    for document in documents:
        asked = {"role": "user", "content": [document, {"text": Q}]}
        assert said({"messages": [asked, answer]}) == [("user", f"Racks: yard.\n\n{Q}"), ("assistant", A)]
    scan = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}}
    turns = [{"role": "user", "content": [scan, {"type": "text", "text": Q}]}, answer]
    assert refused({"messages": turns}) == "unsupported-content"


def test_a_stream_whose_content_is_parts() -> None:
    thinks = [{"type": "thinking", "thinking": [{"type": "text", "text": piece}]} for piece in ("It is", " easy.")]
    deltas = [*([part] for part in thinks), A[:9], A[9:]]
    pieces = [chunk({"content": one}) for one in deltas]
    found = row({"request": ASKED, "response": [*pieces, chunk({"content": ""}, "stop")]}).example.messages
    assert [(m.content, m.reasoning) for m in found[1:]] == [(A, "It is easy.")]


def test_a_request_that_rests_on_what_the_provider_keeps() -> None:
    asked = {"contents": [{"role": "user", "parts": [{"text": Q}]}], "cachedContent": "cachedContents/x1"}
    assert refused({"request": asked, "response": {"candidates": [candidate(A)]}}) == "earlier-turns-missing"


ODD_RECORDS: list[dict[str, Any]] = [
    {"hivetune_session": "messages"},
    {"hivetune_session": "messages", "messages": 1},
    {"hivetune_session": "messages", "messages": [{"speaker": [1], "content": Q}]},
    {"request": ASKED, "response": [{"object": "chat.completion.chunk", "choices": [{"delta": "Behind"}]}]},
    {"request": ASKED, "response": [{"type": "message_start"}, {"index": [0], "delta": {"text": "a"}, "type": "x"}]},
    {"request": ASKED, "response": [{"contentBlockDelta": {"contentBlockIndex": [0], "delta": "a"}}]},
    {"messages": [{"bubbleId": "1", "type": [None], "text": Q}]},
    {"steps": [{"task": Q}, {"step_number": 1, "model_output": ""}, "a note"]},
]


@pytest.mark.parametrize("record", ODD_RECORDS, ids=range(len(ODD_RECORDS)))
def test_a_record_of_odd_types_is_refused_and_no_crash(record: dict[str, Any]) -> None:
    assert refused(record)
