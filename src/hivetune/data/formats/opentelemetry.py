"""Spans of calls of models, by OpenTelemetry's semantic conventions for generative AI: messages as attributes of the
span, of its event, or of an event that is logged. OTLP's batches contain many.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.answers import call_of
from hivetune.data.pieces.format import NOT_HELD, Batch, Conversation, Format
from hivetune.data.pieces.turns import conversation_of, read_tools, with_system
from hivetune.data.pieces.values import Row, listed, objects, one_of, parsed
from hivetune.data.reasons import RowRefused

_ASKED, _ANSWERED = "gen_ai.input.messages", "gen_ai.output.messages"
_SYSTEM, _TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
_SESSION = "gen_ai.conversation.id"
_OPERATION = "gen_ai.client.inference.operation.details"  # the event that holds attributes of its span
_SPAN_COLUMNS = ("span_id", "trace_id", "kind", "events", "context", "start_time")


def attributes(value: Any) -> dict[str, Any]:
    """Return attributes as OTLP writes them, a list of keys with typed values, or as an object."""
    value = parsed(value)
    if isinstance(value, dict):
        return value
    pairs = [pair for pair in listed(value) if isinstance(pair, dict) and isinstance(pair.get("key"), str)]
    return {pair["key"]: _typed(pair.get("value")) for pair in pairs}


def _typed(value: Any) -> Any:
    """Return an OTLP value without its type wrapper ({"stringValue": "a"} is "a")."""
    if not isinstance(value, dict):
        return value
    if "arrayValue" in value:
        return [_typed(item) for item in listed(one_of(value["arrayValue"], "values"))]
    if "kvlistValue" in value:
        return attributes(one_of(value["kvlistValue"], "values"))
    return next(iter(value.values()), None)


def read(row: Row) -> Conversation | None:
    """Return the conversation in a span's attributes. Raise RowRefused: failed, not-held, or the problem with a
    turn.
    """
    held = attributes(row["attributes"])
    if not any(key in row for key in _SPAN_COLUMNS) and not any(key.startswith("gen_ai.") for key in held):
        return None
    for event in objects(row.get("events")) or []:
        held |= attributes(event.get("attributes")) if event.get("name") == _OPERATION else {}
    status = one_of(row.get("status"), "code", "status_code") or row.get("status_code") or row.get("status")
    if status in (2, "STATUS_CODE_ERROR", "ERROR") or held.get("error.type"):
        raise RowRefused("failed", "the call of the model failed: the span's status is an error")
    if not held.get(_ASKED) or not held.get(_ANSWERED):
        # Older conventions, and those of OpenInference and the AI SDK.
        other = next((key for key in held if key.startswith(("llm.", "ai.", "gen_ai.prompt"))), None)
        fact = f"the span has {other}, and no {_ASKED}: export with the current GenAI conventions"
        raise RowRefused(NOT_HELD, fact if other else "the span has no messages of a model")
    # Each message is an answer of its own to one question, but an agent's, of which only the last one has ended.
    answers = objects(parsed(held[_ANSWERED])) or []
    several = len(answers) > 1 and all("finish_reason" in answer for answer in answers)
    messages, _, changed = call_of(held[_ASKED], answers[:1] if several else held[_ANSWERED])
    changed += ("other-answers",) if several else ()
    system = [{**part, "text": part.get("content")} for part in objects(parsed(held.get(_SYSTEM))) or []]
    return conversation_of("opentelemetry", with_system(messages, system), read_tools(held.get(_TOOLS)), changed)


def _spans(record: Row) -> Iterator[Row]:
    """Yield the spans or the logged events of a batch, their attributes as objects, with those of their resource as
    defaults.
    """
    for resource in objects(one_of(record, "resourceSpans", "resourceLogs", "batches")) or [dict(record)]:
        shared = attributes(one_of(resource.get("resource"), "attributes"))
        for scope in objects(one_of(resource, "scopeSpans", "scopeLogs")) or []:
            for span in objects(one_of(scope, "spans", "logRecords")) or []:
                held = {**shared, **attributes(span.get("attributes"))}
                session = {"session_id": held[_SESSION]} if _SESSION in held else {}
                yield {**span, **session, "attributes": held}


_READS = frozenset(("attributes", "events", "resource", "scope", "status", "status_code", *_SPAN_COLUMNS))
FORMAT = Format("opentelemetry", read, needs=("attributes",), reads=_READS)
SPANS_FORMAT = Batch("otlp-spans", _spans, needs=("resourceSpans|resourceLogs|batches|scopeSpans|scopeLogs",))
