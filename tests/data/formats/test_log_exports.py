"""Logs as the programs of others export them: tables of spans, tool steps, saved prompts, pieces of streams."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.chunks import RawRow
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused

Q, A, SYSTEM = "How long may I return shoes?", "Thirty days.", "You help customers."
PLAIN = [("user", Q), ("assistant", A)]
WITH_SYSTEM = [("system", SYSTEM), *PLAIN]
ASKED = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": Q}]
ANSWERED = {"role": "assistant", "content": A}


def dotted(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{f"message.{key}": value for key, value in turn.items()} for turn in turns]


def bedrock(asked: dict[str, Any], answered: Any) -> dict[str, Any]:
    logged = {"schemaType": "ModelInvocationLog", "operation": "InvokeModel", "modelId": "m", "region": "us-east-1"}
    return {**logged, "input": {"inputBodyJson": asked}, "output": {"outputBodyJson": answered}}


def bubble(kind: int, text: str) -> dict[str, Any]:
    return {"type": kind, "bubbleId": str(kind), "text": text}


def lm_studio(steps: list[dict[str, Any]]) -> dict[str, Any]:
    asked = {"type": "singleStep", "role": "user", "content": [{"type": "text", "text": Q}]}
    answered = {"type": "multiStep", "role": "assistant", "steps": steps}
    setting = {"key": "llm.prediction.systemPrompt", "value": SYSTEM}
    return {
        "name": "Shoes",
        "perChatPredictionConfig": {"fields": [setting]},
        "messages": [{"versions": [asked], "currentlySelected": 0}, {"versions": [answered], "currentlySelected": 0}],
    }


def block(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "contentBlock", "content": list(content), **more}


LLAMA = f"<|start_header_id|>user<|end_header_id|>\n\n{Q}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
STREAM = [
    {"type": "message_start", "message": {"role": "assistant", "content": [], "stop_reason": None}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Thirty "}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "days."}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    {"type": "message_stop"},
]
CHUNKS = [
    {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Thirty "}}],
    },
    {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "days."}}]},
    {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
TURNS_OF_WEBUI = {
    "a": {"id": "a", "parentId": None, "role": "user", "content": Q},
    "b": {"id": "b", "parentId": "a", "role": "assistant", "content": A, "done": True},
}
TABLE_OF_SPANS = {"name": "ChatCompletion", "span_kind": "LLM", "context.span_id": "x", "attributes.output.value": A}
SPAN = {"name": "ChatCompletion", "context": {"trace_id": "t"}, "start_time": "2025"}
LIBRECHAT = {"conversationId": "c", "isCreatedByUser": True, "sender": "User", "error": False}
RECORDS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "Bedrock's log, Llama": (bedrock({"prompt": LLAMA}, {"generation": A, "stop_reason": "stop"}), PLAIN),
    "Bedrock's log, Claude 2": (
        bedrock({"prompt": f"\n\nHuman: {Q}\n\nAssistant:"}, {"completion": f" {A}", "stop_reason": "stop_sequence"}),
        PLAIN,
    ),
    "Bedrock's log of a stream": (bedrock({"messages": [{"role": "user", "content": [{"text": Q}]}]}, STREAM), PLAIN),
    "the chunks of OpenAI": ({"request": {"messages": ASKED}, "response": CHUNKS}, WITH_SYSTEM),
    "a table of spans": (
        {
            **TABLE_OF_SPANS,
            "attributes.llm.input_messages": dotted(ASKED),
            "attributes.llm.output_messages": str(dotted([ANSWERED])),
        },
        WITH_SYSTEM,
    ),
    "a span that nests": (
        {
            **SPAN,
            "attributes": {
                "llm": {
                    "input_messages": [{"message": turn} for turn in ASKED],
                    "output_messages": [{"message": ANSWERED}],
                },
                "openinference": {"span": {"kind": "LLM"}},
            },
        },
        WITH_SYSTEM,
    ),
    "a call with attributes beside": (
        {
            **{"op_name": "create", "attributes": {"weave": {}}, "inputs": {"messages": ASKED}},
            "output": {"choices": [{"message": ANSWERED}]},
        },
        WITH_SYSTEM,
    ),
    "a span of OpenAI's agents": (
        {"object": "trace.span", "span_data": {"type": "generation", "input": ASKED, "output": [ANSWERED]}},
        WITH_SYSTEM,
    ),
    "one chat of Open WebUI": (
        {
            "title": "Shoes",
            "history": {"messages": TURNS_OF_WEBUI, "currentId": "b"},
            "messages": [*TURNS_OF_WEBUI.values()],
        },
        PLAIN,
    ),
    "LM Studio with thoughts": (
        lm_studio(
            [block({"type": "text", "text": "hm"}, style={"type": "thinking"}), block({"type": "text", "text": A})]
        ),
        WITH_SYSTEM,
    ),
    "AI Studio": (
        {
            "runSettings": {"temperature": 1},
            "systemInstruction": {"parts": [{"text": SYSTEM}]},
            "chunkedPrompt": {
                "chunks": [
                    {"role": "user", "text": Q},
                    {"role": "model", "text": "I look it up.", "isThought": True},
                    {"role": "model", "text": A},
                ]
            },
        },
        WITH_SYSTEM,
    ),
    "AI Studio, thoughts in parts": (
        {
            "runSettings": {"temperature": 1},
            "systemInstruction": {},
            "chunkedPrompt": {
                "chunks": [
                    {"role": "user", "text": Q},
                    {
                        "role": "model",
                        "text": "**Looking** I look it up.",
                        "isThought": True,
                        "parts": [
                            {"text": "**Looking** ", "thought": True},
                            {"text": "I look it up.", "thought": True},
                        ],
                    },
                    {"role": "model", "text": A, "parts": [{"text": A}]},
                ]
            },
        },
        PLAIN,
    ),
    "text-generation-webui": (
        {"internal": [["<|BEGIN-VISIBLE-CHAT|>", "Hello."], [Q, A]], "visible": [["", "Hello."], [Q, f"<p>{A}</p>"]]},
        PLAIN,
    ),
    "an exporter of a browser": (
        {"metadata": {"title": "Shoes"}, "messages": [{"role": "Prompt", "say": Q}, {"role": "Response", "say": A}]},
        PLAIN,
    ),
    "Cursor": ({"composerId": "c", "name": "Shoes", "conversation": [bubble(1, Q), bubble(2, A)]}, PLAIN),
    "LibreChat": (
        {
            "conversationId": "c",
            "messages": [
                {**LIBRECHAT, "messageId": "1", "parentMessageId": "0", "text": Q},
                {
                    **LIBRECHAT,
                    "messageId": "2",
                    "parentMessageId": "1",
                    "text": A,
                    "sender": "GPT",
                    "isCreatedByUser": False,
                },
            ],
        },
        PLAIN,
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_programs(name: str) -> None:
    record, wanted = RECORDS[name]
    found = read_example(RawRow("f:1", json.dumps(record).encode()), {})
    assert [(m.role, m.content) for m in found.example.messages] == wanted


def test_calls_of_lm_studio() -> None:
    request = {"type": "toolCallRequest", "callId": 1, "name": "lookup", "parameters": {"item": "shoes"}}
    result = {"type": "toolCallResult", "callId": 1, "content": '[{"type": "text", "text": "30"}]'}
    steps = [block({"type": "text", "text": "I look."}, request), block(result, roleOverride="tool"), block(ANSWER)]
    messages = read_example(RawRow("f:1", json.dumps(lm_studio(steps)).encode()), {}).example.messages
    assert [(m.role, m.content) for m in messages][2:] == [("assistant", "I look."), ("tool", "30"), ("assistant", A)]
    assert messages[2].tool_calls[0]["function"]["arguments"] == {"item": "shoes"}


ANSWER = {"type": "text", "text": A}


def test_an_observation_whose_request_is_one_text() -> None:
    """A system prompt and a question can be told apart; of more speakers any line may be somebody's words."""
    row = {"type": "GENERATION", "traceId": "t", "input": f"system: {SYSTEM}\nuser: {Q}", "output": A}
    found = read_example(RawRow("f:1", json.dumps(row).encode()), {})
    assert [(m.role, m.content) for m in found.example.messages] == WITH_SYSTEM
    longer = {**row, "input": f"{row['input']}\nassistant: None\ntool: found"}
    with pytest.raises(RowRefused) as refused:
        read_example(RawRow("f:1", json.dumps(longer).encode()), {})
    assert refused.value.reason == "rendered-text"


