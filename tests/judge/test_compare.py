"""Two sides: which rows are asked, what is kept and asked again, how times are taken, and the document of it all."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data.models import corpus, make_model, template_of

from hivetune.base.journal import Journal
from hivetune.config import EvalConfig, GateConfig
from hivetune.data.snapshot import RowInfo
from hivetune.errors import DataRefused, MachineNotFit, UsageError
from hivetune.judge import answers, evaluate
from hivetune.judge.answers import ANSWERS, Artefact, StoredAnswers, ask_all, minutes_text, note_rate, stored_answers
from hivetune.judge.evaluate import (
    AGAIN_AFTER_S,
    MAX_TIMINGS,
    SideAnswers,
    comparison_document,
    time_until_decided,
    timed_prompts,
)
from hivetune.judge.losses import is_scored, loss_rows
from hivetune.judge.page import agent_cells
from hivetune.judge.rows import Prompt, choose_rows, evidence_groups, prompts_of_rows
from hivetune.judge.verdict import TIMED_PROMPTS, judge
from hivetune.llama import ask
from hivetune.llama.ask import Answer, Endpoint, Unanswered
from hivetune.records import Message

CHECKER = {"name": "contains_any", "any": ["yes"]}
SIDE = Artefact("side", "gguf", identity="hash")


def row(number: int, **fields: Any) -> RowInfo:
    """A held-out row whose words depend on its number."""
    said = (Message("user", f"question {number}"), Message("assistant", "yes"))
    empty = dict.fromkeys(("interaction_id", "agent", "category", "session", "time", "checker"))
    known = {
        "row": number,
        "id": f"id{number}",
        "source": f"f:{number}",
        "split": "test",
        "messages": said,
        "tools": (),
    }
    return RowInfo(**{**empty, **known, **fields})


def prompts(count: int, checker: Mapping[str, Any] | None = CHECKER) -> list[Prompt]:
    return [Prompt(row(number), f"g{number}", checker) for number in range(count)]


# Rows.


def test_prompts_are_stratified_and_every_agent_is_asked() -> None:
    sizes = {"big": 60, "middle": 30, "lone": 1}
    rows = [row(n, agent=agent) for n, agent in enumerate(agent for agent, size in sizes.items() for _ in range(size))]
    chosen = choose_rows(rows, 30)
    agents = [rows[number].agent for number in chosen]
    assert len(chosen) == 30 and chosen == sorted(set(chosen))
    assert agents.count("lone") == 1 and agents.count("big") in (19, 20) and agents.count("middle") in (9, 10)
    # By contents and not by the order of rows.
    again = choose_rows([replace(one, row=90 - one.row) for one in rows], 30)
    assert {rows[90 - number].id for number in again} == {rows[number].id for number in chosen}
    assert choose_rows(rows[:3], 64) == [0, 1, 2]


def test_rows_that_say_nearly_the_same_are_one_piece_of_evidence() -> None:
    """Two rows of one session, two that nobody marked and that differ by one word, and one of its own."""
    long = (
        "The printer on the second floor prints blank pages since the toner was changed on Monday. We have put the "
        "old cartridge back and switched it off and on again, and the lamp for paper is green. What can I do about it"
    )
    rest = (Message("assistant", "Good."), Message("user", "well?"), Message("assistant", "yes"))
    texts = ("Hello.", "Good day to you.", f"{long} now?", f"{long} today?", "My invoice is wrong.")
    rows = [
        row(n, messages=(Message("user", text), *rest), session="s" if n < 2 else None) for n, text in enumerate(texts)
    ]
    assert evidence_groups(rows) == {0: "s", 1: "s", 2: "id2", 3: "id2", 4: "id4"}
    assert evidence_groups([]) == {}


def test_missing_and_infinite_losses_stay_visible() -> None:
    rows = [row(number, agent="ab"[number >= 8]) for number in range(16)]
    snapshot: Any = SimpleNamespace(rows=lambda split: range(16), info=rows.__getitem__)
    base, tuned = ({number: {"nll": nll + number, "tokens": 10} for number in range(16)} for nll in (20.0, 10.0))
    base[0]["nll"] = math.nan
    del tuned[3]
    found = loss_rows(snapshot, [base, tuned])
    assert [one["row"] for one in found] == list(range(16))
    assert found[0]["base"] == "not finite" and found[3]["tuned"] is None
    a, b = agent_cells({"rows": found, "answers": []})
    assert a == ("a", 8, "-", "-", 0, "-", "-") and b[:3] == ("b", 8, "3.150")


def test_whether_all_rows_are_scored_is_found_in_one_walk(tmp_path: Path) -> None:
    """A set was made of all rows for each of them."""

    class Counted(list[int]):
        walks = 0

        def __iter__(self) -> Any:
            self.walks += 1
            return super().__iter__()

    rows = Counted(range(300))
    with Journal(tmp_path / "scores.jsonl") as lines:
        for number in range(300):
            lines.append("loss", model="base", row=number, nll=1.0, tokens=2)
    assert is_scored(tmp_path / "scores.jsonl", "base", rows) and rows.walks == 1


def test_prompts_come_from_any_rows(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "agent": "a"},
        {"agent": "b", "task": "add", "output": "done", "checker": {"name": "regex", "pattern": "."}},
        {"nothing": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    found, refused = prompts_of_rows([str(tmp_path / "rows.jsonl")], EvalConfig())
    assert [prompt.reference for prompt in found] == ["hello", "done"] and sum(refused.values()) == 1
    assert found[0].messages == ({"role": "user", "content": "hi"},)
    assert found[1].checker == {"name": "regex", "pattern": "."}
    (tmp_path / "none.jsonl").write_text('{"nothing": 1}\n')
    with pytest.raises(DataRefused):
        prompts_of_rows([str(tmp_path / "none.jsonl")], EvalConfig())


def test_the_key_of_a_prompt_is_all_that_is_asked() -> None:
    other = replace(row(0), messages=(Message("user", "else"), Message("assistant", "yes")))
    tools = replace(row(0), tools=({"type": "function"},))
    assert len({Prompt(info, "g", CHECKER).key for info in (row(0), other, tools)}) == 3
    assert Prompt(replace(row(0), row=7, id="x"), "h", None).key == prompts(1)[0].key


# Asking.


class FakeSide:
    """Answers with the question in capitals; fails on what `fails` says, that many times."""

    def __init__(self, name: str, log: list[str], fails: Mapping[int, Exception] | None = None, times: int = 99):
        self.name, self.log, self.left = name, log, times
        self.fails = {f"question {number}": error for number, error in (fails or {}).items()}

    def complete(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Answer:
        said = messages[-1]["content"]
        self.log.append(self.name + said.removeprefix("question "))
        if said in self.fails and self.left:
            self.left -= 1
            raise self.fails[said]
        return Answer(said.upper(), True, 0.25, None, 2)


@pytest.fixture(autouse=True)
def quiet(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses."""
    monkeypatch.setattr(ask, "FIRST_PAUSE_S", 0.0)


