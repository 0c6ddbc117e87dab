"""A judge model over HTTP: its replies are kept, and one that fails half-way is asked only for the rest."""

from pathlib import Path
from typing import Any

import pytest
from serve.fake_server import Reply, fake_server, stream

from hivetune.config import EvalConfig
from hivetune.errors import HivetuneError, UsageError
from hivetune.judge import answers as answers_module
from hivetune.judge.preferences import judged
from hivetune.records import silent


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path))
    monkeypatch.setattr(answers_module, "FIRST_PAUSE_S", 0.0)


def document(count: int) -> dict[str, Any]:
    answers = [
        {
            **{key: None for key in ("agent", "category", "reference", "checker")},
            **{"row": number, "id": f"id{number}", "source": f"f:{number}", "group": f"g{number}"},
            "prompt": f"question {number}",
            "base": {"answer": f"long answer {number}"},
            "tuned": {"answer": f"short {number}"},
        }
        for number in range(count)
    ]
    return {"answers": answers, "base": {"label": "base"}, "tuned": {"label": "run"}}


def asked(url: str, count: int = 6) -> dict[str, Any]:
    return judged(document(count), EvalConfig(judge=f"{url}#m", slots=2), None, "q8_0", silent)["preferences"]


def prefers_short(body: dict[str, Any]) -> Reply:
    text = body["messages"][0]["content"]
    return stream("A" if "short" in text.split("ANSWER A")[1].split("ANSWER B")[0] else "B", tokens=1)


def test_a_judge_with_an_opinion_and_one_that_always_takes_the_first() -> None:
    with fake_server(prefers_short) as server:
        found = asked(server.url)
    assert [row["preferred"] for row in found["rows"]] == ["tuned"] * 6 and found["contradictions"] == 0
    with fake_server(lambda body: stream("A", tokens=1)) as server:
        lazy = asked(server.url)
    assert [row["preferred"] for row in lazy["rows"]] == ["tie"] * 6 and lazy["contradictions"] == lazy["asked"] == 6


def test_replies_are_kept_when_the_judge_fails_half_way() -> None:
    state = {"left": 5}

    def fails_later(body: dict[str, Any]) -> Reply:
        state["left"] -= 1
        return prefers_short(body) if state["left"] >= 0 else Reply(b"gone", "text/plain", 503)

    with fake_server(fails_later) as server:
        with pytest.raises(HivetuneError, match="failed 3 times") as raised:
            asked(server.url)
        assert "5 of 12 answers are kept" in raised.value.hint
        state["left"], before = 99, len(server.asked)
        assert [row["preferred"] for row in asked(server.url)["rows"]] == ["tuned"] * 6
        assert len(server.asked) - before == 7
        asked(server.url)
        assert len(server.asked) - before == 7


def test_what_can_not_judge_or_be_judged_is_said(tmp_path: Path) -> None:
    (tmp_path / "figures.yaml").write_text("latency_s: 3\n")
    with pytest.raises(UsageError, match="figures can't judge"):
        judged(document(1), EvalConfig(judge=str(tmp_path / "figures.yaml")), None, "q8_0", silent)
    recorded = {**document(1), "base": {"label": "x", "recorded": True}}
    with pytest.raises(UsageError, match="no answers to judge"):
        judged(recorded, EvalConfig(judge="http://127.0.0.1:1/v1#m"), None, "q8_0", silent)
    assert judged(document(1), EvalConfig(), None, "q8_0", silent) == {}
