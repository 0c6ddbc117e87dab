"""Which stage ships: only what both rivals lose to by a checker, and only while nothing else got worse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data.models import make_sized_model

from hivetune.base.disk import write_manifest
from hivetune.config import GateConfig, RunConfig, parse_config
from hivetune.cycle.loop import release_name
from hivetune.errors import UsageError
from hivetune.learn import choose_stage, learn, safeguards, stage2_problem
from hivetune.sweep import run_sweep
from hivetune.train import start


def sweep_of(config: RunConfig) -> object:
    return run_sweep(config, "m", ["lora.r=4,8"], "all", print)


def evaluation(
    before: int,
    after: int,
    *,
    n: int = 92,
    loss: float = 0.0,
    ended: int | None = None,
    longer: float = 1.0,
    checked: bool = True,
) -> dict[str, Any]:
    """`before` and `after` of `n` answers succeed; the loss of the tuned side is `loss` above 1."""

    def side(good: bool, does_end: bool, size: float) -> dict[str, Any]:
        text = "x" * round(100 * size)
        return {"answer": text, "ended": does_end, "seconds": None, "success": good if checked else None}

    answers = [
        {
            "group": str(number),
            "base": side(number < before, True, 1.0),
            "tuned": side(number < after, number < (n if ended is None else ended), longer),
        }
        for number in range(n)
    ]
    nll = {"tokens": 10, "base": 10.0, "tuned": 10 + 10 * loss}
    rows = [{"row": number, "source": f"r:{number}", "group": str(number), **nll} for number in range(n)]
    return {"rows": rows, "answers": answers, "base": {}, "tuned": {}}


def ships(*evaluations: dict[str, Any]) -> bool:
    named = dict(zip(("stage1", "stage1-longer"), evaluations, strict=True))
    return choose_stage(named, GateConfig())[0]


def test_what_beats_both_rivals_ships() -> None:
    assert ships(evaluation(60, 88), evaluation(62, 88))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (evaluation(60, 88), evaluation(86, 88)),  # more training alone would have done it
        (evaluation(60, 62), evaluation(60, 62)),  # too few to tell
        (evaluation(88, 60), evaluation(88, 60)),
        (evaluation(60, 88, checked=False), evaluation(60, 88, checked=False)),  # no checker, no evidence
        (evaluation(60, 88, loss=0.03), evaluation(60, 88)),
        (evaluation(60, 88, ended=88), evaluation(60, 88)),
        (evaluation(60, 88, longer=0.7), evaluation(60, 88)),
        (evaluation(60, 88, longer=1.3), evaluation(60, 88)),
    ],
    ids=["rival", "few", "worse", "unchecked", "loss", "ended", "shorter", "longer"],
)
def test_what_does_not_ship(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert not ships(first, second)


def test_within_the_safeguards_nothing_is_said() -> None:
    assert safeguards(evaluation(60, 88, loss=0.019, ended=91, longer=1.24)) == []
    said = safeguards(evaluation(60, 88, loss=0.021, ended=80, longer=1.26))
    assert len(said) == 3 and "rose from 1.0000 to 1.0210" in said[0]


def test_rows_that_nobody_called_good_do_not_hold_it_back() -> None:
    """They may have the fault that is to go."""
    document = evaluation(60, 88)
    document["rows"][0]["tuned"] = 100.0
    assert safeguards(document) and not safeguards(document, range(1, 92))


@pytest.mark.parametrize(
    ("bad", "validation", "use", "why"),
    [
        (100, 10, ["sft", "pairs"], ""),
        (49, 10, ["sft", "pairs"], "min_bad asks for 50"),
        (100, 0, ["sft", "failures"], "no validation rows"),
        (100, 10, ["sft", "corrections"], "neither pairs nor failures"),
    ],
)
def test_when_there_is_no_stage_2(bad: int, validation: int, use: list[str], why: str) -> None:
    said = stage2_problem(bad, 50, range(validation), use)
    assert why in said and bool(said) == bool(why)


def test_new_rows_are_learned_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the rows before was refused: it holds a run with other data."""
    model = make_sized_model(tmp_path / "model")
    write_manifest(model)
    monkeypatch.setattr(start, "fetch_model", lambda name, progress: model)
    config = parse_config({"model": str(model), "data": str(tmp_path / "rows.jsonl")})
    roots = []
    for count in (40, 41, 41):
        rows = [{"prompt": f"What comes after {i}?", "completion": f"It is {i + 1}."} for i in range(count)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        roots.append(learn(config, "mine", train=lambda run: {}, say=lambda words: None)["folder"])
    assert roots[0] != roots[1] == roots[2]


@pytest.mark.parametrize("read", [lambda c: learn(c, "m", train=lambda run: {}, say=print), sweep_of, release_name])
def test_rows_that_are_read_several_times_are_no_stream(read: Callable[[RunConfig], object]) -> None:
    """The second stage, variant or look found no row."""
    config = parse_config({"model": "tiny", "data": ["-"], "cycle": {"name": "demo"}})
    with pytest.raises(UsageError, match="standard input can be read once"):
        read(config)
