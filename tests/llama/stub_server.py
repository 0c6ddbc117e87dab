"""Plays `llama-server` without a model, with the real one's arguments: at once, and badly when the question says so.

A file `die` beside it ends it while it loads. The last message names the behaviour; anything else gets "ok".
"""

import asyncio
import json
import os
import sys
from typing import Any

CHUNK = {"object": "chat.completion.chunk", "created": 0, "model": "stub"}


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({**CHUNK, "choices": [choice]}).encode() + b"\n\n"


def answer(text: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"object": "chat.completion", "created": 0, "model": "stub", "choices": [choice], "usage": usage}


def head(status: int, kind: str, size_bytes: int | None) -> bytes:
    length = "Transfer-Encoding: chunked" if size_bytes is None else f"Content-Length: {size_bytes}"
    return f"HTTP/1.1 {status} Said\r\nContent-Type: {kind}\r\n{length}\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def say(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(head(status, "application/json", len(body)) + body)
    await writer.drain()


async def stream(writer: asyncio.StreamWriter, question: str) -> None:
    writer.write(head(200, "text/event-stream", None) + chunk(event("ok")))
    if question == "cut":
        writer.transport.abort()
        return
    odd = {"nonsense": b"[1, 2]", "calls": b'{"choices": [{"delta": {"tool_calls": 5}}]}'}
    if question in odd:
        writer.write(chunk(b"data: " + odd[question] + b"\n\n"))
    if question == "idle":
        await writer.drain()
        await asyncio.Event().wait()
    if question == "early":
        writer.write(chunk(b""))
        return
    while question == "flood":
        writer.write(chunk(event("x" * 8000)))
        await writer.drain()
    writer.write(chunk(event("", "stop")) + chunk(b"data: [DONE]\n\n") + chunk(b""))
    await writer.drain()


async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        size_bytes = 0
        while (header := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                size_bytes = int(value)
        body = json.loads(await reader.readexactly(size_bytes) or b"{}")
        if not line.startswith(b"POST"):
            await say(writer, 200, b'{"status": "ok"}')
            continue
        if line.startswith(b"POST /tokenize"):
            await say(writer, 200, json.dumps({"tokens": [0] * (len(body["content"]) // 4)}).encode())
            continue
        question = body["messages"][-1]["content"]
        if question == "die":
            os._exit(1)
        elif question == "hang":
            await reader.read()  # until the client goes
        elif question == "fail":
            await say(writer, 500, b'{"error": {"message": "out of luck"}}')
        elif body.get("stream"):
            await stream(writer, question)
        else:
            odd = {"garbage": b"<html>", "nonsense": b'{"choices": 5}', "list": b"[]", "deep": b"[" * 100_000}
            odd["calls"] = b'{"choices": [{"message": {"tool_calls": 5}}]}'
            await say(writer, 200, odd.get(question) or json.dumps(answer("ok")).encode())


async def main() -> None:
    server = await asyncio.start_unix_server(converse, sys.argv[sys.argv.index("--host") + 1], backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    if "--version" in sys.argv:
        sys.exit("version: 99999 (stub)")
    if os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "die")):
        sys.exit("stub: the tensors are missing")
    asyncio.run(main())
