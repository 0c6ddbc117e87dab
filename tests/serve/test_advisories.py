"""Published advisories of this field, replayed against the gateway: none may succeed. A new one becomes a case here.

Most run in one process, against a model server that is a function. Those about files are in tests/llama/hostile.py,
those about models in tests/models; the last test counts all of them.
"""

import json
import os
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial, reduce
from pathlib import Path
from typing import Any

import h11
import pytest
from llama.hostile import hostile_files
from serve.stage import CHAT, PORT, QUESTION, Stage, said
from starlette.routing import Route

from hivetune.base.database import open_database
from hivetune.base.disk import problems_since_last_read, write_manifest
from hivetune.errors import UsageError
from hivetune.process.sandbox import named_environment
from hivetune.release.registry import check_release_name, find
from hivetune.serve.capture import Capture
from hivetune.serve.guard import OPEN

Case = Callable[[Stage], Awaitable[None]]
CASES: dict[str, Case] = {}
BEARER = {"Authorization": "Bearer token-a"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "X-ANY")


def replays(*advisories: str) -> Callable[[Case], Case]:
    """Register a case under the advisories that it replays."""

    def keep(case: Case) -> Case:
        CASES.update(dict.fromkeys(advisories, case))
        return case

    return keep


def paths(stage: Stage) -> list[tuple[str, set[str]]]:
    """Return every route of the gateway with its methods, and one unknown path."""
    routes = [route for route in stage.gateway.app().routes if isinstance(route, Route)]
    return [*((route.path.replace("{name:path}", "base"), set(route.methods or ())) for route in routes), ("/x", set())]


async def raw(stage: Stage, headers: list[tuple[bytes, bytes]], path: str = CHAT, method: str = "POST") -> int:
    """Return the status of a request whose headers no client library would send."""
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", PORT)}
    sent: list[Any] = []
    body = [{"type": "http.request", "body": json.dumps(QUESTION).encode(), "more_body": False}]

    async def receive() -> Any:
        return body.pop() if body else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await stage.guard(scope, receive, send)
    return int(sent[0]["status"])


def headers(*more: tuple[bytes, bytes], host: bytes | None = b"127.0.0.1:8642") -> list[tuple[bytes, bytes]]:
    own = [] if host is None else [(b"host", host)]
    return [*own, (b"authorization", b"Bearer token-a"), *more]


