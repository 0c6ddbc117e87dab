"""Faults around a gateway: clients that vanish, servers that fail, a full disk. It stays up, and reports each in the
form of the API. The model server is a stand-in that misbehaves on request."""

import json
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from serve.hive import Running, add_release, gateway, stored, stub_on_path, wait_until

from hivetune.serve.capture import Capture, CapturedAnswer, Feedback

pytestmark = pytest.mark.slow


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "helpdesk", "messages": [{"role": "user", "content": text}], **more}


def ask(client: httpx2.Client, text: str, **more: Any) -> httpx2.Response:
    return client.post("/v1/chat/completions", json=body(text, **more))


def stranger(running: Running, raw: bytes, size: int = 0, token: str = "") -> socket.socket:
    """Open a connection that has sent a request, or its beginning, and reads nothing."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    found = socket.create_connection((host, int(port)), 30)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Authorization: Bearer {token or running.token}\r\nContent-Length: {size or len(raw)}\r\n\r\n"
    )
    found.sendall(head.encode() + raw)
    return found


def running_requests(running: Running) -> float:
    return running.metric("hivetune_running_requests") + running.metric("hivetune_waiting_requests")


def outcomes(running: Running) -> Counter[str]:
    """Return how many answers had each outcome."""
    names = ("ok", "error", "broken_stream", "client_gone")
    return Counter({name: int(running.metric(f'hivetune_answers_total{{outcome="{name}"')) for name in names})


def test_servers_that_answer_nonsense_or_fail(stubbed: Running) -> None:
    before, rows = outcomes(stubbed), len(stored())
    with stubbed.client() as client:
        for text in ("garbage", "nonsense", "calls", "list", "deep", "fail"):
            answer = ask(client, text)
            assert answer.status_code == 502 and answer.json()["error"]["type"] == "server_error", (text, answer.text)
        assert "out of luck" in answer.json()["error"]["message"]
        for text in ("cut", "nonsense", "calls", "early"):
            with client.stream("POST", "/v1/chat/completions", json=body(text, stream=True)) as stream:
                events = [line for line in stream.iter_lines() if line]
            assert "error" in json.loads(events[-1].removeprefix("data: ")), (text, events)
        assert outcomes(stubbed) - before == {"broken_stream": 4, "error": 6}  # each counts against the release
        lone = client.post("/v1/chat/completions", content=json.dumps(body("\ud800")))
        assert lone.status_code == 200
        rated = client.post("/v1/feedback", content=json.dumps({"id": lone.json()["id"], "correction": "\ud800 ok"}))
        assert rated.status_code == 202
        assert ask(client, "hello").status_code == 200
        wait_until(lambda: len(stored()) == rows + 2)  # what was hostile held nothing up
        wait_until(lambda: "? ok" in stored()[rows][2])
    assert stubbed.process.poll() is None


def test_clients_that_vanish_give_their_slots_back(stubbed: Running) -> None:
    before = outcomes(stubbed)
    for content in (body("hang"), body("idle", stream=True)):
        gone = [stranger(stubbed, json.dumps(content).encode()) for _ in range(5)]  # of two slots: three wait
        wait_until(lambda: running_requests(stubbed) == 5)
        for connection in gone:
            connection.close()
        wait_until(lambda: running_requests(stubbed) == 0, timeout_s=10)
    wait_until(lambda: outcomes(stubbed) - before == {"client_gone": 10})
    with stubbed.client() as client:
        assert ask(client, "hello").status_code == 200
    assert "Traceback" not in stubbed.log.read_text()


def test_who_sends_on_while_refused_still_reads_why(stubbed: Running) -> None:
    """A connection that is closed with unread bytes is reset, and the client may lose the answer."""
    for token, size, status in (("", 1 << 30, 413), ("nobody's", 6 << 20, 401)):
        with stranger(stubbed, b"", size, token) as sender:
            for _ in range(6):
                sender.sendall(bytes(1 << 20))
            assert sender.recv(12) == f"HTTP/1.1 {status}".encode()


def test_a_body_of_a_gigabyte_is_refused_before_it_is_read(stubbed: Running, tmp_path: Path) -> None:
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(1 << 30)
    url = f"{stubbed.url}/v1/chat/completions"
    for extra in ([], ["-H", "Transfer-Encoding: chunked"], ["-H", "Expect:"]):
        curl = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-T", str(large), "-X", "POST", *extra, url]
        done = subprocess.run([*curl, "-H", f"Authorization: Bearer {stubbed.token}"], capture_output=True, text=True)
        assert done.stdout == "413", (extra, done)
    assert psutil.Process(stubbed.process.pid).memory_info().rss < 400 << 20


def test_a_server_that_dies_or_hangs_is_replaced(stubbed: Running) -> None:
    with stubbed.client() as client:
        (first,) = stubbed.backends()
        assert ask(client, "die").status_code == 502  # tried three times, each time fatal
        assert ask(client, "hello").status_code == 200
        assert stubbed.metric("hivetune_backend_restarts") >= 1 and first not in stubbed.backends()


def test_a_port_in_use_and_a_server_that_dies_while_loading(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stub_on_path(tmp_path))
    add_release(tmp_path, "helpdesk", 1, champion=True)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "hivetune", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 75 and f"port {port} of 127.0.0.1 is in use" in done.stderr
        assert "--port" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "stub" / "die").touch()
    command = [sys.executable, "-m", "hivetune", "serve", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["token"], "the first try, which could not listen, took it"
        with Running(process, said["url"], said["token"], tmp_path / "log").client() as client:
            wait_until(lambda: "the tensors are missing" in client.get("/health").text)
            answer = ask(client, "hello")
            assert answer.status_code == 503 and "retry-after" in answer.headers
            assert "the tensors are missing" in answer.json()["error"]["message"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def entry(number: int) -> CapturedAnswer:
    return CapturedAnswer(
        f"hive-{number}", "a@1", [{"role": "user", "content": "x" * 20_000}], {"role": "assistant", "content": "y"}
    )


def test_a_full_disk_loses_nothing_that_was_captured_and_counts_the_rest(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(small_disk))
    capture = Capture()
    for number in range(10):
        capture.put(entry(number))
    wait_until(lambda: capture.captured == 10)
    filler = small_disk / "filler"
    filler.write_bytes(b"")
    with open(filler, "ab", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            pass
    for number in range(10, 40):
        capture.put(entry(number))
    wait_until(lambda: capture.captured + capture.left_out == 40)
    assert capture.left_out > 0 and capture.problem
    filler.unlink()
    capture.put(entry(40))
    capture.put(Feedback("hive-3", "", "down"))
    capture.close()
    rows = stored("id, feedback")
    assert len(rows) == len({row[0] for row in rows}) == capture.captured
    assert dict(rows)["hive-3"] == -1 and "hive-40" in dict(rows) and capture.problem == ""


def test_a_run_that_trains_gets_the_card_and_the_gateway_goes_on_without(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is only a name; the leases are the kernel's, between real processes."""
    monkeypatch.setenv("PATH", stub_on_path(tmp_path))
    add_release(tmp_path, "helpdesk", 1, champion=True)
    code = "from hivetune.process.lease import train_on; train_on('cuda:7'); print('mine', flush=True); input()"
    with gateway(tmp_path / "log", "--card", "cuda:7") as running, running.client() as client:
        (on_card,) = running.backends()
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout is not None and trainer.stdout.readline() == b"mine\n"
            wait_until(lambda: not psutil.pid_exists(on_card))  # reaped a moment after its lease is gone
            assert ask(client, "hello").status_code == 200
            (on_cpu,) = running.backends()
            trainer.kill()
        wait_until(lambda: running.backends() and on_cpu not in running.backends()[-1:])
        assert ask(client, "hello").status_code == 200