def stored(side: Artefact = SIDE) -> AbstractContextManager[StoredAnswers]:
    return stored_answers(side, 8, 3)


def ask_all_of(kept: StoredAnswers, side: FakeSide) -> None:
    ask_all(side, kept, prompts(12), slots=3, new_tokens=8)


def test_a_side_that_fails_half_way_is_asked_only_for_the_rest() -> None:
    log: list[str] = []
    with stored() as kept:
        with pytest.raises(MachineNotFit) as raised:
            ask_all_of(kept, FakeSide("", log, {7: Unanswered("gone")}))
        done = len(kept.answers)
    assert "failed again and again on f:7: gone" in raised.value.message
    assert "run it again to resume" in raised.value.hint and 0 < done < 12
    for left in (12 - done, 0):
        log.clear()
        with stored() as kept:
            ask_all_of(kept, FakeSide("", log))
            assert len(kept.answers) == 12 and len(log) == left


def test_a_server_that_comes_back_is_waited_for() -> None:
    log: list[str] = []
    with stored() as kept:
        ask_all_of(kept, FakeSide("", log, {3: Unanswered("busy")}, times=2))
        assert len(kept.answers) == 12 and log.count("3") == 3


def test_what_is_refused_names_the_row_and_is_not_tried_again() -> None:
    log: list[str] = []
    with stored() as kept, pytest.raises(UsageError) as raised:
        ask_all_of(kept, FakeSide("", log, {5: UsageError("too long", hint="shorter")}))
    assert (raised.value.message, raised.value.hint) == (
        "side refused the request for f:5: too long",
        "shorter",
    ) and log.count("5") == 1


