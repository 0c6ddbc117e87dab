"""The APIs of Anthropic, of OpenAI's Responses and of Ollama: what of a request reaches the model server, what is
refused by its name. The model server is a function here; official clients are in test_clients.py."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serve.hive import stored
from serve.stage import Stage, on_stage

from hivetune.serve.api import DIALECTS
from hivetune.serve.fields import FieldRefused

MESSAGES, RESPONSES, CHAT, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
BEARER = {"Authorization": "Bearer token-a"}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "Read", "description": "Reads a file", "parameters": SCHEMA}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "Read", "arguments": '{"path": "a.py"}'}}
SAID = {"reasoning_content": "A file.", "content": "Let me see."}
ASKED = {"role": "user", "content": "hello"}

# What Claude Code, Codex and a client of Ollama send, by their published sources and by what others recorded of them.
AGENTS = json.loads(Path(__file__).with_name("agents.json").read_text(encoding="utf-8"))
IGNORED = {
    MESSAGES: "eager_input_streaming display context_management cache_control signature system[0] output_config.effort",
    RESPONSES: "summary store client_metadata encrypted_content reasoning.effort",
    CHAT: "num_ctx keep_alive think",
}


@pytest.mark.parametrize("path", AGENTS)
@on_stage()
async def test_what_agents_send_reaches_the_model_as_one_conversation(stage: Stage, path: str) -> None:
    told = await stage.post(AGENTS[path], path)
    assert told.status_code == 200, told.text
    ((_, sent),) = stage.asked
    call_id, result = ("call00000", {"name": "Read"}) if path == CHAT else ("call_1", {})
    assert sent["messages"] == [
        {"role": "system", "content": "You are an agent.\nBe brief."},
        {"role": "user", "content": "Read a.py\nToday."},
        {"role": "assistant", **SAID, "tool_calls": [{**CALL, "id": call_id}]},
        {"role": "tool", "content": "x = 1", "tool_call_id": call_id, **result},
        {"role": "user", "content": "Go on.\nA file changed."},
    ]
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["Read"]
    assert sent["tools"][0]["function"]["parameters"] == SCHEMA
    assert told.headers["x-hivetune-release"] == told.json()["model"] == "helpdesk@1"
    assert set(told.headers["x-hivetune-ignored"].split(", ")) == set(IGNORED[path].split())


FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
FIELDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (MESSAGES, {"max_tokens": 5, "stop_sequences": ["x"], "top_k": 3}, {"max_tokens": 5, "stop": ["x"], "top_k": 3}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"response_format": FORM}),
    (MESSAGES, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    (MESSAGES, {"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
    (RESPONSES, {"max_output_tokens": 5, "top_p": 0.5}, {"max_tokens": 5, "top_p": 0.5}),
    (RESPONSES, {"reasoning": {"effort": "low"}}, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (CHAT, {"options": {"num_predict": -1, "seed": 3, "stop": []}}, {"seed": 3, "cache_prompt": False}),
    (CHAT, {"format": SCHEMA, "think": False}, {"response_format": FORM}),
    (GENERATE, {"format": "json", "system": "s"}, {"response_format": {"type": "json_object"}}),
]


def question(path: str, **more: Any) -> dict[str, Any]:
    key, value = {RESPONSES: ("input", "hello"), GENERATE: ("prompt", "hello")}.get(path, ("messages", [ASKED]))
    return {key: value, "stream": False, **({"model": "helpdesk"} if path.startswith("/api") else {}), **more}


@on_stage(live_settings={"template": "{{ enable_thinking }}{{ reasoning_effort }}"})
async def test_fields_have_their_names_in_the_chat(stage: Stage) -> None:
    for path, fields, expected in FIELDS:
        told = await stage.post(question(path, **fields), path)
        assert told.status_code == 200, told.text
        sent = stage.asked[-1][1]
        assert {key: sent.get(key) for key in expected} == expected, (path, fields)
        assert not sent.keys() & {"max_tokens", "stop"} - expected.keys()
        assert sent["messages"][-1] == ASKED


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (MESSAGES, "n_discard", {"n_discard": -1}),
    (MESSAGES, "messages[0].content[0].type", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    (MESSAGES, "messages[0].name", {"messages": [{**ASKED, "name": "x"}]}),
    (MESSAGES, "messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    (MESSAGES, "messages[0]", {"messages": ["hello"]}),
    (MESSAGES, "messages", {"messages": []}),
    (MESSAGES, "tools[0].type", {"tools": [SEARCH]}),
    (MESSAGES, "tool_choice.type", {"tool_choice": {"type": "all"}}),
    (MESSAGES, "metadata.user", {"metadata": {"user": "x"}}),
    (MESSAGES, "thinking.type", {"thinking": {"type": "deep"}}),
    (MESSAGES, "stop_sequences", {"stop_sequences": ["x"] * 17}),
    (MESSAGES, "max_tokens", {"max_tokens": 0}),
    (MESSAGES, "container", {"container": "c"}),
    (MESSAGES, "mcp_servers", {"mcp_servers": [{}]}),
    (RESPONSES, "conversation", {"conversation": "c"}),
    (RESPONSES, "background", {"background": True}),
    (RESPONSES, "truncation", {"truncation": "auto"}),
    (RESPONSES, "include", {"include": ["file_search_call.results"]}),
    (RESPONSES, "tools[0].type", {"tools": [{"type": "web_search"}]}),
    (RESPONSES, "input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
    (RESPONSES, "input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    (RESPONSES, "input", {"input": [{"type": "function_call", "name": "x", "arguments": "{"}]}),
    (RESPONSES, "max_output_tokens", {"max_output_tokens": -1}),
    (RESPONSES, "text.format.type", {"text": {"format": {"type": "xml"}}}),
    (RESPONSES, "prompt", {"prompt": {"id": "p"}}),
    (CHAT, "options.mirostat", {"options": {"mirostat": 2}}),
    (CHAT, "options.temperature", {"options": {"temperature": 5}}),
    (CHAT, "options", {"options": "hot"}),
    (CHAT, "messages[0].images", {"messages": [{**ASKED, "images": ["AA"]}]}),
    (CHAT, "logprobs", {"logprobs": True}),
    (GENERATE, "context", {"context": [1]}),
    (GENERATE, "raw", {"raw": True}),
    (GENERATE, "template", {"template": "x"}),
    (GENERATE, "suffix", {"suffix": "x"}),
]


def problem_of(path: str, told: httpx2.Response) -> str:
    """Return the message of an error, which has the form of its API."""
    document = told.json()
    if path.startswith("/api"):
        assert list(document) == ["error"]
        return str(document["error"])
    assert (document.get("type") == "error") == path.startswith(MESSAGES)
    return str(document["error"]["message"])


@on_stage()
async def test_what_can_not_be_honoured_is_refused_by_its_name(stage: Stage) -> None:
    for path, field, changes in REFUSED:
        told = await stage.post(question(path, **changes), path)
        assert told.status_code == 400, (path, field, told.text)
        assert problem_of(path, told).startswith(f"{field}: "), (field, told.text)
    for path in (MESSAGES, RESPONSES, CHAT, GENERATE, "/v1/messages/count_tokens"):
        for token, model, status in (("wrong", "", 401), ("token-a", "nobody", 404)):
            told = await stage.post(question(path, model=model), path, token)
            assert told.status_code == status and problem_of(path, told), (path, told.text)
        assert "not JSON" in problem_of(path, await stage.client.post(path, content=b"{", headers=BEARER))
    assert stage.asked == []


def spoiled(value: Any) -> Iterator[Any]:
    """Yield a document with each of its values, one at a time, replaced by one of another kind, or left out."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            for other in (5, "x", [5], {"x": 5}, True, None, *spoiled(item)):
                yield {**value, key: other} if isinstance(value, dict) else [*value[:key], other, *value[key + 1 :]]


