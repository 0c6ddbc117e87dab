"""Responses of the providers' APIs as logs hold them: whole, in pieces, cut off, recorded as calls over HTTP."""

import base64
import gzip
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.api.recorded import text_of_bytes
from hivetune.data.rows.containers import rows_inside
from hivetune.data.rows.read import RawRow, ReadRow, read_example

Q, A = "Where do I park my bike?", "Behind the library."
FIRST, SECOND = "Behind ", "the library."
ASKED = {"messages": [{"role": "user", "content": Q}]}
PLAIN = [("user", Q), ("assistant", A)]


def row(record: dict[str, Any]) -> ReadRow:
    return read_example(RawRow("f:1", json.dumps(record).encode()), {})


def said(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in row(record).example.messages]


def refused(record: dict[str, Any]) -> str:
    with pytest.raises(RowRefused) as error:
        row(record)
    return error.value.reason


def chunk(delta: dict[str, Any], end: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": index, "delta": delta, "finish_reason": end}]}


def candidate(text: str, **more: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": [{"text": text}]}, **more}]}


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": A}]}
WHOLE = {"object": "response", "status": "completed", "output": [MESSAGE]}
STREAMS: dict[str, list[dict[str, Any]]] = {
    "AI21 on Bedrock": [
        {"id": "c", "choices": [{"index": 0, "delta": {"content": FIRST}, "finish_reason": None}]},
        {"id": "c", "choices": [{"index": 0, "delta": {"content": SECOND}, "finish_reason": "stop"}]},
    ],
    "Mistral on Bedrock": [
        {"outputs": [{"text": f" {FIRST}", "stop_reason": None}]},
        {"outputs": [{"text": SECOND, "stop_reason": None}]},
        {"outputs": [{"text": "", "stop_reason": "stop"}], "amazon-bedrock-invocationMetrics": {}},
    ],
    "OpenAI": [
        {"object": "", "choices": [], "prompt_filter_results": []},  # Azure begins so
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "In front"}, index=1),
        chunk({"content": FIRST}),
        chunk({"content": SECOND}),
        chunk({}, "stop"),
        {"object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 4}},
    ],
    "OpenAI's completions": [
        {"object": "text_completion", "choices": [{"index": 0, "text": FIRST, "finish_reason": None}]},
        {"object": "text_completion", "choices": [{"index": 0, "text": SECOND, "finish_reason": "stop"}]},
    ],
    "OpenAI's Responses": [
        {"type": "response.created", "response": {"status": "in_progress", "output": []}},
        {"type": "response.output_text.delta", "delta": FIRST},
        {"type": "response.completed", "response": WHOLE},
    ],
    "Anthropic": [
        {"type": "message_start", "message": {"role": "assistant", "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": FIRST}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": SECOND}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ],
    "Anthropic's text completions": [
        {"type": "completion", "completion": FIRST, "stop_reason": None},
        {"type": "ping"},
        {"type": "completion", "completion": SECOND, "stop_reason": None},
        {"type": "completion", "completion": "", "stop_reason": "stop_sequence"},
    ],
    "Gemini": [candidate(FIRST), candidate(SECOND, finishReason="STOP"), {"usageMetadata": {"totalTokenCount": 9}}],
    "Ollama's chat": [
        {"message": {"role": "assistant", "content": FIRST}, "done": False},
        {"message": {"role": "assistant", "content": SECOND}, "done": False},
        {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"},
    ],
    "Ollama's generate": [
        {"response": FIRST, "done": False},
        {"response": SECOND, "done": False},
        {"response": "", "done": True, "done_reason": "stop", "context": [1]},
    ],
    "Bedrock": [
        {"messageStart": {"role": "assistant"}},
        {"contentBlockDelta": {"delta": {"text": FIRST}, "contentBlockIndex": 0}},
        {"contentBlockDelta": {"delta": {"text": SECOND}, "contentBlockIndex": 0}},
        {"contentBlockStop": {"contentBlockIndex": 0}},
        {"messageStop": {"stopReason": "end_turn"}},
        {"metadata": {"usage": {"inputTokens": 3}}},
    ],
    "Cohere's first version": [
        {"is_finished": False, "event_type": "stream-start", "generation_id": "g"},
        {"is_finished": False, "event_type": "text-generation", "text": FIRST},
        {"is_finished": False, "event_type": "text-generation", "text": SECOND},
        {"is_finished": True, "event_type": "stream-end", "response": {"text": A}, "finish_reason": "COMPLETE"},
    ],
    "Cohere": [
        {"type": "message-start", "delta": {"message": {"role": "assistant", "content": []}}},
        {"type": "content-start", "index": 0, "delta": {"message": {"content": {"type": "text", "text": ""}}}},
        {"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": FIRST}}}},
        {"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": SECOND}}}},
        {"type": "content-end", "index": 0},
        {"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": {}}},
    ],
    "llama.cpp": [
        {"content": FIRST, "stop": False},
        {"content": SECOND, "stop": False},
        {"content": "", "stop": True, "stop_type": "eos"},
    ],
}


