"""The fields of a request that reach the model server: those that docs/serve.md lists, each within its range."""

import json
import re
from pathlib import Path
from typing import Any

import httpx2
from serve.stage import CHAT, QUESTION, Stage, on_stage

from hivetune.serve import fields as tables

# Each was passed on to llama.cpp by an earlier gateway, or dropped without a word (more are in test_advisories.py).
NEVER = (
    *("lora", "id_slot", "cache_prompt", "n_predict", "functions", "return_tokens", "n_cmpl", "samplers", "prompt"),
    "t_max_predict_ms",
)
OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "0", True],
    "top_p": [1.5],
    "top_k": [-2],
    "n": [2],
    "max_tokens": [0, -1, 10**9, 2.5],
    "top_logprobs": [21],
    "seed": [2**70],
    "stop": [["x"] * 17, 5, ["x" * 2000]],
    "logit_bias": [{"a": 1}, {"1": 1000}, {str(token): 1 for token in range(5000)}],
    "stream": ["yes"],
    "tool_choice": ["all"],
    "user": [5],
    "metadata": [{str(key): "x" for key in range(40)}],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}, {"type": "text", "json_schema": {"schema": {}}}],
    "modalities": [["audio"]],
    "store": ["yes"],
    "messages": ["hello", []],
    "messages[0].role": [[{"role": "admin", "content": "x"}], [{"role": 5, "content": "x"}]],
    "messages[0].content": [[{"role": "user", "content": 5}], [{"role": "user"}]],
    "messages[0].tool_calls[0].function": [[{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]],
    "messages[0].unknown": [[{"role": "user", "content": "x", "unknown": 1}]],
}


async def refused(stage: Stage, field: str, **fields: Any) -> None:
    answer = await stage.ask(**fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(field), (field, answer.text)
    assert field in error["message"] and error["type"] == "invalid_request_error"


@on_stage()
async def test_what_is_not_documented_or_out_of_range_is_refused_by_its_field(stage: Stage) -> None:
    for field, values in [*((name, [1]) for name in NEVER), *OUT_OF_RANGE.items()]:
        for value in values:
            await refused(stage, field, **{field.partition("[")[0]: value})
    assert stage.asked == []


@on_stage(live_settings={"takes_tools": True})
async def test_what_is_documented_arrives_as_it_was_sent(stage: Stage) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    sent: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "find it"}, {"type": "text", "text": "now"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "thinking_blocks": None},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 1,
        "max_completion_tokens": 7,
        "stop": ["\n"],
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repeat_penalty": 1.1,
        "logit_bias": {"5": -100},
        "logprobs": True,
        "top_logprobs": 3,
        "tools": [tool],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object"},
    }
    said = {"n": 1, "reasoning_effort": None, "user": "ann", "metadata": {"agent": "x"}, "model": "helpdesk"}
    answer = await stage.post({**sent, **said})
    assert answer.status_code == 200, answer.text
    _, arrived = stage.asked[0]
    expected = {**sent, "max_tokens": 7}
    del expected["max_completion_tokens"]
    joined = {"role": "user", "content": "find it\nnow"}  # as llama.cpp joins parts, and as is stored
    expected["messages"][1] = joined
    expected["messages"][2] = {"role": "assistant", "tool_calls": [call]}
    assert {key: arrived[key] for key in expected} == expected
    own = {"lora", "id_slot", "cache_prompt", "reasoning_format", "stream"}
    assert arrived.keys() - expected.keys() <= own, arrived


