"""Records of calls as APIs, traces and chat programs log them, each in the form that its maker documents."""

import json
from typing import Any

import pytest

from hivetune.data.conversation import read_conversation
from hivetune.data.pieces.said import Conversation
from hivetune.data.reasons import RowRefused

ASK = {"role": "user", "content": "What is the capital of France?"}
SYSTEM = {"role": "system", "content": "Answer in one word."}
PARIS = {"role": "assistant", "content": "Paris."}
PLAIN = [("user", ASK["content"]), ("assistant", "Paris.")]
WITH_SYSTEM = [("system", SYSTEM["content"]), *PLAIN]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OPENAI_RESPONSE = {
    "id": "chatcmpl-9x",
    "object": "chat.completion",
    "created": 1741569952,
    "model": "gpt-4.1-2025-04-14",
    "choices": [{"index": 0, "message": {**PARIS, "refusal": None, "annotations": []}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 19, "completion_tokens": 2, "total_tokens": 21},
}
RESPONSES_OUTPUT = [
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "France: Paris"}]},
    {
        "type": "message",
        "id": "msg_67",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Paris.", "annotations": []}],
    },
]
ANTHROPIC_RESPONSE = {
    "id": "msg_01",
    "type": "message",
    "role": "assistant",
    "model": "claude-sonnet-4",
    "content": [{"type": "text", "text": "Paris."}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 25, "output_tokens": 4},
}
GEMINI_RESPONSE = {
    "candidates": [{"content": {"parts": [{"text": "Paris."}], "role": "model"}, "finishReason": "STOP", "index": 0}],
    "usageMetadata": {"promptTokenCount": 8},
    "modelVersion": "gemini-2.0-flash",
}
LANGCHAIN_HUMAN = {
    "lc": 1,
    "type": "constructor",
    "id": ["langchain", "schema", "messages", "HumanMessage"],
    "kwargs": {"content": ASK["content"], "type": "human"},
}
LANGCHAIN_AI = {
    "lc": 1,
    "type": "constructor",
    "id": ["langchain", "schema", "messages", "AIMessage"],
    "kwargs": {"content": "Paris.", "type": "ai", "tool_calls": [], "response_metadata": {"finish_reason": "stop"}},
}

