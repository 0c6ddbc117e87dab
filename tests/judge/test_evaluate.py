"""The rows that are answered, and the losses of all of them in one document that loses nothing."""

import math
from dataclasses import dataclass, replace
from typing import Any

from hivetune.judge.losses import loss_rows
from hivetune.judge.page import agent_cells
from hivetune.judge.rows import choose_rows, evidence_groups
from hivetune.records import Message


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

    def rows(self, split: str) -> list[int]:
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


def test_prompts_are_stratified_and_every_agent_is_asked() -> None:
    snapshot = held_out(big=60, middle=30, lone=1)
    chosen = choose_rows(snapshot.infos, 30)
    agents = [snapshot.info(row).agent for row in chosen]
    assert len(chosen) == 30 and chosen == sorted(set(chosen))
    assert agents.count("lone") == 1
    assert agents.count("big") in (19, 20) and agents.count("middle") in (9, 10)


def test_prompts_follow_the_contents_not_the_order() -> None:
    snapshot = held_out(a=40, b=20)
    reordered = HeldOut([Info(59 - info.row, info.id, info.source, info.agent) for info in snapshot.infos])
    ids = [{s.info(row).id for row in choose_rows(s.infos, 12)} for s in (snapshot, reordered)]
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
    assert choose_rows(held_out(a=3).infos, 64) == [0, 1, 2]


def test_missing_and_infinite_losses_stay_visible() -> None:
    snapshot = held_out(a=8, b=8)
    base, tuned = ({row: {"nll": nll + row, "tokens": 10} for row in range(16)} for nll in (20.0, 10.0))
    base[0]["nll"] = math.nan
    del tuned[3]
    rows = loss_rows(snapshot, [base, tuned])
    assert [row["row"] for row in rows] == list(range(16))
    assert rows[0]["base"] == "not finite" and rows[3]["tuned"] is None
    a, b = agent_cells({"rows": rows, "answers": []})
    assert a == ("a", 8, "-", "-", 0, "-", "-") and b[:3] == ("b", 8, "3.150")
