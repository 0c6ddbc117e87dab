"""What `--over` means: every combination, each a valid config, and every mistake named."""

import pytest

from hivetune.cli.training import show_sweep
from hivetune.config import parse_config
from hivetune.errors import UsageError
from hivetune.sweep import make_variants

CONFIG = parse_config({"model": "tiny", "data": "rows.jsonl"})


def test_every_combination_in_the_order_that_was_given() -> None:
    variants = make_variants(CONFIG, ["learning_rate=1e-4,2e-4", "lora.r=8,16"])
    assert [variant.label for variant in variants] == [
        "learning_rate=1e-4 lora.r=8",
        "learning_rate=1e-4 lora.r=16",
        "learning_rate=2e-4 lora.r=8",
        "learning_rate=2e-4 lora.r=16",
    ]
    assert [(v.config.learning_rate, v.config.lora.r) for v in variants][1] == (1e-4, 16)


def test_commas_in_lists_and_quotes_belong_to_a_value() -> None:
    variants = make_variants(CONFIG, ["lora.target_modules=[q_proj, v_proj],all-linear"])
    assert [variant.config.lora.target_modules for variant in variants] == [["q_proj", "v_proj"], "all-linear"]
    assert len(make_variants(CONFIG, ["lora.target_modules='a,b',c"])) == 2


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ([], "needs settings"),
        (["learning_rate"], "not of the form"),
        (["learning_rate=1e-4,"], "not of the form"),
        (["learning_rate=1e-4,1e-4"], "twice"),
        (["lora.r=8,16", "lora.r=32"], "given twice"),
        (["learning_rat=1,2"], "did you mean 'learning_rate'"),
        (["learning_rate=1e-4,fast"], "learning_rate"),
        (["output=a,b"], "does not change the training"),
        (["lora.r=" + ",".join(map(str, range(1, 100)))], "99 combinations, at most 64"),
    ],
)
def test_mistakes_are_named(over: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_variants(CONFIG, over)


def test_the_next_command_of_a_run_in_a_folder_with_spaces_works(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"settings": ["lora.r=8"], "run": "/my runs/01", "state": "done", "steps": 9, "steps_planned": 9, "why": ""}
    runs = [{**line, "validation_loss": 2.0, "above_best": None}]
    verdict = {"verdict": "deploy", "reasons": []}
    show_sweep({"already_done": False, "sweep": "/s", "runs": runs, "best": "lora.r=8", "verdict": verdict})
    assert "next: hivetune export '/my runs/01' --to gguf" in capsys.readouterr().out