LOGS: dict[str, tuple[dict[str, Any], str, list[tuple[str, str]]]] = {
    "OpenAI chat": (
        {"request": {"model": "gpt-4.1", "messages": [SYSTEM, ASK]}, "response": OPENAI_RESPONSE},
        "request-response",
        WITH_SYSTEM,
    ),
    "OpenAI chat, flat": ({"messages": [ASK], **OPENAI_RESPONSE}, "request-response", PLAIN),
    "OpenAI chat as JSON text in a CSV": (
        {
            "request_body": json.dumps({"messages": [ASK]}),
            "response_body": json.dumps(OPENAI_RESPONSE),
            "status": "200",
        },
        "request-response",
        PLAIN,
    ),
    "OpenAI completions": (
        {
            "request": {"prompt": "Say hi"},
            "response": {"object": "text_completion", "choices": [{"text": "hi", "finish_reason": "stop"}]},
        },
        "request-response",
        [("user", "Say hi"), ("assistant", "hi")],
    ),
    "OpenAI Responses": (
        {
            "request": {"model": "gpt-5", "instructions": SYSTEM["content"], "input": ASK["content"]},
            "response": {
                "object": "response",
                "status": "completed",
                "previous_response_id": None,
                "output": RESPONSES_OUTPUT,
            },
        },
        "request-response",
        WITH_SYSTEM,
    ),
    "OpenAI Responses, items": (
        {
            "request": {
                "input": [
                    ASK,
                    *RESPONSES_OUTPUT,
                    {"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
                ]
            },
            "response": {
                "object": "response",
                "output": [
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
                ],
            },
        },
        "request-response",
        [*PLAIN, ("user", "Sure?"), ("assistant", "Yes.")],
    ),
    "OpenAI batch": (
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "gpt-4o-mini", "messages": [SYSTEM, ASK]},
            "response": {"status_code": 200, "request_id": "req_1", "body": OPENAI_RESPONSE},
            "error": None,
        },
        "request-response",
        WITH_SYSTEM,
    ),
    "OpenAI, answer as text": (
        {"messages": [SYSTEM, ASK], "response": "Paris.", "model": "x"},
        "messages",
        WITH_SYSTEM,
    ),
    "Anthropic": (
        {
            "request": {
                "model": "claude-sonnet-4",
                "max_tokens": 64,
                "system": [{"type": "text", "text": SYSTEM["content"], "cache_control": {"type": "ephemeral"}}],
                "messages": [ASK],
            },
            "response": ANTHROPIC_RESPONSE,
        },
        "request-response",
        WITH_SYSTEM,
    ),
    "Ollama chat": (
        {
            "request": {"model": "llama3.2", "messages": [ASK], "stream": False},
            "response": {
                "model": "llama3.2",
                "created_at": "2023-12-12T14:13:43Z",
                "message": PARIS,
                "done_reason": "stop",
                "done": True,
                "eval_count": 3,
            },
        },
        "request-response",
        PLAIN,
    ),
    "Ollama generate": (
        {
            "request": {"model": "llama3.2", "prompt": ASK["content"], "system": SYSTEM["content"]},
            "response": {"model": "llama3.2", "response": "Paris.", "done": True, "context": [1, 2, 3]},
        },
        "request-response",
        WITH_SYSTEM,
    ),
    "Gemini": (
        {
            "request": {
                "systemInstruction": {"parts": [{"text": SYSTEM["content"]}]},
                "contents": [{"role": "user", "parts": [{"text": ASK["content"]}]}],
            },
            "response": GEMINI_RESPONSE,
        },
        "request-response",
        WITH_SYSTEM,
    ),
    "Gemini tuning": (
        {
            "systemInstruction": {"role": "system", "parts": [{"text": SYSTEM["content"]}]},
            "contents": [
                {"role": "user", "parts": [{"text": ASK["content"]}]},
                {"role": "model", "parts": [{"text": "Paris."}]},
            ],
        },
        "contents",
        WITH_SYSTEM,
    ),
    "Bedrock Converse": (
        {
            "request": {
                "modelId": "m",
                "system": [{"text": SYSTEM["content"]}],
                "messages": [{"role": "user", "content": [{"text": ASK["content"]}]}],
            },
            "response": {
                "output": {"message": {"role": "assistant", "content": [{"text": "Paris."}]}},
                "stopReason": "end_turn",
                "usage": {"inputTokens": 9},
            },
        },
        "request-response",
        WITH_SYSTEM,
    ),
    "Bedrock invocation log": (
        {
            "schemaType": "ModelInvocationLog",
            "schemaVersion": "1.0",
            "timestamp": "2024-06-01T12:00:00Z",
            "accountId": "1",
            "region": "us-east-1",
            "requestId": "r",
            "operation": "InvokeModel",
            "modelId": "anthropic.claude",
            "input": {
                "inputContentType": "application/json",
                "inputBodyJson": {"anthropic_version": "bedrock-2023-05-31", "messages": [ASK], "max_tokens": 10},
                "inputTokenCount": 9,
            },
            "output": {
                "outputContentType": "application/json",
                "outputBodyJson": ANTHROPIC_RESPONSE,
                "outputTokenCount": 4,
            },
        },
        "request-response",
        PLAIN,
    ),
    "Bedrock tuning": (
        {
            "schemaVersion": "bedrock-conversation-2024",
            "system": [{"text": SYSTEM["content"]}],
            "messages": [
                {"role": "user", "content": [{"text": ASK["content"]}]},
                {"role": "assistant", "content": [{"text": "Paris."}]},
            ],
        },
        "messages",
        WITH_SYSTEM,
    ),
    "LangSmith run": (
        {
            "id": "a",
            "trace_id": "t",
            "name": "ChatOpenAI",
            "run_type": "llm",
            "start_time": "2024-01-01T00:00:00",
            "error": None,
            "inputs": {"messages": [[LANGCHAIN_HUMAN]]},
            "outputs": {
                "generations": [
                    [{"text": "Paris.", "message": LANGCHAIN_AI, "generation_info": {"finish_reason": "stop"}}]
                ],
                "llm_output": {"model_name": "m"},
            },
            "parent_run_id": "p",
        },
        "langsmith",
        PLAIN,
    ),
    "LangSmith run of an OpenAI client": (
        {
            "id": "a",
            "run_type": "llm",
            "name": "ChatOpenAI",
            "inputs": {"messages": [SYSTEM, ASK], "model": "m"},
            "outputs": OPENAI_RESPONSE,
        },
        "langsmith",
        WITH_SYSTEM,
    ),
    "LangSmith data set": (
        {"inputs": {"question": ASK["content"]}, "outputs": {"answer": "Paris."}, "metadata": {}},
        "langsmith",
        PLAIN,
    ),
    "LangGraph root run": (
        {
            "run_type": "chain",
            "parent_run_id": None,
            "inputs": {"messages": [{"type": "human", "content": ASK["content"]}]},
            "outputs": {
                "messages": [
                    {"type": "human", "content": ASK["content"], "id": "1"},
                    {"type": "ai", "content": "Paris.", "id": "2"},
                ]
            },
        },
        "langsmith",
        PLAIN,
    ),
    "LangChain messages": (
        {
            "messages": [
                {"type": "human", "data": {"content": ASK["content"], "additional_kwargs": {}}},
                {"type": "ai", "data": {"content": "Paris.", "additional_kwargs": {}}},
            ],
            "session_id": "s",
        },
        "messages",
        PLAIN,
    ),
    "Langfuse generation": (
        {
            "id": "o",
            "traceId": "t",
            "type": "GENERATION",
            "name": "chat",
            "startTime": "2024-05-01T10:00:00Z",
            "model": "gpt-4o",
            "modelParameters": {"temperature": 1},
            "input": [SYSTEM, ASK],
            "output": PARIS,
            "level": "DEFAULT",
            "statusMessage": None,
            "usage": {"input": 9},
        },
        "langfuse",
        WITH_SYSTEM,
    ),
    "Langfuse CSV": (
        {
            "id": "o",
            "trace_id": "t",
            "type": "GENERATION",
            "input": json.dumps({"messages": [ASK]}),
            "output": json.dumps(PARIS),
            "metadata": "{}",
        },
        "langfuse",
        PLAIN,
    ),
    "Langfuse data set": (
        {"id": "i", "input": {"question": ASK["content"]}, "expectedOutput": {"answer": "Paris."}, "metadata": None},
        "langfuse",
        PLAIN,
    ),
    "OpenTelemetry GenAI": (
        {
            "name": "chat gpt-4o",
            "traceId": "5b8",
            "spanId": "05",
            "kind": 3,
            "attributes": {
                "gen_ai.operation.name": "chat",
                "gen_ai.system_instructions": json.dumps([{"type": "text", "content": SYSTEM["content"]}]),
                "gen_ai.input.messages": json.dumps(
                    [{"role": "user", "parts": [{"type": "text", "content": ASK["content"]}]}]
                ),
                "gen_ai.output.messages": json.dumps(
                    [{"role": "assistant", "parts": [{"type": "text", "content": "Paris."}], "finish_reason": "stop"}]
                ),
            },
        },
        "opentelemetry",
        WITH_SYSTEM,
    ),
    "OpenLLMetry": (
        {
            "name": "openai.chat",
            "trace_id": "5b8",
            "span_id": "05",
            "attributes": {
                "gen_ai.system": "OpenAI",
                "gen_ai.prompt.0.role": "user",
                "gen_ai.prompt.0.content": ASK["content"],
                "gen_ai.completion.0.role": "assistant",
                "gen_ai.completion.0.content": "Paris.",
                "gen_ai.completion.0.finish_reason": "stop",
            },
        },
        "opentelemetry",
        PLAIN,
    ),
    "OpenInference": (
        {
            "name": "ChatCompletion",
            "context": {"trace_id": "0x5", "span_id": "0x1"},
            "attributes": {
                "openinference.span.kind": "LLM",
                "llm.input_messages.0.message.role": "user",
                "llm.input_messages.0.message.content": ASK["content"],
                "llm.output_messages.0.message.role": "assistant",
                "llm.output_messages.0.message.content": "Paris.",
            },
        },
        "opentelemetry",
        PLAIN,
    ),
    "OpenTelemetry events": (
        {
            "name": "chat",
            "trace_id": "5",
            "span_id": "1",
            "attributes": {"gen_ai.system": "openai"},
            "events": [
                {"name": "gen_ai.user.message", "attributes": {"content": ASK["content"]}},
                {
                    "name": "gen_ai.choice",
                    "attributes": {"index": 0, "finish_reason": "stop", "message": json.dumps(PARIS)},
                },
            ],
        },
        "opentelemetry",
        PLAIN,
    ),
    "ChatGPT": (
        {
            "title": "Capitals",
            "create_time": 1700000000.1,
            "conversation_id": "c",
            "current_node": "d",
            "mapping": {
                "r": {"id": "r", "message": None, "parent": None, "children": ["s"]},
                "s": {
                    "id": "s",
                    "message": {
                        "author": {"role": "system"},
                        "content": {"content_type": "text", "parts": [""]},
                        "metadata": {"is_visually_hidden_from_conversation": True},
                    },
                    "parent": "r",
                    "children": ["a"],
                },
                "a": {
                    "id": "a",
                    "message": {
                        "author": {"role": "user"},
                        "content": {"content_type": "text", "parts": [ASK["content"]]},
                    },
                    "parent": "s",
                    "children": ["b", "d"],
                },
                "b": {
                    "id": "b",
                    "message": {
                        "author": {"role": "assistant"},
                        "content": {"content_type": "text", "parts": ["Lyon."]},
                        "recipient": "all",
                    },
                    "parent": "a",
                    "children": [],
                },
                "d": {
                    "id": "d",
                    "message": {
                        "author": {"role": "assistant"},
                        "content": {"content_type": "text", "parts": ["Paris."]},
                        "recipient": "all",
                        "status": "finished_successfully",
                    },
                    "parent": "a",
                    "children": [],
                },
            },
        },
        "chatgpt",
        PLAIN,
    ),
    "Claude": (
        {
            "uuid": "u",
            "name": "Capitals",
            "created_at": "2024-01-01T00:00:00Z",
            "account": {"uuid": "x"},
            "chat_messages": [
                {
                    "uuid": "1",
                    "text": ASK["content"],
                    "content": [{"type": "text", "text": ASK["content"]}],
                    "sender": "human",
                    "attachments": [],
                    "files": [],
                },
                {
                    "uuid": "2",
                    "text": "Paris.",
                    "content": [{"type": "text", "text": "Paris."}],
                    "sender": "assistant",
                    "attachments": [],
                    "files": [],
                },
            ],
        },
        "claude",
        PLAIN,
    ),
    "Open WebUI": (
        {
            "id": "x",
            "user_id": "u",
            "title": "Capitals",
            "chat": {
                "title": "Capitals",
                "models": ["m"],
                "history": {
                    "currentId": "2",
                    "messages": {
                        "1": {
                            "id": "1",
                            "parentId": None,
                            "childrenIds": ["3", "2"],
                            "role": "user",
                            "content": ASK["content"],
                        },
                        "3": {
                            "id": "3",
                            "parentId": "1",
                            "childrenIds": [],
                            "role": "assistant",
                            "content": "Lyon.",
                            "done": True,
                        },
                        "2": {
                            "id": "2",
                            "parentId": "1",
                            "childrenIds": [],
                            "role": "assistant",
                            "content": '<details type="reasoning" done="true">\n<summary>Thought for 2 s</summary>\n'
                            "> France, so Paris\n</details>\nParis.",
                            "done": True,
                        },
                    },
                },
                "messages": [],
            },
            "created_at": 1710000000,
        },
        "open-webui",
        PLAIN,
    ),
    "LM Studio": (
        {
            "name": "Capitals",
            "pinned": False,
            "createdAt": 1721000000000,
            "tokenCount": 12,
            "systemPrompt": SYSTEM["content"],
            "messages": [
                {
                    "versions": [
                        {"type": "singleStep", "role": "user", "content": [{"type": "text", "text": ASK["content"]}]}
                    ],
                    "currentlySelected": 0,
                },
                {
                    "versions": [
                        {
                            "type": "multiStep",
                            "role": "assistant",
                            "senderInfo": {"senderName": "m"},
                            "steps": [
                                {
                                    "type": "contentBlock",
                                    "stepIdentifier": "1",
                                    "content": [{"type": "text", "text": "Lyon."}],
                                }
                            ],
                        },
                        {
                            "type": "multiStep",
                            "role": "assistant",
                            "steps": [
                                {
                                    "type": "contentBlock",
                                    "stepIdentifier": "2",
                                    "content": [{"type": "text", "text": "Paris."}],
                                },
                                {"type": "debugInfoBlock", "stepIdentifier": "3", "debugInfo": "Conversation naming"},
                            ],
                        },
                    ],
                    "currentlySelected": 1,
                },
            ],
        },
        "lm-studio",
        WITH_SYSTEM,
    ),
    "OpenCode": (
        {
            "info": {"id": "ses_1", "title": "Capitals", "version": "0.5"},
            "messages": [
                {
                    "info": {"id": "msg_1", "role": "user", "sessionID": "ses_1"},
                    "parts": [{"type": "text", "text": ASK["content"]}],
                },
                {
                    "info": {"id": "msg_2", "role": "assistant", "sessionID": "ses_1"},
                    "parts": [
                        {"type": "step-start"},
                        {"type": "reasoning", "text": "France"},
                        {
                            "type": "tool",
                            "callID": "c1",
                            "tool": "grep",
                            "state": {"status": "completed", "input": {"pattern": "France"}, "output": "France: Paris"},
                        },
                        {"type": "step-finish"},
                        {"type": "step-start"},
                        {"type": "text", "text": "Paris."},
                        {"type": "step-finish"},
                    ],
                },
            ],
        },
        "opencode",
        [("user", ASK["content"]), ("assistant", ""), ("tool", "France: Paris"), ("assistant", "Paris.")],
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_logs(name: str) -> None:
    record, layout, expected = LOGS[name]
    found = read_conversation(record)
    assert found.layout == layout
    assert [(m.role, m.content) for m in found.messages] == expected


def calls(conversation: Conversation) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for m in conversation.messages for c in m.tool_calls]


