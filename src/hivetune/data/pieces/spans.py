"""What the formats of traces share: ids that join the parts of a step, and what a trace says of all its steps."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.columns import column_kind, looks_like_content
from hivetune.data.pieces.answers import is_response, read_answer, read_request
from hivetune.data.pieces.calls import read_tools
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import (
    Conversation,
    Row,
    first_of,
    listed,
    objects,
    one_of,
    parsed,
)
from hivetune.data.pieces.turns import ROLES, in_order
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

MODEL_RUNS = ("llm", "chat_model", "chat")  # types of LangSmith's runs
# What a trace says of all its steps.
SHARED = ("sessionId", "session_id", "userId", "user_id", "traceId", "trace_id")
_OF_SPANS = ("spans", "resourceSpans", "batches")


def without_wrapper(record: dict[str, Any]) -> dict[str, Any]:
    """Return what Tempo keeps below `trace`, and MLflow below `data`, beside what it says of the whole trace."""
    inner = next((record[key] for key in ("trace", "data") if isinstance(record.get(key), dict)), None)
    if inner is None or not any(objects(inner.get(key)) for key in _OF_SPANS):
        return record
    return {key: inner[key] for key in (*_OF_SPANS, *SHARED) if key in inner}


def joined_by_id(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return objects with one id as one, in the order of the first of each: what comes later goes before, unless it is
    null. What has no id stays alone.
    """
    found: list[dict[str, Any]] = []
    by_id: dict[str, dict[str, Any]] = {}
    for part in parts:
        said = {key: value for key, value in part.items() if value is not None}
        if (known := by_id.get(str(part.get("id")))) is not None and part.get("id") is not None:
            known.update(said)
            continue
        found.append(said)
        by_id[str(part.get("id"))] = said
    return found


# Attributes of spans: out of the ways in which exporters nest them, under names with dots and back to trees.


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