# Fields that are refused by their names.
DEEP: dict[str, Any] = reduce(lambda schema, _: {"items": schema}, range(200), {})
PARTS = (
    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
    {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1:1\\@evil/"}},
    {"type": "file", "file": {"file_id": "file:///etc/passwd"}},
    {"type": "text", "text": "x", "image_url": {"url": "x"}},
)
FIELDS: dict[tuple[str, ...], list[tuple[str, Any]]] = {
    ("CVE-2026-21869", "ggml-org/llama.cpp#24786"): [("n_discard", value) for value in (-1, -(2**31), 2**31 - 1)],
    ("ggml-org/llama.cpp#22234",): [
        ("grammar", "root ::= " + "(" * 10_000),
        ("json_schema", {}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": DEEP}}),
    ],
    ("vLLM and llama.cpp: answers that fill memory (logprobs, n, lengths)",): [
        ("top_logprobs", 100_000),
        ("n_probs", 100_000),
        ("n", 1000),
        ("max_tokens", 2**40),
    ],
    ("CVE-2024-34359", "CVE-2026-5760", "CVE-2026-1868"): [
        ("chat_template", "{{ ''.__class__.__mro__ }}"),
        ("chat_template_kwargs", {"x": "{{ 7*7 }}"}),
    ],
    # Nothing is fetched for a request, so there is no parser of addresses to deceive.
    ("CVE-2026-22778", "CVE-2026-45400", "CVE-2025-61784"): [
        ("messages[0].content[0]", [{"role": "user", "content": [part]}]) for part in PARTS
    ],
}


async def _refuses(fields: list[tuple[str, Any]], stage: Stage) -> None:
    for field, value in fields:
        answer = await stage.ask(**{field.partition("[")[0]: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(field), answer.text
    assert stage.asked == []
    for text in ("{{ 7*7 }}", "{% for a in range(9**9) %}{% endfor %}"):
        assert (await stage.ask(messages=[{"role": "user", "content": text}])).status_code == 200
        assert stage.asked.pop()[1]["messages"][0]["content"] == text  # a text is a text


for advisories, fields in FIELDS.items():
    replays(*advisories)(partial(_refuses, fields))


@replays("CVE-2026-43631", "CVE-2024-42477", "CVE-2024-42478", "CVE-2024-42479")
async def variables_of_a_shell(stage: Stage) -> None:
    """One needs a server that sleeps; an RPC server gets the model; a backend path loads code."""
    bad = [f"LLAMA_ARG_{name}" for name in ("SLEEP_IDLE_SECONDS", "RPC", "HOST", "PORT", "LORA", "MODEL_URL")]
    bad += ["LD_PRELOAD", "GGML_BACKEND_PATH", "GGML_RPC", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"]
    good = ["PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LC_ALL", "HIVETUNE_HOME"]
    made = named_environment(dict.fromkeys([*bad, *good], "1"), OMP_WAIT_POLICY="PASSIVE")
    assert set(made) == {*good, "OMP_WAIT_POLICY"}


@replays("CVE-2026-48710", "CVE-2026-42271")
async def bad_hosts(stage: Stage) -> None:
    odd = [
        b"127.0.0.1:8642" + tail for tail in (b"/x?y=", b"?x", b"#x", b"\tx", b"/", b"@evil", b"\\x", b" ", b".", b":1")
    ]
    odd += [b"evil@127.0.0.1:8642", b"127.0.0.1:8642,evil", b"127.0.0.1", b"evil", b"", b"[::1", b"\xff"]
    for path, _ in paths(stage):
        for host in odd:
            assert await raw(stage, headers(host=host), path, "GET") == 421, (path, host)
        assert await raw(stage, headers(host=None), path, "GET") == 421
    assert stage.asked == []


@replays("CVE-2025-62593", "CVE-2025-14279", "CVE-2026-2611")
async def pages_of_other_sites(stage: Stage) -> None:
    for path, methods in paths(stage):
        for origin in ("http://evil.example", "null", "http://127.0.0.1:8643", "http://127.0.0.1:8642.evil.example"):
            answer = await stage.client.request(
                min(methods, default="GET"), path, headers={**BEARER, "Origin": origin}, json=QUESTION
            )
            assert answer.status_code == 403, (path, origin)
            assert "access-control-allow-origin" not in answer.headers


@replays("CVE-2026-27482")
async def every_method_on_every_path(stage: Stage) -> None:
    for path, methods in paths(stage):
        for method in METHODS:
            for extra in ({}, {"X-HTTP-Method-Override": "DELETE"}):
                answer = await stage.client.request(method, path, headers={**BEARER, **extra}, content=b"")
                allowed = method in methods and answer.status_code in (200, 400, 503)
                assert allowed or answer.status_code in (404, 405), (path, method, answer.status_code)
    assert stage.asked == []


@replays("CVE-2026-0545", "CVE-2026-44556")
async def no_path_forgets_the_token(stage: Stage) -> None:
    for path, methods in paths(stage):
        for method in methods or {"GET"}:
            for token in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic eDp5"}, {"Cookie": "hivetune=x"}):
                answer = await stage.client.request(method, path, headers=token, json=QUESTION)
                assert answer.status_code == 401 or path in OPEN, (path, method, token)
    assert stage.asked == []


@replays("CVE-2026-2651")
async def multipart_bodies(stage: Stage) -> None:
    answer = await stage.client.post(CHAT, headers=BEARER, files={"file": ("../../x", b"{}")})
    assert answer.status_code == 400 and stage.asked == []


@replays("CVE-2026-2614", "CVE-2024-37032")
async def names_that_are_paths(stage: Stage) -> None:
    for name in ("../x", "file:///etc/passwd", "a/b", "a\\b", "a\0b", ".", "..", "%2e%2e", "A", "a" * 65, "\uff0e", ""):
        with pytest.raises(UsageError):
            check_release_name(name)
        answer = await stage.ask(model=name or "x")
        assert answer.status_code in (400, 404) and stage.asked == []
    for path in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/chat.js/../../../etc/passwd"):
        assert (await stage.client.get(path, headers=BEARER)).status_code == 404
    with closing(open_database()) as database:
        for name in ("helpdesk@\u00b2", "helpdesk@" + "9" * 5000, "helpdesk@\u0663", "helpdesk@-1", "helpdesk@1.0"):
            with pytest.raises(UsageError):
                find(database, name)


@replays("CVE-2026-45349", "CVE-2026-45671")
async def another_clients_answer(stage: Stage) -> None:
    answer = (await stage.ask(metadata={"session_id": "s"})).json()["id"]
    body = {"id": answer, "rating": "down", "correction": "poison"}
    stage.gateway.capture = Capture()
    assert (await stage.post(body, "/v1/feedback", token="token-b")).status_code == 404
    await stage.ask_as("token-b", X_Session_Id="s")
    assert stage.asked[0][1]["id_slot"] != stage.asked[1][1]["id_slot"]


@replays("request smuggling: RFC 9112, 6.3")
async def two_lengths(stage: Stage) -> None:
    """The parser of the server refuses what a proxy could read differently; the guard sees the size."""
    for odd in (b"Content-Length: 10\r\nContent-Length: 11", b"Host: evil", b"Transfer-Encoding: x"):
        parser = h11.Connection(h11.SERVER)
        parser.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\n" + odd + b"\r\n\r\n")
        with pytest.raises(h11.RemoteProtocolError):
            parser.next_event()
    for size in (b"-1", b"+5", b"1_0", b"\xb2", b"9" * 5000, b"0x10", b""):
        assert await raw(stage, headers((b"content-length", size))) == 413, size


@replays("CVE-2025-46570")  # timing of a shared prefix cache; also PromptPeek, KeyPooling
async def anothers_prefix(stage: Stage) -> None:
    for token in ("token-a", "token-b", "token-a", "token-a", "token-a"):
        assert (await stage.ask_as(token)).status_code == 200
    cached = [body["cache_prompt"] for _, body in stage.asked]
    slots = [body["id_slot"] for _, body in stage.asked]
    assert slots == [0, 1, 0, 0, 0] and cached == [False, False, True, True, True]


@replays("a release that is changed after its verdict")
async def changed_after_the_verdict(stage: Stage) -> None:
    """The time of a file can be set back; that of its inode can't."""
    folder = Path(os.environ["HIVETUNE_HOME"]) / "release"
    folder.mkdir(parents=True)
    adapter = folder / "adapter.gguf"
    adapter.write_bytes(b"what was judged")
    write_manifest(folder)
    times = os.stat(adapter)
    adapter.write_bytes(b"what is served!")
    os.utime(adapter, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert os.stat(adapter).st_mtime_ns == times.st_mtime_ns
    assert problems_since_last_read(folder) == ["adapter.gguf: its hash is not the recorded one"]


@replays("a prompt of megabytes holds up everybody")
async def prompts_of_megabytes(stage: Stage) -> None:
    for messages in ([{"role": "user", "content": "word " * 400_000}], [{"role": "user", "content": "x"}] * 50_000):
        answer = await stage.ask(messages=messages)
        assert answer.status_code == 400 and "context" in answer.text
    assert stage.asked == []


@replays("WebSockets go around what checks requests")
async def websockets(stage: Stage) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await stage.guard({"type": "websocket", "path": CHAT, "headers": headers()}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize("advisory", CASES)
def test_it_does_not_succeed(advisory: str) -> None:
    """Besides, other clients are answered afterwards, and no release is withdrawn."""
    afterwards: list[int] = []

    async def attack(stage: Stage) -> None:
        await CASES[advisory](stage)
        stage.gateway.capture, stage.answer = None, lambda path, body: said()
        afterwards.append((await stage.ask_as("token-b")).status_code)

    stage = Stage()
    stage.play(attack)
    assert afterwards == [200] and stage.rolled_back == []


# Those of models and checkpoints need torch, and are replayed beside the code that reads them.
ELSEWHERE = {
    "CVE-2026-4372": ("models/worker/test_prepare_model.py", "test_no_code_is_loaded_that_a_config_names"),
    "CVE-2025-32434": ("models/worker/test_prepare_model.py", "test_a_pickle_is_never_opened"),
    "CVE-2026-1839": ("models/worker/test_prepare_model.py", "test_a_pickle_is_never_opened"),
}


def test_how_many_are_replayed() -> None:
    published = {
        name.split()[0] for name in hostile_files() if name.split()[0].startswith(("CVE", "GHSA", "llama.cpp-"))
    }
    published |= {name for name in CASES if name.startswith(("CVE", "ggml-org/")) and " " not in name}
    for advisory, (file, test) in ELSEWHERE.items():
        source = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        assert advisory in source.partition(f"def {test}(")[2].partition("\ndef ")[0]
        published.add(advisory)
    assert len(published) >= 36, sorted(published)
