"""Asking two sides: what is kept, what is asked again after a failure, and how their times are taken."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated import row_info

from hivetune.config import EvalConfig
from hivetune.errors import DataRefused, DoesNotFit, MachineNotFit, UsageError
from hivetune.judge import answers, artefacts
from hivetune.judge.answers import (
    ANSWERS,
    StoredAnswers,
    ask_all,
    minutes_text,
    note_rate,
    stored_answers,
    time_in_turns,
)
from hivetune.judge.artefacts import BESIDE_FILE_BYTES, Artefact, check_memory
from hivetune.judge.evaluate import TIMED_PROMPTS, timed_prompts
from hivetune.judge.rows import Prompt, prompts_of_rows
from hivetune.llama import ask
from hivetune.llama.ask import Answer, Endpoint, Unanswered
from hivetune.records import Message

SIDE = Artefact("side", "gguf", identity="hash")


class FakeSide:
    """Answers with the question in capitals; fails on what `fails` says, that many times."""

    def __init__(self, name: str, log: list[str], fails: Mapping[str, Exception] | None = None, times: int = 99):
        self.name, self.log, self.fails, self.left = name, log, fails or {}, times

    def complete(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Answer:
        said = messages[-1]["content"]
        self.log.append(f"{self.name}{said}")
        if said in self.fails and self.left:
            self.left -= 1
            raise self.fails[said]
        return Answer(said.upper(), True, 0.25, None, 2)


def prompts(count: int) -> list[Prompt]:
    infos = [row_info(row=i, source=f"f:{i}", messages=(Message("user", str(i)),)) for i in range(count)]
    return [Prompt(info, f"g{info.row}", None) for info in infos]


@pytest.fixture(autouse=True)
def quiet(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses."""
    monkeypatch.setattr(ask, "FIRST_PAUSE_S", 0.0)


def stored(side: Artefact = SIDE) -> AbstractContextManager[StoredAnswers]:
    return stored_answers(side, 8, 3)


def ask_all_of(kept: StoredAnswers, side: FakeSide, count: int = 12) -> None:
    ask_all(side, kept, prompts(count), slots=3, new_tokens=8)


def test_an_endpoint_that_fails_half_way_is_asked_only_for_the_rest() -> None:
    log: list[str] = []
    with stored() as kept:
        with pytest.raises(MachineNotFit) as raised:
            ask_all_of(kept, FakeSide("", log, {"7": Unanswered("gone")}))
        done = len(kept.answers)
    assert "failed again and again on f:7: gone" in raised.value.message
    assert "the same command continues" in raised.value.hint and 0 < done < 12
    for left in (12 - done, 0):
        log.clear()
        with stored() as kept:
            ask_all_of(kept, FakeSide("", log))
            assert len(kept.answers) == 12 and len(log) == left


def test_a_server_that_comes_back_is_waited_for() -> None:
    log: list[str] = []
    with stored() as kept:
        ask_all_of(kept, FakeSide("", log, {"3": Unanswered("busy")}, times=2))
        assert len(kept.answers) == 12 and log.count("3") == 3


def test_what_is_refused_names_the_row_and_is_not_tried_again() -> None:
    log: list[str] = []
    with stored() as kept, pytest.raises(UsageError) as raised:
        ask_all_of(kept, FakeSide("", log, {"5": UsageError("too long", hint="shorter")}))
    assert raised.value.message == "side on f:5: too long" and log.count("5") == 1
    assert raised.value.hint == "shorter"


def test_a_damaged_line_is_asked_again(own_home: Path) -> None:
    with stored() as kept:
        ask_all_of(kept, FakeSide("", []))
    (file,) = own_home.rglob(ANSWERS)
    lines = file.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace('"ended": true', '"ended": false')
    file.write_text("".join(lines)[:-5])
    with stored() as kept:
        assert len(kept.answers) in (10, 11)  # the torn last line may be the batch's


def test_sides_are_timed_in_turns_and_the_answers_count() -> None:
    log: list[str] = []
    other = Artefact("b", "gguf", identity="other")
    with stored() as first, stored(other) as second:
        sides = [(FakeSide("a", log), first), (FakeSide("b", log), second)]
        times = time_in_turns(sides, prompts(4), new_tokens=8)
        assert log == ["a0", "b0", "a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3"]  # two to warm up
        assert times[0] == times[1] == {prompt.key: 0.25 for prompt in prompts(4)}
        assert len(first.answers) == len(second.answers) == 4
        assert time_in_turns(sides, [], new_tokens=8) == [{}, {}]


def test_prompts_come_from_any_rows(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "agent": "a"},
        {"agent": "b", "task": "add", "output": "done", "checker": {"name": "regex", "pattern": "."}},
        {"nothing": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, refused = prompts_of_rows([str(tmp_path / "rows.jsonl")], EvalConfig())
    assert [prompt.reference for prompt in found] == ["hello", "done"] and sum(refused.values()) == 1
    assert found[0].messages == ({"role": "user", "content": "hi"},) and found[1].checker == {
        "name": "regex",
        "pattern": ".",
    }
    (tmp_path / "none.jsonl").write_text('{"nothing": 1}\n')
    with pytest.raises(DataRefused):
        prompts_of_rows([str(tmp_path / "none.jsonl")], EvalConfig())


def test_what_is_timed_is_spread_over_all_prompts() -> None:
    asked = [*prompts(3 * TIMED_PROMPTS), replace(prompts(1)[0], origin="win")]
    assert [prompt.info.row for prompt in timed_prompts(asked)] == list(range(0, 3 * TIMED_PROMPTS, 3))
    assert len(timed_prompts(asked[:3])) == 3 and timed_prompts([]) == []


def test_the_minutes_of_answers_follow_from_the_last_rate_here() -> None:
    settings = EvalConfig(prompts=60, tokens=100)
    assert minutes_text("model", settings) == ""
    note_rate("model", 2000, 10.0)
    assert minutes_text("model", settings) == "; an evaluation's answers take up to 1 min here"
    note_rate("model", 0, 10.0)  # everything was there before: no rate
    note_rate("other", 100, 10.0)
    assert "up to 20 min" in minutes_text("other", settings) and "1 min" in minutes_text("model", settings)


def test_a_base_that_both_sides_have_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"base.gguf": 9 << 20, "a.gguf": 1 << 20, "b.gguf": 1 << 20}
    files = {name: tmp_path / name for name in sizes}
    for name, path in files.items():
        path.write_bytes(bytes(sizes[name]))
    sides = [Artefact(name, "run", model=files["base.gguf"], adapter=files[name]) for name in ("a.gguf", "b.gguf")]
    needed = 11 * (1 << 20) + 2 * BESIDE_FILE_BYTES
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(artefacts.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        if fits:
            check_memory(sides)
        else:
            with pytest.raises(DoesNotFit, match=r"both models need about 1\.1 GB"):
                check_memory(sides)


def test_answers_are_kept_for_one_build_of_llama_cpp_and_never_for_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model behind the same URL was never asked again, and another build's answers were kept."""
    kept: list[int] = []
    for build in ("xllamacpp 1", "xllamacpp 1", "xllamacpp 2"):
        monkeypatch.setattr(answers, "build_name", lambda build=build: build)
        for side in (SIDE, Artefact("url", "endpoint", endpoint=Endpoint("http://x", "m"))):
            with stored(side) as found:
                kept.append(len(found.answers))
                ask_all_of(found, FakeSide("", []))
    assert kept == [0, 0, 12, 0, 0, 0]
