"""How a config is read: values as users write them, errors that name the key."""

import contextlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.config import known_settings, load_config, override_config, parse_config, written_settings
from hivetune.errors import UsageError

SMALL = {"model": "smollm2-135m", "data": {"path": "rows.jsonl"}}
THREE_LINES = "model: m\ndata:\n  path: a\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("rows.jsonl", "there/rows.jsonl"),
        ("../other/*.csv", "there/../other/*.csv"),
        ("store", "store"),
        ("-", "-"),
        ("~/rows.jsonl", "~/rows.jsonl"),
        ("/data/rows.jsonl", "/data/rows.jsonl"),
        ("https://example.org/rows.jsonl", "https://example.org/rows.jsonl"),
    ],
)
def test_rows_lie_beside_the_file_that_names_them(
    written: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    for path, expected in ((written, found), ([written, "store"], [found, "store"])):
        (tmp_path / "there/run.yaml").write_text(f"model: m\ndata: {{path: {json.dumps(path)}}}\n")
        assert load_config(Path("there/run.yaml")).data.path == expected
    assert load_config(Path("there/run.yaml"), ["data.path=rows.jsonl"]).data.path == "rows.jsonl"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({**SMALL, "epoch": 2}, "did you mean 'epochs'"),
        ({**SMALL, "lora": {"rank": 4}}, "did you mean 'lora.r'"),
        ({**SMALL, "gate": {"max_seconds": -1}}, "'gate.max_seconds': Input should be greater than 0"),
        ({**SMALL, "eval": {"prompt": 3}}, "did you mean 'eval.prompts'"),
        ({**SMALL, "data": {"path": "a", "also_train": ["faled"]}}, "'data.also_train"),
        ({**SMALL, "data": "faq.csv"}, "'data' is a group of settings: set data.path"),
        ({**SMALL, "lora": {"r": "many"}}, "'lora.r'"),
        ({**SMALL, "batch_size": 0}, "'batch_size'"),
        ({"model": "m"}, "'data' is missing"),
        ({**SMALL, "gate": {"loss_gain": False}}, "'gate.loss_gain': must be a number or null, got False"),
        ({**SMALL, "batch_size": True}, "'batch_size': must be a number, got True"),
        (
            {**SMALL, "data": {"path": "a", "validation": 0.5, "test": 0.5}},
            "'data.test': must be below 1 - data.validation",
        ),
        *(
            ({**SMALL, "workers": value}, "must be auto, a number from 1 to 64, or HOST:PORT of a cluster")
            for value in (0, 65, "all", "10.0.0.5", "http://host:1", 1.5, True)
        ),
    ],
)
def test_a_wrong_setting_is_named(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_config(tree, "run.yaml")
    assert caught.value.message.startswith("run.yaml: ") and caught.value.exit_code == 2


def test_the_values_of_the_caller_stay_as_they_are_and_may_be_paths(tmp_path: Path) -> None:
    """A loop over settings in Python would train with those of the rounds before."""
    tree = {"model": "m", "data": {"path": "a", "columns": {"prompt": "q"}}, "lora": {"r": 8}}
    before = json.dumps(tree)
    assert parse_config(tree, overrides=["lora.r=16", "data.test=0.3"]).data.test == 0.3
    assert json.dumps(tree) == before and parse_config(tree).lora.r == 8
    config = parse_config({"model": tmp_path, "data": {"path": [tmp_path / "a.jsonl"]}})
    assert (config.model, config.data.path) == (str(tmp_path), [str(tmp_path / "a.jsonl")])


def test_a_number_may_have_an_exponent(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-4 as text."""
    config = load_config(write(tmp_path, f"{THREE_LINES}learning_rate: 1e-4\n"), ["weight_decay=1e-2", "epochs=2.0"])
    assert (config.learning_rate, config.weight_decay, config.epochs) == (1e-4, 1e-2, 2)


def test_a_setting_that_was_null_takes_parts() -> None:
    """`eval RUN --set eval.checker.name=exact`: a run's config is written out, its checker as null."""
    parts = ["eval.checker.name=exact", "eval.checker.text=four"]
    assert override_config(parse_config(SMALL), parts).eval.checker == {"name": "exact", "text": "four"}
    with pytest.raises(UsageError, match="epochs has no settings"):
        override_config(parse_config(SMALL), ["epochs.x=1"])


def test_a_wrong_setting_of_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, f"{THREE_LINES}epoch: 2\n")
    with pytest.raises(UsageError) as caught:
        load_config(path, ["lerning_rate=1", "lora.r=0"])
    lines = caught.value.message.splitlines()
    assert f"{path}: unknown setting 'epoch', did you mean 'epochs'?" in lines
    assert "--set lerning_rate=1: unknown setting 'lerning_rate', did you mean 'learning_rate'?" in lines
    assert any(line.startswith("--set lora.r=0: 'lora.r'") for line in lines)


def test_only_settings_that_were_set_are_written_and_read_back_equal() -> None:
    """As `config.resolved.yaml` keeps them."""
    tree = {
        **SMALL,
        "data": {"path": "a", "also_train": ["failed"], "test": 0.2},
        "eval": {"tokens": 9},
        "max_steps": 7,
    }
    config = parse_config(tree)
    assert written_settings(config) == tree and parse_config(config.model_dump(mode="json")) == config


def test_every_setting_says_what_it_is() -> None:
    assert [setting.key for setting in known_settings() if not setting.meaning] == []


def aliases(levels: int) -> str:
    """The "billion laughs": each line stands for nine of the line before."""
    lines = ["l0: &l0 lol"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


REFUSED_FILES = {
    "aliases": (aliases(10), "has the alias \\*l0: write the value again"),
    "itself": ("a: &a [*a]", "has the alias \\*a"),
    "deep flow": ("[" * 500_000, "not YAML"),
    "deep block": ("- " * 300_000, "not YAML"),
    "long number": ("a: " + "9" * 10_000, "not YAML"),
    "date": ("a: 2026-02-30", "not YAML"),
    "large": ("x" * (2 << 20), "larger than 1,024 KiB"),
    "many": ("a: [" + "1," * 200_000 + "]", "unknown setting 'a'"),
    "NUL": ("\x00", "not YAML"),
    "list as key": ("? [a]\n: b", "not YAML"),
    "empty": ("", "contains no settings"),
    "a list": ("- a\n- b\n", "contains no settings"),
    "words": ("just words", "contains no settings"),
    # YAML would take the last one in silence.
    "twice": (f"{THREE_LINES}lora:\n  r: 8\nmodel: n\n", r"run\.yaml:6: 'model' is set twice, first in line 1"),
    "twice on a line": (f"{THREE_LINES}lora: {{r: 8, r: 16}}\n", "'r' is set twice"),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_hostile_files_are_refused_in_little_time(tmp_path: Path, name: str) -> None:
    text, message = REFUSED_FILES[name]
    started = time.process_time()
    with pytest.raises(UsageError, match=message):
        load_config(write(tmp_path, text))
    assert time.process_time() - started < 10  # 0.5 s on a quiet machine; without the bounds some never end


@pytest.mark.parametrize("text", ["epochs=.inf", "epochs=1e300", "learning_rate=.nan", "lora.r=2000000000", "epochs"])
def test_numbers_without_end_and_half_overrides_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=text.partition("=")[0]):
        load_config(write(tmp_path, THREE_LINES), [text])


@given(st.text(), st.binary())
def test_no_text_is_a_traceback(tmp_path_factory: pytest.TempPathFactory, value: str, content: bytes) -> None:
    path = tmp_path_factory.mktemp("yaml") / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        load_config(path)
    path.write_text(THREE_LINES)
    with contextlib.suppress(UsageError):
        load_config(path, [f"seed={value}"])
