"""The fields of a request: only documented ones reach the model server, each with a type and a range.

llama.cpp reads about eighty fields. Some write before a block of its heap (`n_discard`, CVE-2026-21869), compile a
grammar (ggml-org/llama.cpp#22234), move adapters and slots, or cost a gigabyte (`n_probs`). A field that is unknown,
out of range or unsupported is refused by name: a client that is told nothing believes that its field took effect.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from hivetune.errors import UsageError

MAX_TOKENS = 1 << 20  # of an answer; its slot's context ends it before
MAX_LOGPROBS = 20  # as OpenAI's API; 100,000 of a token gave an answer of 53 MB and held up the next one for 31 s
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
MAX_BIASES = 1024
MAX_TOOLS = 128
MAX_PAIRS = 16  # of metadata, as OpenAI's API
# llama.cpp makes a grammar of a schema, which grows with each repetition.
SCHEMA_DEPTH, SCHEMA_VALUES, SCHEMA_REPEATS, SCHEMA_PATTERN_CHARS = 32, 2000, 1000, 256
_REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
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
        super().__init__(
            field, reason, hint="shorten it; hivetune serve --context N gives as many as the model can use"
        )


def _bounded_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema. Raises ValueError if its grammar would be large, or if it refers to another document."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    for count, (value, depth) in enumerate(waiting):  # grows while it is read
        if depth > SCHEMA_DEPTH or count > SCHEMA_VALUES:
            raise ValueError(f"a schema has at most {SCHEMA_DEPTH} levels and {SCHEMA_VALUES:,} values")
        if isinstance(value, dict):
            for key in _REPEATS:
                if isinstance(value.get(key), int | float) and value[key] > SCHEMA_REPEATS:
                    raise ValueError(f"{key} is at most {SCHEMA_REPEATS:,}")
            if isinstance(value.get("pattern"), str) and len(value["pattern"]) > SCHEMA_PATTERN_CHARS:
                raise ValueError(f"a pattern has at most {SCHEMA_PATTERN_CHARS} characters")
            if isinstance(value.get("$ref"), str) and not value["$ref"].startswith("#"):
                raise ValueError("a $ref stays inside the schema")
            waiting += ((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            waiting += ((item, depth + 1) for item in value)
    return schema


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


def refuse_not_enforced(schema: Any, place: str = "") -> None:
    """Raise ValueError for a keyword of a strict schema that would not hold, with its place."""
    if isinstance(schema, list):
        for number, item in enumerate(schema):
            refuse_not_enforced(item, f"{place}/{number}")
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        pattern = value if key == "pattern" and isinstance(value, str) else None
        half = pattern is not None and not (pattern.startswith("^") and pattern.endswith("$"))
        escaped = pattern is not None and re.search(r"\\[dDwWsSbB]", pattern) is not None
        refused = (
            key in _NOT_ENFORCED
            or (key in _RANGES and schema.get("type") != "integer")
            or (key == "format" and value not in _FORMATS)
            or half
            or escaped
        )
        if refused:
            shown = f" {value!r}" if isinstance(value, str) else ""
            raise ValueError(f"strict: {key}{shown} at {place or '/'} is not enforced here; leave it or strict out")
        if key in _MAPS and isinstance(value, dict):
            for name, item in value.items():
                refuse_not_enforced(item, f"{place}/{key}/{name}")
        elif key not in ("enum", "const", "default", "examples"):
            refuse_not_enforced(value, f"{place}/{key}")


Schema = Annotated[dict[str, Any], AfterValidator(_bounded_schema)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Name = Annotated[str, Field(max_length=256)]


class _Fields(BaseModel):
    """The base of all fields: types are strict, and null means that a field was not sent."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _sent(cls, fields: Any) -> Any:
        """Return the fields without null: clients' message objects have fields of other servers, which are null."""
        return {key: value for key, value in fields.items() if value is not None} if type(fields) is dict else fields


class TextPart(_Fields):
    type: Literal["text"]
    text: str


def _joined(content: str | list[TextPart] | None) -> str | None:
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


class Called(_Fields):
    name: Name
    arguments: Annotated[str, AfterValidator(_an_object)] = "{}"


