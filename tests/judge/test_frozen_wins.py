"""What a champion answers rightly is frozen, asked of the next candidate, and never trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_families import write_model

from hivetune.base.disk import write_json
from hivetune.config import EvalConfig, parse_config
from hivetune.data.frozen import freeze, wins_of
from hivetune.data.prepare.prepare import prepare
from hivetune.data.snapshot import Snapshot
from hivetune.errors import UsageError
from hivetune.judge.rows import MAX_WINS, WINS_PER_RELEASE, choose_wins, freeze_wins, frozen_prompts
from hivetune.release.registry import Release
from hivetune.run.folder import write_record

CHECKER = {"name": "contains_any", "any": ["yes"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder, "llama")
    return folder


def rows(count: int = 60) -> list[dict[str, Any]]:
    same = {"completion": "yes", "checker": CHECKER}
    return [{"prompt": f"Is {i} a number?", "user": f"u{i}", **same} for i in range(count)]


def snapshot_of(path: Path, model: Path, **settings: Any) -> Snapshot:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    data = {"path": str(path), "near_duplicates": 0, "test": 0.4, "validation": 0.1}
    return prepare(parse_config({"model": str(model), "data": data, **settings}), model)


def answer(number: int, base: bool, tuned: bool, **changes: Any) -> dict[str, Any]:
    fields = {"row": number, "id": f"id{number}", "agent": "a", "category": None, "checker": CHECKER}
    return {**fields, "base": {"success": base}, "tuned": {"success": tuned}, **changes}


@pytest.mark.slow
def test_the_life_of_a_past_win(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "rows.jsonl"
    snapshot = snapshot_of(path, model)
    held_out = snapshot.rows("test")
    right = set(held_out[:6])
    release = Release("helper", 1, "run", "tiny", "m", "a", snapshot.hash, "deploy", {}, 0.0)
    release.folder.mkdir(parents=True)
    record = {"name": "helper", "created": 1.0, "status": "done", "snapshot": str(snapshot.folder)}
    write_record(release.folder, record)
    evaluation = release.folder / "eval.json"
    answers = [answer(row, False, row in right) for row in held_out]
    write_json(evaluation, {"adapter_sha256": "other", "answers": answers})
    assert freeze_wins(release) == 0, "the adapter changed since"
    write_json(evaluation, {"adapter_sha256": "a", "answers": answers})
    assert freeze_wins(release) == 6 and freeze_wins(release) == 0
    evaluation.unlink()
    assert freeze_wins(release) == 0
    said = {snapshot.info(row).messages[0].content for row in right}
    assert {win.messages[0].content for win in wins_of("helper")} == said
    assert all(win.release == "helper@1" and win.user and win.reference == "yes" for win in wins_of("helper"))

    asked = frozen_prompts(EvalConfig(), ("helper@champion", "base"))
    assert {prompt.said for prompt in asked} == said and {prompt.origin for prompt in asked} == {"win"}
    assert all(prompt.info.row < 0 and prompt.checker == CHECKER and prompt.reference == "yes" for prompt in asked)
    assert all(len(prompt.messages) == 1 for prompt in asked)
    assert frozen_prompts(EvalConfig(), ("base", "run")) == []
    assert len(frozen_prompts(EvalConfig(frozen=["helper"]), ("base", "run"))) == 6

    again = snapshot_of(path, model)
    assert again.hash == snapshot.hash  # a win stays among the test rows, so nothing changes for a run on these rows
    trained = snapshot.info(snapshot.rows("train")[0]).messages[0].content
    win = wins_of("helper")[0]
    freeze("helper", [type(win)("win", "f:1", (type(win.messages[0])("user", trained),), CHECKER)])
    without = snapshot_of(path, model)
    assert len(without.rows("train")) == len(snapshot.rows("train")) - 1
    assert without.manifest["accounting"]["set_aside"] == {"frozen-question": 1}


def test_a_name_of_no_release_is_refused() -> None:
    """It asked nothing and told nobody. The first cycle of a name has no release of it yet."""
    with pytest.raises(UsageError, match="no release is called 'helpdsk'"):
        frozen_prompts(EvalConfig(frozen=["helpdsk"]), ())
    assert frozen_prompts(EvalConfig(frozen=["helpdesk"]), (), "helpdesk") == []


@pytest.mark.slow
def test_own_questions_are_not_trained(tmp_path: Path, model: Path) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({**rows()[3], "prompt": "IS 3 A NUMBER?"}) + "\n")
    own = {"frozen": [str(tmp_path / "own.jsonl")]}
    snapshot, plain = (snapshot_of(tmp_path / "rows.jsonl", model, eval=settings) for settings in (own, {}))
    was_trained = any(plain.info(row).messages[0].content == "Is 3 a number?" for row in plain.rows("train"))
    assert snapshot.manifest["accounting"]["set_aside"] == ({"frozen-question": 1} if was_trained else {})
    (prompt,) = frozen_prompts(EvalConfig(**own), ())
    assert (prompt.origin, prompt.checker, prompt.reference) == ("own", CHECKER, "yes")


def test_wins_are_what_training_won() -> None:
    answers = [answer(number, number % 2 == 0, number % 5 != 0) for number in range(100)]
    answers += [answer(200, False, True, checker=None), answer(201, False, False)]
    chosen = choose_wins(answers, 0)
    assert len(chosen) == WINS_PER_RELEASE and all(one["tuned"]["success"] for one in chosen)
    assert not any(one["base"]["success"] for one in chosen)
    assert choose_wins(list(reversed(answers)), 0) == chosen
    assert len(choose_wins(answers, MAX_WINS - 3)) == 3 and choose_wins(answers, MAX_WINS) == []
