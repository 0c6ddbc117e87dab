"""Calls over HTTP as tools record them, to play them again or to look at them: HAR files, cassettes of VCR as JSON,
lists of nock.

Each call is a row with the bodies of its request and its response. Calls that ask no model are set aside.

http://www.softwareishard.com/blog/har-12-spec/ https://vcrpy.readthedocs.io https://github.com/nock/nock#recording
"""

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.pieces.answers import is_request, says_answer
from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects, one_of, parsed
from hivetune.data.pieces.streams import is_events, json_lines, pieces_in, text_of_bytes

_NOCK_KEY = "rawHeaders"  # of each call that nock records
_RECORDED_KEYS = ("interactions", "http_interactions", "entries")
_BODIES = ("parsed_body", "body", "postData", "content", "body_segments")
_TEXTS = frozenset(("string", "text", "base64_string", "encoding", "textJSON"))  # the last: Polly's, as an object
_PAGE = re.compile(r"\s*<(?:!doctype|html|head|\?xml)\b", re.I)
_IN_BASE64 = "base64:"  # what a proxy of tests writes in front of bytes
_EMBEDS = re.compile(r"/embed(?:dings?)?\b", re.I)  # asks for numbers
_HEX = re.compile(r"(?:[0-9a-f]{2}){8,}")  # how nock keeps what is no text, or came packed


def rows(record: Row) -> Iterator[Row]:
    """Yield the calls of a recording."""
    for call in _calls(record):
        request, response = call["request"], call["response"]
        body, answer = parsed(_body(request)), _body(response)
        when = one_of(call, "startedDateTime", "recorded_at")
        columns = {} if when is None else {"time": when}
        asks = isinstance(body, dict) and is_request(body) and not _EMBEDS.search(str(one_of(request, "uri", "url")))
        # A token count, a stored file and a page are no answers.
        told = parsed(answer)
        page = isinstance(told, str) and (not told or _PAGE.match(told))
        if not asks or not answer or page or (isinstance(told, dict) and not says_answer(told)):
            yield {**columns, "run_type": "http", "inputs": None, "outputs": None}
            continue
        status = one_of(response, "status_code", "code", "status")
        status = one_of(status, "code") if isinstance(status, dict) else status
        if isinstance(status, int) and status >= 400:
            answer = {"error": {"message": f"status {status}"}}
        elif isinstance(answer, str) and (is_events(answer) or json_lines(answer)) and pieces_in(answer) is None:
            answer = {"error": {"message": "what came are the pieces of a stream, of an API that is not known"}}
        yield {**columns, "request": body, "response": answer}


def _calls(record: Row) -> list[dict[str, Any]]:
    """Return the calls of a recording: of nock, one alone (proxies of tests keep each in a file of its own) or a
    list.
    """
    if isinstance(record.get("scope"), str) and {_NOCK_KEY, "path", "body", "response"} <= record.keys():
        body: Any = record["response"]
        pieces = body if isinstance(body, list) else [body]
        if all(isinstance(piece, str) and _HEX.fullmatch(piece) for piece in pieces):
            body = text_of_bytes(bytes.fromhex("".join(pieces)))
        response = {"status": record.get("status"), "body": body}
        return [{"request": {"uri": record["path"], "body": record["body"]}, "response": response}]
    request, answered = record.get("request"), record.get("response")
    heads = isinstance(request, dict) and isinstance(answered, dict) and {"headers", "status"} <= answered.keys()
    if heads and isinstance(one_of(request, "method"), str) and isinstance(one_of(request, "url", "uri"), str):
        return [dict(record)]
    holder = record["log"] if isinstance(record.get("log"), dict) else record
    calls = next((entries for key in _RECORDED_KEYS if (entries := objects(holder.get(key)))), None) or []
    are_calls = all(isinstance(call.get(side), dict) for call in calls for side in ("request", "response"))
    return calls if are_calls else []


def _body(side: Mapping[str, Any]) -> Any:
    """Return the body of a request or a response, as text or as an object; None where there is none or it is no
    text.
    """
    body = next((side[key] for key in _BODIES if side.get(key) is not None), None)
    if isinstance(body, list) and len(body) == 1:
        body = body[0]  # of Gemini's client, which keeps a stream as several
    if isinstance(body, str) and body.startswith(_IN_BASE64):
        return _decoded(body.removeprefix(_IN_BASE64))
    if not isinstance(body, dict) or not _TEXTS & body.keys():
        return body
    if isinstance(body.get("base64_string"), str):
        return _decoded(body["base64_string"])
    text = one_of(body, "string", "text", "data", "textJSON")
    return _decoded(text) if body.get("encoding") == "base64" and isinstance(text, str) else text


def _decoded(text: str) -> str | None:
    """Return the text of bytes in base64, unpacked where they are compressed."""
    pieces = parsed(text) if text.startswith("[") else [text]  # Polly keeps what came packed in several
    try:
        return text_of_bytes(b"".join(base64.b64decode(piece, validate=True) for piece in pieces))
    except (ValueError, TypeError):
        return None


FORMAT = Batch("http-recording", rows, needs=frozenset((*_RECORDED_KEYS, "log", "request", _NOCK_KEY)))
