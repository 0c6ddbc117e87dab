"""Spans as the programs write them that collect them: each variant gives the conversation that a person sees in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.chunks import RawRow
from hivetune.data.conversation import read_conversation
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused

Q, A, SYSTEM = "How long may I return shoes?", "You may return them for thirty days.", "You help customers."
ASKED = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": Q}]
ANSWERED = {"role": "assistant", "content": A}
PLAIN = [("user", Q), ("assistant", A)]
WITH_SYSTEM = [("system", SYSTEM), *PLAIN]
OBJECT = json.dumps({"days": 30, "kinds": ["boots", "shoes"]})
NUMBERED = {
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": Q,
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": A,
}


def span(attributes: dict[str, Any], **more: Any) -> dict[str, Any]:
    context = {"trace_id": "0x1", "span_id": "0x2"}
    return {"name": "chat", "context": context, "kind": "CLIENT", "parent_id": None, "attributes": attributes, **more}


def tags(said: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "type": "string", "value": value} for key, value in said.items()]


def jaeger(said: dict[str, str], logs: list[dict[str, Any]]) -> dict[str, Any]:
    one = {"traceID": "t", "spanID": "s", "operationName": "chat", "references": [], "startTime": 1, "duration": 2}
    return {"data": [{"traceID": "t", "spans": [{**one, "tags": tags(said), "logs": logs}], "processes": {}}]}


def mlflow(*steps: tuple[str, Any, Any]) -> dict[str, Any]:
    spans = [
        span(
            {
                "mlflow.spanType": json.dumps(kind),
                "mlflow.spanInputs": json.dumps(asked),
                "mlflow.spanOutputs": json.dumps(answered),
            }
        )
        for kind, asked, answered in steps
    ]
    said = {"request": json.dumps(steps[0][1]), "response": json.dumps(steps[0][2])}
    return {"info": {"request_id": "r", "status": "OK"}, "data": {"spans": spans, **said}}


DATADOG = {
    "span_id": "1",
    "trace_id": "2",
    "parent_id": "undefined",
    "status": "ok",
    "meta": {"span.kind": "llm", "input": {"messages": ASKED}, "output": {"messages": [ANSWERED]}, "metadata": {}},
}
BRAINTRUST = {"id": "i", "span_id": "s", "is_root": True, "span_parents": None, "metadata": {"model": "m"}}
CALL = {"messages": ASKED, "model": "m"}, {"choices": [{"finish_reason": "stop", "index": 0, "message": ANSWERED}]}
FILES: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "Jaeger, tags": (jaeger(NUMBERED, []), PLAIN),
    "Jaeger, logs": (
        jaeger(
            {"gen_ai.system": "openai"},
            [
                {"fields": tags({"event": "gen_ai.content.prompt", "gen_ai.prompt": json.dumps(ASKED)})},
                {"fields": tags({"event": "gen_ai.content.completion", "gen_ai.completion": json.dumps([ANSWERED])})},
            ],
        ),
        WITH_SYSTEM,
    ),
    "Zipkin": ([{"traceId": "t", "id": "s", "name": "chat", "localEndpoint": {}, "tags": NUMBERED}], PLAIN),
    "Tempo": ({"trace": {"resourceSpans": [{"scopeSpans": [{"spans": [span(NUMBERED)]}]}]}}, PLAIN),
    "a resource alone": ({"resource": {}, "scopeSpans": [{"scope": {}, "spans": [span(NUMBERED)]}]}, PLAIN),
    "Datadog": ([DATADOG], WITH_SYSTEM),
    "Datadog, as it is sent": ({"event_type": "span", "spans": [DATADOG]}, WITH_SYSTEM),
    "Datadog, as its API gives it": (
        {
            "data": [
                {
                    "id": "x",
                    "type": "span",
                    "attributes": {"span_kind": "llm", "input": {"messages": ASKED}, "output": {"value": A}},
                }
            ]
        },
        WITH_SYSTEM,
    ),
    "MLflow": (mlflow(("CHAIN", {"question": Q}, A), ("CHAT_MODEL", *CALL)), WITH_SYSTEM),
    "MLflow, a chain alone": (mlflow(("CHAIN", {"question": Q}, A)), PLAIN),
    "Logfire, a client": (
        [span({"request_data": json.dumps({"messages": ASKED}), "response_data": json.dumps({"message": ANSWERED})})],
        WITH_SYSTEM,
    ),
    "Logfire, events in an attribute": (
        [
            span(
                {
                    "events": json.dumps(
                        [
                            {"content": Q, "role": "user", "event.name": "gen_ai.user.message"},
                            {"index": 0, "message": ANSWERED, "event.name": "gen_ai.choice"},
                        ]
                    )
                }
            )
        ],
        PLAIN,
    ),
    "Logfire, an agent's run": (
        [
            span(
                {
                    "pydantic_ai.all_messages": json.dumps(
                        [
                            {"role": "user", "parts": [{"type": "text", "content": Q}]},
                            {"role": "assistant", "parts": [{"type": "text", "content": A}]},
                        ]
                    ),
                    "final_result": A,
                }
            )
        ],
        PLAIN,
    ),
    "Semantic Kernel, events": (
        [
            span(
                {"gen_ai.operation.name": "chat.completions"},
                events=[
                    {"name": "gen_ai.user.message", "attributes": {"gen_ai.event.content": json.dumps(ASKED[1])}},
                    {
                        "name": "gen_ai.choice",
                        "attributes": {"gen_ai.event.content": json.dumps({"index": 0, "message": ANSWERED})},
                    },
                ],
            )
        ],
        PLAIN,
    ),
    "the AI SDK, its outer span": (
        [span({"ai.prompt": json.dumps({"system": SYSTEM, "prompt": Q}), "ai.response.text": A})],
        WITH_SYSTEM,
    ),
    "the AI SDK, an object": (
        [span({"ai.prompt.messages": json.dumps([ASKED[1]]), "ai.response.object": OBJECT})],
        [("user", Q), ("assistant", OBJECT)],
    ),
    "the AI SDK, JSON as the answer": (
        [span({"ai.prompt.messages": json.dumps([ASKED[1]]), "ai.response.text": OBJECT})],
        [("user", Q), ("assistant", OBJECT)],
    ),
    "OpenInference, a completion": (
        [
            span(
                {
                    "openinference.span.kind": "LLM",
                    "llm.prompts.0.prompt.text": Q,
                    "llm.choices.0.completion.text": A,
                }
            )
        ],
        PLAIN,
    ),
    "OpenLLMetry, its first names": (
        [span({"llm.prompts.0.role": "user", "llm.prompts.0.content": Q, "llm.completions.0.content": A})],
        PLAIN,
    ),
    "AgentOps": (
        [
            {
                "trace_id": "t",
                "span_id": "s",
                "status_code": "OK",
                "span_attributes": {"gen_ai": {"prompt": [ASKED[1]], "completion": [ANSWERED]}},
            }
        ],
        PLAIN,
    ),
    "Braintrust": (
        [
            {
                **BRAINTRUST,
                "span_attributes": {"type": "llm"},
                "input": ASKED,
                "output": [{"index": 0, "message": ANSWERED}],
            }
        ],
        WITH_SYSTEM,
    ),
    "Braintrust, an experiment": (
        [{**BRAINTRUST, "span_attributes": {"type": "eval"}, "input": Q, "output": "Fourteen.", "expected": A}],
        PLAIN,
    ),
    "Braintrust, a data set": ([{"id": "i", "input": {"question": Q}, "expected": A, "metadata": {}}], PLAIN),
}


RESPONSE = {
    "object": "response",
    "status": "completed",
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": A}]}],
}


def test_instructions_beside_what_was_asked(tmp_path: Path) -> None:
    asked = {"input": [ASKED[1]], "instructions": SYSTEM, "model": "m"}
    call = {"openinference.span.kind": "LLM", "input.value": json.dumps(asked), "output.value": json.dumps(RESPONSE)}
    assert read([span(call), {"run_type": "llm", "inputs": asked, "outputs": RESPONSE}], tmp_path) == [WITH_SYSTEM] * 2


def test_spans_in_a_list_are_no_conversation(tmp_path: Path) -> None:
    steps = [span({"openinference.span.kind": kind, "input.value": Q, "output.value": A}) for kind in ("AGENT", "TOOL")]
    assert PLAIN + PLAIN not in read({"accepted": steps, "rejected": steps}, tmp_path)


def read(record: Any, folder: Path) -> list[Any]:
    path = folder / "export.json"
    path.write_text(json.dumps(record, indent=1))
    found: list[Any] = []
    for raw in rows_of_files([str(path)]):
        try:
            found.append([(m.role, m.content) for m in read_example(raw, {}).example.messages])
        except RowRefused as refused:
            found.append(refused.reason)
    return found


@pytest.mark.parametrize("name", FILES)
def test_spans_of_programs(name: str, tmp_path: Path) -> None:
    record, said = FILES[name]
    assert [row for row in read(record, tmp_path) if row != "not-a-model-call"] == [said]


def test_a_span_is_not_changed_by_its_reading() -> None:
    """A row is read several times; its events grew each time by those that its attributes hold."""
    asked = {"event.name": "gen_ai.user.message", "content": "What is a weir?"}
    answered = {"event.name": "gen_ai.choice", "message": {"role": "assistant", "content": "A low dam."}}
    row = span({"events": json.dumps([asked, answered])}, events=[{"name": "first token", "attributes": {}}])
    before = json.dumps(row)
    found = read_example(RawRow("f:1", before.encode()), {})
    assert [message.content for message in found.example.messages] == ["What is a weir?", "A low dam."]
    read_conversation(row)
    assert json.dumps(row) == before


def test_a_failed_span_is_not_learned(tmp_path: Path) -> None:
    failed = [span(NUMBERED, status_code="ERROR"), {**DATADOG, "status": "error"}]
    assert read(failed, tmp_path) == ["failed", "failed"]


def test_tags_that_are_words_about_a_row_are_no_attributes(tmp_path: Path) -> None:
    row = {"trace_id": "t", "tags": {"team": "shop"}, "prompt": Q, "completion": A}
    assert read([row], tmp_path) == [PLAIN]


def test_a_step_that_judges_an_answer_is_not_learned(tmp_path: Path) -> None:
    judged = {"question": Q, "answer": "Fourteen."}
    assert read([{"input": judged, "expected": "wrong"}], tmp_path) == ["unexplained-column"]
