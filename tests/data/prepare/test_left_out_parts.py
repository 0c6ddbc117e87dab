"""An agent's log and a model whose template has no place for calls: the refusal names the ways out, and both work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data.conftest import adds_up

from hivetune.config import DataConfig, parse_config
from hivetune.data.prepare.prepare import check, prepare
from hivetune.errors import DataRefused


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def called(number: int, content: str = "") -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "shell", "arguments": {"command": "ls"}}}
    result = {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number} files"}
    return [said(content, tool_calls=[call]), result]


def asked(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def session(number: int) -> dict[str, Any]:
    """Two questions: one answered behind two calls, one at once."""
    looked = [*called(number, "I'll look."), *called(number), said(f"There are {number} files.")]
    plain = [asked(f"Is {number} much?"), said(f"No, {number} is not.")]
    return {"messages": [asked(f"How many files has folder {number}?"), *looked, *plain]}


def test_a_refused_log_names_the_setting_that_trains_its_answers(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows([session(number) for number in range(9)])
    with pytest.raises(DataRefused) as refused:
        refusing = check(DataConfig(path=str(path)), model_folder=chatml)
        refusing.refuse(0.2)
    assert "--set data.do_not_train=tools" in refused.value.hint
    assert "Qwen/Qwen3-0.6B" in refused.value.hint
    found = check(DataConfig(path=str(path), on_tools="leave_out"), model_folder=chatml)
    assert (found.usable, found.document["changed"]) == (9, {"tools-left-out": 9})
    assert adds_up(found)


def test_each_question_is_kept_with_the_answer_behind_its_last_call(
    write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    broken_off = [asked("And folder 7?"), *called(7, "Looking.")]
    rows = [
        session(1),
        {"messages": [*session(2)["messages"], *broken_off]},
        {"messages": [*broken_off, asked("Well?"), said("It is empty.")], "tools": [{"name": "shell"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, *broken_off]},
        {"messages": [asked("Why?"), said("Because.", reasoning_content="Think.")]},
    ]
    out = tmp_path / "clean.jsonl"
    settings = DataConfig(path=str(write_rows(rows)), on_tools="leave_out", on_reasoning="leave_out")
    found = check(settings, clean=out)
    assert found.document["set_aside"] == {"only-tool-calls": 1}
    assert found.document["changed"]["tools-left-out"] == 3
    assert found.document["changed"]["reasoning-left-out"] == 1
    assert adds_up(found)


def test_a_judged_answer_that_is_a_call_teaches_nothing_in_words(write_rows: Callable[..., Path]) -> None:
    """The judgement is about the last answer; the one before it was not judged."""
    turns = [asked("Hello?"), said("Hi."), asked("List it."), *called(1)[:1]]
    path = write_rows([{"messages": turns, "success": False}])
    settings = DataConfig(path=str(path), on_tools="leave_out", on_failed="set_aside")
    assert check(settings).document["set_aside"] == {"only-tool-calls": 1}


def test_what_is_trained_is_what_was_said(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows([session(number) for number in range(9)])
    tree = {"model": "m", "data": {"path": str(path), "on_tools": "leave_out"}}
    snapshot = prepare(parse_config(tree), chatml)
    for row in range(9):
        messages = snapshot.info(row).messages
        assert [m.role for m in messages] == ["user", "assistant"] * 2
        assert messages[1].content.startswith("There are") and not any(m.tool_calls for m in messages)
    assert "I'll look" not in json.dumps([m.content for row in range(9) for m in snapshot.info(row).messages])