def test_a_damaged_line_is_asked_again(own_home: Path) -> None:
    with stored() as kept:
        ask_all_of(kept, FakeSide("", []))
    (file,) = own_home.rglob(ANSWERS)
    lines = file.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace('"ended": true', '"ended": false')
    file.write_text("".join(lines)[:-5])
    with stored() as kept:
        assert len(kept.answers) in (10, 11)  # the torn last line may be the batch's


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


def test_sides_are_timed_in_turns_and_the_answers_count() -> None:
    log: list[str] = []
    with stored() as first, stored(replace(SIDE, identity="other")) as second:
        sides = [(FakeSide("a", log), first), (FakeSide("b", log), second)]
        times = answers.time_in_turns(sides, prompts(4), new_tokens=8)
        assert log == ["a0", "b0", "a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3"]  # two to warm up
        assert times[0] == times[1] == {prompt.key: 0.25 for prompt in prompts(4)}
        assert len(first.answers) == len(second.answers) == 4
        assert answers.time_in_turns(sides, [], new_tokens=8) == [{}, {}]


def test_what_is_timed_is_spread_over_all_prompts() -> None:
    asked = [*prompts(3 * TIMED_PROMPTS), replace(prompts(1)[0], origin="win")]
    assert [prompt.info.row for prompt in timed_prompts(asked)] == list(range(0, 3 * TIMED_PROMPTS, 3))
    assert len(timed_prompts(asked[:3])) == 3 and timed_prompts([]) == []


