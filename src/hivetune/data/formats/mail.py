"""Mail: an mbox or one message (.eml). Messages of one thread are a conversation, without what they quote and without
signatures. Who answers is `--columns assistant=ADDRESS`.

https://www.rfc-editor.org/rfc/rfc4155 and https://www.rfc-editor.org/rfc/rfc5322
"""

import email
import email.policy
import re
from collections.abc import Iterator
from email.message import EmailMessage
from email.utils import parseaddr, parsedate_to_datetime

from hivetune.data.pieces.format import Head, Lines, Log, PlacedRow
from hivetune.data.pieces.rendered import without_markup
from hivetune.data.pieces.sessions import MAX_ROW_CHARS, TableTurn, Threads
from hivetune.data.reasons import RowRefused

_BEGINS = re.compile(r"From \S+ .*\d{4}$")
_HEADERS = re.compile(rb"(?:From|To|Received|Return-Path|Delivered-To|MIME-Version|Message-ID|Date|Subject): ", re.I)
_QUOTED = re.compile(r"^(?:>.*|On .{1,200} wrote:|Am .{1,200} schrieb .{0,80}:|Le .{1,200} a écrit :)$", re.M)
_ADDRESSED = re.compile(r"^(?:>|-{2,}\s?(?:Original Message|Ursprüngliche Nachricht))", re.M)
_ID = re.compile(r"<[^<>\s]+>")
_REPLY = re.compile(r"^(?:(?:re|aw|sv|antw|fwd?)\s*:\s*)+", re.I)


def recognise(head: Head) -> bool:
    lines = head.data.splitlines()[:40]
    if not lines:
        return False
    named = [line for line in lines if _HEADERS.match(line)]
    return len(named) >= 3 and (_HEADERS.match(lines[0]) is not None or lines[0].startswith(b"From "))


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each thread: messages that refer to each other by their ids."""
    threads = Threads()
    thread_of: dict[str, str] = {}  # by the ids of messages, and by subjects
    for number, text in _messages(lines):
        if len(text) > MAX_ROW_CHARS:
            fact = f"a mail has {len(text):,} characters, which is too long for a row: remove it"
            yield number, RowRefused("too-long", fact)
            continue
        mail = email.message_from_string(text, policy=email.policy.default)
        if body := _text(mail) or [{"type": "file"} for _ in mail.iter_attachments()]:
            title = str(mail.get("Subject", "")).strip()
            subject = _REPLY.sub("", title).strip().lower()
            named = _ID.findall(f"{mail.get('References', '')} {mail.get('In-Reply-To', '')}")
            own = str(mail.get("Message-ID", "")).strip() or f"message {number}"
            # A reply that names no message belongs to the last thread of its subject.
            known = [*named, *([subject] if not named and _REPLY.match(title) else [])]
            thread = next((thread_of[name] for name in known if name in thread_of), named[0] if named else own)
            thread_of |= dict.fromkeys((own, subject), thread)
            turn = {"speaker": parseaddr(str(mail.get("From", "")))[1].lower(), "content": body}
            threads.add(number, TableTurn(thread, turn, _time(mail)))
    yield from threads.rows("mail")


def _time(mail: EmailMessage) -> float | None:
    """Return seconds since 1970 of the date of a message; None without one, and for one that is not a date."""
    try:
        return parsedate_to_datetime(str(mail.get("Date", ""))).timestamp()
    except (ValueError, OverflowError):
        return None


def _messages(lines: Lines) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of each message of an mbox; a message that is larger than a row is cut."""
    begun, begin, size = list[str](), 1, 0
    for number, line in lines:
        if _BEGINS.match(line) and (not begun or not begun[-1].strip()):
            if begun:
                yield begin, "\n".join(begun)
            begun, begin, size = [], number, 0
        elif size <= MAX_ROW_CHARS:
            begun.append(line[1:] if line.startswith(">From ") else line)
            size += len(line) + 1
    if any(line.strip() for line in begun):
        yield begin, "\n".join(begun)


def _text(mail: EmailMessage) -> str:
    """Return the writer's text: plain text, or HTML as text, without quotations and signature."""
    part = mail.get_body(("plain", "html"))
    if part is None:
        return ""
    text = part.get_content()
    text = without_markup(text) if part.get_content_type() == "text/html" else text
    text = re.split(r"^-- ?$", text.replace("\r\n", "\n"), maxsplit=1, flags=re.M)[0]
    cut = _ADDRESSED.search(text)
    text = text[: cut.start()] if cut and text[: cut.start()].strip() else text
    return re.sub(r"\n{3,}", "\n\n", _QUOTED.sub("", text)).strip()


FORMAT = Log("mail", recognise, rows)
