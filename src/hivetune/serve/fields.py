"""The fields of a request: an allow-list of those that reach the model server, each with a type and a range.

A field that is unknown, out of range or unsupported is refused by name. Checked chat fields are the gateway's only form
of a request; requests of other APIs are mapped to them and checked alike.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic reads typing's own only from Python 3.12 on

from hivetune.errors import UsageError

# Of an answer; its slot's context ends it before.
MAX_TOKENS = 1 << 20
# As OpenAI's API; 100,000 of a token gave an answer of 53 MB and held up the next one for 31 s.
MAX_LOGPROBS = 20
# llama.cpp makes a grammar of a schema, which grows with each repetition.
SCHEMA_DEPTH, SCHEMA_VALUES, SCHEMA_REPEATS, SCHEMA_PATTERN_CHARS = 32, 2000, 1000, 256
_GENERIC = re.compile(r"(?:str|list\[.*|Literal\[.*|constrained-.*|function-.*|bool|int|float)\Z")


class FieldRefused(UsageError):
    """A field of a request is unknown, out of range or unsupported. `field`: its path in the request. `code`: the API's
    error code, which clients compare.
    """

    def __init__(self, field: str, reason: str, hint: str = "", code: str | None = None):
        super().__init__(f"{field}: {reason}", hint=hint or "docs/serve.md lists the fields and their ranges")
        self.field, self.code = field, code


def too_long(field: str, what: str, context_tokens: int) -> FieldRefused:
    """Return the error for a prompt that does not fit into the context of `context_tokens`."""
    reason = f"{what} do not fit into the context of {context_tokens:,} tokens"
    hint = "shorten it; hivetune serve --context N gives as many as the model can use"
    return FieldRefused(field, reason, hint, "context_length_exceeded")


# Keywords of JSON Schema that llama.cpp's grammar leaves out in silence: an answer may break them.
_NOT_ENFORCED = frozenset(
    (
        *("allOf", "not", "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
        *("minProperties", "maxProperties"),
    )
)
_RANGES = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))  # enforced for integers only
_FORMATS = frozenset(("date", "time", "date-time", "uuid"))
_REPEATS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))
_MAPS = frozenset(("properties", "$defs", "definitions"))  # whose keys are names
_VALUES = frozenset(("enum", "const", "default", "examples"))  # which hold no schemas


def _check_schema(schema: Any, *, strict: bool = False) -> Any:
    """Return a JSON schema. Raises ValueError if its grammar would be large or it refers to another document; with
    `strict` also for a keyword that can't be enforced, with its place.
    """
    waiting = [("", 0, schema, True)]  # place, depth, value, whether it stands where a schema does
    for place, depth, part, is_schema in waiting:  # grows while it is read
        if depth > SCHEMA_DEPTH or len(waiting) > SCHEMA_VALUES:
            raise ValueError(f"a schema has at most {SCHEMA_DEPTH} levels and {SCHEMA_VALUES:,} values")
        if isinstance(part, list):
            waiting += ((f"{place}/{number}", depth + 1, item, is_schema) for number, item in enumerate(part))
        for key, value in part.items() if isinstance(part, dict) else ():
            if is_schema and key in _MAPS and isinstance(value, dict):
                waiting += ((f"{place}/{key}/{name}", depth + 2, each, True) for name, each in value.items())
            else:
                waiting.append((f"{place}/{key}", depth + 1, value, is_schema and key not in _VALUES))
            problem = _too_large(key, value)
            if strict and is_schema and not problem and not _is_enforced(key, value, part):
                shown = f" {value!r}" if isinstance(value, str) else ""
                problem = f"strict: {key}{shown} at {place or '/'} is not enforced here; leave it or strict out"
            if problem:
                raise ValueError(problem)
    return schema


def _too_large(key: str, value: Any) -> str:
    """Return the reason why a keyword's value makes the grammar too large, or ""."""
    if key in _REPEATS and isinstance(value, int | float) and value > SCHEMA_REPEATS:
        return f"{key} is at most {SCHEMA_REPEATS:,}"
    if key == "pattern" and isinstance(value, str) and len(value) > SCHEMA_PATTERN_CHARS:
        return f"a pattern has at most {SCHEMA_PATTERN_CHARS} characters"
    return "a $ref stays inside the schema" if key == "$ref" and str(value)[:1] != "#" else ""


