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
from collecting import RedisServer, collect_now, free_port, query, row, stored_numbers, total
from programs import require_program

from hivetune.base.database import open_database
from hivetune.data.intake import collect as collecting_module
from hivetune.data.intake.collect import parse_sources
from hivetune.data.intake.interactions import commit_batch
from hivetune.data.intake.reader import rows_of_cells
from hivetune.data.intake.streams import RedisReader
from hivetune.data.reasons import RowRefused
from hivetune.errors import MachineNotFit, UsageError

ENTRIES = [
    ({"data": '{"prompt": "a"}'}, None, {"prompt": "a"}),
    ({"payload": '{"prompt": "a"}', "user_id": "u"}, None, {"prompt": "a", "user_id": "u"}),
    ({"prompt": "a", "completion": "b"}, None, {"prompt": "a", "completion": "b"}),
    ({"prompt": "a", "messages": '[{"role": "user"}]'}, None, {"prompt": "a", "messages": [{"role": "user"}]}),
    ({"prompt": "42", "completion": "{no"}, None, {"prompt": "42", "completion": "{no"}),
    ({"row": '{"prompt": "a"}', "other": "x"}, "row", {"prompt": "a"}),
]


@pytest.mark.parametrize(("fields", "field", "expected"), ENTRIES)
def test_the_row_in_an_entry(fields: dict[str, str], field: str | None, expected: dict[str, Any]) -> None:
    assert rows_of_cells({name: value.encode() for name, value in fields.items()}, field, {}) == [expected]


TWO = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "yes"}]} for q in ("is it?", "why?")
]
HOLD_TWO = [
    ({"data": json.dumps(TWO)}, None, {}),
    ({"other": "x", "log": json.dumps(TWO)}, "log", {}),
    ({"user_id": "u", "data": json.dumps(TWO)}, None, {"user_id": "u"}),
]


@pytest.mark.parametrize(("fields", "field", "beside"), HOLD_TWO)
def test_an_entry_of_two_conversations_is_two_rows(
    fields: dict[str, str], field: str | None, beside: dict[str, Any]
) -> None:
    """As in a file: stored whole, nothing would read them."""
    assert rows_of_cells({name: value.encode() for name, value in fields.items()}, field, {}) == [
        {**beside, **row} for row in TWO
    ]


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"data": b"{oops"}, None, "bad-json"),
        ({"data": b"[1]"}, None, "bad-json"),
        ({"other": b"{}"}, "row", "bad-json"),
        ({"prompt": b"\xff"}, None, "bad-utf8"),
    ],
)
def test_an_entry_that_holds_no_row(fields: dict[str, bytes], field: str | None, reason: str) -> None:
    with pytest.raises(RowRefused) as refused:
        rows_of_cells(fields, field, {})
    assert refused.value.reason == reason


def test_a_password_is_never_shown() -> None:
    for url in ("redis://:secret@host:1/0?stream=s", "redis+cluster://user:secret@a:1,b:2?stream=s"):
        assert "secret" not in RedisReader(url).name


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("redis://h/0", "names no stream"),
        ("redis://h/0?streem=a", "unknown option streem"),
        ("redis://a,b/0?stream=a", "takes one host"),
        ("kafka://h/t", "not a known kind"),
    ],
)
def test_slips_are_explained(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_sources([source])


def reader_of(server: RedisServer, **options: Any) -> RedisReader:
    return RedisReader(f"{server.url}?stream=chats", **options)


def collect_with(reader: RedisReader) -> int:
    collected = collecting_module.collect([reader], follow=False, stop=threading.Event())
    return collected.total().stored


@pytest.mark.slow
def test_entries_come_once_with_stream_id_and_time(server: RedisServer) -> None:
    server.client.xadd("chats", {"data": json.dumps(row(1))}, id="1767323045000-7")
    assert total(f"{server.url}?stream=chats") == (1, 0, 0, 0)
    assert query("SELECT source, time FROM interactions") == [("chats:1767323045000-7", 1767323045.0)]
    assert total(f"{server.url}?stream=chats") == (0, 0, 0, 0)


@pytest.mark.slow
def test_what_was_not_stored_comes_again(server: RedisServer) -> None:
    server.add("chats", *range(10))
    with closing(open_database()) as database:
        for _ in range(2):  # dies before its batch is stored
            with closing(reader_of(server).batches(database, False)) as batches:
                batch = next(batches)
                assert batch and len(batch.deliveries) == 10
        commit_batch(database, batch)
    assert total(f"{server.url}?stream=chats") == (0, 0, 0, 0)
    assert stored_numbers() == list(range(10))


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
def test_bad_entries_are_kept_aside(server: RedisServer) -> None:
    server.client.xadd("chats", {"data": "{oops"}, id="1-1")
    server.add("chats", 1)
    assert total(f"{server.url}?stream=chats") == (1, 0, 1, 0)
    assert query("SELECT source, reason FROM refused") == [("chats:1-1", "bad-json")]


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
    with pytest.raises(MachineNotFit, match=r"redis://127.* cannot be used"):
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
            with pytest.raises(MachineNotFit, match=r"redis://127.* cannot be used"):
                collect_with(reader)
        finally:
            stop.set()
            thread.join()
