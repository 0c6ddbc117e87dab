"""The fields of a request: an allow-list of those that reach the model server, each with a type and a range.

llama.cpp reads about eighty fields. Some write before a block of its heap (`n_discard`, CVE-2026-21869), compile a
grammar (ggml-org/llama.cpp#22234), move adapters and slots, or cost a gigabyte (`n_probs`). A field that is unknown,
out of range or unsupported is refused by name: silently ignored fields mislead clients. Checked chat fields are the one
form of a request inside the gateway; another API's request is mapped to them and checked like them.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from hivetune.errors import UsageError

MAX_TOKENS = 1 << 20  # of an answer; its slot's context ends it before
MAX_LOGPROBS = 20  # as OpenAI's API; 100,000 of a token gave an answer of 53 MB and held up the next one for 31 s
# llama.cpp makes a grammar of a schema, which grows with each repetition.
SCHEMA_DEPTH, SCHEMA_VALUES, SCHEMA_REPEATS, SCHEMA_PATTERN_CHARS = 32, 2000, 1000, 256
_GENERIC = re.compile(r"(?:str|list\[.*|Literal\[.*|constrained-.*|function-.*|bool|int|float)\Z")


class FieldRefused(UsageError):
    """A field of a request is unknown, out of range or unsupported. `field`: its path in the request. `code`: the API's
    name of the error, which clients know."""

    code: str | None = None

    def __init__(self, field: str, reason: str, hint: str = "docs/serve.md lists the fields and their ranges"):
        super().__init__(f"{field}: {reason}", hint=hint)
        self.field = field


class TooLong(FieldRefused):
    """A prompt does not fit into the context."""

    code = "context_length_exceeded"

    def __init__(self, field: str, what: str, context_tokens: int):
        reason = f"{what} do not fit into the context of {context_tokens:,} tokens"
        hint = "shorten it; hivetune serve --context N gives as many as the model can use"
        super().__init__(field, reason, hint=hint)


_REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
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
_MAPS = frozenset(("properties", "$defs", "definitions"))  # whose keys are names
_VALUES = frozenset(("enum", "const", "default", "examples"))  # which hold no schemas


def _check_schema(schema: Any, *, strict: bool = False) -> None:
    """Raise ValueError for a JSON schema whose grammar would be large, or that refers to another document; with
    `strict` also for a keyword that would not hold, with its place."""
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
            if key in _REPEATS and isinstance(value, int | float) and value > SCHEMA_REPEATS:
                raise ValueError(f"{key} is at most {SCHEMA_REPEATS:,}")
            if key == "pattern" and isinstance(value, str) and len(value) > SCHEMA_PATTERN_CHARS:
                raise ValueError(f"a pattern has at most {SCHEMA_PATTERN_CHARS} characters")
            if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
                raise ValueError("a $ref stays inside the schema")
            if strict and is_schema and not _is_enforced(key, value, part):
                shown = f" {value!r}" if isinstance(value, str) else ""
                raise ValueError(f"strict: {key}{shown} at {place or '/'} is not enforced here; leave it or strict out")


def _is_enforced(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether an answer always keeps a keyword of its schema."""
    if key == "pattern" and isinstance(value, str):
        return value.startswith("^") and value.endswith("$") and re.search(r"\\[dDwWsSbB]", value) is None
    if key in _RANGES:
        return bool(schema.get("type") == "integer")
    return key not in _NOT_ENFORCED and (key != "format" or value in _FORMATS)


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    _check_schema(schema)
    return schema


def _joined(content: "str | list[TextPart] | None") -> str | None:
    """Return the text of a message. llama.cpp puts parts on lines of their own; read from a store, they would be
    joined without, and another prompt would be learned than was answered."""
    return "\n".join(part.text for part in content) if isinstance(content, list) else content


def _an_object(arguments: str) -> str:
    """Return the arguments of a call. Raises ValueError where llama.cpp would fail, as if the release had. A call
    without arguments may have an empty text."""
    text = arguments.strip() or "{}"
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError("the arguments of a call are a JSON object")
    return text


def _not_blank(text: str) -> str:
    """Return the text. Raises ValueError for one without a character: it would take the place of an answer."""
    if not text.strip():
        raise ValueError("an empty text corrects nothing; leave it out")
    return text


Schema = Annotated[dict[str, Any], AfterValidator(_bounded)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Name = Annotated[str, Field(max_length=256)]
Text512 = Annotated[str, Field(max_length=512)]
NewTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,7}$")], Annotated[float, Field(ge=-100, le=100)]]


class Fields(BaseModel):
    """The base of all fields: types are strict, and null means that a field was not sent."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _sent(cls, fields: Any) -> Any:
        """Return the fields without null: clients' message objects have fields of other servers, which are null."""
        return {key: value for key, value in fields.items() if value is not None} if type(fields) is dict else fields


class TextPart(Fields):
    type: Literal["text"]
    text: str


class Called(Fields):
    name: Name
    arguments: Annotated[str, AfterValidator(_an_object)] = "{}"


class Call(Fields):
    id: Name | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: Called


