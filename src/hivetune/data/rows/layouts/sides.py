"""Which columns of a record are the request and the response of an API, by what they hold."""

from typing import Any

from hivetune.data.pieces.answers import has_completions, is_request, is_response
from hivetune.data.pieces.said import Row, is_json_text, objects, one_of, parsed
from hivetune.data.pieces.streams import starts_events

REQUESTS = (
    *("request", "request_body", "req", "body", "kwargs", "input", "inputs", "params", "payload", "raw_request"),
    *("llm_input", "model_input", "request_json", "full_request", "llm_request", "api_request", "request_payload"),
    "prompt",
)
RESPONSES = (
    *("response", "response_body", "resp", "output", "outputs", "result", "completion", "raw_response"),
    *("llm_output", "model_output", "response_json", "full_response", "llm_response", "api_response"),
    *("request_response", "original_response", "response_payload"),
)
# Answers beside a list of messages, of which nothing else in the row can be the answer.
TEXT_ANSWERS = (
    *("response_text", "output_text", "completion_text", "answer_text", "assistant_message", "assistant_reply"),
    *("response_content", "raw_response", "raw_output", "llm_output", "result"),
)
REPEATED_REQUESTS = ("proxy_server_request", "function_kwargs")  # what was asked once more, or only there


def request_and_response(row: Row) -> tuple[str, str] | None:
    """(the column of the request, the column of the response), "" for the row itself; None if it is no such record."""
    if not any(map(_is_structured, row.values())):
        return None  # texts alone, as most rows are: a question and its answer
    answered = _answered(row)
    if answered is None:
        return _listed_and_text(row)
    asked = next((name for name in REQUESTS if name != answered and _is_asked(name, row.get(name))), None)
    if asked is None and _asks_flat(row, answered):
        asked = ""
    if asked is None:
        asked = next((name for name in REPEATED_REQUESTS if _is_asked(name, row.get(name))), None)
    return None if asked is None else (asked, answered)


def _listed_and_text(row: Row) -> tuple[str, str] | None:
    """A request that is a list of messages in an object, and its answer as a text or an object with one."""
    asked = next((name for name in REQUESTS if objects(one_of(parsed(row.get(name)), "messages", "contents"))), None)
    if asked is None:
        return None
    answers = (name for name in (*RESPONSES, *TEXT_ANSWERS, "answer", "reply") if name != asked)
    answered = next((name for name in answers if row.get(name) not in (None, "")), None)
    held = None if answered is None else row[answered]
    said = one_of(held, "content", "text") if isinstance(held, dict) else held
    return (asked, answered) if answered is not None and isinstance(said, str) and said.strip() else None


def _answered(row: Row) -> str | None:
    """The column of the response, "" for the row itself."""
    found = next((name for name in RESPONSES if _is_structured(row.get(name)) and is_response(row[name])), None)
    if found is None and (_is_list(row.get("choices")) or _is_list(row.get("candidates")) or has_completions(row)):
        return ""
    if found is None and isinstance(row.get("message"), dict) and "messages" in row:
        return ""  # Ollama's answer beside what was asked
    return found


def _asks_flat(row: Row, answered: str) -> bool:
    """Whether the row itself says what was asked."""
    if any(isinstance(parsed(row.get(key)), list) for key in ("messages", "contents", "input")):
        return True
    if answered in ("", "response", "response_body") and isinstance(row.get("prompt"), str):
        return True
    if answered == "" and isinstance(one_of(row.get("prompt"), "text"), str):
        return True
    return answered == "output" and isinstance(row.get("input"), str) and row.get("object") == "response"


def _is_asked(name: str, value: Any) -> bool:
    if name == "prompt" and not isinstance(value, dict):
        return False  # a list of turns beside a list of turns: prompt-completion
    return isinstance(parsed(value), dict) and is_request(value)


def _is_structured(value: Any) -> bool:
    return isinstance(value, dict | list) or (isinstance(value, str) and (is_json_text(value) or starts_events(value)))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
