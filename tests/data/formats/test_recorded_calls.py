"""Calls of the providers' APIs as recorders of HTTP keep them: HAR, cassettes, nock, frames, httprr."""

import base64
import gzip
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from api_pieces import ASKED, FIRST, PLAIN, SECOND, STREAMS, A, Q, as_events, chunk, har, outcomes, refused, said

from hivetune.data.pieces.streams import text_of_bytes
from hivetune.data.prepare.understand import rows_of_files

COMPLETION = {"choices": [{"message": {"role": "assistant", "content": A}, "finish_reason": "stop"}]}


def coded(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


RECORDINGS: dict[str, Any] = {
    "a HAR file": har({"status": 200, "content": {"mimeType": "application/json", "text": json.dumps(COMPLETION)}}),
    "a HAR file in base64": har({"status": 200, "content": {"encoding": "base64", "text": coded(COMPLETION)}}),
    "a HAR file with a stream": har({"status": 200, "content": {"text": as_events(STREAMS["OpenAI"])}}),
    "a cassette of vcrpy": {
        "version": 1,
        "interactions": [
            {
                "request": {"method": "POST", "uri": "https://h", "body": json.dumps(ASKED)},
                "response": {"status": {"code": 200, "message": "OK"}, "body": {"string": json.dumps(COMPLETION)}},
            }
        ],
    },
    "a cassette of Betamax": {
        "http_interactions": [
            {
                "request": {"method": "POST", "body": {"encoding": "utf-8", "string": json.dumps(ASKED)}},
                "response": {
                    "status": {"code": 200},
                    "body": {"encoding": "utf-8", "base64_string": coded(COMPLETION)},
                },
            }
        ],
        "recorded_with": "betamax",
    },
}


PACKED = base64.b64encode(gzip.compress(json.dumps(COMPLETION).encode())).decode()
RECORDINGS["a recording of httpx"] = {
    "interactions": [
        {
            "request": {"method": "POST", "path": "/v1", "content": ASKED},
            "response": {"status_code": 200, "content": {"data": PACKED, "encoding": "base64", "size": 9}},
        }
    ]
}
RECORDINGS["a replay of Gemini's client"] = {
    "replay_id": "a/b",
    "interactions": [
        {
            "request": {"method": "post", "body_segments": [{"contents": [{"parts": [{"text": Q}]}]}]},
            "response": {"status_code": 200, "body_segments": segments, "sdk_response_segments": [{}]},
        }
        for segments in [STREAMS["Gemini"]]
    ],
}


RECORDINGS["a HAR file of Polly, packed in pieces"] = har(
    {"status": 200, "content": {"encoding": "base64", "text": json.dumps([PACKED])}}
)


def frame(kind: str, said: dict[str, Any]) -> bytes:
    """An event as Bedrock streams it."""
    payload = json.dumps(said).encode()
    head = b"\x0b:event-type\x07" + len(kind).to_bytes(2, "big") + kind.encode()
    prelude = struct.pack(">II", 16 + len(head) + len(payload), len(head))
    body = prelude + zlib.crc32(prelude).to_bytes(4, "big") + head + payload
    return body + zlib.crc32(body).to_bytes(4, "big")


def nock(response: Any) -> list[dict[str, Any]]:
    call = {"scope": "https://h:443", "method": "POST", "path": "/v1", "body": ASKED, "status": 200}
    return [{**call, "response": response, "rawHeaders": {"date": "today"}, "reqheaders": {"host": "h"}}]


OF_CONVERSE = [frame(*event.popitem()) for event in json.loads(json.dumps(STREAMS["Bedrock"]))]
OF_INVOKE = [
    frame("chunk", {"bytes": base64.b64encode(json.dumps(said).encode()).decode(), "p": "ab"})
    for said in ({"generation": FIRST, "stop_reason": None}, {"generation": SECOND, "stop_reason": "stop"})
]
RECORDINGS["nock"] = nock(COMPLETION)
RECORDINGS["nock, packed"] = nock([base64.b64decode(PACKED).hex()])
RECORDINGS["a call in a file of its own, what Bedrock's Converse streams"] = {
    "request": {"method": "POST", "url": "https://h", "headers": {}, "body": json.dumps(ASKED)},
    "response": {
        "status": {"code": 200, "message": "OK"},
        "headers": {},
        "body": f"base64:{base64.b64encode(b''.join(OF_CONVERSE)).decode()}",
    },
}
RECORDINGS["nock, what Bedrock's Converse streams"] = nock(b"".join(OF_CONVERSE).hex())
RECORDINGS["nock, what a model of Bedrock streams"] = nock(b"".join(OF_INVOKE).hex())


def test_frames_that_break_off() -> None:
    assert text_of_bytes(b"".join(OF_CONVERSE)[:-3]) is not None
    assert text_of_bytes(OF_CONVERSE[0].replace(b"{", b"[")) is None


def test_a_piece_of_a_stream_is_no_text() -> None:
    assert refused({"type": "response.output_text.done", "item_id": "m", "text": A}) == "unknown-layout"


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_calls(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(RECORDINGS[name], indent=1))
    assert [one for one in outcomes(path) if one != "not-a-model-call"] == [PLAIN]


def test_a_recorded_call_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "calls.har"
    path.write_text(json.dumps(har({"status": 429, "content": {"text": "slow down"}})))
    assert outcomes(path) == ["not-a-model-call", "failed"]


@pytest.mark.parametrize(
    "answered",
    [{"input_tokens": 14}, {"name": "cachedContents/x1", "model": "m", "usageMetadata": {"totalTokenCount": 9}}],
)
def test_a_recorded_call_that_answers_with_no_text(answered: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "calls.har"
    path.write_text(json.dumps(har({"status": 200, "content": {"text": json.dumps(answered)}})))
    assert outcomes(path) == ["not-a-model-call", "not-a-model-call"]


def in_yaml(*calls: str) -> str:
    return "interactions:\n" + "".join(calls) + "version: 1\n"


ASKED_IN_YAML = f"""- request:
    body: '{json.dumps(ASKED)}'
    headers:
      accept:
      - application/json
    method: POST
    uri: https://h/v1
"""
ANSWERED_IN_YAML = f"""  response:
    body:
      string: '{json.dumps(COMPLETION)}'
    status:
      code: 200
      message: OK
"""
IN_BYTES = f"""  response:
    body:
      string: !!binary |
        {PACKED}
    status:
      code: 200
"""
PARSED = f"""- request:
    parsed_body: {json.dumps(ASKED)}
  response:
    parsed_body: {json.dumps(COMPLETION)}
    status: {{code: 200}}
"""
OF_RUBY = f"""---
http_interactions:
- request:
    method: post
    body:
      encoding: UTF-8
      string: '{json.dumps(ASKED)}'
  response:
    status:
      code: 200
    body:
      encoding: ASCII-8BIT
      string: '{json.dumps(COMPLETION)}'
  recorded_at: Thu, 05 Feb 2026 10:00:00 GMT
recorded_with: VCR 6.4.0
"""


@pytest.mark.parametrize(
    "text",
    [
        in_yaml(ASKED_IN_YAML, ANSWERED_IN_YAML),
        in_yaml(ASKED_IN_YAML.replace("body: '", "body: !!python/unicode '"), ANSWERED_IN_YAML),
        in_yaml(
            ASKED_IN_YAML.replace("accept:", "? !!python/object/apply:a.b\n      - accept\n      :"), ANSWERED_IN_YAML
        ),
        in_yaml(ASKED_IN_YAML, IN_BYTES),
        in_yaml(ASKED_IN_YAML, IN_BYTES.replace("!!binary", "!binary")),
        in_yaml(PARSED),
        OF_RUBY,
    ],
)
def test_cassettes_in_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calls.yaml"
    path.write_text(text)
    assert outcomes(path) == [PLAIN]


def test_recordings_of_gos_httprr(tmp_path: Path) -> None:
    """What went over the wire behind its sizes: whole, in chunks, and a call that asks no model."""
    asked = f"POST https://h/v1/chat/completions HTTP/1.1\nHost: h\n\n{json.dumps(ASKED)}"
    stream = as_events([chunk({"content": FIRST}), chunk({"content": SECOND}, "stop")])
    chunks = "".join(f"{len(part.encode()):x}\r\n{part}\r\n" for part in (stream[:30], stream[30:], ""))
    calls = [
        (asked, f"HTTP/2.0 200 OK\nServer: s\n\n{json.dumps(COMPLETION)}"),
        (asked, f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}"),
        ("GET https://h/ HTTP/1.1\n\n", "HTTP/1.1 200 OK\n\nhello"),
    ]
    path = tmp_path / "calls.httprr"
    told = "".join(f"{len(sent.encode())} {len(came.encode())}\n{sent}{came}" for sent, came in calls)
    path.write_bytes(f"httprr trace v1\n{told}".encode())
    assert outcomes(path) == [PLAIN, PLAIN, "not-a-model-call"]
    places = [raw.source.rpartition(":")[2] for raw in rows_of_files(str(path))]
    assert places == ["2", "9", str(told[: told.index("GET https")].count("\n") + 1)]
    for end in ("no sizes", "9" * 5000 + " 1\n", "1 -1\n"):
        path.write_bytes(f"httprr trace v1\n{told}{end}".encode())
        assert outcomes(path)[-1] == "broken-file"
    path.write_bytes(f"httprr trace v1\n{17 << 20} 5\nshort".encode())
    assert outcomes(path) == ["line-too-large"]


def test_a_recorded_stream_as_its_lines() -> None:
    """As a recorder of Llama Stack keeps what went to Anthropic's API."""
    pieces = [chunk({"content": FIRST}), chunk({"content": SECOND}, "stop")]
    lines = as_events(pieces).split("\n")
    request = {"url": "http://h/v1/messages", "method": "POST", "payload": ASKED}
    assert said({"test_id": "t", "request": request, "response": {"body": lines}}) == PLAIN


def test_a_har_file_in_yaml(tmp_path: Path) -> None:
    """As Polly keeps what Cody was asked, with what was asked as an object, and the pieces that Sourcegraph sends."""
    events = as_events([{"deltaText": FIRST}, {"deltaText": SECOND, "stopReason": "end_turn"}, {}])
    answered = json.dumps(events.replace("data: [DONE]", ""))
    text = (
        "log:\n  _recordingName: a\n  creator:\n    name: Polly.JS\n  entries:\n"
        "    - _id: a\n      request: {method: GET, url: https://h/}\n"
        "      response:\n        status: 200\n        content: {text: hello}\n\n"
        "    - _id: b\n      request:\n        method: POST\n        postData:\n          params: []\n"
        f"          textJSON:\n            messages:\n              - speaker: human\n                text: {Q}\n"
        f"      response:\n        status: 200\n        content:\n          text: {answered}\n"
        "  pages: []\n  version: '1.2'\n"
    )
    path = tmp_path / "recording.har.yaml"
    path.write_text(text)
    assert outcomes(path) == ["not-a-model-call", PLAIN]
    path.write_text("log:\n" + "          name: x\n" * 30 + "end\n")  # looked at once
    assert "not-a-model-call" not in outcomes(path)
    path.write_text("entries:\n  - request: {}\n")
    assert "not-a-model-call" not in outcomes(path)


def test_a_cassette_with_calls_that_are_none(tmp_path: Path) -> None:
    """One that gets a page, one without an answer, one that refers to another, one that is no YAML."""
    page = "- request:\n    body: null\n    method: GET\n  response:\n    body: {string: hello}\n"
    empty = ASKED_IN_YAML + "  response:\n    body:\n      string: ''\n"
    refers = "- request: &a\n    body: x\n  response: *a\n"
    path = tmp_path / "calls.yaml"
    path.write_text(in_yaml(page, empty, refers, "- request: [\n", ASKED_IN_YAML, ANSWERED_IN_YAML))
    assert outcomes(path) == ["not-a-model-call", "not-a-model-call", "broken-file", "broken-file", PLAIN]
