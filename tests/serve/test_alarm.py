"""The alarm of a watch: quiet on usual rates however often it is asked, raised soon on worse ones."""

import random

from hivetune.base.database import open_database
from hivetune.serve.watch import FALSE_ALARMS, MIN_ANSWERS, Watch, is_raised, usual_rate


def test_ten_bad_answers_decide_nothing() -> None:
    assert not any(is_raised(0.02, answers, answers) for answers in range(MIN_ANSWERS))
    assert is_raised(0.02, MIN_ANSWERS, MIN_ANSWERS)


def first_alarm(seed: int, usual: float, rate: float, answers: int) -> int | None:
    """Return after how many answers the alarm is raised, asked at each bad one."""
    draw, bad = random.Random(seed).random, 0
    for count in range(1, answers + 1):
        if draw() < rate:
            bad += 1
            if is_raised(usual, count, bad):
                return count
    return None


def test_what_is_usual_raises_it_in_few_of_many_lives() -> None:
    """400 lives of 1,000 answers at exactly the usual rate, looked at after each: alpha is 1 %, so 4 are expected."""
    raised = sum(first_alarm(seed, 0.05, 0.05, 1000) is not None for seed in range(400))
    assert raised <= 400 * FALSE_ALARMS + 3 * (400 * FALSE_ALARMS) ** 0.5


def test_three_times_as_bad_is_noticed() -> None:
    """Three times the usual 5 %: within 400 answers in at least 95 of 100 lives."""
    assert sum(first_alarm(seed, 0.05, 0.15, 400) is not None for seed in range(100)) >= 95


def test_the_usual_rate_is_never_nothing() -> None:
    assert usual_rate(0, 0) == 0.5  # nothing is known
    assert 0.02 < usual_rate(100, 0) < 0.06
    assert usual_rate(100_000, 0) == 0.02
    assert 0.1 < usual_rate(10_000, 1000) < 0.11


def test_restarts_of_the_gateway_begin_no_alarm_anew(own_home: object) -> None:
    """With 29 restarts 12 of 400 lives at the usual rate raised one, since each restart began anew; 0 without any."""
    raised: list[str] = []
    for seed in range(10):
        draw = random.Random(seed).random
        watch = Watch(lambda label, reason: raised.append(label), open_database)
        for number in range(3000):
            if number % 300 == 299:
                watch.save()
                watch = Watch(watch.roll_back, open_database)
                watch.load()
            watch.keep({f"a@{seed}": "a@before"})
            watch.watches[f"a@{seed}"].usual = {"errors": 0.05, "complaints": 0.05}
            watch.answered(f"a@{seed}", error=draw() < 0.05)
        assert sum(counts.answers for counts in watch.watches[f"a@{seed}"].clients.values()) == 3000
    assert len(raised) <= 1