FIND = CHOSEN = {"type": "function", "function": {"name": "find"}}


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [*QUESTION["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]


@on_stage(live_settings={"takes_tools": False})
async def test_tools_without_a_template_for_them_are_refused(stage: Stage) -> None:
    """llama.cpp leaves them out without a word."""
    await refused(stage, "tools", tools=[FIND])
    await refused(stage, "tools", tools=[FIND], tool_choice="required")
    await refused(stage, "tool_choice", tool_choice="required")
    await refused(stage, "messages[1].tool_calls", messages=[*called("{}"), {"role": "tool", "content": "found"}])
    assert (await stage.ask(tools=[], tool_choice="none")).status_code == 200


@on_stage()
async def test_tools_that_are_chosen_and_called(stage: Stage) -> None:
    """llama.cpp takes the choice of a function for "auto", and fails at arguments that are no object."""
    assert (await stage.ask(tools=[FIND, {**FIND, "function": {"name": "x"}}], tool_choice=CHOSEN)).status_code == 200
    assert (stage.asked[-1][1]["tools"], stage.asked[-1][1]["tool_choice"]) == ([FIND], "required")
    await refused(stage, "tool_choice", tools=[{**FIND, "function": {"name": "x"}}], tool_choice=CHOSEN)
    await refused(stage, "tool_choice", tool_choice="required")
    for arguments in ("{", "[]", "5", "[" * 5000):
        await refused(stage, "messages[1].tool_calls[0].function.arguments", messages=called(arguments))
    assert (await stage.ask(messages=called(""))).status_code == 200
    assert stage.asked[-1][1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


@on_stage()
async def test_bodies_that_json_does_not_say_clearly(stage: Stage) -> None:
    """Of a key with two values Python takes the last one; a proxy that checks the model may take the first."""
    for more, status in (
        ('"model": "helpdesk", "model": "base"', 400),
        ('"model": "base", "model": "base"', 200),
        ('"user": "\\ud800 x"', 200),
        *((f'"temperature": {number}', 400) for number in ("NaN", "Infinity", "-Infinity", "1e999")),
    ):
        raw = json.dumps(QUESTION)[:-1] + f", {more}}}"
        answer = await stage.client.post(CHAT, content=raw, headers={"Authorization": "Bearer token-a"})
        assert answer.status_code == status, more
    for raw, words in (
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 20_000, "not JSON"),
        ("[" * 400_000, "400,000 bytes do not fit into the context of 4,096 tokens"),  # it is not even parsed
    ):
        answer = await stage.client.post(CHAT, content=raw, headers={"Authorization": "Bearer token-a"})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


ERROR = {"code": 400, "message": "x", "type": "exceed_context_size_error", "n_prompt_tokens": 5000, "n_ctx": 4096}


@on_stage(answer=lambda path, body: httpx2.Response(400, json={"error": ERROR}))
async def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(stage: Stage) -> None:
    """Whoever finds it: the server, or the gateway before it reads a text that no context holds."""
    for text in ("hello", "hello " * 40_000):
        answer = await stage.ask(messages=[{"role": "user", "content": text}])
        told = answer.json()["error"]
        assert (answer.status_code, told["param"], told["code"]) == (400, "messages", "context_length_exceeded")
        assert "do not fit into the context of 4,096 tokens" in told["message"] and "--context" in told["message"]


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "string"}


@on_stage()
async def test_schemas_are_bounded(stage: Stage) -> None:
    """llama.cpp makes a grammar of a schema, and its size grows with every repetition (ggml-org/llama.cpp#22234)."""
    for schema in (
        nested(200),
        {"type": "array", "items": {"type": "string"}, "maxItems": 10**6},
        {"type": "string", "minLength": 10**6},
        {"anyOf": [{"const": number} for number in range(10_000)]},
        {"type": "string", "pattern": "a{1000000}" * 100},
        {"$ref": "https://example.com/schema.json"},
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
        for field, fields in (("response_format", {"response_format": form}), ("tools[0]", {"tools": [tool]})):
            answer = await stage.ask(**fields)
            assert answer.status_code == 400 and field in answer.text, schema
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(5)}}
    assert (await stage.ask(response_format=form)).status_code == 200
    assert stage.asked[0][1]["response_format"] == form


def test_every_field_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    table = set(re.findall(r"`(\w+)`", page))
    of = (tables.FORWARDED, tables.OBEYED, tables.TEMPLATE, tables.HINTS)
    assert {name for fields in of for name in fields} - table == set()


@on_stage()
async def test_hints_to_other_servers_are_accepted_and_named(stage: Stage) -> None:
    hints: dict[str, Any] = dict.fromkeys(("prompt_cache_key", "safety_identifier", "service_tier", "verbosity"), "low")
    hints |= {"store": True, "metadata": {"ticket": "7"}, "reasoning_effort": "low"}
    answer = await stage.ask(**hints)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["X-Hivetune-Ignored"].split(", ")) == hints.keys()
    assert not hints.keys() & stage.asked[-1][1].keys()
    plain = await stage.ask(store=False, service_tier="auto", metadata={"agent": "a"})
    assert "X-Hivetune-Ignored" not in plain.headers


@on_stage(live_settings={"template": "{{ reasoning_effort }}"})
async def test_reasoning_effort_goes_to_a_template_that_knows_it_and_reasoning_of_a_history_is_kept(
    stage: Stage,
) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "reasoning_content": "a greeting"},
        {"role": "user", "content": "and?"},
    ]
    answer = await stage.ask(messages=turns, reasoning_effort="low")
    assert "X-Hivetune-Ignored" not in answer.headers
    sent = stage.asked[-1][1]
    assert sent["chat_template_kwargs"] == {"reasoning_effort": "low"} and sent["messages"] == turns


STRICT = [
    ("multipleOf", {"type": "integer", "multipleOf": 5}),
    ("minimum", {"type": "number", "minimum": 3}),
    ("uniqueItems", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
    ("allOf", {"allOf": [{"type": "string"}]}),
    ("not", {"not": {"type": "string"}}),
    ("pattern", {"type": "string", "pattern": "^\\d+$"}),
    ("pattern", {"type": "string", "pattern": "^ab"}),
    ("format", {"type": "string", "format": "email"}),
    ("", {"type": "integer", "minimum": 1, "maximum": 9}),
    ("", {"type": "string", "format": "date"}),
    ("", {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "maxLength": 20}),
    ("", {"enum": ["not", "allOf"]}),
    ("", {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "maxItems": 3}),
]


@on_stage()
async def test_a_strict_schema_that_would_not_hold_is_refused_with_its_keyword(stage: Stage) -> None:
    for keyword, part in STRICT:
        schema = {"type": "object", "properties": {"not": part}, "required": ["not"], "additionalProperties": False}
        for is_strict in (True, False):
            named = {"name": "x", "strict": is_strict, "schema": schema}
            answer = await stage.ask(response_format={"type": "json_schema", "json_schema": named})
            if keyword and is_strict:
                assert answer.status_code == 400 and f"strict: {keyword}" in answer.text, answer.text
                assert "/properties/not" in answer.text
            else:
                assert answer.status_code == 200, answer.text
