"""A family behind the gateway: who answers, what the header says, and that adapters never mix."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from serve.hive import Running, add_release, gateway, health, stored, wait_until

from hivetune.base.database import open_database
from hivetune.release.registry import retire
from hivetune.routing.choose import SpecialistTable, write_table
from hivetune.routing.domains import RowDomain
from hivetune.routing.steps import SpecialistStep, add_steps
from hivetune.routing.text_router import RoutedText, learn_router
from hivetune.serve.swap.wanted import wanted

pytestmark = pytest.mark.slow
EXPERTS = ("team-coder", "team-tester")


def make_family(work: Path) -> None:
    """Make a shared release and two specialists whose adapters answer differently, with a router that knows their
    cues."""
    for seed, name in enumerate(("team", *EXPERTS), 1):
        add_release(work, name, seed, champion=True)
    with closing(open_database()) as database:
        for name in EXPERTS:
            domain = RowDomain("agent", (name.removeprefix("team-"),))
            add_steps(database, SpecialistStep("team", domain, "serving", "planted", name, "parent"))
    rows = []
    for own, other, cue in ((*EXPERTS, "code"), (*reversed(EXPERTS), "test")):
        gains = {own: 0.3, other: -0.3}
        rows += [RoutedText(f"{cue} question {n % 40} of {n % 7}", gains, held_out=n % 2 == 0) for n in range(160)]
    keys = {"agent": {"coder": "team-coder", "tester": "team-tester", "clerk": ""}}
    write_table(SpecialistTable("team", EXPERTS, keys, learn_router(rows, EXPERTS)))


def ask(running: Running, text: str, *, model: str = "team", agent: str = "", **headers: str) -> tuple[str, str, str]:
    """Return (release, reason, text)."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    body |= {"metadata": {"agent": agent}} if agent else {}
    with running.client(**headers) as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()["choices"][0]["message"]["content"]
    return answer.headers["x-hivetune-release"], answer.headers["x-hivetune-reason"], said


def interleaved(running: Running, requests: int) -> dict[str, int]:
    """Send `requests` from eight clients at once. Each answer equals that of the same question asked alone."""
    texts = [f"{('code', 'test', 'bake')[n % 3]} question {n % 12} of {n % 5}" for n in range(requests)]
    expected = {text: ask(running, text) for text in sorted(set(texts))}
    with ThreadPoolExecutor(8) as pool:
        found: Sequence[Any] = list(pool.map(lambda text: ask(running, text), texts))
    wrong = [(text, got) for text, got in zip(texts, found, strict=True) if got != expected[text]]
    assert wrong == []
    labels = [got[0] for got in found]
    return {label: labels.count(label) for label in sorted(set(labels))}


def test_each_request_finds_its_expert_and_is_told_why(own_home: Path, tmp_path: Path) -> None:
    make_family(tmp_path)
    with gateway(tmp_path / "log", "team", "--capture") as running:  # the experts of a name come with it
        assert ask(running, "x", model="team-coder")[:2] == ("team-coder@1", "named")
        assert ask(running, "x", **{"X-Hivetune-Agent": "tester"})[:2] == ("team-tester@1", "declared: agent=tester")
        wait_until(lambda: running.metric("hivetune_captured_answers") == 2)
        assert [json.loads(row).get("agent") for (row,) in stored("row")] == [None, "tester"]
        stranger = ask(running, "code question 3 of 2", agent="stranger\r\n\u4e00")
        assert stranger[0] == "team-coder@1" and "no training row had the agent" in stranger[1]  # as without an agent
        label, reason, _ = ask(running, "code question 3 of 2", **{"X-Session-Id": "s1"})
        assert label == "team-coder@1" and reason.startswith("text: ")
        assert ask(running, "test question 3 of 2", **{"X-Session-Id": "s1"})[:2] == (
            "team-coder@1",
            "as before in this session",
        )
        assert ask(running, "bake me a large cake")[0] == "team@1"
        assert ask(running, "code question 1 of 1", model="")[0] == "team-coder@1"
        assert running.metric('hivetune_routed_total{by="text"') == 3
        assert interleaved(running, 36).keys() == {"team@1", "team-coder@1", "team-tester@1"}
        with closing(open_database()) as database:
            retire(database, "team-coder", by="test", reason="gone")
        wait_until(lambda: ask(running, "x", model="team-coder")[0] == "team@1")
        assert "team-coder can't be served now" in ask(running, "code question 3 of 2")[1]
        assert health(running) == 200
        assert running.metric('hivetune_adapter_bytes{release="team-tester@1"}') > 1000
        assert running.metric('hivetune_computing_seconds_total{release="team-tester@1"}') > 0
    with closing(open_database()) as database:
        database.execute("UPDATE releases SET model_sha256 = 'upgraded' WHERE name = 'team-tester'")
        found = wanted(database, ("team",))
    assert found.champions == {"team": "team@1"} and found.family["team-tester"] == "team"
    assert "team-tester is of another base than team, which answers instead" in found.problems


@pytest.mark.proof
def test_two_hundred_interleaved_requests(own_home: Path, tmp_path: Path, record_property: Any) -> None:
    make_family(tmp_path)
    with gateway(tmp_path / "log") as running:
        counts = interleaved(running, 200)  # raises for an answer that differs from the same question asked alone
        assert sum(counts.values()) == 200 and counts.keys() == {"team@1", "team-coder@1", "team-tester@1"}
        for label, count in counts.items():
            record_property(f"answers of {label}", count)
