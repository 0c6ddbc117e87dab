"""A kill between what is told of an expert and what is done with it leaves a state from which the next call goes on."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hivetune.walk.experts.life
from hivetune.base.database import open_database
from hivetune.judge.experts.birth import ScoredUnit
from hivetune.judge.experts.domains import ExpertRow, RowDomain
from hivetune.release.experts import newest_steps
from hivetune.walk.experts.life import review
from hivetune.walk.experts.routes import Serving, keys_of

DOMAIN = RowDomain("agent", ("coder",))


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_kill_while_an_expert_is_retired_does_not_leave_it_serving(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step says that it is retired: the next look decides anew about its domain."""
    shared = SimpleNamespace(name="helpdesk", label="helpdesk@2", adapter_sha256="new")
    found: Any = SimpleNamespace(shared=shared, snapshot=SimpleNamespace(hash="rows"))
    one: Any = Serving(DOMAIN, SimpleNamespace(label="helpdesk-coder@1"), parent="old")  # type: ignore[arg-type]
    monkeypatch.setattr(hivetune.walk.experts.life, "serving", lambda _: ({"helpdesk-coder": one}, []))
    monkeypatch.setattr(
        hivetune.walk.experts.life,
        "_matrix",
        lambda *_: {"helpdesk-coder": [ScoredUnit("s", 10, {"shared": 1.0, "helpdesk-coder": 1.0})]},
    )
    monkeypatch.setattr(hivetune.walk.experts.life, "retire", killed)
    with pytest.raises(KeyboardInterrupt):
        review(found)
    with closing(open_database()) as database:
        assert newest_steps(database, "helpdesk")["helpdesk-coder"].step == "retired"


def test_a_vanished_domain_keeps_its_keys() -> None:
    """Those that its adapter was made for, and what its rows declared besides when the table was made."""
    rows = [ExpertRow("1", "train", "s", (1,), {"agent": "clerk", "system": "c1"}, "")]
    before = {"agent": {"coder": "helpdesk-coder"}, "system": {"c0": "helpdesk-coder", "gone": "helpdesk-old", "x": ""}}
    for table in (before, {}):
        keys = keys_of(rows, {"helpdesk-coder": DOMAIN}, table)
        assert keys["agent"] == {"clerk": "", "coder": "helpdesk-coder"}
        assert keys["system"] == {"c1": ""} | ({"c0": "helpdesk-coder"} if table else {})


def test_an_expert_without_test_rows_is_a_persons_choice(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not retired by a new shared adapter, for lack of a measurement; nor made one with another expert."""
    shared = SimpleNamespace(name="helpdesk", label="helpdesk@2", adapter_sha256="new")
    found: Any = SimpleNamespace(shared=shared, snapshot=SimpleNamespace(hash="rows"), rows=())
    one: Any = Serving(DOMAIN, SimpleNamespace(label="helpdesk-coder@1"), parent="old")  # type: ignore[arg-type]
    monkeypatch.setattr(hivetune.walk.experts.life, "serving", lambda _: ({"helpdesk-coder": one}, []))
    monkeypatch.setattr(hivetune.walk.experts.life, "_matrix", lambda *_: {"helpdesk-coder": []})
    monkeypatch.setattr(hivetune.walk.experts.life, "retire", killed)
    assert review(found) == []
