"""What the formats of traces share: ids that join the parts of a step, and what a trace says of all its steps."""

import json
import re
from typing import Any

from hivetune.data.columns import column_kind, looks_like_content
from hivetune.data.pieces.answers import is_response, read_answer, read_request
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.parts import read_tools
from hivetune.data.pieces.said import Conversation, Row, first_of, listed, objects, one_of, parsed
from hivetune.data.pieces.turns import ROLES, conversation_of
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

# What a trace says of all its steps.
SHARED = ("sessionId", "session_id", "userId", "user_id", "traceId", "trace_id")
_OF_SPANS = ("spans", "resourceSpans", "batches")
INPUTS, OUTPUTS = ("inputs", "input"), ("outputs", "output", "expected_output", "expected")
# What a step may be given besides its question without changing what is asked.
_SETTINGS = (
    *("messages", "input", "prompt", "prompts", "message", "question", "query", "system", "system_prompt"),
    *("system_instruction", "instructions", "chat_history", "history"),
)
# An answer among what a step was given: the step judges it.
_JUDGED = ("output", "answer", "response", "completion", "prediction", "expected", "actual_output", "submission")
_SPEAKER = re.compile(r"^(system|developer|user|human|assistant|ai|tool): ", re.M | re.I)


def without_wrapper(record: dict[str, Any]) -> dict[str, Any]:
    """Return the spans that Tempo keeps below `trace` and MLflow below `data`, with the fields of the trace."""
    inner = next((record[key] for key in ("trace", "data") if isinstance(record.get(key), dict)), None)
    if inner is None or not any(objects(inner.get(key)) for key in _OF_SPANS):
        return record
    return {key: inner[key] for key in (*_OF_SPANS, *SHARED) if key in inner}


def joined_by_id(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return objects with one id as one, in the order of the first of each. Later values win, unless they are null.
    Objects without an id stay separate.
    """
    joined: dict[Any, dict[str, Any]] = {}
    for index, part in enumerate(parts):
        fields = joined.setdefault(index if part.get("id") is None else str(part["id"]), {})
        fields |= {key: value for key, value in part.items() if value is not None}
    return list(joined.values())


def attributes(value: Any) -> dict[str, Any]:
    """Return attributes as OTLP writes them, a list of keys with typed values, or as an object."""
    if isinstance(value, dict):
        return value
    pairs = [pair for pair in listed(value) if isinstance(pair, dict) and isinstance(pair.get("key"), str)]
    return {pair["key"]: typed(pair.get("value")) for pair in pairs}


def typed(value: Any) -> Any:
    """Return a value of OTLP without the name of its type."""
    if not isinstance(value, dict):
        return value
    if "arrayValue" in value:
        return [typed(item) for item in listed(one_of(value["arrayValue"], "values"))]
    if "kvlistValue" in value:
        return attributes(one_of(value["kvlistValue"], "values"))
    return next(iter(value.values()), None)


def read_step(name: str, row: Row, settings: Any, *, is_call: bool) -> Conversation:
    """Return the conversation of a step, from its input and output. `is_call`: it is a call of a model, so its input is
    a request; else a chain with inputs of its own.
    """
    request_column, response_column = first_of(row, INPUTS) or "", first_of(row, OUTPUTS) or ""
    step_input, response = decoded(row.get(request_column)), decoded(row.get(response_column))
    if response in (None, "", [], {}, "None", "null"):  # Python's and JSON's nothing, as text
        raise RowRefused("not-a-model-call", "the step has no output")
    if step_input is None:
        raise RowRefused("not-a-model-call", "the step has no input")
    if isinstance(step_input, dict) and "role" in step_input and "content" in step_input:
        step_input = [step_input]
    if isinstance(step_input, dict) and not is_call and len(step_input) == 1:
        only = next(iter(step_input.values()))
        step_input = step_input if isinstance(only, dict) else parsed(only)  # {"topic": text}: a chain with one input
    if isinstance(step_input, dict):
        if "messages" not in step_input and "contents" not in step_input:
            for key, value in step_input.items():  # with more input than a question the prompt is unknown
                plain = plain_name(key)
                extra = plain not in _SETTINGS and column_kind(plain) != "note" and looks_like_content(value)
                if extra or (plain in _JUDGED and isinstance(value, str)):
                    fact = f"the step was also given {key[:40]!r}: use the call of the model itself"
                    option = f"--columns prompt={request_column},completion={response_column}"
                    raise RowRefused("unexplained-column", f"{fact}, or if all of it is the question, {option}")
        prompts = step_input.get("prompts")  # LangChain gives a model that completes texts a list of prompts
        if isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts):
            if len(prompts) != 1:
                hint = f"a call with {len(prompts)} prompts: a row for each is needed"
                raise RowRefused("unsupported-content", hint)
            step_input = prompts[0]
    if isinstance(response, dict) and len(response) == 1 and not is_response(response):
        response = next(iter(response.values()))  # a chain's output: one text under any name
    request = read_request(_turns_in(step_input) if isinstance(step_input, str) else step_input)
    reply, changed = read_answer(response)
    tools = request.tools or read_tools(one_of(one_of(settings, "invocation_params"), "tools"))
    return conversation_of(name, joined(request.messages, reply), tools, changed, (request_column, response_column))


def decoded(value: Any) -> Any:
    """Return decoded JSON text, also nested JSON text, as some exporters write objects."""
    if isinstance(value, str) and value[:1] == '"' and value[-1:] == '"':
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return parsed(value)


def _turns_in(written: str) -> str | list[dict[str, str]]:
    """Return the turns of messages that were written as one text, as LangChain does: questions and answers in turn,
    after a system prompt; any other text as it is.

    Raise RowRefused: of other speakers it is unclear which of its lines are turns.
    """
    roles = [ROLES[name.lower()] for name in _SPEAKER.findall(written)]
    begins = _SPEAKER.match(written) is not None
    if not roles or (len(roles) == 1 and (roles[0] != "user" or not begins)):
        return written
    spoken = roles[1:] if roles[0] == "system" else roles
    in_turn = all(role == ("user", "assistant")[i % 2] for i, role in enumerate(spoken))
    if not in_turn or len(spoken) % 2 == 0 or not begins:
        raise RowRefused("rendered-text", "the request is one text with several speakers: log its messages as a list")
    texts = _SPEAKER.split(written)[2::2]
    return [{"role": role, "content": text.strip()} for role, text in zip(roles, texts, strict=True)]


def joined(question: list[Message], answer: list[Message]) -> list[Message]:
    """Return question and answer; agents answer with the whole conversation, the question included."""
    num_asked = len(question)
    same = [(m.role, m.content) for m in question] == [(m.role, m.content) for m in answer[:num_asked]]
    return answer if same and len(answer) > num_asked else [*question, *answer]
