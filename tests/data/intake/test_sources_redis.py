"""Redis Streams against real servers: what is acknowledged and when, whose entries are taken over, what is refused."""

import json
import socket
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from collecting import RedisServer, collect_now, free_port, row, total
from programs import require_program

from hivetune.base.database import open_database
from hivetune.data.intake import collect as collecting_module
from hivetune.data.intake.reader import rows_of_cells
from hivetune.data.intake.streams import RedisReader
from hivetune.data.reasons import RowRefused
from hivetune.errors import MachineNotFit, UsageError

TWO = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "yes"}]} for q in ("is it?", "why?")
]
# Fields of an entry, the field that the user names, and its rows or the reason why it has none.
ENTRIES: list[tuple[dict[str, Any], str | None, Any]] = [
    ({"data": '{"prompt": "a"}'}, None, [{"prompt": "a"}]),
    ({"payload": '{"prompt": "a"}', "user_id": "u"}, None, [{"prompt": "a", "user_id": "u"}]),
    ({"prompt": "a", "completion": "b"}, None, [{"prompt": "a", "completion": "b"}]),
    ({"prompt": "a", "messages": '[{"role": "user"}]'}, None, [{"prompt": "a", "messages": [{"role": "user"}]}]),
    ({"prompt": "42", "completion": "{no"}, None, [{"prompt": "42", "completion": "{no"}]),
    ({"row": '{"prompt": "a"}', "other": "x"}, "row", [{"prompt": "a"}]),
    # As in a file: stored whole, nothing would read them.
    ({"data": json.dumps(TWO)}, None, TWO),
    ({"other": "x", "log": json.dumps(TWO)}, "log", TWO),
    ({"user_id": "u", "data": json.dumps(TWO)}, None, [{"user_id": "u", **one} for one in TWO]),
    ({"data": "{oops"}, None, "bad-json"),
    ({"data": "[1]"}, None, "bad-json"),
    ({"other": "{}"}, "row", "bad-json"),
    ({"prompt": b"\xff"}, None, "bad-characters"),
]


@pytest.mark.parametrize(("fields", "field", "expected"), ENTRIES)
def test_the_rows_in_an_entry(fields: dict[str, Any], field: str | None, expected: Any) -> None:
    cells = {name: value.encode() if isinstance(value, str) else value for name, value in fields.items()}
    try:
        found: Any = rows_of_cells(cells, field)
    except RowRefused as refused:
        found = refused.reason
    assert found == expected


def reader_of(server: RedisServer, **options: Any) -> RedisReader:
    return RedisReader(f"{server.url}?stream=chats", **options)


def collect_with(reader: RedisReader) -> int:
    collected = collecting_module.collect([reader], follow=False, stop=threading.Event())
    return collected.total().stored


@pytest.mark.slow
def test_trimming_faster_than_collecting_is_said(server: RedisServer) -> None:
    server.add("chats", *range(3))
    collect_now(f"{server.url}?stream=chats")
    server.add("chats", *range(3, 10))
    server.client.xtrim("chats", maxlen=2, approximate=False)
    reader = reader_of(server)
    assert collect_with(reader) == 2
    assert any("5 entries were trimmed before" in note for note in reader.notes)


@pytest.mark.slow
def test_a_stream_that_was_made_again_is_read_from_its_beginning(server: RedisServer) -> None:
    server.add("chats", *range(700))
    collect_now(f"{server.url}?stream=chats")
    server.client.delete("chats")
    for number in (1, 700):
        server.client.xadd("chats", {"data": json.dumps(row(number))}, id=f"1-{number}")
    assert total(f"{server.url}?stream=chats") == (1, 1, 0, 0)


@pytest.mark.slow
def test_a_key_that_is_no_stream(server: RedisServer) -> None:
    server.client.set("chats", "text")
    with pytest.raises(UsageError, match="is not a stream"):
        collect_now(f"{server.url}?stream=chats")


@pytest.mark.slow
def test_a_stream_that_is_deleted_under_a_follower(server: RedisServer) -> None:
    reader = reader_of(server)
    with closing(open_database()) as database:
        batches = reader.batches(database, True)
        assert next(batches) is None
        server.client.delete("chats")
        server.add("chats", 1)
        batch = next(batches)
        assert batch and len(batch.deliveries) == 1
        batches.close()


@pytest.mark.slow
def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RedisReader(f"redis://127.0.0.1:{free_port()}/0?stream=chats", patience_s=0.0)
    with pytest.raises(MachineNotFit, match=r"redis://127.* can't be read"):
        collect_with(reader)


@pytest.mark.slow
def test_a_stop_is_heard_while_waiting_for_a_server() -> None:
    reader = RedisReader(f"redis://127.0.0.1:{free_port()}/0?stream=chats")
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    started = time.monotonic()
    collecting_module.collect([reader], follow=True, stop=stop)
    assert time.monotonic() - started < 5  # it would try for 60 s


@pytest.mark.slow
def test_a_password_and_a_wrong_one(server: RedisServer) -> None:
    server.client.config_set("requirepass", "secret")
    try:
        url = f"redis://:secret@127.0.0.1:{server.port}/0?stream=chats"
        collect_now(url)
        for wrong in (url.replace("secret", "guess"), url.replace(":secret@", "")):
            with pytest.raises(UsageError, match="refuses the login"):
                collect_now(wrong)
    finally:
        server.client.execute_command("AUTH", "secret")
        server.client.config_set("requirepass", "")


@pytest.mark.slow
def test_tls(tmp_path: Path) -> None:
    openssl = require_program("openssl", "openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *subject], check=True, capture_output=True)
    port = free_port()
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    server = RedisServer(tmp_path / "redis", "--tls-port", str(port), "--tls-auth-clients", "no", *files)
    try:
        server.add("chats", 1)
        url = f"rediss://localhost:{port}/0?stream=chats"
        assert total(f"{url}&ssl_ca_certs={certificate}") == (1, 0, 0, 0)
        stranger = RedisReader(url, patience_s=0.0)
        with pytest.raises(MachineNotFit, match="certificate"):
            collect_with(stranger)
    finally:
        server.close()


def test_a_stranger_on_the_port_is_no_redis() -> None:
    """Every answer is outside input: one that is no Redis answer ends in an error for people."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stop = threading.Event()

        def answer() -> None:
            listener.settimeout(0.1)
            while not stop.is_set():
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    continue
                with peer:
                    peer.recv(4096)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            reader = RedisReader(f"redis://127.0.0.1:{port}/0?stream=chats", patience_s=0.0)
            with pytest.raises(MachineNotFit, match=r"redis://127.* can't be read"):
                collect_with(reader)
        finally:
            stop.set()
            thread.join()
