"""The APIs of Anthropic, of OpenAI's Responses and of Ollama: what of a request reaches the model server, what is
refused by its name, and what the official clients read of an answer. The model server is a function here."""

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest
from serve.hive import stored
from serve.stage import PORT, Stage, on_stage, said

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
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


USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


def thinks_and_calls(path: str, body: dict[str, Any]) -> httpx2.Response:
    """Answer with a thought, a text and a call, as llama.cpp does."""
    assert body["reasoning_format"] == "auto"
    if not body.get("stream"):
        choice = {"finish_reason": "tool_calls", "message": {**SAID, "tool_calls": [CALL]}}
        return httpx2.Response(200, json={"choices": [choice], "usage": USAGE})
    begin = {"index": 0, "id": "call_1", "function": {"name": "Read", "arguments": '{"path"'}}
    deltas: list[dict[str, Any]] = [{"reasoning_content": "A "}, {"reasoning_content": "file."}]
    deltas += [{"content": "Let me"}, {"content": " see."}, {"tool_calls": [begin]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": ': "a.py"}'}}]}]
    pieces: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    pieces += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}, {"choices": [], "usage": USAGE}]
    lines = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces)
    return httpx2.Response(200, content=f"{lines}data: [DONE]\n\n".encode())


def clients(stage: Stage) -> tuple[anthropic.AsyncAnthropic, openai.AsyncOpenAI, ollama.AsyncClient]:
    url = f"http://127.0.0.1:{PORT}"
    theirs = httpx2.AsyncClient(transport=httpx2.ASGITransport(stage.guard))
    return (
        anthropic.AsyncAnthropic(base_url=url, api_key="token-a", http_client=theirs, max_retries=0),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="token-a", http_client=theirs, max_retries=0),
        ollama.AsyncClient(url, headers=BEARER, transport=httpx.ASGITransport(stage.guard)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@on_stage(answer=thinks_and_calls)
async def test_the_official_clients_read_thoughts_texts_and_calls(stage: Stage, stream: bool) -> None:
    claude, gpt, llama = clients(stage)
    sent: dict[str, Any] = {"model": "helpdesk", "messages": [ASKED], "max_tokens": 64}
    if stream:
        async with claude.messages.stream(**sent) as told:
            message = await told.get_final_message()
    else:
        message = await claude.messages.create(**sent)
    thought, text, call = message.content
    assert (thought.thinking, text.text) == ("A file.", "Let me see.")
    assert (call.id, call.name, call.input) == ("call_1", "Read", {"path": "a.py"})
    assert (message.stop_reason, message.model) == ("tool_use", "helpdesk@1")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (5, 4)
    assert message.usage.output_tokens == 5

    if stream:
        async with gpt.responses.stream(model="helpdesk", input="hello") as answering:
            numbers = [event.sequence_number async for event in answering]
            response = await answering.get_final_response()
        assert numbers == list(range(len(numbers)))
    else:
        response = await gpt.responses.create(model="helpdesk", input="hello")
    reasoning, said_, called = response.output
    assert reasoning.summary[0].text == "A file." and response.output_text == said_.content[0].text == "Let me see."
    assert (called.call_id, called.name, called.arguments) == ("call_1", "Read", '{"path": "a.py"}')
    assert (response.status, response.model, response.usage.total_tokens) == ("completed", "helpdesk@1", 14)
    assert response.usage.input_tokens_details.cached_tokens == 4

    answer: Any = await llama.chat("helpdesk", [ASKED], stream=stream)
    parts = [part async for part in answer] if stream else [answer]
    assert "".join(part.message.thinking or "" for part in parts) == "A file."
    assert "".join(part.message.content for part in parts) == "Let me see."
    ((called,),) = [part.message.tool_calls for part in parts if part.message.tool_calls]
    assert (called.function.name, called.function.arguments) == ("Read", {"path": "a.py"})
    last = parts[-1]
    assert (last.done, last.done_reason, last.model, last.prompt_eval_count) == (True, "stop", "helpdesk@1", 9)
    written: Any = await llama.generate("helpdesk", "hello", stream=stream)
    wrote = [part async for part in written] if stream else [written]
    assert "".join(part.response for part in wrote) == "Let me see." and wrote[-1].eval_count == 5


def broken(path: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.Response(200, content=b'data: {"choices": [{"delta": {"content": "ok"}}]}\n\ndata: {"error": {}}\n\n')


@on_stage(answer=broken)
async def test_a_stream_that_breaks_off_says_so(stage: Stage) -> None:
    claude, gpt, llama = clients(stage)
    with pytest.raises(anthropic.APIStatusError, match="model server failed"):
        async with claude.messages.stream(model="helpdesk", messages=[ASKED], max_tokens=5) as told:  # type: ignore[list-item]
            await told.get_final_message()
    events = [event async for event in await gpt.responses.create(model="helpdesk", input="hello", stream=True)]
    assert events[-1].type == "response.failed" and "model server failed" in events[-1].response.error.message
    with pytest.raises(ollama.ResponseError, match="model server failed"):
        async for _ in await llama.chat("helpdesk", [ASKED], stream=True):
            pass


# An agent's session: a question, a call with its result, another question. Each request repeats what was before it.
GO_ON: Any = {"role": "user", "content": "Go on."}
FUNCTION = {"type": "function", "name": "Read", "parameters": SCHEMA}


async def of_claude(stage: Stage) -> None:
    claude = clients(stage)[0]
    history: list[Any] = [ASKED]
    tools: Any = [{"name": "Read", "input_schema": SCHEMA}]
    for number in range(3):
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: {number};"},
            {"type": "text", "text": "Be brief."},
        ]
        told = await claude.messages.create(model="", system=system, messages=history, tools=tools, max_tokens=9)
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "x = 1"}
        asked = [GO_ON, {"role": "user", "content": [result]}, GO_ON][number]
        history += [{"role": "assistant", "content": told.content}, asked]


