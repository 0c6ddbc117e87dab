"""Calls over HTTP as tools record them, to play them again or to look at them: HAR files, cassettes of VCR as JSON.

Each call is a row with the bodies of its request and its response. Calls that ask no model are set aside.
"""

import base64
import re
import zlib
from collections.abc import Mapping
from typing import Any

from hivetune.data.rows.layouts.answers import is_request
from hivetune.data.rows.layouts.said import objects, one_of, parsed

# How a cassette in YAML begins.
CASSETTE_HEAD = re.compile(r"\ufeff?(?:---[ \t]*\n)?(?:version: \d+\n)?((?:http_)?interactions):[ \t]*\n( *)- ")
RECORDED_KEYS = ("interactions", "http_interactions", "entries")


def recorded_calls(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The calls of a recording; None: it is something else."""
    holder = record["log"] if isinstance(record.get("log"), dict) else record
    calls = next((found for key in RECORDED_KEYS if (found := objects(holder.get(key)))), None)
    if calls is None or not all(isinstance(call.get(side), dict) for call in calls for side in ("request", "response")):
        return None
    return [_row(call) for call in calls]


def _row(call: Mapping[str, Any]) -> dict[str, Any]:
    request, response = call["request"], call["response"]
    asked, answered = parsed(_body(request)), _body(response)
    when = one_of(call, "startedDateTime", "recorded_at")
    about = {} if when is None else {"time": when}
    asks = isinstance(asked, dict) and is_request(asked) and not _EMBEDS.search(str(one_of(request, "uri", "url")))
    if not asks or not answered:
        return {**about, "run_type": "http", "inputs": None, "outputs": None}
    status = one_of(response, "status_code", "code", "status")
    status = one_of(status, "code") if isinstance(status, dict) else status
    if isinstance(status, int) and status >= 400:
        answered = {"error": {"message": f"status {status}"}}
    return {**about, "request": asked, "response": answered}


def _body(side: Mapping[str, Any]) -> Any:
    """The body of a request or a response, as text or as an object; None where there is none or it is no text."""
    body = next((side[key] for key in _BODIES if side.get(key) is not None), None)
    if isinstance(body, list) and len(body) == 1:
        body = body[0]  # of Gemini's client, which keeps a stream as several
    if not isinstance(body, dict) or not {"string", "text", "base64_string", "encoding"} & body.keys():
        return body
    if isinstance(body.get("base64_string"), str):
        return _decoded(body["base64_string"])
    text = one_of(body, "string", "text", "data")
    return _decoded(text) if body.get("encoding") == "base64" and isinstance(text, str) else text


_EMBEDS = re.compile(r"/embed(?:dings?)?\b", re.I)  # asks for numbers
_BODIES = ("parsed_body", "body", "postData", "content", "body_segments")
_MAX_BODY_BYTES = 16 << 20  # unpacked


def _decoded(text: str) -> str | None:
    """The text of bytes in base64, unpacked where they are compressed."""
    try:
        return text_of_bytes(base64.b64decode(text, validate=True))
    except ValueError:
        return None


def text_of_bytes(data: bytes) -> str | None:
    """The text of a body, unpacked where it is compressed; None where it is no text."""
    try:
        if data.startswith(b"\x1f\x8b"):
            data = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, _MAX_BODY_BYTES)
        return data.decode()
    except (ValueError, zlib.error):
        return None
