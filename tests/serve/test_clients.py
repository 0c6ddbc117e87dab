"""The official clients of all APIs against a real gateway with a real llama.cpp: one text, whoever asks for it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from programs import require_program
from serve.hive import Running, stored

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ASKED: Any = [{"role": "user", "content": "hello"}]


def plain(text: str | None) -> str:
    """Return a text up to bytes that are no character, or not yet: what random weights say has some."""
    return (text or "").partition("\ufffd")[0]


def texts_of(running: Running) -> dict[str, str]:
    """Return what each client is told, by its name, whole and streamed."""
    claude = anthropic.Anthropic(base_url=running.url, api_key=running.token, max_retries=0)
    gpt = openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.token, max_retries=0)
    llama = ollama.Client(running.url, headers={"Authorization": f"Bearer {running.token}"})
    short: Any = {"num_predict": 6, "temperature": 0}
    message = claude.messages.create(model="helpdesk", messages=ASKED, max_tokens=6)
    with claude.messages.stream(model="helpdesk", messages=ASKED, max_tokens=6) as stream:
        streamed = "".join(stream.text_stream)
    counted = claude.messages.count_tokens(model="helpdesk", messages=ASKED)
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 6)
    response = gpt.responses.create(model="helpdesk", input="hello", max_output_tokens=6)
    assert response.status == "incomplete" and response.model == message.model == "helpdesk@1"
    with gpt.responses.stream(model="helpdesk", input="hello", max_output_tokens=6) as events:
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert [model.model for model in llama.list().models] == ["helpdesk", "helpdesk@1", "helpdesk@2", "base"]
    shown = llama.show("helpdesk:latest")
    assert "completion" in (shown.capabilities or ()) and (shown.modelinfo or {})["hivetune.context_length"] == 256
    return {
        "chat": running.chat("hello", "helpdesk", max_tokens=6)["choices"][0]["message"]["content"],
        "messages": "".join(block.text for block in message.content if block.type == "text"),
        "messages, streamed": streamed,
        "responses": response.output_text,
        "responses, streamed": said,
        "ollama": llama.chat("helpdesk", ASKED, options=short).message.content or "",
        "ollama, streamed": "".join(
            part.message.content or "" for part in llama.chat("helpdesk", ASKED, stream=True, options=short)
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
