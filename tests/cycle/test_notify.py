"""Notices reach a real program, web server and mail server; what fails is a problem, never an exception."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Sink
from aiosmtpd.smtp import AuthResult, LoginPassword

from hivetune.config import EmailConfig, NotifyConfig
from hivetune.cycle import notify
from hivetune.cycle.notify import MAX_SENTENCE_CHARS, Notice, Sent, send_notice

pytestmark = pytest.mark.filterwarnings("ignore:Requiring AUTH")  # a mail server without TLS, for a test

NOTICE = Notice("rollback", "helpdesk@4", "12 of 60 answers failed; at most 5.0% was usual with helpdesk@3", 1.8e9)
SENTENCE = (
    "helpdesk@4 was rolled back: 12 of 60 answers failed; at most 5.0% was usual with helpdesk@3"  # one line for people
)


def program(folder: Path, text: str) -> str:
    path = folder / "tell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_nothing_is_sent_where_nothing_is_named() -> None:
    assert send_notice(NOTICE, NotifyConfig()) == []


def test_a_command_gets_the_sentence_and_the_document(tmp_path: Path) -> None:
    path = program(tmp_path, f'printf "%s|" "$@" > {tmp_path}/said; cat > {tmp_path}/read')
    assert send_notice(NOTICE, NotifyConfig(command=[path, "-t", "a b; touch x"])) == [Sent("command")]
    assert (tmp_path / "said").read_text() == f"-t|a b; touch x|{SENTENCE}|"
    document = json.loads((tmp_path / "read").read_text())
    assert document == {
        "schema": 1,
        "kind": "rollback",
        "release": "helpdesk@4",
        "reason": NOTICE.reason,
        "time": 1.8e9,
        "text": f"Hivetune: {SENTENCE}",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exit 3", "tell ended with 3"),
        ("exec <&-; sleep 60 & wait", "tell was ended after"),
        (None, "can't be started"),
    ],
)
def test_a_command_that_fails_hangs_or_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, problem: str
) -> None:
    monkeypatch.setattr(notify, "SEND_TIMEOUT_S", 1.0 if text and "sleep" in text else 20.0)
    path = program(tmp_path, text) if text else str(tmp_path / "missing")
    (sent,) = send_notice(NOTICE, NotifyConfig(command=[path]))
    assert problem in sent.problem


class Hook(BaseHTTPRequestHandler):
    """A webhook that answers as its path says, and keeps what it was sent."""

    seen: list[tuple[str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.path, json.loads(body)))
        self.send_response(int(self.path.strip("/")))
        self.send_header("Location", "/200")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hook() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Hook.seen.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_gets_the_document(hook: str) -> None:
    assert send_notice(NOTICE, NotifyConfig(webhook=f"{hook}/200")) == [Sent("webhook")]
    assert [(path, body["text"]) for path, body in Hook.seen] == [("/200", f"Hivetune: {SENTENCE}")]


@pytest.mark.parametrize("status", [302, 307, 404, 500])
def test_a_webhook_that_refuses_or_sends_on(hook: str, status: int) -> None:
    """A redirect is not followed: the notice goes where its user said."""
    assert send_notice(NOTICE, NotifyConfig(webhook=f"{hook}/{status}")) == [
        Sent("webhook", f"the webhook answered {status}")
    ]
    assert [path for path, _ in Hook.seen] == [f"/{status}"]


def test_a_webhook_that_is_not_there_or_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "SEND_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/token-of-mine"
        (sent,) = send_notice(NOTICE, NotifyConfig(webhook=url))
        assert "no answer" in sent.problem or "timed out" in sent.problem
    (sent,) = send_notice(NOTICE, NotifyConfig(webhook=url))
    assert "can't be reached" in sent.problem
    assert "token-of-mine" not in sent.problem


@pytest.mark.parametrize("address", ["127.0.0.1:1/of-mine token", "127.0.0.1:of-mine/x", "127.0.0.1:1/of-mine\u00e9"])
def test_a_webhook_whose_address_is_none_is_not_quoted(address: str) -> None:
    (sent,) = send_notice(NOTICE, NotifyConfig(webhook=f"http://{address}"))
    assert "not valid" in sent.problem and "of-mine" not in sent.problem


class Mailbox(Sink):
    def __init__(self) -> None:
        self.mails: list[tuple[str, list[str], str]] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.mails.append((envelope.mail_from, envelope.rcpt_tos, envelope.content.decode()))
        return "250 OK"


@pytest.fixture
def mailbox() -> Iterator[tuple[Mailbox, int]]:
    def check(server: Any, session: Any, envelope: Any, mechanism: str, who: Any) -> AuthResult:
        right = isinstance(who, LoginPassword) and (who.login, who.password) == (b"ada", b"secret")
        return AuthResult(success=right, handled=right)

    box = Mailbox()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    controller = Controller(
        box, hostname="127.0.0.1", port=port, authenticator=check, auth_require_tls=False, auth_required=True
    )
    controller.start()
    yield box, port
    controller.stop()


def email(port: int, **more: Any) -> NotifyConfig:
    settings = {"to": ["ada@example.org"], "sender": "hive@example.org", "host": "127.0.0.1", "port": port}
    return NotifyConfig(email=EmailConfig(**settings, **{"security": "none", **more}))


def test_a_mail_arrives(mailbox: tuple[Mailbox, int], monkeypatch: pytest.MonkeyPatch) -> None:
    box, port = mailbox
    monkeypatch.setenv("MAIL_PASSWORD", "secret")
    assert send_notice(NOTICE, email(port, user="ada", password_variable="MAIL_PASSWORD")) == [Sent("email")]
    (mail,) = box.mails
    assert mail[:2] == ("hive@example.org", ["ada@example.org"])
    assert "Subject: Hivetune: rollback: helpdesk@4" in mail[2]
    assert SENTENCE in mail[2].replace("=\r\n", "")


def test_a_mail_that_is_refused(mailbox: tuple[Mailbox, int], monkeypatch: pytest.MonkeyPatch) -> None:
    box, port = mailbox
    monkeypatch.setenv("MAIL_PASSWORD", "hunter22")
    for settings, problem in (
        (email(port, user="ada", password_variable="MAIL_PASSWORD"), "did not take the mail"),
        (email(port, user="ada", password_variable="NO_SUCH_PASSWORD"), "NO_SUCH_PASSWORD is not set"),
        (email(port, security="starttls"), "STARTTLS"),
        (email(port, security="tls"), "did not take the mail"),
    ):
        (sent,) = send_notice(NOTICE, settings)
        assert problem in sent.problem
        assert "hunter22" not in sent.problem
    assert box.mails == []


def test_one_way_that_fails_does_not_stop_the_others(hook: str, tmp_path: Path) -> None:
    settings = NotifyConfig(command=[str(tmp_path / "missing")], webhook=f"{hook}/200")
    assert [bool(sent.problem) for sent in send_notice(NOTICE, settings)] == [True, False]


def test_a_sentence_is_one_printable_line() -> None:
    sentence = Notice("stuck", "helpdesk", "first\r\nBcc: x@example.org\x1b[2J" + "a" * 900).sentence
    assert sentence.startswith("the cycle of helpdesk can't continue: first Bcc: x@example.org")
    assert sentence.isprintable()
    assert len(sentence) == MAX_SENTENCE_CHARS