async def of_codex(stage: Stage) -> None:
    gpt = clients(stage)[1]
    history: list[Any] = [ASKED]
    for number in range(3):
        told = await gpt.responses.create(input=history, instructions="Be brief.", tools=[FUNCTION])  # type: ignore[call-overload]
        result = {"type": "function_call_output", "call_id": "call_1", "output": "x = 1"}
        history += [*(item.model_dump() for item in told.output), [GO_ON, result, GO_ON][number]]


async def of_a_chain(stage: Stage) -> None:
    """Only what is new is sent: the gateway has the rest."""
    gpt = clients(stage)[1]
    previous = None
    result = {"type": "function_call_output", "call_id": "call_1", "output": "x = 1"}
    for asked in (ASKED, GO_ON, result):
        told = await gpt.responses.create(
            input=[asked],
            instructions="Be brief.",
            tools=[FUNCTION],
            previous_response_id=previous,  # type: ignore[call-overload]
        )
        previous = told.id


async def of_ollama(stage: Stage) -> None:
    llama = clients(stage)[2]
    history: list[Any] = [{"role": "system", "content": "Be brief."}, ASKED]
    for number in range(3):
        told = await llama.chat("helpdesk", history, tools=[TOOL])
        result = {"role": "tool", "tool_name": "Read", "content": "x = 1"}
        history += [told.message, [GO_ON, result, GO_ON][number]]


async def of_a_chat(stage: Stage) -> None:
    gpt = clients(stage)[1]
    history: list[Any] = [{"role": "system", "content": "Be brief."}, ASKED]
    for number in range(3):
        told = await gpt.chat.completions.create(model="helpdesk", messages=history, tools=[TOOL])  # type: ignore[call-overload]
        result = {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"}
        history += [told.choices[0].message, [GO_ON, result, GO_ON][number]]


@pytest.mark.slow
@pytest.mark.parametrize("session", [of_claude, of_codex, of_a_chain, of_ollama, of_a_chat])
@on_stage(captures=True)
async def test_a_session_is_one_row_with_its_calls(stage: Stage, session: Callable[[Stage], Awaitable[None]]) -> None:
    called = {"finish_reason": "tool_calls", "message": {"role": "assistant", **SAID, "tool_calls": [CALL]}}
    answers = [said("Hello."), httpx2.Response(200, json={"choices": [called]}), said("x is 1.")]
    stage.answer = lambda path, body: answers[len(stage.asked) - 1]
    await session(stage)
    rows = [json.loads(row) for _, _, row in stored()]
    roles = [message["role"] for message in rows[2]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
    assert rows[2]["messages"] == [*stage.asked[2][1]["messages"], {"role": "assistant", "content": "x is 1."}]
    assert rows[2]["messages"][4] == {**rows[1]["messages"][4], "tool_calls": rows[2]["messages"][4]["tool_calls"]}
    report = check(DataConfig(path="store", also_train=["own_answers"])).document
    assert (report["rows_in"], report["beginnings"], report["usable"]) == (3, 2, 1), report


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
