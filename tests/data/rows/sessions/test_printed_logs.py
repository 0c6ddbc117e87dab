"""What LM Studio's server, `lms log stream` and LangChain's debug mode print, from file to rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from session_files import read, said

Q, A = "When is low tide?", "At six in the evening."
PLAIN = [("user", Q), ("assistant", A)]
STAMP = "[2025-11-21 18:14:41]"


def requested(question: str = Q) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": question}], "stream": False}
    return f"{STAMP}[DEBUG] Received request: POST to /v1/chat/completions with body  {json.dumps(body, indent=2)}\n"


def predicted(answer: str = A) -> str:
    choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}
    return f"{STAMP}[INFO][m] Generated prediction: {json.dumps(body, indent=2)}\n"


def packet(delta: dict[str, Any], end: str | None = None) -> str:
    body = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
    return f"{STAMP}[INFO][m] Generated packet: {json.dumps(body, indent=2)}\n"


RUNNING = f"{STAMP}[INFO][m] Running chat completion on conversation with 1 messages.\n"
FINISHED = f"{STAMP}[INFO][m] Finished streaming response\n"
EMBEDDED = f'{STAMP}[DEBUG] Received request: POST to /v1/embeddings with body {{\n  "input": ["tide"]\n}}\n'


def log(tmp_path: Path, text: str, name: str = "2025-11-21.1.log") -> list[Any]:
    path = tmp_path / name
    path.write_text(text)
    return [row if isinstance(row, str) else said(row) for row in read(path, tmp_path).values()]


@pytest.mark.parametrize("name", ["server.log", "server.txt"])
def test_lm_studio(tmp_path: Path, name: str) -> None:
    in_packets = packet({"role": "assistant", "content": "At six "}) + packet({"content": "in the evening."})
    text = requested() + RUNNING + predicted() + requested() + in_packets + packet({}, "stop") + FINISHED
    assert log(tmp_path, f"{STAMP}[INFO] Server started.\n{text}", name) == [PLAIN, PLAIN]


def test_lm_studio_that_did_not_answer(tmp_path: Path) -> None:
    """Cut off by the client, without its text, or asked while another call was open."""
    left = f"{STAMP}[INFO][LM STUDIO SERVER] Client disconnected. Stopping generation...\n"
    assert log(tmp_path, requested() + packet({"content": "At"}) + left) == ["no-answer"]
    assert log(tmp_path, requested() + RUNNING + FINISHED) == ["no-answer"]
    both = requested() + requested("And high tide?") + predicted() + predicted("At noon.")
    assert log(tmp_path, both + requested() + predicted()) == ["no-answer", "no-answer", PLAIN]


PROMPT = f"<|im_start|>user\n{Q}<|im_end|>\n<|im_start|>assistant\n"


def streamed(kind: str, text: str, model: str = "m") -> str:
    head = f"timestamp: 9/15/2025, 3:16:39 PM\ntype: llm.prediction.{kind}\nmodelIdentifier: {model}\n"
    return f"{head}{'modelPath: o/m' if kind == 'input' else ''}\n{kind}:\n{text}\n\n"


def test_lms_log_stream(tmp_path: Path) -> None:
    head = "Streaming logs from LM Studio\n\n"
    answer = f"{A}\ninput: is no field here"
    text = head + streamed("input", PROMPT) + streamed("output", answer) + streamed("input", PROMPT)
    assert log(tmp_path, text, "stream.txt") == [[("user", Q), ("assistant", answer)], "no-answer"]
    mixed = streamed("input", PROMPT) * 2 + streamed("output", A) * 2
    assert log(tmp_path, head + mixed) == ["no-answer", "no-answer"]
    apart = streamed("input", PROMPT) + streamed("input", PROMPT, "n") + streamed("output", "No.", "n")
    assert log(tmp_path, head + apart + streamed("output", A)) == [[("user", Q), ("assistant", "No.")], PLAIN]


def run(asked: str, answered: str, crumbs: str = "[llm:ChatX]") -> str:
    outputs = {"generations": [[{"text": answered, "generation_info": {"finish_reason": "stop"}}]], "llm_output": None}
    green = "\x1b[32;1m\x1b[1;3m[llm/start]\x1b[0m \x1b[1m"
    return (
        f"{green}{crumbs} Entering LLM run with input:\n\x1b[0m{json.dumps({'prompts': [asked]}, indent=2)}\n"
        f"[llm/end] {crumbs} [1.20s] Exiting LLM run with output:\n{json.dumps(outputs, indent=2)}\n"
    )


def test_langchain(tmp_path: Path) -> None:
    chain = '[chain/start] [chain:Tides] Entering Chain run with input:\n{\n  "question": "When?"\n}\n'
    asked = f"System: You know tides.\nHuman: {Q}"
    rows = log(tmp_path, chain + run(asked, A) + run(f"Human: {Q}", A), "debug.log")
    assert rows == [[("system", "You know tides."), *PLAIN], PLAIN]
    talk = f"Human: Hi\nAI: Hello.\nHuman: {Q}"
    assert log(tmp_path, chain + run(talk, A)) == [[("user", "Hi"), ("assistant", "Hello."), *PLAIN]]
    failed = run(Q, A).split("[llm/end]")[0] + "[llm/error] [llm:ChatX] [1ms] LLM run errored with error:\n'no route'\n"
    assert log(tmp_path, failed) == ["failed"]
