"""The fields of a request that reach the model server: those that docs/serve.md lists, each within its range."""

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serve.stage import CHAT, QUESTION, Stage, on_stage

from hivetune.serve import fields as tables

# Each was passed on to llama.cpp by an earlier gateway, or dropped without a word. CVE-2026-21869: n_discard.
NEVER = (
    *("n_discard", "grammar", "json_schema", "lora", "id_slot", "cache_prompt", "n_probs", "n_predict", "functions"),
    *("chat_template", "chat_template_kwargs", "return_tokens", "n_cmpl", "samplers", "t_max_predict_ms"),
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
    "response_format": [{"type": "xml"}],
    "modalities": [["audio"]],
    "store": ["yes"],
}
ODD_MESSAGES = [
    ("messages", "hello"),
    ("messages", []),
    ("messages[0].role", [{"role": "admin", "content": "x"}]),
    ("messages[0].role", [{"role": 5, "content": "x"}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages[0].tool_calls[0].function", [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]),
    ("messages[0].unknown", [{"role": "user", "content": "x", "unknown": 1}]),
]


async def refused(stage: Stage, field: str, **fields: Any) -> None:
    answer = await stage.ask(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), answer.text
    assert field in error["message"] and error["type"] == "invalid_request_error"


@on_stage()
async def test_what_is_not_documented_or_out_of_range_is_refused_by_its_field(stage: Stage) -> None:
    for field in NEVER:
        await refused(stage, field, **{field: 1})
    for field, values in OUT_OF_RANGE.items():
        for value in values:
            answer = await stage.ask(**{field: value})
            assert answer.status_code == 400, (field, value, answer.text)
            assert answer.json()["error"]["param"].startswith(field), answer.text
    for field, messages in ODD_MESSAGES:
        await refused(stage, field, messages=messages)
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


@on_stage(live_settings={"takes_tools": False})
async def test_tools_without_a_template_for_them_are_refused(stage: Stage) -> None:
    tool = {"type": "function", "function": {"name": "find"}}

    await refused(stage, "tools", tools=[tool])
    await refused(stage, "tools", tools=[tool], tool_choice="required")
    await refused(stage, "tool_choice", tool_choice="required")
    assert (await stage.ask(tools=[], tool_choice="none")).status_code == 200
    called = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find"}}]}
    asked = [*QUESTION["messages"], called, {"role": "tool", "content": "found"}]
    await refused(stage, "messages[1].tool_calls", messages=asked)  # llama.cpp left them out without a word


@on_stage()
async def test_a_key_with_two_values_is_refused(stage: Stage) -> None:
    """Python takes the last one; a proxy that checks the model may take the first."""
    for twice, status in (('"model": "helpdesk", "model": "base"', 400), ('"model": "base", "model": "base"', 200)):
        raw = json.dumps(QUESTION)[:-1] + f", {twice}}}"
        answer = await stage.client.post(CHAT, content=raw, headers={"Authorization": "Bearer token-a"})
        assert answer.status_code == status and ("'model' has two values" in answer.text) == (status == 400)


@pytest.mark.parametrize(("path", "asked"), [(CHAT, QUESTION), ("/v1/completions", {"prompt": "hello"})])
def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(path: str, asked: dict[str, Any]) -> None:
    error = {"code": 400, "message": "x", "type": "exceed_context_size_error", "n_prompt_tokens": 5000, "n_ctx": 4096}

    async def scene(stage: Stage) -> None:
        for more in ("", "hello " * 40_000):
            field = next(iter(asked))
            long = {"prompt": more} if field == "prompt" else {"messages": [{"role": "user", "content": more}]}
            answer = await stage.post(long if more else asked, path)
            told = answer.json()["error"]
            assert (answer.status_code, told["param"], told["code"]) == (400, field, "context_length_exceeded")
            assert "do not fit into the context of 4,096 tokens" in told["message"] and "--context" in told["message"]

    Stage(lambda path, body: httpx2.Response(400, json={"error": error})).play(scene)


@on_stage(live_settings={"takes_tools": True})
async def test_a_tool_that_is_chosen_is_the_only_one(stage: Stage) -> None:
    """llama.cpp takes the choice of a function for "auto", so the model was free to call none."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("find", "other")]

    chosen = {"type": "function", "function": {"name": "find"}}
    assert (await stage.ask(tools=tools, tool_choice=chosen)).status_code == 200
    _, arrived = stage.asked[-1]
    assert (arrived["tools"], arrived["tool_choice"]) == (tools[:1], "required")
    chosen = {"type": "function", "function": {"name": "unknown"}}
    await refused(stage, "tool_choice", tools=tools, tool_choice=chosen)
    await refused(stage, "tool_choice", tool_choice="required")


@on_stage(live_settings={"takes_tools": True})
async def test_arguments_that_are_no_object_are_the_clients_mistake(stage: Stage) -> None:
    """llama.cpp answered 500, which counted as a failure of the release."""

    def called(arguments: str) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}
        return [*QUESTION["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]

    for arguments in ("{", "[]", "5", "[" * 5000):
        await refused(stage, "messages[1].tool_calls[0].function.arguments", messages=called(arguments))
    assert (await stage.ask(messages=called(""))).status_code == 200
    assert stage.asked[-1][1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


@on_stage(live_settings={"takes_tools": True})
async def test_schemas_are_bounded(stage: Stage) -> None:
    """llama.cpp makes a grammar of a schema, and its size grows with every repetition (ggml-org/llama.cpp#22234)."""

    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(depth):
            schema = {"type": "array", "items": schema}
        return schema

    hostile = [
        nested(200),
        {"type": "array", "items": {"type": "string"}, "maxItems": 10**6},
        {"type": "string", "minLength": 10**6},
        {"anyOf": [{"const": number} for number in range(10_000)]},
        {"type": "string", "pattern": "a{1000000}" * 100},
        {"$ref": "https://example.com/schema.json"},
    ]

    for schema in hostile:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = await stage.ask(response_format=form)
        assert answer.status_code == 400 and "response_format" in answer.text, schema
        answer = await stage.ask(tools=[{"type": "function", "function": {"name": "x", "parameters": schema}}])
        assert answer.status_code == 400 and "tools[0]" in answer.text, schema
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(5)}}
    assert (await stage.ask(response_format=form)).status_code == 200
    assert stage.asked[0][1]["response_format"] == form


@pytest.mark.parametrize("extra", [{"logprobs": 5}, {"n": 2}, {"echo": True}, {"suffix": "x"}, {"best_of": 3}])
def test_completions_refuse_what_they_can_not_honour(extra: dict[str, Any]) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.post({"prompt": "one two", **extra}, "/v1/completions")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(extra))), answer.text
        assert (await stage.post({"messages": []}, "/v1/completions")).status_code == 400
        for prompt in ("one two", ["one two"]):
            ok = await stage.post({"prompt": prompt, "n": 1, "max_tokens": 3}, "/v1/completions")
            assert ok.status_code == 200 and stage.asked[-1][1]["prompt"] == "one two"
        for prompts in (["one", "two"], [], [1, 2], [[1, 2]], 5):
            answer = await stage.post({"prompt": prompts}, "/v1/completions")
            assert (answer.status_code, answer.json()["error"]["param"].partition("[")[0]) == (400, "prompt")

    text = {"choices": [{"index": 0, "text": "three", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
    Stage(lambda path, body: httpx2.Response(200, json=text)).play(scene)


def test_every_field_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    table = set(re.findall(r"`(\w+)`", page))
    of = (tables.FORWARDED, tables.FORWARDED_OF_CHATS, tables.OBEYED, tables.TEMPLATE, tables.HINTS)
    assert {name for fields in of for name in fields} - table == set()


@on_stage()
async def test_lone_surrogates_and_numbers_that_are_none_end_no_check(stage: Stage) -> None:
    raw = json.dumps({**QUESTION, "messages": [{"role": "user", "content": "\ud800 x"}]})
    headers = {"Authorization": "Bearer token-a"}
    answer = await stage.client.post("/v1/chat/completions", content=raw, headers=headers)
    assert answer.status_code == 200
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        raw = json.dumps(QUESTION)[:-1] + f', "temperature": {number}}}'
        answer = await stage.client.post("/v1/chat/completions", content=raw, headers=headers)
        assert answer.status_code == 400, number


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


NOT_ENFORCED = [
    ("multipleOf", {"type": "integer", "multipleOf": 5}),
    ("minimum", {"type": "number", "minimum": 3}),
    ("uniqueItems", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
    ("allOf", {"allOf": [{"type": "string"}]}),
    ("not", {"not": {"type": "string"}}),
    ("pattern", {"type": "string", "pattern": "^\\d+$"}),
    ("pattern", {"type": "string", "pattern": "^ab"}),
    ("format", {"type": "string", "format": "email"}),
]


@pytest.mark.parametrize(("keyword", "part"), NOT_ENFORCED)
@on_stage()
async def test_a_strict_schema_that_would_not_hold_is_refused_with_its_keyword(
    stage: Stage, keyword: str, part: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"not": part}, "required": ["not"]}

    named = {"name": "x", "strict": True, "schema": schema}
    answer = await stage.ask(response_format={"type": "json_schema", "json_schema": named})
    assert answer.status_code == 400 and f"strict: {keyword}" in answer.text, answer.text
    assert "/properties/not" in answer.text
    loose = {**named, "strict": False}
    assert (await stage.ask(response_format={"type": "json_schema", "json_schema": loose})).status_code == 200


@on_stage()
async def test_a_strict_schema_that_holds_is_taken(stage: Stage) -> None:
    properties = {
        "allOf": {"type": "integer", "minimum": 1, "maximum": 9},
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "maxLength": 20},
        "kind": {"enum": ["not", "allOf"]},
        "many": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "maxItems": 3},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    answer = await stage.ask(response_format=form)
    assert answer.status_code == 200, answer.text
