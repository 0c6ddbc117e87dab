"""Named checkers: what counts as success, and that a typo or a hostile pattern never counts as failure."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama.fake_server import Reply, chat_reply, fake_server

from hivetune.checkers.find import CHECKERS, Checking, answer_succeeds, find_checker, row_checker
from hivetune.errors import UsageError

KEYERROR = {"name": "contains_any", "any": ["KeyError", "mapping"]}


@pytest.mark.parametrize(
    ("answer", "checker", "expected"),
    [
        ("Raises KeyError.", KEYERROR, True),
        ("raises keyerror", KEYERROR, False),
        ("raises keyerror", {**KEYERROR, "ignore_case": True}, True),
        ("MyKeyErrors", KEYERROR, False),
        ("MyKeyErrors", {**KEYERROR, "whole_words": False}, True),
        ("it prints", {"name": "contains_any", "any": ["int"]}, False),
        ("a.b[0]", {"name": "contains_any", "any": ["[0]"]}, True),
        ("x[0]]", {"name": "contains_any", "any": ["x[0"]}, True),
        ("a and b", {"name": "contains_all", "all": ["a", "b"]}, True),
        ("a and c", {"name": "contains_all", "all": ["a", "b"]}, False),
        ("fine", {"name": "contains_none", "none": ["sorry"]}, True),
        ("sorry, no", {"name": "contains_none", "none": ["sorry"]}, False),
        ("  yes \n", {"name": "exact", "text": "yes"}, True),
        ("Cafe\u0301", {"name": "exact", "text": "Caf\u00e9"}, True),
        ("yes!", {"name": "exact", "text": "yes"}, False),
        ("id-42", {"name": "regex", "pattern": r"\bid-\d+$"}, True),
        ("id-x", {"name": "regex", "pattern": r"\bid-\d+$"}, False),
        ('{"a": 1}', {"name": "json_valid"}, True),
        ('```json\n{"a": 1}\n```', {"name": "json_valid", "keys": ["a"]}, True),
        ('{"b": 1}', {"name": "json_valid", "keys": ["a"]}, False),
        ("{a: 1}", {"name": "json_valid"}, False),
        ("[" * 100_000, {"name": "json_valid"}, False),
        (
            '{"a": 1}',
            {"name": "json_schema", "schema": {"required": ["a"], "properties": {"a": {"type": "integer"}}}},
            True,
        ),
        ('{"a": "x"}', {"name": "json_schema", "schema": {"properties": {"a": {"type": "integer"}}}}, False),
        ("no json", {"name": "json_schema", "schema": {}}, False),
        ("so it is 1,234.5", {"name": "number_close", "value": 1234.5}, True),
        ("so it is 3.2", {"name": "number_close", "value": 3.14, "tolerance": 0.1}, True),
        ("1e999", {"name": "number_close", "value": 3}, False),
        ("about 10-20", {"name": "number_close", "value": 20}, True),
        ("it is -20", {"name": "number_close", "value": -20}, True),
        ("我喜欢苹果。", {"name": "contains_any", "any": ["苹果"]}, True),
        ("用int类型", {"name": "contains_any", "any": ["int"]}, True),
        ("사과를 먹어요", {"name": "contains_any", "any": ["사과"]}, True),
        ("それは東京です", {"name": "contains_all", "all": ["東京"]}, True),
        ("<think>It could be Linz.</think>\n\nGraz", {"name": "contains_none", "none": ["Linz"]}, True),
        ("It could be Linz.</think>Graz", {"name": "exact", "text": "Graz"}, True),
        ("<think>It could be Graz", {"name": "contains_any", "any": ["Graz"]}, False),
        ("none", {"name": "number_close", "value": 3}, False),
    ],
)
def test_checkers(answer: str, checker: dict[str, Any], expected: bool) -> None:
    assert answer_succeeds(answer, checker) is expected


def test_an_answer_cut_at_the_limit_fails_where_it_must_end() -> None:
    assert answer_succeeds("KeyError", KEYERROR, ended=False)
    assert not answer_succeeds("KeyError", {**KEYERROR, "must_end": True}, ended=False)
    assert answer_succeeds("KeyError", {**KEYERROR, "must_end": True}, ended=True)


@pytest.mark.parametrize(
    ("checker", "message"),
    [
        ({"name": "contain_any", "any": ["x"]}, "contains_any"),
        ({"name": "zzz"}, "known: "),
        ({}, "known: "),
        ({"name": "contains_any", "zzz": ["x"]}, "it takes"),
        ({"name": "contains_any", "anyy": ["x"]}, "it takes: any"),
        ({"name": "contains_any"}, "needs 'any'"),
        ({"name": "contains_any", "any": "x"}, "wrong type"),
        ({"name": "contains_any", "any": []}, "at least one"),
        ({"name": "contains_any", "any": [""]}, "none of them empty"),
        ({"name": "contains_any", "any": ["x"], "must_end": "yes"}, "wrong type"),
        ({"name": "number_close", "value": True}, "wrong type"),
        ({"name": "regex", "pattern": "("}, "not a valid regular expression"),
        ({"name": "regex", "pattern": "a" * 501}, "longer than"),
    ],
)
def test_a_wrong_checker_is_named_not_failed(checker: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_checker(checker)
    assert message in str(caught.value)


@pytest.mark.slow
def test_a_pattern_that_explodes_is_stopped_in_time() -> None:
    with pytest.raises(UsageError, match="took longer than 2 s"):
        answer_succeeds("a" * 60 + "!", {"name": "regex", "pattern": r"(a+)+$"})


@given(st.text(max_size=300))
def test_no_answer_breaks_a_checker(answer: str) -> None:
    for name, arguments in (
        ("contains_any", {"any": ["é", "\\"]}),
        ("exact", {"text": "x"}),
        ("json_valid", {}),
        ("number_close", {"value": 1}),
    ):
        assert answer_succeeds(answer, {"name": name, **arguments}) in (True, False)


def test_every_checker_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
    assert not [name for name in CHECKERS if f"`{name}`" not in text]


def test_a_judge_is_asked_whether_the_answer_meets_the_reference() -> None:
    row = {"prompt": "Where?", "reference": "Graz", "agent": None, "category": None, "source": "f:1"}
    asked: list[str] = []

    def reply(body: dict[str, Any]) -> Reply:
        asked.append(body["messages"][1]["content"])
        return chat_reply("<think>The same town.</think>" + ("Yes." if "in Graz" in asked[-1] else "No, it is not."))

    with fake_server(reply) as server:
        checker = {"name": "judge", "model": f"{server.url}#m"}
        checking = Checking()
        assert checking.succeeds("<think>Linz?</think>It is in Graz.", checker, ended=True, row=row)
        assert not checking.succeeds("Linz", checker, ended=True, row=row)
        assert "Reference answer:\nGraz" in asked[0] and "Linz" not in asked[0]
        with pytest.raises(UsageError, match="needs a row with a reference"):
            checking.succeeds("Linz", checker, ended=True, row={**row, "reference": None})


def test_rows_name_neither_code_nor_servers() -> None:
    for name in ("function", "judge"):
        checker = row_checker({"name": name, "file": "x.py", "model": "http://h/v1#m"}, None)
        with pytest.raises(UsageError, match=r"only eval\.checker may name"):
            find_checker(checker or {})
