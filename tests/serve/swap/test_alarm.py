"""The alarm after a swap: quiet on usual rates however often it is asked, raised soon on worse ones."""

import random

from hivetune.serve.swap.watch import FALSE_ALARMS, MIN_ANSWERS, Alarm, usual_rate


def test_ten_bad_answers_decide_nothing() -> None:
    alarm = Alarm(0.02)
    for _ in range(MIN_ANSWERS - 1):
        alarm.add(True)
        assert not alarm.raised
    alarm.add(True)
    assert alarm.raised


def test_what_is_usual_raises_it_in_few_of_many_lives() -> None:
    """400 lives of 1,000 answers at exactly the usual rate, looked at after each: alpha is 1 %, so 4 are expected."""
    raised = 0
    for seed in range(400):
        draw, alarm = random.Random(seed).random, Alarm(0.05)
        for _ in range(1000):
            bad = draw() < 0.05
            alarm.add(bad)
            if bad and alarm.raised:  # a good answer only lowers the evidence
                raised += 1
                break
    assert raised <= 400 * FALSE_ALARMS + 3 * (400 * FALSE_ALARMS) ** 0.5


def test_three_times_as_bad_is_noticed() -> None:
    """Three times the usual 5 %: within 400 answers in at least 95 of 100 lives."""
    noticed = 0
    for seed in range(100):
        draw, alarm = random.Random(seed).random, Alarm(0.05)
        for _ in range(400):
            bad = draw() < 0.15
            alarm.add(bad)
            if bad and alarm.raised:
                noticed += 1
                break
    assert noticed >= 95


def test_the_usual_rate_is_never_nothing() -> None:
    assert usual_rate(0, 0, 0.02) == 0.5  # nothing is known
    assert 0.02 < usual_rate(0, 100, 0.02) < 0.06
    assert usual_rate(0, 100_000, 0.02) == 0.02
    assert 0.1 < usual_rate(1000, 10_000, 0.02) < 0.11
