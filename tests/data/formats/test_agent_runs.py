"""Runs of agents as their frameworks keep them: steps, chats, tasks and messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused

Q, A, SYSTEM = "How long may I return shoes?", "You may return them for thirty days.", "You help customers."
PLAIN = [("user", Q), ("assistant", A)]
WITH_SYSTEM = [("system", SYSTEM), *PLAIN]


def constructed(kind: str, text: str) -> dict[str, Any]:
    return {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", kind],
        "kwargs": {"content": text},
    }


def acted(number: int, said: str, **more: Any) -> dict[str, Any]:
    return {"step_number": number, "timing": {}, "tool_calls": None, "error": None, "model_output": said, **more}


def strands(role: str, text: str) -> dict[str, Any]:
    return {"name": f"gen_ai.{role}.message", "attributes": {"content": json.dumps([{"text": text}])}}


def kernel(role: str, text: str) -> dict[str, Any]:
    return {"Role": {"Label": role}, "Items": [{"$type": "TextContent", "Text": text}]}


def span(operation: str, parent: int, output: str | None = None, **more: Any) -> dict[str, Any]:
    """A span of any-agent; `more`: attributes, whose names have dots for the underscores here."""
    said = {f"gen_ai.{name.replace('__', '.')}": value for name, value in more.items()}
    said |= {} if output is None else {"gen_ai.output": output, "gen_ai.output.type": "json"}
    attributes = {"gen_ai.operation.name": operation, **said}
    return {"name": operation, "parent": {"span_id": parent}, "context": {"trace_id": 1}, "attributes": attributes}


ASKED_ONCE = json.dumps([{"role": "system", "content": SYSTEM}, {"role": "user", "content": Q}])
SHOP_CALLS = json.dumps(
    [{"tool.name": "find", "tool.args": '{"what": "rules"}'}, {"tool.name": "clock", "tool.args": "{}"}]
)
PYTHON = [{"id": "c", "type": "function", "function": {"name": "python_interpreter", "arguments": "print(30)"}}]
FIND = [{"id": "c", "type": "function", "function": {"name": "find", "arguments": {"what": "rules"}}}]
LAST = [{"id": "d", "type": "function", "function": {"name": "final_answer", "arguments": {"answer": A}}}]
RUNS: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "smolagents, code": (
        [
            {"system_prompt": SYSTEM},
            {"task": Q, "task_images": None},
            acted(1, "I print it.", tool_calls=PYTHON, observations="Logs:\n30", is_final_answer=False),
            acted(2, A, tool_calls=PYTHON, observations="x", is_final_answer=True),
        ],
        [("system", SYSTEM), ("user", Q), ("assistant", "I print it."), ("user", "Observation:\nLogs:\n30"), PLAIN[1]],
    ),
    "smolagents, calls, in a row": (
        {"steps": [{"task": Q}, acted(1, "", tool_calls=FIND, observations="30 days"), acted(2, "", tool_calls=LAST)]},
        [("user", Q), ("assistant", ""), ("tool", "30 days"), PLAIN[1]],
    ),
    "ATIF": (
        {
            "schema_version": "ATIF-v1.5",
            "agent": {"name": "a", "model_name": "m"},
            "steps": [
                {"step_id": 1, "source": "system", "message": SYSTEM},
                {"step_id": 2, "source": "user", "message": Q},
                {"step_id": 3, "source": "system", "message": "Added the context of the shop"},
                {
                    "step_id": 4,
                    "source": "agent",
                    "message": "I look.",
                    "tool_calls": [{"tool_call_id": "c", "function_name": "find", "arguments": {"what": "rules"}}],
                    "observation": {"results": [{"source_call_id": "c", "content": "30 days"}]},
                },
                {"step_id": 5, "source": "agent", "message": A},
            ],
        },
        [("system", SYSTEM), ("user", Q), ("assistant", "I look."), ("tool", "30 days"), PLAIN[1]],
    ),
    "AutoGen, whose first speaker writes as the assistant": (
        {
            "chat_id": 1,
            "chat_history": [
                {"role": "assistant", "content": Q, "name": "customer"},
                {"role": "user", "content": A, "name": "clerk"},
            ],
            "summary": A,
            "cost": {},
        },
        PLAIN,
    ),
    "CrewAI": ({"raw": A, "tasks_output": [{"description": Q, "expected_output": "One sentence.", "raw": A}]}, PLAIN),
    "a set of Google's ADK": (
        {
            "eval_set_id": "e",
            "eval_cases": [
                {
                    "eval_id": "c",
                    "conversation": [
                        {
                            "user_content": {"parts": [{"text": Q}], "role": "user"},
                            "final_response": {"parts": [{"text": "I look."}], "role": "model"},
                            "intermediate_data": {"tool_uses": [{"name": "find", "args": {}}]},
                        },
                        {
                            "user_content": {"parts": [{"text": "And?"}], "role": "user"},
                            "final_response": {"parts": [{"text": A}], "role": "model"},
                        },
                    ],
                }
            ],
        },
        [("user", Q), ("assistant", "I look."), ("user", "And?"), PLAIN[1]],
    ),
    "any-agent, whose first call alone holds the request": (
        {
            "spans": [
                span("call_llm", 7, SHOP_CALLS, input__messages=ASKED_ONCE),
                span("execute_tool", 7, "noon", tool__name="clock"),
                span("execute_tool", 7, "30 days", tool__name="find"),
                span("call_llm", 7, A),
                span("invoke_agent", 0, agent__name="clerk"),
            ],
            "final_output": {"days": 30},
        },
        [("system", SYSTEM), ("user", Q), ("assistant", ""), ("tool", "noon"), ("tool", "30 days"), PLAIN[1]],
    ),
    "LangChain's dump": ([constructed("HumanMessage", Q), constructed("AIMessage", A)], PLAIN),
    "items of OpenAI's agents": (
        [
            {"role": "user", "content": Q},
            {
                "id": "m",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": A, "annotations": []}],
            },
        ],
        PLAIN,
    ),
    "Semantic Kernel, .NET": ([kernel("system", SYSTEM), kernel("user", Q), kernel("assistant", A)], WITH_SYSTEM),
    "Semantic Kernel, Python": (
        {
            "messages": [
                {"role": "user", "items": [{"content_type": "text", "text": Q}]},
                {"role": "assistant", "items": [{"content_type": "text", "text": A}]},
            ]
        },
        PLAIN,
    ),
    "Strands": (
        [
            {
                "name": "chat",
                "trace_id": "t",
                "span_id": "s",
                "status": "OK",
                "attributes": {"gen_ai.operation.name": "chat"},
                "events": [
                    strands("system", SYSTEM),
                    strands("user", Q),
                    {"name": "gen_ai.choice", "attributes": {"message": json.dumps([{"text": A}])}},
                ],
            }
        ],
        WITH_SYSTEM,
    ),
}


def read(record: Any, folder: Path) -> list[list[tuple[str, str]]]:
    path = folder / "run.json"
    path.write_text(json.dumps(record, indent=1))
    found = [read_example(raw, {}).example for raw in rows_of_files([str(path)])]
    return [[(m.role, m.content) for m in example.messages] for example in found]


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_frameworks(name: str, tmp_path: Path) -> None:
    record, said = RUNS[name]
    assert read(record, tmp_path) == [said]


def test_calls_of_semantic_kernel(tmp_path: Path) -> None:
    call = {
        "$type": "FunctionCallContent",
        "Id": "c",
        "PluginName": "shop",
        "FunctionName": "find",
        "Arguments": {"a": 1},
    }
    result = {"$type": "FunctionResultContent", "CallId": "c", "FunctionName": "find", "Result": "30 days"}
    turns = [
        kernel("user", Q),
        {"Role": {"Label": "assistant"}, "Items": [call]},
        {"Role": {"Label": "tool"}, "Items": [result]},
        kernel("assistant", A),
    ]
    path = tmp_path / "history.json"
    path.write_text(json.dumps(turns, indent=1))
    [example] = [read_example(raw, {}).example for raw in rows_of_files([str(path)])]
    assert [(m.role, m.content) for m in example.messages] == [
        ("user", Q),
        ("assistant", ""),
        ("tool", "30 days"),
        PLAIN[1],
    ]
    assert example.messages[1].tool_calls[0]["function"] == {"name": "shop-find", "arguments": {"a": 1}}


def test_steps_of_another_kind_are_no_observations_of_a_model(tmp_path: Path) -> None:
    steps = [("agent", Q, A), ("generation", Q, A), ("tool", "find the rules", "30 days")]
    listed = [{"name": "n", "type": kind, "input": asked, "output": said} for kind, asked, said in steps]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"trace_id": "t", "input": Q, "output": A, "observations": listed}))
    found = []
    for raw in rows_of_files([str(path)]):
        try:
            found.append(read_example(raw, {}).example.messages[-1].content)
        except RowRefused as refused:
            found.append(refused.reason)
    assert found == ["not-a-model-call", A, "not-a-model-call"]


def test_spans_of_openai_agents_are_no_messages(tmp_path: Path) -> None:
    """A kind of step is no speaker, though one is called an agent."""
    asked, answered = [{"role": "user", "content": Q}], [{"role": "assistant", "content": A}]
    lines = [
        {"object": "trace", "id": "t", "workflow_name": "w"},
        {
            "object": "trace.span",
            "id": "a",
            "trace_id": "t",
            "span_data": {"type": "generation", "input": asked, "output": answered},
        },
        {"object": "trace.span", "id": "b", "trace_id": "t", "span_data": {"type": "agent", "name": "clerk"}},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for raw in rows_of_files([str(path)]):
        try:
            found.append([(m.role, m.content) for m in read_example(raw, {}).example.messages])
        except RowRefused as refused:
            found.append(refused.reason)
    assert found == ["unknown-layout", PLAIN, "not-a-model-call"]