TOOL_LOGS: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "tools": [{"type": "function", "function": WEATHER}],
        "messages": [
            ASK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
            {"role": "assistant", "content": "12 degrees."},
        ],
    },
    "OpenAI's older function_call": {
        "functions": [WEATHER],
        "messages": [
            ASK,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            },
            {"role": "function", "name": "get_weather", "content": "12 degrees"},
            {"role": "assistant", "content": "12 degrees."},
        ],
    },
    "Responses": {
        "request": {
            "tools": [{"type": "function", **WEATHER}],
            "input": [
                ASK,
                {
                    "type": "function_call",
                    "id": "fc_1",
                    "call_id": "c1",
                    "name": "get_weather",
                    "arguments": '{"city": "Paris"}',
                },
                {"type": "function_call_output", "call_id": "c1", "output": "12 degrees"},
            ],
        },
        "response": {
            "output": [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12 degrees."}]}
            ]
        },
    },
    "Anthropic": {
        "tools": [
            {"name": "get_weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
        ],
        "messages": [
            ASK,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "12 degrees"}]}
                ],
            },
            {"role": "assistant", "content": "12 degrees."},
        ],
    },
    "Gemini": {
        "tools": [{"functionDeclarations": [WEATHER]}],
        "contents": [
            {"role": "user", "parts": [{"text": ASK["content"]}]},
            {"role": "model", "parts": [{"functionCall": {"name": "get_weather", "args": {"city": "Paris"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "get_weather", "response": "12 degrees"}}]},
            {"role": "model", "parts": [{"text": "12 degrees."}]},
        ],
    },
    "Bedrock": {
        "toolConfig": {
            "tools": [
                {
                    "toolSpec": {
                        "name": "get_weather",
                        "description": WEATHER["description"],
                        "inputSchema": {"json": WEATHER["parameters"]},
                    }
                }
            ]
        },
        "messages": [
            {"role": "user", "content": [{"text": ASK["content"]}]},
            {
                "role": "assistant",
                "content": [{"toolUse": {"toolUseId": "c1", "name": "get_weather", "input": {"city": "Paris"}}}],
            },
            {
                "role": "user",
                "content": [
                    {"toolResult": {"toolUseId": "c1", "content": [{"text": "12 degrees"}], "status": "success"}}
                ],
            },
            {"role": "assistant", "content": [{"text": "12 degrees."}]},
        ],
    },
    "Hermes": {
        "tools": json.dumps([{"type": "function", "function": WEATHER}]),
        "conversations": [
            {"from": "human", "value": ASK["content"]},
            {
                "from": "gpt",
                "value": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            },
            {"from": "tool", "value": "<tool_response>\n12 degrees\n</tool_response>"},
            {"from": "gpt", "value": "12 degrees."},
        ],
    },
    "OpenTelemetry": {
        "name": "chat",
        "trace_id": "t",
        "kind": 3,
        "attributes": {
            "gen_ai.tool.definitions": [{"type": "function", **WEATHER}],
            "gen_ai.input.messages": [
                {"role": "user", "parts": [{"type": "text", "content": ASK["content"]}]},
                {
                    "role": "assistant",
                    "parts": [{"type": "tool_call", "id": "c1", "name": "get_weather", "arguments": {"city": "Paris"}}],
                },
                {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "12 degrees"}]},
            ],
            "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "12 degrees."}]}],
        },
    },
    "OpenInference": {
        "name": "llm",
        "trace_id": "t",
        "kind": 3,
        "attributes": {
            "llm.tools.0.tool.json_schema": json.dumps({"type": "function", "function": WEATHER}),
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": ASK["content"],
            "llm.input_messages.1.message.role": "assistant",
            "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "get_weather",
            "llm.input_messages.1.message.tool_calls.0.tool_call.function.arguments": '{"city": "Paris"}',
            "llm.input_messages.2.message.role": "tool",
            "llm.input_messages.2.message.content": "12 degrees",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": "12 degrees.",
        },
    },
}