class Turn(Fields):
    """A message. `annotations` are those of the official client's own message objects, and empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, AfterValidator(_joined)] = None
    name: Name | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None  # the template keeps or drops it
    annotations: list[None] | None = Field(default=None, max_length=0)


class _Schema(Fields):
    """What has a schema: a function, by `parameters`, or the form of an answer, by `schema`."""

    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _enforced(self) -> Self:
        if self.strict:
            _check_schema(getattr(self, "schema_" if isinstance(self, _NamedSchema) else "parameters"), strict=True)
        return self


class Function(_Schema):
    name: Name
    parameters: Schema | None = None


class _NamedSchema(_Schema):
    name: Name | None = None
    schema_: Schema = Field(alias="schema")


class Tool(Fields):
    type: Literal["function"]
    function: Function


class _NamedFunction(Fields):
    name: Name


class NamedTool(Fields):
    type: Literal["function"]
    function: _NamedFunction


class Form(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema needs the type json_schema")
        return self


class _StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Common(Fields):
    """The fields that chat and completions share. The last five are hints to OpenAI's own servers, which have no effect
    here (`ignored_fields`)."""

    model: Name | None = None
    max_tokens: NewTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Field(ge=0.1, le=2)] | None = None
    logit_bias: Annotated[Bias, Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: Text512 | None = None
    metadata: Annotated[dict[Name, str | int | float | bool], Field(max_length=16)] | None = None  # 16 as OpenAI's API
    n: Literal[1] | None = None
    store: bool | None = None
    service_tier: Name | None = None
    prompt_cache_key: Text512 | None = None
    safety_identifier: Text512 | None = None
    verbosity: Name | None = None


class ChatFields(_Common):
    """The fields of /v1/chat/completions."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Form | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Name | None = None
    enable_thinking: bool | None = None


class TextFields(_Common):
    """The fields of /v1/completions."""

    prompt: Annotated[
        str | Annotated[list[str], Field(min_length=1, max_length=1)],  # LangChain sends a list of one
        AfterValidator(lambda prompt: prompt if isinstance(prompt, str) else prompt[0]),
    ]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None


class EmbeddingFields(Fields):
    """The fields of /v1/embeddings."""

    model: Name | None = None
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    user: Text512 | None = None


class FeedbackFields(Fields):
    """The fields of /v1/feedback."""

    id: Name
    rating: Literal["up", "down"] | None = None
    correction: Annotated[str, AfterValidator(_not_blank)] | None = None
    reason: Annotated[str, Field(max_length=10_000)] | None = None


_HINTS = ("prompt_cache_key", "safety_identifier", "store", "service_tier", "verbosity")
# What the gateway itself obeys, or what says only what is done anyway.
_OF_TEMPLATE = ("reasoning_effort", "enable_thinking")  # its arguments, where it knows them
_NOT_SENT = ("model", "user", "metadata", "n", "modalities", "best_of", "echo", *_OF_TEMPLATE, *_HINTS)
_USED_METADATA = frozenset(("agent", "category", "session_id"))


def checked_fields(fields: type[Fields], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `body` that were sent, as JSON types. Raises FieldRefused, naming the first wrong one."""
    try:
        checked = fields.model_validate(body)
    except ValidationError as error:
        # Of the branches of a union the one that came farthest is what was meant.
        wrong = max(error.errors(include_url=False, include_input=False), key=lambda problem: len(problem["loc"]))
        unknown = wrong["type"] == "extra_forbidden"
        reason = "no field of this API" if unknown else wrong["msg"].removeprefix("Value error, ")
        # A path such as `messages[0].content`, without the names of the types that pydantic tried.
        parts = [part for part in wrong["loc"] if isinstance(part, int) or not _GENERIC.match(part)]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
        raise FieldRefused(path.lstrip("."), reason) from None
    sent = checked.model_dump(exclude_none=True, exclude_unset=True, by_alias=True)
    for number, turn in enumerate(sent.get("messages", ())):
        if "content" not in turn and not turn.get("tool_calls"):
            raise FieldRefused(f"messages[{number}].content", "a message has a content or tool_calls")
    choice = sent.get("tool_choice")
    if isinstance(choice, dict):  # llama.cpp takes it for "auto"
        named = [tool for tool in sent.get("tools", ()) if tool["function"]["name"] == choice["function"]["name"]]
        sent |= {"tools": named, "tool_choice": "required"}
    if sent.get("tool_choice") == "required" and not sent.get("tools"):
        raise FieldRefused("tool_choice", "no such tool is given")
    return sent


def ignored_fields(sent: Mapping[str, Any], template: str) -> list[str]:
    """Return the fields that were sent and have no effect. `template`: the model's chat template."""
    ignored = [key for key in _HINTS if sent.get(key) not in (None, False, "auto", "default")]
    if "metadata" in sent and not sent["metadata"].keys() & _USED_METADATA:
        ignored.append("metadata")
    return ignored + [name for name in _OF_TEMPLATE if name in sent and name not in template]


def upstream_fields(sent: Mapping[str, Any], *, takes_tools: bool, template: str = "") -> dict[str, Any]:
    """Return the fields for the model server. `template`: the model's chat template. Raises FieldRefused for tools that
    it has no place for: it would leave them out without a word."""
    if not takes_tools:
        used = ["tools"] if sent.get("tools") else []
        used += ["tool_choice"] if sent.get("tool_choice") not in (None, "none", "auto") else []
        turns = enumerate(sent.get("messages", ()))
        used += [f"messages[{number}].tool_calls" for number, turn in turns if turn.get("tool_calls")]
        if used:
            raise FieldRefused(used[0], "the chat template of this model has no place for tools")
    forwarded = {key: value for key, value in sent.items() if key not in _NOT_SENT}
    if "max_completion_tokens" in forwarded:
        forwarded["max_tokens"] = forwarded.pop("max_completion_tokens")
    known = {name: sent[name] for name in _OF_TEMPLATE if name in sent and name in template}
    return {**forwarded, "chat_template_kwargs": known} if known else forwarded