def as_events(pieces: Sequence[dict[str, Any]]) -> str:
    return "".join(f"event: x\ndata: {json.dumps(piece)}\r\n\r\n" for piece in pieces) + "data: [DONE]\n\n"


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
    """An agent that writes what its tools found as turns of the assistant."""
    turns = [("user", Q), ("assistant", "Action: look around"), ("assistant", "Observation: a shed behind the library")]
    request = {"messages": [{"role": role, "content": text} for role, text in turns]}
    response = {"choices": [{"message": {"role": "assistant", "content": f"Final Answer: {A}"}}]}
    assert said({"request": request, "response": response}) == [
        *turns[:2],
        ("user", turns[2][1]),
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
    assert said({"text": Q, "intent": "parking"}) == [("user", Q), ("assistant", "parking")]


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


COMPLETION = {"choices": [{"message": {"role": "assistant", "content": A}, "finish_reason": "stop"}]}
PAGE = {"request": {"method": "GET", "url": "https://h/"}, "response": {"status": 200, "content": {"text": "<p>Hi"}}}


def har(response: dict[str, Any]) -> dict[str, Any]:
    asked = {"method": "POST", "url": "https://h/v1", "postData": {"text": json.dumps(ASKED)}}
    return {"log": {"version": "1.2", "entries": [PAGE, {"request": asked, "response": response}]}}


def coded(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


RECORDINGS: dict[str, Any] = {
    "a HAR file": har({"status": 200, "content": {"mimeType": "application/json", "text": json.dumps(COMPLETION)}}),
    "a HAR file in base64": har({"status": 200, "content": {"encoding": "base64", "text": coded(COMPLETION)}}),
    "a HAR file with a stream": har({"status": 200, "content": {"text": as_events(STREAMS["OpenAI"])}}),
    "a cassette of vcrpy": {
        "version": 1,
        "interactions": [
            {
                "request": {"method": "POST", "uri": "https://h", "body": json.dumps(ASKED)},
                "response": {"status": {"code": 200, "message": "OK"}, "body": {"string": json.dumps(COMPLETION)}},
            }
        ],
    },
    "a cassette of Betamax": {
        "http_interactions": [
            {
                "request": {"method": "POST", "body": {"encoding": "utf-8", "string": json.dumps(ASKED)}},
                "response": {
                    "status": {"code": 200},
                    "body": {"encoding": "utf-8", "base64_string": coded(COMPLETION)},
                },
            }
        ],
        "recorded_with": "betamax",
    },
}


PACKED = base64.b64encode(gzip.compress(json.dumps(COMPLETION).encode())).decode()
RECORDINGS["a recording of httpx"] = {
    "interactions": [
        {
            "request": {"method": "POST", "path": "/v1", "content": ASKED},
            "response": {"status_code": 200, "content": {"data": PACKED, "encoding": "base64", "size": 9}},
        }
    ]
}
RECORDINGS["a replay of Gemini's client"] = {
    "replay_id": "a/b",
    "interactions": [
        {
            "request": {"method": "post", "body_segments": [{"contents": [{"parts": [{"text": Q}]}]}]},
            "response": {"status_code": 200, "body_segments": segments, "sdk_response_segments": [{}]},
        }
        for segments in [STREAMS["Gemini"]]
    ],
}


RECORDINGS["a HAR file of Polly, packed in pieces"] = har(
    {"status": 200, "content": {"encoding": "base64", "text": json.dumps([PACKED])}}
)


def frame(kind: str, said: dict[str, Any]) -> bytes:
    """An event as Bedrock streams it."""
    payload = json.dumps(said).encode()
    head = b"\x0b:event-type\x07" + len(kind).to_bytes(2, "big") + kind.encode()
    prelude = struct.pack(">II", 16 + len(head) + len(payload), len(head))
    body = prelude + zlib.crc32(prelude).to_bytes(4, "big") + head + payload
    return body + zlib.crc32(body).to_bytes(4, "big")


def nock(response: Any) -> list[dict[str, Any]]:
    call = {"scope": "https://h:443", "method": "POST", "path": "/v1", "body": ASKED, "status": 200}
    return [{**call, "response": response, "rawHeaders": {"date": "today"}, "reqheaders": {"host": "h"}}]


OF_CONVERSE = [frame(*event.popitem()) for event in json.loads(json.dumps(STREAMS["Bedrock"]))]
OF_INVOKE = [
    frame("chunk", {"bytes": base64.b64encode(json.dumps(said).encode()).decode(), "p": "ab"})
    for said in ({"generation": FIRST, "stop_reason": None}, {"generation": SECOND, "stop_reason": "stop"})
]
RECORDINGS["nock"] = nock(COMPLETION)
RECORDINGS["nock, packed"] = nock([base64.b64decode(PACKED).hex()])
RECORDINGS["a call in a file of its own, what Bedrock's Converse streams"] = {
    "request": {"method": "POST", "url": "https://h", "headers": {}, "body": json.dumps(ASKED)},
    "response": {
        "status": {"code": 200, "message": "OK"},
        "headers": {},
        "body": f"base64:{base64.b64encode(b''.join(OF_CONVERSE)).decode()}",
    },
}
RECORDINGS["nock, what Bedrock's Converse streams"] = nock(b"".join(OF_CONVERSE).hex())
RECORDINGS["nock, what a model of Bedrock streams"] = nock(b"".join(OF_INVOKE).hex())


def test_frames_that_break_off() -> None:
    assert text_of_bytes(b"".join(OF_CONVERSE)[:-3]) is not None
    assert text_of_bytes(OF_CONVERSE[0].replace(b"{", b"[")) is None


def test_a_piece_of_a_stream_is_no_text() -> None:
    assert refused({"type": "response.output_text.done", "item_id": "m", "text": A}) == "unknown-layout"


def outcomes(path: Path) -> list[Any]:
    found: list[Any] = []
    for raw in rows_of_files([str(path)]):
        try:
            found.append([(m.role, m.content) for m in read_example(raw, {}).example.messages])
        except RowRefused as error:
            found.append(error.reason)
    return found


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_calls(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(RECORDINGS[name], indent=1))
    assert [one for one in outcomes(path) if one != "not-a-model-call"] == [PLAIN]


def test_a_recorded_call_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "calls.har"
    path.write_text(json.dumps(har({"status": 429, "content": {"text": "slow down"}})))
    assert outcomes(path) == ["not-a-model-call", "failed"]


@pytest.mark.parametrize(
    "answered",
    [{"input_tokens": 14}, {"name": "cachedContents/x1", "model": "m", "usageMetadata": {"totalTokenCount": 9}}],
)
def test_a_recorded_call_that_answers_with_no_text(answered: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "calls.har"
    path.write_text(json.dumps(har({"status": 200, "content": {"text": json.dumps(answered)}})))
    assert outcomes(path) == ["not-a-model-call", "not-a-model-call"]


def in_yaml(*calls: str) -> str:
    return "interactions:\n" + "".join(calls) + "version: 1\n"


ASKED_IN_YAML = f"""- request:
    body: '{json.dumps(ASKED)}'
    headers:
      accept:
      - application/json
    method: POST
    uri: https://h/v1
"""
ANSWERED_IN_YAML = f"""  response:
    body:
      string: '{json.dumps(COMPLETION)}'
    status:
      code: 200
      message: OK
"""
IN_BYTES = f"""  response:
    body:
      string: !!binary |
        {PACKED}
    status:
      code: 200
"""
PARSED = f"""- request:
    parsed_body: {json.dumps(ASKED)}
  response:
    parsed_body: {json.dumps(COMPLETION)}
    status: {{code: 200}}
"""
OF_RUBY = f"""---
http_interactions:
- request:
    method: post
    body:
      encoding: UTF-8
      string: '{json.dumps(ASKED)}'
  response:
    status:
      code: 200
    body:
      encoding: ASCII-8BIT
      string: '{json.dumps(COMPLETION)}'
  recorded_at: Thu, 05 Feb 2026 10:00:00 GMT
recorded_with: VCR 6.4.0
"""


@pytest.mark.parametrize(
    "text",
    [
        in_yaml(ASKED_IN_YAML, ANSWERED_IN_YAML),
        in_yaml(ASKED_IN_YAML.replace("body: '", "body: !!python/unicode '"), ANSWERED_IN_YAML),
        in_yaml(
            ASKED_IN_YAML.replace("accept:", "? !!python/object/apply:a.b\n      - accept\n      :"), ANSWERED_IN_YAML
        ),
        in_yaml(ASKED_IN_YAML, IN_BYTES),
        in_yaml(ASKED_IN_YAML, IN_BYTES.replace("!!binary", "!binary")),
        in_yaml(PARSED),
        OF_RUBY,
    ],
)
def test_cassettes_in_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calls.yaml"
    path.write_text(text)
    assert outcomes(path) == [PLAIN]


def test_recordings_of_gos_httprr(tmp_path: Path) -> None:
    """What went over the wire behind its sizes: whole, in chunks, and a call that asks no model."""
    asked = f"POST https://h/v1/chat/completions HTTP/1.1\nHost: h\n\n{json.dumps(ASKED)}"
    stream = as_events([chunk({"content": FIRST}), chunk({"content": SECOND}, "stop")])
    chunks = "".join(f"{len(part.encode()):x}\r\n{part}\r\n" for part in (stream[:30], stream[30:], ""))
    calls = [
        (asked, f"HTTP/2.0 200 OK\nServer: s\n\n{json.dumps(COMPLETION)}"),
        (asked, f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}"),
        ("GET https://h/ HTTP/1.1\n\n", "HTTP/1.1 200 OK\n\nhello"),
    ]
    path = tmp_path / "calls.httprr"
    told = "".join(f"{len(sent.encode())} {len(came.encode())}\n{sent}{came}" for sent, came in calls)
    path.write_bytes(f"httprr trace v1\n{told}".encode())
    assert outcomes(path) == [PLAIN, PLAIN, "not-a-model-call"]
    places = [raw.source.rpartition(":")[2] for raw in rows_of_files(str(path))]
    assert places == ["2", "9", str(told[: told.index("GET https")].count("\n") + 1)]
    for end in ("no sizes", "9" * 5000 + " 1\n", "1 -1\n"):
        path.write_bytes(f"httprr trace v1\n{told}{end}".encode())
        assert outcomes(path)[-1] == "broken-file"
    path.write_bytes(f"httprr trace v1\n{17 << 20} 5\nshort".encode())
    assert outcomes(path) == ["line-too-large"]


def test_a_recorded_stream_as_its_lines() -> None:
    """As a recorder of Llama Stack keeps what went to Anthropic's API."""
    pieces = [chunk({"content": FIRST}), chunk({"content": SECOND}, "stop")]
    lines = as_events(pieces).split("\n")
    request = {"url": "http://h/v1/messages", "method": "POST", "payload": ASKED}
    assert said({"test_id": "t", "request": request, "response": {"body": lines}}) == PLAIN


def test_a_har_file_in_yaml(tmp_path: Path) -> None:
    """As Polly keeps what Cody was asked, with what was asked as an object, and the pieces that Sourcegraph sends."""
    events = as_events([{"deltaText": FIRST}, {"deltaText": SECOND, "stopReason": "end_turn"}, {}])
    answered = json.dumps(events.replace("data: [DONE]", ""))
    text = (
        "log:\n  _recordingName: a\n  creator:\n    name: Polly.JS\n  entries:\n"
        "    - _id: a\n      request: {method: GET, url: https://h/}\n"
        "      response:\n        status: 200\n        content: {text: hello}\n\n"
        "    - _id: b\n      request:\n        method: POST\n        postData:\n          params: []\n"
        f"          textJSON:\n            messages:\n              - speaker: human\n                text: {Q}\n"
        f"      response:\n        status: 200\n        content:\n          text: {answered}\n"
        "  pages: []\n  version: '1.2'\n"
    )
    path = tmp_path / "recording.har.yaml"
    path.write_text(text)
    assert outcomes(path) == ["not-a-model-call", PLAIN]
    path.write_text("log:\n" + "          name: x\n" * 30 + "end\n")  # looked at once
    assert "not-a-model-call" not in outcomes(path)
    path.write_text("entries:\n  - request: {}\n")
    assert "not-a-model-call" not in outcomes(path)


def test_a_cassette_with_calls_that_are_none(tmp_path: Path) -> None:
    """One that gets a page, one without an answer, one that refers to another, one that is no YAML."""
    page = "- request:\n    body: null\n    method: GET\n  response:\n    body: {string: hello}\n"
    empty = ASKED_IN_YAML + "  response:\n    body:\n      string: ''\n"
    refers = "- request: &a\n    body: x\n  response: *a\n"
    path = tmp_path / "calls.yaml"
    path.write_text(in_yaml(page, empty, refers, "- request: [\n", ASKED_IN_YAML, ANSWERED_IN_YAML))
    assert outcomes(path) == ["not-a-model-call", "not-a-model-call", "broken-file", "broken-file", PLAIN]


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