def test_a_turn_that_is_only_thought() -> None:
    turns = [
        {"role": "user", "parts": [{"text": Q}]},
        {"role": "model", "isThought": True, "parts": [{"text": "I look it up."}]},
        {"role": "model", "parts": [{"text": A}]},
    ]
    found = read_example(RawRow("f:1", json.dumps({"messages": turns}).encode()), {}).example
    assert [(m.content, m.reasoning) for m in found.messages][1:] == [(A, "I look it up.")]


def test_pieces_of_a_stream_without_its_end() -> None:
    for pieces in (STREAM[:-2], CHUNKS[:-1]):
        with pytest.raises(RowRefused) as refused:
            read_example(RawRow("f:1", json.dumps({"request": {"messages": ASKED}, "response": pieces}).encode()), {})
        assert refused.value.reason == "cut-off-answer"


def test_a_span_of_an_agent_that_is_no_call_of_a_model() -> None:
    span = {
        "object": "trace.span",
        "span_data": {"type": "function", "name": "search", "input": "q", "output": "found"},
    }
    with pytest.raises(RowRefused) as refused:
        read_example(RawRow("f:1", json.dumps(span).encode()), {})
    assert refused.value.reason == "not-a-model-call"


def event(name: str, **body: Any) -> dict[str, Any]:
    values = [{"key": key, "value": value} for key, value in body.items()]
    return {"eventName": name, "traceId": "t", "spanId": "s", "body": {"kvlistValue": {"values": values}}}


def text(value: str) -> dict[str, Any]:
    return {"stringValue": value}


