"""A kill between what is told of an expert and what is done with it leaves a state from which the next call goes on."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from specialists.test_birth import units

import hivetune.specialists.runs
import hivetune.specialists.station
import hivetune.specialists.survey
from hivetune.base.database import open_database, transaction
from hivetune.config import LoraConfig, parse_config
from hivetune.errors import UsageError
from hivetune.routing.domains import KeyedRow, RowDomain
from hivetune.routing.steps import add_steps, newest_steps
from hivetune.specialists.decide import ScoredUnit, decide_birth
from hivetune.specialists.routes import keys_of
from hivetune.specialists.runs import _make, birth_step, propose_domains
from hivetune.specialists.station import review
from hivetune.specialists.survey import ALONE, Serving, read_survey

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
    monkeypatch.setattr(hivetune.specialists.station, "serving", lambda _: ({"helpdesk-coder": one}, []))
    monkeypatch.setattr(
        hivetune.specialists.station,
        "_matrix",
        lambda *_: {"helpdesk-coder": [ScoredUnit("s", 10, {"shared": 1.0, "helpdesk-coder": 1.0})]},
    )
    monkeypatch.setattr(hivetune.specialists.station, "retire", killed)
    with pytest.raises(KeyboardInterrupt):
        review(found)
    with closing(open_database()) as database:
        assert newest_steps(database, "helpdesk")["helpdesk-coder"].step == "retired"


def test_a_name_that_a_person_gave_is_no_experts(own_home: Path, tmp_path: Path) -> None:
    """The expert became its next version, and its champion."""
    with closing(open_database()) as database, transaction(database):
        database.execute(
            "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, verdict, proof,"
            " created) VALUES ('helpdesk-coder', 1, '/runs/mine', 'm', '', '', '', 'deploy', '{}', 1)"
        )
    shared = SimpleNamespace(name="helpdesk", label="helpdesk@2", adapter_sha256="new")
    survey: Any = SimpleNamespace(
        shared=shared, folder=tmp_path, domains=[DOMAIN], rows_of=lambda _: [], snapshot=SimpleNamespace(hash="rows")
    )
    (step,) = propose_domains(survey)
    assert step.step == "not-born" and step.reason.endswith("of releases from another run (/runs/mine)")


def test_a_vanished_domain_keeps_its_keys() -> None:
    """Those that its adapter was made for, and what its rows declared besides when the table was made."""
    rows = [KeyedRow("1", "train", "s", (1,), {"agent": "clerk", "system": "c1"}, "")]
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
    monkeypatch.setattr(hivetune.specialists.station, "serving", lambda _: ({"helpdesk-coder": one}, []))
    monkeypatch.setattr(hivetune.specialists.station, "_matrix", lambda *_: {"helpdesk-coder": []})
    assert review(found) == []


def test_rows_that_declare_nothing_of_the_wanted_kind_are_an_error(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty table would look like rows that need no expert."""
    shared = SimpleNamespace(check=lambda: None, model_sha256="base", folder=tmp_path, name="team", adapter_sha256="a")
    theirs = SimpleNamespace(lora=LoraConfig(), method="lora")
    fakes: dict[str, Any] = {
        "find": lambda *_: shared,
        "fetch_model": lambda *_: tmp_path,
        "sha256_file": lambda _: "base",
        "read_resolved": lambda _: (theirs,),
        "prepare_data": lambda *_: SimpleNamespace(hash="rows"),
        "_rows_of": lambda _: ([KeyedRow("1", "train", "s", (1,), {"category": "x"}, "")], {}),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(hivetune.specialists.survey, name, fake)
    config = parse_config({"model": "m", "data": {"path": "rows.jsonl"}, "experts": {"shared": "team", "by": "agent"}})
    with pytest.raises(UsageError, match=r"experts\.by is agent, and none of 1 rows declares one") as refused:
        read_survey(config)
    assert "rows declare category" in refused.value.hint


@pytest.mark.parametrize("verdict", ["deploy", "abort"])
def test_a_birth_beside_a_shared_adapter_that_still_gains_is_said_of_the_specialist_too(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    """The newest step is what a person sees, and its reason used to be the gate's alone."""
    shared = SimpleNamespace(name="helpdesk", label="helpdesk@2", adapter_sha256="new")
    found: Any = SimpleNamespace(shared=shared, snapshot=SimpleNamespace(hash="rows"))
    run: Any = SimpleNamespace(folder=Path("/run"), plan=SimpleNamespace(steps=()))
    judged = SimpleNamespace(verdict=verdict, reasons=("loss: gain 0.1",), decisive=1)
    fakes: dict[str, Any] = {
        "train_specialist": lambda *_: None,
        "_is_evaluated": lambda _: True,
        "judge_run": lambda _: judged,
        "register_run": lambda *_: (SimpleNamespace(label="helpdesk-coder@1"), True),
        "promote": lambda *_, **__: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(hivetune.specialists.runs, name, fake)
    birth = decide_birth(units(0.15, 0.1, 60, over_shared=0.5), forks=1)
    with closing(open_database()) as database:
        add_steps(database, birth_step(found, DOMAIN, birth, {}))
        _make(found, DOMAIN, run, ALONE)
        step = newest_steps(database, "helpdesk")["helpdesk-coder"]
    assert step.step == ("serving" if verdict == "deploy" else "refused")
    assert "loss: gain 0.1; the shared adapter itself still gains +0.3" in step.reason
