"""A server of the chat API that answers as a test says: real HTTP on a free port of this machine."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """A reply: status, content type, body. `cut`: the connection closes before the end of the body."""

    body: bytes
    kind: str = "application/json"
    status: int = 200


def chat_reply(text: str, *, finish: str | None = "stop", tokens: int | None = 3) -> Reply:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    return Reply(json.dumps({"choices": [choice], **usage}).encode())


@dataclass
class FakeServer:
    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def fake_server(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[FakeServer]:
    found = FakeServer("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.asked.append({"path": self.path, **body})
            found.headers.append(dict(self.headers))
            reply = answer(body)
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