RUN = {"run_type": "llm", "inputs": {"messages": ASKED}, "outputs": {"choices": [{"message": ANSWERED}]}}
HELD = {"kvlistValue": {"values": [{"key": "role", "value": text("assistant")}, {"key": "content", "value": text(A)}]}}
LOGGED = [event("gen_ai.user.message", content=text(Q)), event("gen_ai.choice", message=HELD)]
FILES: dict[str, tuple[str, Any, list[list[tuple[str, str]]]]] = {
    "a batch of logs": ("logs.jsonl", [{"resourceLogs": [{"scopeLogs": [{"logRecords": LOGGED}]}]}], [PLAIN]),
    "runs below a run": (
        "run.json",
        {"run_type": "chain", "inputs": {"question": Q}, "outputs": {"output": A}, "child_runs": [RUN]},
        [WITH_SYSTEM],
    ),
    "a page of an API": (
        "page.json",
        {"data": [{"id": "t", "input": ASKED, "output": A}], "meta": {"page": 1, "limit": 50, "totalPages": 1}},
        [WITH_SYSTEM],
    ),
    "a memory file": (
        "memory.json",
        [
            {"type": "human", "data": {"content": Q, "type": "human"}},
            {"type": "ai", "data": {"content": A, "type": "ai"}},
        ],
        [PLAIN],
    ),
    "spans whose turns are numbered": (
        "spans.json",
        [
            {
                **{"trace_id": trace, "span_id": "s", "startTimeUnixNano": "1000"},
                "attributes": {
                    "openinference.span.kind": "LLM",
                    "llm.input_messages.0.message.role": "user",
                    "llm.input_messages.0.message.content": Q,
                    "llm.output_messages.0.message.role": "assistant",
                    "llm.output_messages.0.message.content": A,
                },
            }
            for trace in ("a", "b")
        ],
        [PLAIN, PLAIN],
    ),
    "messages of Pydantic AI": (
        "history.json",
        [
            {
                "kind": "request",
                "parts": [
                    {"part_kind": "system-prompt", "content": SYSTEM},
                    {"part_kind": "user-prompt", "content": Q},
                ],
            },
            {
                "kind": "response",
                "parts": [{"part_kind": "tool-call", "tool_name": "look", "args": "{}", "tool_call_id": "c"}],
            },
            {"kind": "request", "parts": [{"part_kind": "tool-return", "tool_call_id": "c", "content": "30"}]},
            {"kind": "response", "parts": [{"part_kind": "text", "content": A}]},
        ],
        [[("system", SYSTEM), ("user", Q), ("assistant", ""), ("tool", "30"), ("assistant", A)]],
    ),
    "a store of sessions": (
        "store.json",
        {
            "chat-next-store": {
                "sessions": [{"id": "s", "topic": "Shoes", "messages": [*ASKED[1:], ANSWERED]}],
                "index": 0,
            }
        },
        [PLAIN],
    ),
    "parts of nobody's session": (
        "ui.json",
        [
            {"id": "1", "role": "user", "parts": [{"type": "text", "text": Q}]},
            {"id": "2", "role": "assistant", "parts": [{"type": "step-start"}, {"type": "text", "text": A}]},
        ],
        [PLAIN],
    ),
    "a text under each party's name": (
        "chat.json",
        [{"user": Q}, {"bot": A}, {"user": "hi"}, {"bot": "Hello!"}],
        [[*PLAIN, ("user", "hi"), ("assistant", "Hello!")]],
    ),
    "pairs of a user and an agent, one of them short": (
        "talk.json",
        {
            "conversation_id": "c",
            "turns": [
                {"turn": 1, "user": Q, "agent": "You may return them for thirty days.", "intent": "refund"},
                {"turn": 2, "user": "hi", "agent": "Hello!", "intent": "greet"},
            ],
        },
        [[("user", Q), ("assistant", "You may return them for thirty days."), ("user", "hi"), ("assistant", "Hello!")]],
    ),
    "a transcript of Cursor": (
        "agent.jsonl",
        [
            {"role": "user", "message": {"content": [{"type": "text", "text": Q}]}},
            {"role": "assistant", "message": {"content": [{"type": "text", "text": A}]}},
            *(
                {"role": "user", "message": {"content": [{"type": "text", "text": text}]}}
                for text in ("ok", "and bags?")
            ),
        ],
        [PLAIN],
    ),
    "a table of messages": (
        "store.jsonl",
        [
            {"id": 1, "session_id": "s", "message": json.dumps({"type": "human", "data": {"content": Q}})},
            {"id": 2, "session_id": "s", "message": json.dumps({"type": "ai", "data": {"content": A}})},
        ],
        [PLAIN],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_programs(name: str, tmp_path: Path) -> None:
    called, content, wanted = FILES[name]
    lines = (
        "".join(json.dumps(row) + "\n" for row in content) if called.endswith("l") else json.dumps(content, indent=1)
    )
    (tmp_path / called).write_text(lines, encoding="utf-8")
    found = [read_example(row, {}).example.messages for row in rows_of_files(str(tmp_path / called))]
    assert [[(m.role, m.content) for m in messages] for messages in found] == wanted