@pytest.mark.parametrize("name", TOOL_LOGS)
def test_calls_results_and_tools_of_every_provider(name: str) -> None:
    found = read_conversation(TOOL_LOGS[name])
    assert [(m.role, m.content) for m in found.messages] == [
        ("user", ASK["content"]),
        ("assistant", ""),
        ("tool", "12 degrees"),
        ("assistant", "12 degrees."),
    ]
    assert calls(found) == [("get_weather", {"city": "Paris"})]
    assert found.tools == ({"type": "function", "function": WEATHER},)


def test_thoughts_are_kept_apart_from_the_answer() -> None:
    for name in ("OpenAI Responses", "Open WebUI", "OpenCode"):
        found = read_conversation(LOGS[name][0])
        assert any("France" in (m.reasoning or "") for m in found.messages), name
    block = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "France", "signature": "x"}, {"type": "text", "text": "Paris."}],
    }
    found = read_conversation({"messages": [ASK, block]})
    assert (found.messages[1].reasoning, found.messages[1].content) == ("France", "Paris.")


def test_retries_that_were_given_up_are_counted_and_not_learned() -> None:
    for name in ("ChatGPT", "Open WebUI", "LM Studio"):
        found = read_conversation(LOGS[name][0])
        assert found.changed == ("other-branches",), name
        assert "Lyon." not in [m.content for m in found.messages]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cut at a limit": (
        {"request": {"messages": [ASK]}, "response": {"choices": [{"message": PARIS, "finish_reason": "length"}]}},
        "cut-off-answer",
    ),
    "cut at a limit, Anthropic": (
        {"messages": [ASK], "response": {**ANTHROPIC_RESPONSE, "stop_reason": "max_tokens"}},
        "cut-off-answer",
    ),
    "cut at a limit, Gemini": (
        {
            "contents": [{"role": "user", "parts": [{"text": "q"}]}],
            "response": {"candidates": [{"content": {"parts": [{"text": "a"}]}, "finishReason": "MAX_TOKENS"}]},
        },
        "cut-off-answer",
    ),
    "cut at a limit, Responses": (
        {
            "request": {"input": "q"},
            "response": {
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
                "output": RESPONSES_OUTPUT,
            },
        },
        "cut-off-answer",
    ),
    "cut at a limit, LangSmith": (
        {
            "run_type": "llm",
            "inputs": {"messages": [[LANGCHAIN_HUMAN]]},
            "outputs": {"generations": [[{"text": "Pa", "generation_info": {"finish_reason": "length"}}]]},
        },
        "cut-off-answer",
    ),
    "a piece of a stream": (
        {"request": {"messages": [ASK]}, "response": {"message": PARIS, "done": False}},
        "cut-off-answer",
    ),
    "an error": ({"request": {"messages": [ASK]}, "response": {"error": {"message": "overloaded"}}}, "failed"),
    "a failed batch line": (
        {"body": {"messages": [ASK]}, "response": {"status_code": 400, "body": {"error": {"message": "bad"}}}},
        "failed",
    ),
    "earlier turns elsewhere": (
        {
            "request": {"input": "and Spain?", "previous_response_id": "resp_1"},
            "response": {"output": RESPONSES_OUTPUT},
        },
        "earlier-turns-missing",
    ),
    "a tool's run": ({"run_type": "tool", "inputs": {"input": "x"}, "outputs": {"output": "y"}}, "not-a-model-call"),
    "an inner chain": (
        {"run_type": "chain", "parent_run_id": "p", "inputs": {"input": "x"}, "outputs": {"output": "y"}},
        "not-a-model-call",
    ),
    "a span of a database": (
        {"name": "SELECT", "trace_id": "t", "kind": 3, "attributes": {"db.system": "postgresql"}},
        "not-a-model-call",
    ),
    "an observation that is a span": (
        {"type": "SPAN", "traceId": "t", "input": "x", "output": "y"},
        "not-a-model-call",
    ),
    "a chain with context": (
        {
            "run_type": "chain",
            "inputs": {"question": "q", "lookup": "a long piece of text that was found"},
            "outputs": {"output": "y"},
        },
        "unexplained-column",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, PARIS]},
        "unsupported-content",
    ),
    "a tool of the provider": (
        {
            "request": {"input": "q"},
            "response": {"output": [{"type": "file_search_call", "id": "w"}, *RESPONSES_OUTPUT]},
        },
        "not-held",
    ),
    "a message of a chat log": ({"conversation_id": "c", "role": "assistant", "content": "Paris."}, "one-message"),
    "a text with a role": (
        {"message_id": "m", "parent_id": "p", "role": "prompter", "text": "Hi there"},
        "one-message",
    ),
}


def test_calls_as_the_content_of_a_tools_turn() -> None:
    """As Koog logs them."""
    call = {"id": "c", "type": "function", "function": {"name": "greet", "arguments": {"name": "Bob"}}}
    asked = [{"role": "user", "content": "Greet Bob."}, {"role": "tool", "content": [call]}]
    found = read_conversation({"messages": [*asked, {"role": "tool", "content": "Hi"}, PARIS]}).messages
    assert [(m.role, len(m.tool_calls)) for m in found] == [
        ("user", 0),
        ("assistant", 1),
        ("tool", 0),
        ("assistant", 0),
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_what_must_not_be_learned(name: str) -> None:
    record, reason = REFUSED[name]
    with pytest.raises(RowRefused) as refused:
        read_conversation(record)
    assert refused.value.reason == reason