def dotted(value: Mapping[str, Any], namespaces: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Return attributes under names with dots, where an exporter nests those of `namespaces`."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        nests = isinstance(inner, dict) and name.partition(".")[0] in namespaces
        found |= dotted(inner, namespaces, f"{name}.") if nests else {name: inner}
    return found


def tree_below(flat: Mapping[str, Any], prefix: str) -> list[Any] | None:
    """Return the list whose parts have names that begin with `prefix`; None if there is none."""
    found = nested(flat, prefix)
    return found if isinstance(found, list) else None


def nested(flat: Mapping[str, Any], prefix: str) -> Any:
    """Return what stands below `prefix`, nested as the dots in the names say."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if not key.startswith(prefix):
            continue
        node = tree
        *path, last = key.removeprefix(prefix).split(".")
        for step in path:
            inner = node.setdefault(step, {})
            node = inner if isinstance(inner, dict) else node
        node[last] = value
    return _as_lists(tree)


def _as_lists(value: Any) -> Any:
    """Return objects whose keys are 0, 1, 2 ... as lists."""
    if not isinstance(value, dict):
        return value
    if value and all(key.isdecimal() for key in value):
        return [_as_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _as_lists(item) for key, item in value.items()}


# A step of a trace, by what it was given and what it gave back.

INPUTS, OUTPUTS = ("inputs", "input"), ("outputs", "output", "expected_output", "expected")
# What a step may be given besides its question without changing what is asked.
SETTINGS = (
    "messages",
    "input",
    "prompt",
    "prompts",
    "message",
    "question",
    "query",
    "system",
    "system_prompt",
    "system_instruction",
    "instructions",
    "chat_history",
    "history",
)
# An answer among what a step was given: the step judges it.
JUDGED = ("output", "answer", "response", "completion", "prediction", "expected", "actual_output", "submission")


def step_said(name: str, row: Row, settings: Any, *, is_call: bool) -> Conversation:
    """Return the conversation of a step. `is_call`: it is a call of a model, so its input is a request; else a
    chain with inputs of its own.
    """
    asked_column, answered_column = first_of(row, INPUTS), first_of(row, OUTPUTS)
    asked = decoded(row[asked_column]) if asked_column else None
    answered = decoded(row[answered_column]) if answered_column else None
    _refuse_half(asked, answered)
    if isinstance(asked, dict) and "role" in asked and "content" in asked:
        asked = [asked]
    if isinstance(asked, dict) and not is_call and len(asked) == 1:
        only = next(iter(asked.values()))
        asked = asked if isinstance(only, dict) else parsed(only)  # {"topic": text}: a chain with one input
    if isinstance(asked, dict):
        _refuse_more(asked, (asked_column, answered_column))
        asked = _only_prompt(asked)
    request = read_request(_from_transcript(asked))
    said, changed = read_answer(_only_text(answered))
    tools = request.tools or read_tools(one_of(one_of(settings, "invocation_params"), "tools"))
    messages, more = in_order(joined(request.messages, said))
    columns = (asked_column or "", answered_column or "")
    return Conversation(name, messages, tools, changed=(*changed, *more), explained=columns)


def _only_prompt(asked: Mapping[str, Any]) -> Any:
    """Return the only prompt of a list: LangChain gives a model that completes texts a list of prompts."""
    prompts = asked.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        return asked
    if len(prompts) != 1:
        raise RowRefused("unsupported-content", f"a call with {len(prompts)} prompts: a row for each is needed")
    return prompts[0]


def _refuse_half(asked: Any, answered: Any) -> None:
    if answered in (None, "", [], {}, "None", "null"):  # Python's and JSON's nothing, as text
        raise RowRefused("not-a-model-call", "the step has no output")
    if asked is None:
        raise RowRefused("not-a-model-call", "the step has no input")


def decoded(value: Any) -> Any:
    """Return what JSON text holds, also JSON text within JSON text, as some exporters write objects."""
    if isinstance(value, str) and value[:1] == '"' and value[-1:] == '"':
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return parsed(value)


def _only_text(answered: Any) -> Any:
    """Return a chain's output is an object with one text under any name."""
    if isinstance(answered, dict) and len(answered) == 1 and not is_response(answered):
        return next(iter(answered.values()))
    return answered


def _from_transcript(asked: Any) -> Any:
    """Return the turns of messages that were written as one text, as LangChain does: questions and answers in turn,
    after a system prompt.

    Raise RowRefused: of other speakers nobody can tell which of its lines are turns.
    """
    speakers = [name.lower() for name in _SPEAKER.findall(asked)] if isinstance(asked, str) else []
    if not speakers or (len(speakers) == 1 and (ROLES[speakers[0]] != "user" or not _SPEAKER.match(asked))):
        return asked
    roles = [ROLES[name] for name in speakers]
    spoken = roles[1:] if roles[0] == "system" else roles
    in_turn = all(role == ("user", "assistant")[i % 2] for i, role in enumerate(spoken))
    if not in_turn or len(spoken) % 2 == 0 or not _SPEAKER.match(asked):
        raise RowRefused("rendered-text", "the request is one text with several speakers: log its messages as a list")
    texts = _SPEAKER.split(asked)[2::2]
    return [{"role": role, "content": text.strip()} for role, text in zip(roles, texts, strict=True)]


_SPEAKER = re.compile(r"^(system|developer|user|human|assistant|ai|tool): ", re.M | re.I)


def _refuse_more(asked: Mapping[str, Any], columns: tuple[str | None, str | None]) -> None:
    """Raise RowRefused for a step that was given more than a question in the first of these columns: nobody
    knows what stood in its prompt.
    """
    if "messages" in asked or "contents" in asked:
        return
    for key, value in asked.items():
        name = plain_name(key)
        more = name not in SETTINGS and column_kind(name) != "note" and looks_like_content(value)
        if more or (name in JUDGED and isinstance(value, str)):
            raise RowRefused(
                "unexplained-column",
                f"the step was also given {key[:40]!r}: use the call of the model itself, or if all of it is the"
                f" question, --columns prompt={columns[0]},completion={columns[1]}",
            )


def joined(asked: list[Message], answered: list[Message]) -> list[Message]:
    """Return question and answer; agents answer with the whole conversation, the question included."""
    known = len(asked)
    same = [(m.role, m.content) for m in asked] == [(m.role, m.content) for m in answered[:known]]
    return answered if same and len(answered) > known else [*asked, *answered]
