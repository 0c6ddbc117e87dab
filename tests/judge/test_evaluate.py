"""The rows that are scored, and the join of scores into one document that loses nothing."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hivetune.config import EvalConfig
from hivetune.errors import UsageError
from hivetune.judge.findings import Thresholds, by_part
from hivetune.judge.gate import judge
from hivetune.judge.held_out import evaluation_document, evidence_groups, plan_evaluation
from hivetune.process.protocol import Generate
from hivetune.records import Message

WORD = {"name": "contains_any", "any": ["yes"], "must_end": True}


@dataclass(frozen=True)
class Info:
    row: int
    id: str
    source: str
    agent: str | None
    category: str | None = None
    session: str | None = None
    messages: tuple[Message, ...] = (Message("user", "well?"), Message("assistant", "yes"))
    checker: dict[str, Any] | None = None


@dataclass
class HeldOut:
    infos: list[Info]
    hash: str = "abc"
    asked: list[str] = field(default_factory=list)

    def rows(self, split: str) -> list[int]:
        self.asked.append(split)
        return [info.row for info in self.infos]

    def info(self, row: int) -> Info:
        return next(info for info in self.infos if info.row == row)


def conversation(said: str) -> tuple[Message, ...]:
    """Ends alike whatever was said before."""
    return (Message("user", said), Message("assistant", "Good."), Message("user", "well?"), Message("assistant", "yes"))


def held_out(**agents: int) -> HeldOut:
    infos = []
    for agent, count in agents.items():
        infos += [
            Info(
                len(infos) + i, f"{agent}{i}", f"f:{len(infos) + i}", agent, messages=conversation(f"I am {agent} {i}.")
            )
            for i in range(count)
        ]
    return HeldOut(infos)


def scores(snapshot: HeldOut, plan: tuple[Sequence[int], Generate], answer: str = "yes") -> list[dict[str, Any]]:
    rows, generate = plan
    lines: list[dict[str, Any]] = []
    for model, nll in (("base", 20.0), ("tuned", 10.0)):
        lines += [{"event": "loss", "model": model, "row": row, "nll": nll + row, "tokens": 10} for row in rows]
        lines += [
            {
                "event": "answer",
                "model": model,
                "row": row,
                "answer": answer,
                "ended": True,
                "seconds": 0.5,
                "new_tokens": 3,
            }
            for row in generate.rows
        ]
    return lines


OUTCOME = {side: {"tokens_per_second": 40.0, "peak_memory_bytes": 1000} for side in ("base", "tuned")}


def test_prompts_are_stratified_and_every_agent_is_asked() -> None:
    snapshot = held_out(big=60, middle=30, lone=1)
    rows, generate = plan_evaluation(snapshot, EvalConfig(prompts=30))
    chosen = list(generate.rows)
    agents = [snapshot.info(row).agent for row in chosen]
    assert snapshot.asked == ["test"]
    assert len(chosen) == 30 and chosen == sorted(set(chosen))
    assert agents.count("lone") == 1
    assert agents.count("big") in (19, 20) and agents.count("middle") in (9, 10)
    assert rows == tuple(range(91))


def test_prompts_follow_the_contents_not_the_order() -> None:
    snapshot = held_out(a=40, b=20)
    reordered = HeldOut([Info(59 - info.row, info.id, info.source, info.agent) for info in snapshot.infos])
    ids = [
        {s.info(row).id for row in plan_evaluation(s, EvalConfig(prompts=12))[1].rows} for s in (snapshot, reordered)
    ]
    assert ids[0] == ids[1]


def test_rows_that_say_nearly_the_same_are_one_piece_of_evidence() -> None:
    """Two rows of one session, two that nobody marked and that differ by one word, and one of its own."""
    long = (
        "The printer on the second floor prints blank pages since the toner was changed on Monday. We have put the "
        "old cartridge back and switched it off and on again, and the lamp for paper is green. What can I do about it"
    )
    texts = ("Hello.", "Good day to you.", f"{long} now?", f"{long} today?", "My invoice is wrong.")
    infos = [Info(i, f"r{i}", f"f:{i}", None, messages=conversation(text)) for i, text in enumerate(texts)]
    infos[:2] = [replace(info, session="s") for info in infos[:2]]
    assert evidence_groups(infos) == {0: "s", 1: "s", 2: "r2", 3: "r2", 4: "r4"}
    assert evidence_groups([]) == {}


def test_fewer_rows_than_prompts() -> None:
    assert plan_evaluation(held_out(a=3), EvalConfig(prompts=64))[1].rows == (0, 1, 2)


def test_a_broken_checker_in_the_config_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UsageError, match=r"eval\.checker"):
        plan_evaluation(held_out(a=3), EvalConfig(checker={"name": "contain_any"}))


def test_the_document_keeps_each_row_and_is_what_the_gate_reads() -> None:
    snapshot, config = held_out(a=40, b=40), EvalConfig(prompts=8, checker=WORD)
    plan = plan_evaluation(snapshot, config)
    document = evaluation_document(snapshot, config, scores(snapshot, plan), OUTCOME, {"model": "m"})
    json.dumps(document, allow_nan=False)
    assert tuple(row["row"] for row in document["rows"]) == plan[0]
    assert all(answer[side]["success"] is True for answer in document["answers"] for side in ("base", "tuned"))
    assert document["answers"][0]["prompt"] == "well?"
    assert document["answers"][0]["reference"] == "yes"
    assert document["problems"] == []
    assert judge(document, Thresholds()).verdict == "deploy"
    assert [(a["agent"], a["rows"], a["base_loss"] > a["tuned_loss"]) for a in by_part(document, "agent")] == [
        ("a", 40, True),
        ("b", 40, True),
    ]


def test_a_row_without_checker_counts_in_loss_only() -> None:
    snapshot, config = held_out(a=8), EvalConfig(prompts=8)
    document = evaluation_document(snapshot, config, scores(snapshot, plan_evaluation(snapshot, config)), OUTCOME, {})
    assert [answer["base"]["success"] for answer in document["answers"]] == [None] * 8
    assert judge(document, Thresholds()).metrics[2].n == 0


def test_missing_and_infinite_scores_stay_visible() -> None:
    snapshot, config = held_out(a=8), EvalConfig(prompts=2)
    lines = scores(snapshot, plan_evaluation(snapshot, config))
    lines = [line for line in lines if not (line["model"] == "tuned" and line["row"] == 3)]
    lines[0]["nll"] = math.nan
    document = evaluation_document(snapshot, config, lines, OUTCOME, {})
    assert document["rows"][0]["base"] == "not finite"
    assert document["rows"][3]["tuned"] is None
    assert judge(document, Thresholds()).verdict == "abort"


def test_a_row_with_a_broken_checker_is_a_problem_not_a_failure() -> None:
    snapshot = HeldOut([Info(0, "x", "f:1", None, checker={"name": "nope"})])
    config = EvalConfig()
    document = evaluation_document(snapshot, config, scores(snapshot, plan_evaluation(snapshot, config)), OUTCOME, {})
    assert document["answers"][0]["tuned"]["success"] is None
    assert "nope" in document["problems"][0]["problem"]
    assert document["problems"][0]["source"] == "f:1"