@pytest.mark.parametrize("path", AGENTS)
def test_any_document_is_answered_or_refused_by_name(path: str) -> None:
    dialect = next(dialect for dialect in DIALECTS if dialect.path == path)
    refused = 0
    for document in spoiled(AGENTS[path]):
        try:
            dialect.read(document, lambda answer: [])
        except FieldRefused as problem:
            assert problem.field, document
            refused += 1
    assert refused > 100


@on_stage(captures=True)
async def test_one_client_has_nothing_of_another(stage: Stage) -> None:
    """An answer that another client got is not known, whatever API asks for it or rates it."""
    for path in (MESSAGES, RESPONSES, CHAT, GENERATE):
        told = await stage.post(question(path), path, x_hivetune_agent="Guard", x_session_id=path)
        id = told.json()["id"]
        assert told.headers["x-hivetune-captured"] == "yes"
        for token, status in (("token-b", 404), ("token-a", 200)):
            more = await stage.post({"input": "And?", "previous_response_id": id}, RESPONSES, token)
            assert more.status_code == status, more.text
            rated = await stage.post({"id": id, "rating": "up"}, "/v1/feedback", token)
            assert rated.status_code == (202 if status == 200 else 404), rated.text
    keyed = {"x-api-key": "token-b"}
    assert (await stage.client.post(MESSAGES, json=question(MESSAGES), headers=keyed)).status_code == 200
    twice = [("x-api-key", "token-a"), ("x-api-key", "token-b")]
    assert (await stage.client.post(MESSAGES, json=question(MESSAGES), headers=twice)).status_code == 400
    unknown = await stage.post({"input": "And?", "previous_response_id": "hive-0"}, RESPONSES)
    assert unknown.status_code == 404 and "hive-0" in problem_of(RESPONSES, unknown)
    rows = [json.loads(row) for _, _, row in stored()]
    assert {row["client"] for row in rows} == {"a", "b"}
    named = {row.get("session_id") for row in rows if row.get("agent") == "guard"}
    assert named == {MESSAGES, RESPONSES, CHAT, GENERATE}
    assert [len(row["messages"]) for row in rows if row["client"] == "b"] == [2]