def _is_enforced(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether every answer obeys a keyword of its schema."""
    if key == "pattern" and isinstance(value, str):
        return value.startswith("^") and value.endswith("$") and re.search(r"\\[dDwWsSbB]", value) is None
    if key in _RANGES:
        return bool(schema.get("type") == "integer")
    return key not in _NOT_ENFORCED and (key != "format" or value in _FORMATS)


def _enforced(named: dict[str, Any]) -> dict[str, Any]:
    """Return a function or the form of an answer after the check of its schema (`parameters` or `schema`)."""
    if named.get("strict"):
        _check_schema(named.get("parameters", named.get("schema")), strict=True)
    return named


def _joined(content: str | list[dict[str, str]]) -> str:
    # llama.cpp puts parts on lines of their own; read from a store, they would be joined without, and another prompt
    # would be learned than was answered.
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _an_object(arguments: str) -> str:
    """Return the text of a call's arguments, which must be a JSON object; "{}" for an empty text. Raises ValueError."""
    text = arguments.strip() or "{}"
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    # llama.cpp would answer 500, as if the release had failed.
    if not is_object:
        raise ValueError("the arguments of a call must be a JSON object")
    return text


def _not_null(fields: Any) -> Any:
    # Null counts as not sent: clients' message objects have fields of other servers.
    return {key: value for key, value in fields.items() if value is not None} if type(fields) is dict else fields


def _object(needed: Mapping[str, Any], **other: Any) -> Any:
    """Return the type of an object with exactly these fields, of strict types."""
    fields = {**needed, **{name: NotRequired[kind] for name, kind in other.items()}}
    kind = with_config(strict=True, extra="forbid", allow_inf_nan=False)(TypedDict("object", fields))  # type: ignore
    return Annotated[kind, BeforeValidator(_not_null)]


def _checked(kind: Any, check: Callable[[Any], Any]) -> Any:
    return Annotated[kind, AfterValidator(check)]


def _range(kind: Any, low: float, high: float) -> Any:
    return Annotated[kind, Field(ge=low, le=high)]


def _sized(kind: Any, most: int | None = None, least: int = 0) -> Any:
    """Return the type of a text or map with `least` to `most` characters or items."""
    return Annotated[kind, Field(min_length=least, max_length=most)]


def _list(kind: Any, most: int | None = None, least: int = 0) -> Any:
    return _sized(list[kind], most, least)


# Of the biases of tokens, by their numbers, and of the metadata.
_Token = Annotated[str, Field(pattern=r"^[0-9]{1,7}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Key = Annotated[str, Field(max_length=256)]

_NAME, _STOP = _sized(str, 256), _sized(str, 1024, 1)
_SCHEMA = _checked(dict[str, Any], _check_schema)
_CALLED = _object({"name": _NAME}, arguments=_checked(str, _an_object))
_CALL = _object({"function": _CALLED}, id=_NAME, type=Literal["function"], index=int)
_PART = _object({"type": Literal["text"], "text": str})
_TURN = _object(
    {"role": Literal["system", "developer", "user", "assistant", "tool"]},
    content=_checked(str | _list(_PART), _joined),
    name=_NAME,
    tool_calls=_list(_CALL),
    tool_call_id=_NAME,
    reasoning_content=str,  # the template keeps or drops it
    # The official client sends its own message objects back, where it is empty.
    annotations=_list(None, 0),
)
_FUNCTION = _object({"name": _NAME}, description=str, strict=bool, parameters=_SCHEMA)
_TOOL = _object({"type": Literal["function"], "function": _checked(_FUNCTION, _enforced)})
_CHOSEN_TOOL = _object({"type": Literal["function"], "function": _object({"name": _NAME})})
_NAMED_SCHEMA = _object({"schema": _SCHEMA}, name=_NAME, description=str, strict=bool)
_FORM = _object({"type": Literal["json_schema"], "json_schema": _checked(_NAMED_SCHEMA, _enforced)})
_FORM |= _object({"type": Literal["text", "json_object"]})

# llama.cpp reads about eighty fields. Some write before a block of its heap (`n_discard`, CVE-2026-21869), compile a
# grammar (ggml-org/llama.cpp#22234), move adapters and slots, or cost a gigabyte (`n_probs`). So these are all, and no
# other is ignored in silence, which misleads clients.
#
# Sent on.
FORWARDED = {
    "max_tokens": _range(int, 1, MAX_TOKENS),
    "max_completion_tokens": _range(int, 1, MAX_TOKENS),
    "temperature": _range(float, 0, 2),
    "top_p": _range(float, 0, 1),
    "top_k": _range(int, 0, 1 << 20),
    "min_p": _range(float, 0, 1),
    "seed": _range(int, 0, (1 << 32) - 1),
    "stop": _STOP | _list(_STOP, 16),
    "presence_penalty": _range(float, -2, 2),
    "frequency_penalty": _range(float, -2, 2),
    "repeat_penalty": _range(float, 0.1, 2),
    "logit_bias": _sized(dict[_Token, _Bias], 1024),
    "stream": bool,
    "stream_options": _object({}, include_usage=bool, include_obfuscation=Literal[False]),
    "logprobs": bool,
    "top_logprobs": _range(int, 0, MAX_LOGPROBS),
    "tools": _list(_TOOL, 128),
    "tool_choice": Literal["none", "auto", "required"] | _CHOSEN_TOOL,
    "parallel_tool_calls": bool,
    "response_format": _FORM,
}
# Obeyed by the gateway itself.
OBEYED = {
    "model": _NAME,
    "user": _sized(str, 512),
    "metadata": _sized(dict[_Key, str | int | float | bool], 16),  # as OpenAI's API
    "n": Literal[1],
    "modalities": list[Literal["text"]],
}
# Arguments of the chat template, where it knows them.
TEMPLATE = {"reasoning_effort": _NAME, "enable_thinking": bool}
# Hints to OpenAI's own servers, which have no effect here.
HINTS = {
    "prompt_cache_key": _sized(str, 512),
    "safety_identifier": _sized(str, 512),
    "store": bool,
    "service_tier": _NAME,
    "verbosity": _NAME,
}
_SENT_ON = {*FORWARDED, "messages"}
_USED_METADATA = frozenset(("agent", "category", "session_id"))

Api = TypeAdapter[dict[str, Any]]
CHAT_FIELDS: Api = TypeAdapter(_object({"messages": _list(_TURN, least=1)}, **FORWARDED, **OBEYED, **TEMPLATE, **HINTS))
FEEDBACK_FIELDS: Api = TypeAdapter(
    _object({"id": _NAME}, rating=Literal["up", "down"], correction=str, reason=_sized(str, 10_000))
)


def checked_fields(fields: Api, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `body` that were sent. Raises FieldRefused, naming the first wrong one."""
    try:
        sent = fields.validate_python(body)
    except ValidationError as error:
        # Of the branches of a union the one that came farthest is what was meant.
        wrong = max(error.errors(include_url=False, include_input=False), key=lambda problem: len(problem["loc"]))
        unknown = wrong["type"] == "extra_forbidden"
        reason = "is not a field of this API" if unknown else wrong["msg"].removeprefix("Value error, ")
        # A path such as `messages[0].content`, without the names of the types that pydantic tried.
        parts = [part for part in wrong["loc"] if isinstance(part, int) or not _GENERIC.match(part)]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
        raise FieldRefused(path.lstrip("."), reason) from None
    for number, turn in enumerate(sent.get("messages", ())):
        if "content" not in turn and not turn.get("tool_calls"):
            raise FieldRefused(f"messages[{number}].content", "a message must have content or tool_calls")
    choice = sent.get("tool_choice")
    # llama.cpp takes it for "auto".
    if isinstance(choice, dict):
        named = [tool for tool in sent.get("tools", ()) if tool["function"]["name"] == choice["function"]["name"]]
        sent |= {"tools": named, "tool_choice": "required"}
    if sent.get("tool_choice") == "required" and not sent.get("tools"):
        raise FieldRefused("tool_choice", "it names a tool that is not in tools")
    return sent


def ignored_fields(sent: Mapping[str, Any], template: str) -> list[str]:
    """Return the names of the sent fields that have no effect with this model. `template`: its chat template."""
    ignored = [key for key in HINTS if sent.get(key) not in (None, False, "auto", "default")]
    if "metadata" in sent and not sent["metadata"].keys() & _USED_METADATA:
        ignored.append("metadata")
    return ignored + [name for name in TEMPLATE if name in sent and name not in template]


def upstream_fields(sent: Mapping[str, Any], *, takes_tools: bool, template: str = "") -> dict[str, Any]:
    """Return the fields for the model server. `template`: the model's chat template. Raises FieldRefused for tools if
    the template can't render them.
    """
    if not takes_tools:  # it would leave them out without a word
        used = ["tools"] if sent.get("tools") else []
        used += ["tool_choice"] if sent.get("tool_choice") not in (None, "none", "auto") else []
        turns = enumerate(sent.get("messages", ()))
        used += [f"messages[{number}].tool_calls" for number, turn in turns if turn.get("tool_calls")]
        if used:
            raise FieldRefused(used[0], "the chat template of this model does not write tools")
    forwarded = {key: value for key, value in sent.items() if key in _SENT_ON}
    if "max_completion_tokens" in forwarded:
        forwarded["max_tokens"] = forwarded.pop("max_completion_tokens")
    known = {name: sent[name] for name in TEMPLATE if name in sent and name in template}
    return {**forwarded, "chat_template_kwargs": known} if known else forwarded
