"""Which answers of a release are frozen."""

from typing import Any

from hivetune.judge.frozen import MAX_WINS, WINS_PER_RELEASE, choose_wins


def row(number: int, base: bool | None, tuned: bool | None, origin: str = "win", **changes: Any) -> dict[str, Any]:
    fields = {"id": f"id{number}", "source": f"r:{number}", "agent": "a", "category": None, "checker": {"name": "x"}}
    return {**fields, "origin": origin, "base": {"success": base}, "tuned": {"success": tuned}, **changes}


def test_wins_are_what_training_won_of_every_agent() -> None:
    answers = [row(number, number % 2 == 0, number % 5 != 0, agent="ab"[number % 3 == 0]) for number in range(100)]
    answers += [row(200, False, True, checker=None), row(201, False, False)]
    chosen = choose_wins(answers, 0)
    assert len(chosen) == WINS_PER_RELEASE and all(one["tuned"]["success"] for one in chosen)
    assert not any(one["base"]["success"] for one in chosen) and {one["agent"] for one in chosen} == {"a", "b"}
    assert choose_wins(list(reversed(answers)), 0) == chosen
    assert len(choose_wins(answers, MAX_WINS - 3)) == 3 and choose_wins(answers, MAX_WINS) == []
