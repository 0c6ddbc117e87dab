"""No row holds a preparation: its length is checked first, its time is limited, and each change has its place."""

import json
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from data.conftest import chat

from hivetune.config import DataConfig
from hivetune.data import time_limit
from hivetune.data.checks.redact import apply_policy
from hivetune.data.prepare import examine
from hivetune.data.prepare.prepare import check
from hivetune.data.reasons import RowRefused
from hivetune.data.time_limit import TimeLimit

MAIL = "ana.lima7@uol.com.br"


def limit_of(seconds: float) -> TimeLimit:
    return TimeLimit(seconds, lambda: RowRefused("too-costly"))


def spend(seconds: float) -> None:
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        sum(range(5000))


@pytest.mark.slow
def test_two_rows_of_10_mb_take_no_longer_than_their_bytes(write_rows: Callable[..., Path], chatml: Path) -> None:
    """Five took 72 s when every rule read them before their length was checked; 8 s is for a busy machine."""
    long = "the key: word-" * 750_000
    path = write_rows([chat(f"question {i}", long) for i in range(2)])
    for model in (None, chatml):
        started = time.process_time()
        report = check(DataConfig(path=str(path)), model_folder=model)
        assert report.document["rejected"] == {"too-long": 2}
        assert time.process_time() - started < 8


def test_a_row_that_takes_too_long_is_refused_and_the_next_one_read(
    write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(example: Any, *rest: Any) -> Any:
        while "stuck" in example.messages[0].content:
            pass
        return apply_policy(example, *rest)

    monkeypatch.setattr(examine, "apply_policy", stuck)
    monkeypatch.setattr(examine, "ROW_LIMIT_S", 0.1)
    path = write_rows([chat("stuck at me@home.org", "answer"), chat("fine", "answer")])
    report = check(DataConfig(path=str(path)))
    assert (report.document["rejected"], report.usable) == ({"too-costly": 1}, 1)


def running() -> tuple[object, object]:
    return signal.getitimer(signal.ITIMER_VIRTUAL), TimeLimit.running


NONE_RUNS = ((0.0, 0.0), None)


def test_a_time_limit_ends_with_its_block() -> None:
    with limit_of(0.2):
        pass
    spend(0.3)
    with pytest.raises(RowRefused, match="too-costly"), limit_of(0.05):
        while True:
            pass
    assert running() == NONE_RUNS


def test_inside_of_a_limit_and_in_other_threads_there_is_none() -> None:
    with limit_of(5.0):
        with limit_of(0.05):
            spend(0.2)
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 1
    with ThreadPoolExecutor() as threads:
        with limit_of(0.05):
            pass
        threads.submit(limit_of(0.05).__enter__).result()
    spend(0.2)
    assert running() == NONE_RUNS


def test_an_error_that_python_swallowed_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where an object is finalised, and where the garbage collector calls who asked for it."""
    swallowed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: swallowed.append(told.exc_type))

    class Slow:
        def __del__(self) -> None:
            spend(0.2)

    with pytest.raises(RowRefused, match="too-costly"), limit_of(0.05):
        Slow()
        while True:
            pass
    assert swallowed == [RowRefused]


def test_a_limit_that_is_reached_on_its_way_out_ends() -> None:
    """The block was in time, and nothing of its limit is left for what comes after it."""

    def reach(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is TimeLimit.__exit__.__code__:
            time_limit._reached(signal.SIGVTALRM, frame)

    with limit_of(5.0):
        sys.setprofile(reach)
    sys.setprofile(None)
    assert running() == NONE_RUNS


def test_every_redaction_has_its_place_and_reason(write_rows: Callable[..., Path]) -> None:
    secret = "ghp_" + "a1B2" * 9
    asked = chat("hello there", "good morning"), chat(f"I am {MAIL}", f"use {secret}")
    path = write_rows([*asked, {"prompt": "x", "completion": ""}])
    document = check(DataConfig(path=str(path))).document
    assert document["changed"] == {"redacted-personal": 1, "redacted-secret": 1}
    common = {"source": f"{path}:2", "rows": 1, "severity": "warn"}
    personal = "e-mail address in the question (message 1); check that the row still makes sense"
    assert document["changes"] == [
        {**common, "reason": "redacted-secret", "hint": "GitHub token in the answer (message 2); revoke it"},
        {**common, "reason": "redacted-personal", "hint": personal},
    ]
    assert secret not in json.dumps(document)
    assert MAIL not in json.dumps(document)


def test_a_system_prompt_of_the_config_is_covered(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows([chat("hello there", "good morning", agent="desk")])
    data = DataConfig(path=str(path), system_prompts={"desk": f"You answer for {MAIL}."})
    document = check(data, model_folder=chatml).document
    assert [change["hint"] for change in document["changes"]] == [
        "e-mail address in the system prompt (message 1); check that the row still makes sense"
    ]