class Call(_Fields):
    id: Name | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: Called


class Turn(_Fields):
    """A message. `annotations` are those of the official client's own message objects, and empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, AfterValidator(_joined)] = None
    name: Name | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None  # the template keeps or drops it
    annotations: list[None] | None = Field(default=None, max_length=0)


class Function(_Fields):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _enforced(self) -> "Function":
        if self.strict:
            refuse_not_enforced(self.parameters)
        return self


class Tool(_Fields):
    type: Literal["function"]
    function: Function


class _NamedFunction(_Fields):
    name: Name


class NamedTool(_Fields):
    type: Literal["function"]
    function: _NamedFunction


class _NamedSchema(_Fields):
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Schema = Field(alias="schema")

    @model_validator(mode="after")
    def _enforced(self) -> "_NamedSchema":
        if self.strict:
            refuse_not_enforced(self.schema_)
        return self


class Form(_Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> "Form":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema needs the type json_schema")
        return self


class _StreamOptions(_Fields):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Common(_Fields):
    """The fields that chat and completions share. The last ones are hints to OpenAI's own servers, which have no effect
    here (`ignored_fields`)."""

    model: Name | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.1, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,7}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: Annotated[dict[Name, str | int | float | bool], Field(max_length=MAX_PAIRS)] | None = None
    n: Literal[1] | None = None
    store: bool | None = None
    service_tier: Name | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    verbosity: Name | None = None


class ChatFields(_Common):
    """The fields of /v1/chat/completions."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Form | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Name | None = None


class TextFields(_Common):
    """The fields of /v1/completions."""

    prompt: Annotated[
        str | Annotated[list[str], Field(min_length=1, max_length=1)],  # LangChain sends a list of one
        AfterValidator(lambda prompt: prompt if isinstance(prompt, str) else prompt[0]),
    ]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None


def _not_blank(text: str) -> str:
    """Return the text. Raises ValueError for one without a character: it would take the place of an answer."""
    if not text.strip():
        raise ValueError("an empty text corrects nothing; leave it out")
    return text


class FeedbackFields(_Fields):
    """The fields of /v1/feedback."""

    id: Name
    rating: Literal["up", "down"] | None = None
    correction: Annotated[str, AfterValidator(_not_blank)] | None = None
    reason: Annotated[str, Field(max_length=10_000)] | None = None


# What the gateway itself obeys, or what says only what is done anyway.
_HINTS = ("prompt_cache_key", "safety_identifier", "store", "service_tier", "verbosity")
_NOT_SENT = ("model", "user", "metadata", "n", "modalities", "best_of", "echo", "reasoning_effort", *_HINTS)
_USED_METADATA = frozenset(("agent", "category", "session_id"))


def checked_fields(fields: type[_Fields], body: Mapping[str, Any]) -> dict[str, Any]:
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
    if "reasoning_effort" in sent and "reasoning_effort" not in template:
        ignored.append("reasoning_effort")
    return ignored


def upstream_fields(sent: Mapping[str, Any], *, takes_tools: bool, template: str = "") -> dict[str, Any]:
    """Return the fields for the model server. `template`: the model's chat template. Raises FieldRefused for tools that
    it has no place for."""
    if not takes_tools:
        if sent.get("tools"):
            raise FieldRefused("tools", "the chat template of this model has no place for tools")
        if sent.get("tool_choice") not in (None, "none", "auto"):
            raise FieldRefused("tool_choice", "the chat template of this model has no place for tools")
        for number, turn in enumerate(sent.get("messages", ())):
            if turn.get("tool_calls"):  # it would leave them out without a word
                field = f"messages[{number}].tool_calls"
                raise FieldRefused(field, "the chat template of this model has no place for tools")
    forwarded = {key: value for key, value in sent.items() if key not in _NOT_SENT}
    if "max_completion_tokens" in forwarded:
        forwarded["max_tokens"] = forwarded.pop("max_completion_tokens")
    if "reasoning_effort" in sent and "reasoning_effort" in template:
        forwarded["chat_template_kwargs"] = {"reasoning_effort": sent["reasoning_effort"]}
    return forwarded
