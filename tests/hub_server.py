"""A loopback stand-in for the Hugging Face Hub: one model from a local folder, by the addresses its client asks for."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_model(
    repository: str,
    folder: Path,
    *,
    gated: bool = False,
    headers: list[dict[str, str]] | None = None,
    pause_s: float = 0.0,
) -> Iterator[tuple[str, list[str]]]:
    """(endpoint, the paths that were asked for). `headers` gets those of each request. `pause_s`: before the first
    answer."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            time.sleep(0.0 if asked else pause_s)
            asked.append(f"{self.command} {path}")
            if headers is not None:
                headers.append({name.lower(): value for name, value in self.headers.items()})
            if gated:
                return self.reply(403, {"X-Error-Code": "GatedRepo"}, b"{}", with_body)
            if path.startswith(f"/api/models/{repository}"):
                rest = path.removeprefix(f"/api/models/{repository}")
                body = tree(folder) if rest.startswith("/tree/") else describe(repository, folder)
                return self.reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode(), with_body)
            file = folder / path.removeprefix(f"/{repository}/resolve/{COMMIT}/")
            if path.startswith(f"/{repository}/resolve/") and file.is_file():
                data = file.read_bytes()
                fields = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return self.reply(200, fields, data, with_body)
            return self.reply(404, {"X-Error-Code": "RepoNotFound"}, b"{}", with_body)

        def reply(self, status: int, fields: dict[str, str], body: bytes, with_body: bool) -> None:
            self.send_response(status)
            for name, value in {**fields, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def describe(repository: str, folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {
        "_id": "1",
        "id": repository,
        "sha": COMMIT,
        "private": False,
        "gated": False,
        "tags": [],
        "siblings": [{"rfilename": path.name, "size": path.stat().st_size, "blobId": "0" * 40} for path in files],
    }


def tree(folder: Path) -> list[dict[str, Any]]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40} for path in files]
