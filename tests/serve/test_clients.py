"""The official clients of all APIs: what they read of the answers of a function, and one text of a real llama.cpp,
whoever asks for it. Imported where they are used: it takes 3 s, and each worker of pytest-xdist reads this file."""

import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from programs import require_program
from serve.hive import Running, stored
from serve.stage import PORT, Stage, on_stage, said
from serve.test_dialects import BEARER, CALL, SAID, SCHEMA, TOOL

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ASKED: Any = {"role": "user", "content": "hello"}


def plain(text: str | None) -> str:
    """Return a text up to bytes that are no character, or not yet: what random weights say has some."""
    return (text or "").partition("\ufffd")[0]


def texts_of(running: Running) -> dict[str, str]:
    """Return what each client is told, by its name, whole and streamed."""
    import anthropic
    import ollama
    import openai

    claude = anthropic.Anthropic(base_url=running.url, api_key=running.token, max_retries=0)
    gpt = openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.token, max_retries=0)
    llama = ollama.Client(running.url, headers={"Authorization": f"Bearer {running.token}"})
    short: Any = {"num_predict": 6, "temperature": 0}
    message = claude.messages.create(model="helpdesk", messages=[ASKED], max_tokens=6)
    with claude.messages.stream(model="helpdesk", messages=[ASKED], max_tokens=6) as stream:
        streamed = "".join(stream.text_stream)
    counted = claude.messages.count_tokens(model="helpdesk", messages=[ASKED])
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 6)
    response = gpt.responses.create(model="helpdesk", input="hello", max_output_tokens=6)
    assert response.status == "incomplete" and response.model == message.model == "helpdesk@1"
    with gpt.responses.stream(model="helpdesk", input="hello", max_output_tokens=6) as events:
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    chunks = list(gpt.chat.completions.create(model="helpdesk", messages=[ASKED], max_tokens=6, stream=True))
    assert {(chunk.system_fingerprint, chunk.id) for chunk in chunks} == {("helpdesk@1", chunks[0].id)}
    assert [model.model for model in llama.list().models] == ["helpdesk", "helpdesk@1", "helpdesk@2", "base"]
    shown = llama.show("helpdesk:latest")
    assert "completion" in (shown.capabilities or ()) and (shown.modelinfo or {})["hivetune.context_length"] == 256
    return {
        "chat": running.chat("hello", "helpdesk", max_tokens=6)["choices"][0]["message"]["content"],
        "chat, streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "messages": "".join(block.text for block in message.content if block.type == "text"),
        "messages, streamed": streamed,
        "responses": response.output_text,
        "responses, streamed": said,
        "ollama": llama.chat("helpdesk", [ASKED], options=short).message.content or "",
        "ollama, streamed": "".join(
            part.message.content or "" for part in llama.chat("helpdesk", [ASKED], stream=True, options=short)
        ),
        "generate": llama.generate("helpdesk", "hello", options=short).response or "",
    }


def test_one_text_for_all_clients(served: Running) -> None:
    before = len(stored())
    texts = texts_of(served)
    assert len({plain(text) for text in texts.values()}) == 1 and plain(texts["chat"]), texts
    rows = [json.loads(row) for _, _, row in stored()[before:]]
    assert len(rows) == len(texts)
    assert {row["messages"][0]["content"] for row in rows} == {"hello"}
    assert {source for _, source, _ in stored()[before:]} == {"gateway:helpdesk@1"}
    assert "hello" not in served.log.read_text()


def test_a_client_in_javascript(served: Running) -> None:
    """The official one after `npm install --no-save --prefix .cache/node openai@7.59.0`, which needs npm's registry."""
    node, package = require_program("node", "nodejs"), ROOT / ".cache" / "node" / "node_modules"
    script = Path(__file__).with_name("client.cjs")
    command = [node, str(script), f"{served.url}/v1", served.token]
    env = {**os.environ, "NODE_PATH": str(package)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["official"] == (package / "openai").exists()
    assert len({plain(text) for text in told["texts"]}) == 1 and plain(told["texts"][0]), told
    assert told["numbers"] == list(range(len(told["numbers"]))) and told["models"] == ["helpdesk@1"] * 3
    assert told["chained"] and told["refused"] == [400, "background"]


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


def clients(stage: Stage) -> tuple[Any, Any, Any]:
    import anthropic
    import ollama
    import openai

    url = f"http://127.0.0.1:{PORT}"
    theirs = httpx2.AsyncClient(transport=httpx2.ASGITransport(stage.guard))
    return (
        anthropic.AsyncAnthropic(base_url=url, api_key="token-a", http_client=theirs, max_retries=0),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="token-a", http_client=theirs, max_retries=0),
        ollama.AsyncClient(url, headers=BEARER, transport=httpx.ASGITransport(stage.guard)),
    )


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
    import anthropic
    import ollama

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