@pytest.mark.parametrize(
    ("factors", "takes"),
    [
        ([1.1, 1.2] * 10, 1),
        ([3.0, 3.1] * 10, 1),
        ([0.2, 2.9] * 10, 3),
        ([0.2, 2.9], 1),  # too few for an interval: more of the same would not help
    ],
)
def test_times_that_straddle_their_limit_are_taken_at_most_three_times(
    factors: list[float], takes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little later each time. What is still too wide then stays open and says why: test_verdict."""
    pauses: list[float] = []
    monkeypatch.setattr(evaluate.time, "sleep", pauses.append)
    asked = prompts(len(factors))
    taken = {"a": 0, "b": 0}

    class Timed(FakeSide):
        def complete(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Answer:
            factor = factors[int(messages[-1]["content"].split()[1])] if self.name == "b" else 1.0
            taken[self.name] += 1
            return replace(super().complete(messages, **options), seconds=factor)

    sides = [(Timed(name, []), StoredAnswers(name)) for name in taken]
    told: list[int] = []
    times = time_until_decided(sides, asked, 8, MAX_TIMINGS, lambda done, total: told.append(done))
    assert told == [*range(1, len(asked) + 1)] * takes
    assert [times[1][prompt.key] for prompt in asked] == factors
    assert set(taken.values()) == {takes * (len(factors) + 1)} and pauses[1:] == [AGAIN_AFTER_S] * (takes - 1)


def test_the_minutes_of_answers_follow_from_the_last_rate_here() -> None:
    settings = EvalConfig(prompts=60, tokens=100)
    assert minutes_text("model", settings) == ""
    note_rate("model", 2000, 10.0)
    assert minutes_text("model", settings) == "; an evaluation's answers take up to 1 min here"
    note_rate("model", 0, 10.0)  # everything was there before: no rate
    note_rate("other", 100, 10.0)
    assert "up to 20 min" in minutes_text("other", settings) and "1 min" in minutes_text("model", settings)


# The document.


def side(label: str, texts: list[str | None], seconds: float, peak_memory_bytes: int | None = None) -> SideAnswers:
    keys = [prompt.key for prompt in prompts(len(texts))]
    found = {key: Answer(text, True, 9.0, 3, 3) for key, text in zip(keys, texts, strict=True) if text is not None}
    return SideAnswers(label, "release", found, dict.fromkeys(keys[:10], seconds), peak_memory_bytes)


def metrics(document: dict[str, Any]) -> dict[str, Any]:
    verdict = judge(document, GateConfig(loss_gain=None), beside_base=False)
    return {metric.name: metric for metric in verdict.metrics}


def test_success_and_times_are_paired_by_row() -> None:
    sides = [side("a@1", ["no"] * 10 + ["yes"] * 10, 2.0, 10**9), side("a@2", ["yes"] * 20, 1.0, 2 * 10**9)]
    document = comparison_document(prompts(20), sides, "no loss here", {})
    found = metrics(document)
    assert (found["success"].base, found["success"].tuned, found["success"].n) == (0.5, 1.0, 20)
    assert (found["latency_s"].base, found["latency_s"].tuned, found["latency_s"].n) == (2.0, 1.0, 10)
    assert found["peak_memory_bytes"].gain == -1.0
    assert document["not_compared"] == {"loss": "no loss here"} and document["problems"] == []


def test_what_is_missing_or_can_not_be_checked_is_a_problem_and_no_failure() -> None:
    sides = [side("a", ["yes"] * 5 + [None], 1.0), side("b", ["yes"] * 6, 1.0)]
    document = comparison_document(prompts(6), sides, "none", {})
    assert [problem["problem"] for problem in document["problems"]] == ["no answer"]
    assert metrics(document)["success"].n == 5
    document = comparison_document(prompts(6, {"name": "contains_all"}), sides, "none", {})
    assert len(document["problems"]) == 12 and "needs 'all'" in document["problems"][0]["problem"]
    assert document["answers"][0]["base"]["success"] is None


@pytest.mark.parametrize("has_run", [True, False])
def test_calls_of_a_file_are_asked_with_the_ids_that_the_template_requires(
    has_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp answers Mistral's templates with an error for any other id. Two releases need no run beside them."""
    folder = make_model(tmp_path / "model", template_of("mistral_nemo"), corpus()["mistral_nemo"])
    call = {"type": "function", "id": "call_0123456789", "function": {"name": "look", "arguments": {"at": "it"}}}
    turns = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a list", "tool_call_id": call["id"], "name": "look"},
        {"role": "assistant", "content": "A list."},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    _, (prompt,) = of_a_file(tmp_path, folder, monkeypatch, has_run)
    _, called, answered = prompt.messages
    assert len(called["tool_calls"][0]["id"]) == 9 and called["tool_calls"][0]["id"] == answered["tool_call_id"]


def of_a_file(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool = True
) -> tuple[dict[str, Any], list[Prompt]]:
    """Compare base and x, both of `model`, on the rows of `folder`/rows.jsonl; return the document and the prompts."""
    run: Any = SimpleNamespace(folder=folder, model=model, config=SimpleNamespace(cycle=SimpleNamespace(name=None)))
    run = run if has_run else None
    named, asked = [], list[Prompt]()

    def find(text: str, of: Any) -> Any:
        named.append((text, of))
        return SimpleNamespace(label=text, identity=text, trained=(model, None))

    def answer(sides: Any, prompts: list[Prompt], *others: Any) -> list[SideAnswers]:
        asked.extend(prompts)
        return [side(name, ["yes"], 1.0) for name in ("base", "x")]

    monkeypatch.setattr(evaluate, "find_artefact", find)
    monkeypatch.setattr(evaluate, "_answer", answer)
    document = evaluate.compare_pair("base", "x", EvalConfig(), run=run, rows=[str(folder / "rows.jsonl")])
    assert named == [("base", run), ("x", run)]
    return document, asked


def test_the_base_of_a_run_answers_the_rows_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hint names --run, which was left out of account beside --rows: `base` answered no file."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say one.", "completion": "one"}\n')
    document, _ = of_a_file(tmp_path, tmp_path / "none", monkeypatch)
    assert document["rows_from"] == str(tmp_path / "rows.jsonl") and document["snapshot"] is None
    assert "rows that are given as a file" in document["not_compared"]["loss"]
