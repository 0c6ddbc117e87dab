"""Notices about the loop to people: by a command, a webhook or an e-mail of their own, and by nothing else.

A notice is one sentence. One that can't be sent is a problem in the journal, never an exception: the loop continues.
"""

import json
import os
import smtplib
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from email.message import EmailMessage
from email.utils import formatdate
from http.client import HTTPException, InvalidURL
from typing import Any, Literal

from hivetune.config import EmailConfig, NotifyConfig

NoticeKind = Literal["promote", "rollback", "ask", "stuck", "suspect", "disk"]
SEND_TIMEOUT_S = 20.0  # of each way; the loop waits no longer, whatever the other side does
MAX_SENTENCE_CHARS = 500
_BEGINNINGS: dict[NoticeKind, str] = {
    "promote": "{release} is the new champion",
    "rollback": "{release} was rolled back",
    "ask": "{release} waits for a person to promote it",
    "stuck": "the cycle of {release} can't continue",
    "suspect": "rows of {release} are set aside",
    "disk": "the cycle of {release} waits for room on the disk",
}


@dataclass(frozen=True)
class Notice:
    """A notice. `release`: NAME@VERSION, or NAME where it is about the loop itself. `reason`: why, in words."""

    kind: NoticeKind
    release: str
    reason: str
    time: float = field(default_factory=time.time)

    @property
    def sentence(self) -> str:
        """Return one line for people."""
        text = f"{_BEGINNINGS[self.kind].format(release=self.release)}: {self.reason}"
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
        return line if len(line) <= MAX_SENTENCE_CHARS else line[: MAX_SENTENCE_CHARS - 3] + "..."


@dataclass(frozen=True)
class Sent:
    """One delivery of a notice. `problem`: the reason of a failure, else empty."""

    way: Literal["command", "webhook", "email"]
    problem: str = ""


def send_notice(notice: Notice, settings: NotifyConfig) -> list[Sent]:
    """Send a notice in every way that is set. Never raises for one that fails; each takes at most SEND_TIMEOUT_S."""
    sent = []
    if settings.command:
        sent.append(Sent("command", _run_command(settings.command, notice)))
    if settings.webhook is not None:
        url = settings.webhook
        sent.append(Sent("webhook", _in_time(lambda: _post(url, notice))))
    if settings.email is not None:
        email = settings.email
        sent.append(Sent("email", _in_time(lambda: _mail(email, notice))))
    return sent


def notice_document(notice: Notice) -> dict[str, Any]:
    """Return the JSON that a webhook and a command's standard input get. Slack, Mattermost and Matrix show `text`."""
    return {"schema": 1, **asdict(notice), "text": f"Hivetune: {notice.sentence}"}


def _run_command(command: list[str], notice: Notice) -> str:
    """Run the user's command with the sentence as its last argument. There is no shell, and its output is not read."""
    document = json.dumps(notice_document(notice)).encode()
    try:
        process = subprocess.Popen(
            [*command, notice.sentence],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"{command[0]} can't be started: {error}"
    try:
        process.communicate(document, timeout=SEND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with whatever it started
        process.wait()
        return f"{command[0]} was ended after {SEND_TIMEOUT_S:.0f} s"
    return "" if process.returncode == 0 else f"{command[0]} ended with {process.returncode}"


class _Stay(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect: the notice goes to the address that its user named, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, notice: Notice) -> str:
    request = urllib.request.Request(
        url,
        data=json.dumps(notice_document(notice)).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "hivetune"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=SEND_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answered {error.code}"
    except (InvalidURL, ValueError):  # the error quotes the address, which is a secret of the user's
        return "the webhook's address is not valid: no space, no control character, a port in digits"
    except (OSError, HTTPException) as error:
        return f"the webhook can't be reached: {getattr(error, 'reason', error)}"


def _mail(settings: EmailConfig, notice: Notice) -> str:
    message = EmailMessage()
    message["Subject"] = f"Hivetune: {notice.kind}: {notice.release}"
    message["From"], message["To"] = settings.sender, ", ".join(settings.to)
    message["Date"] = formatdate(notice.time)
    message.set_content(f"{notice.sentence}\n")
    password = os.environ.get(settings.password_variable) if settings.password_variable else None
    if settings.password_variable and password is None:
        return f"the environment variable {settings.password_variable} is not set: it holds the password"
    checked = ssl.create_default_context()  # smtplib's own would take any certificate
    try:
        with (
            smtplib.SMTP_SSL(settings.host, settings.port, timeout=SEND_TIMEOUT_S, context=checked)
            if settings.security == "tls"
            else smtplib.SMTP(settings.host, settings.port, timeout=SEND_TIMEOUT_S)
        ) as server:
            if settings.security == "starttls":
                server.starttls(context=checked)
            if settings.user is not None:
                server.login(settings.user, password or "")
            server.send_message(message)
    except (OSError, smtplib.SMTPException, ValueError) as error:
        return f"{settings.host} did not take the mail: {error}"
    return ""


def _in_time(send: Callable[[], str]) -> str:
    """Run `send` in its own thread, so that a slow server delays only this thread."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(send()), daemon=True)
    thread.start()
    thread.join(SEND_TIMEOUT_S)
    return answers[0] if answers else f"no answer after {SEND_TIMEOUT_S:.0f} s"
