"""How a config is read: values as users write them, errors that name the key, and one documented list of settings."""

import contextlib
import json
import os
import runpy
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.config import (
    known_settings,
    load_config,
    override_config,
    parse_config,
    written_settings,
)
from hivetune.errors import UsageError
from hivetune.process.cluster import cluster_of

DOCS = Path(__file__).parent.parent / "docs"
SMALL = {"model": "smollm2-135m", "data": {"path": "rows.jsonl"}}


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_three_lines_are_a_config(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "model: smollm2-135m\ndata:\n  path: rows.jsonl\n"))
    assert config.lora.r == 16
    assert config.data.path == str(tmp_path / "rows.jsonl")


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    """PyYAML reads 1e-4 as a string; users write it everywhere."""
    config = load_config(write(tmp_path, "model: m\ndata: {path: a}\nlearning_rate: 1e-4\n"), ["lora.alpha=2e1"])
    assert config.learning_rate == 1e-4
    assert config.lora.alpha == 20


@pytest.mark.parametrize("written", ["016", "-010", "1:30"])
def test_a_number_that_two_versions_of_yaml_read_differently_is_refused(written: str, tmp_path: Path) -> None:
    """PyYAML reads 016 as 14 and 1:30 as 90."""
    with pytest.raises(UsageError, match=f"run.yaml:3: {written} is another number in YAML 1.1"):
        load_config(write(tmp_path, f"model: m\ndata: {{path: a}}\nbatch_size: {written}\n"))


def test_overrides_win_and_can_open_a_section(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\ndata: {path: a}\nepochs: 1\n")
    config = load_config(path, ["epochs=2", "lora.r=4", "data.path=[a, b]"])
    assert (config.epochs, config.lora.r, config.data.path) == (2, 4, ["a", "b"])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({**SMALL, "epoch": 2}, "did you mean 'epochs'"),
        ({**SMALL, "lora": {"rank": 4}}, "did you mean 'lora.r'"),
        ({**SMALL, "gate": {"max_seconds": -1}}, "'gate.max_seconds': Input should be greater than 0"),
        ({**SMALL, "eval": {"prompt": 3}}, "did you mean 'eval.prompts'"),
        ({**SMALL, "data": {"path": "a", "also_train": ["faled"]}}, "'data.also_train"),
        ({**SMALL, "data": "faq.csv"}, "'data': it has settings of its own, such as data.path"),
        ({**SMALL, "lora": {"r": "many"}}, "'lora.r'"),
        ({**SMALL, "batch_size": 0}, "'batch_size'"),
        ({"model": "m"}, "'data' is missing"),
    ],
)
def test_a_wrong_setting_is_named(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_config(tree, "run.yaml")
    assert caught.value.message.startswith("run.yaml: ")
    assert caught.value.exit_code == 2


def test_the_values_of_the_caller_stay_as_they_are() -> None:
    """A loop over settings in Python would train with those of the rounds before."""
    tree = {"model": "m", "data": {"path": "a", "columns": {"prompt": "q"}}, "lora": {"r": 8}}
    before = json.dumps(tree)
    assert parse_config(tree, overrides=["lora.r=16", "data.test=0.3"]).data.test == 0.3
    assert json.dumps(tree) == before and parse_config(tree).lora.r == 8


def test_paths_may_be_given_as_such(tmp_path: Path) -> None:
    config = parse_config(
        {"model": tmp_path, "data": {"path": [tmp_path / "a.jsonl"]}, "eval": {"checker": {"file": tmp_path}}}
    )
    assert (config.model, config.data.path) == (str(tmp_path), [str(tmp_path / "a.jsonl")])


def test_a_setting_that_was_null_takes_parts() -> None:
    """`eval RUN --set eval.checker.name=exact`: a run's config is written out, its checker as null."""
    parts = ["eval.checker.name=exact", "eval.checker.text=four"]
    assert override_config(parse_config(SMALL), parts).eval.checker == {"name": "exact", "text": "four"}
    with pytest.raises(UsageError, match="epochs has no settings"):
        override_config(parse_config(SMALL), ["epochs.x=1"])


def test_a_wrong_setting_of_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\ndata: {path: a}\nepoch: 2\n")
    with pytest.raises(UsageError) as caught:
        load_config(path, ["lerning_rate=1", "lora.r=0"])
    lines = caught.value.message.splitlines()
    assert f"{path}: unknown setting 'epoch', did you mean 'epochs'?" in lines
    assert "--set lerning_rate=1: unknown setting 'lerning_rate', did you mean 'learning_rate'?" in lines
    assert any(line.startswith("--set lora.r=0: 'lora.r'") for line in lines)


def test_a_setting_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """YAML would take the last one in silence."""
    path = write(tmp_path, "model: m\ndata: {path: a}\nlora:\n  r: 8\nmodel: n\n")
    with pytest.raises(UsageError, match=r"run\.yaml:5: 'model' is set twice, first in line 1"):
        load_config(path)
    with pytest.raises(UsageError, match="'r' is set twice"):
        load_config(write(tmp_path, "model: m\ndata: {path: a}\nlora: {r: 8, r: 16}\n"))


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "model: [", "just words"])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        load_config(write(tmp_path, text))


def test_a_missing_file_and_a_bad_override(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_config(tmp_path / "no.yaml")
    with pytest.raises(UsageError, match=r"a\.b=c"):
        load_config(write(tmp_path, "model: m\ndata: {path: a}\n"), ["epochs"])


def test_the_values_of_a_config_read_back_equal() -> None:
    """As `config.resolved.yaml` keeps them."""
    config = parse_config({**SMALL, "lora": {"target_modules": ["q_proj"]}, "max_steps": 7})
    assert parse_config(config.model_dump(mode="json")) == config


def test_every_setting_is_documented_with_its_reason() -> None:
    """The page is written by tools/pages.py."""
    text = (DOCS / "config.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS.parent / "tools" / "pages.py"))["with_settings"](text) == text


def test_every_setting_says_what_it_is() -> None:
    assert [setting.key for setting in known_settings() if not setting.meaning] == []


def aliases(levels: int) -> str:
    """The "billion laughs": each line stands for nine of the line before."""
    lines = ["l0: &l0 lol"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (aliases(10), "has the alias \\*l0: write the value again"),
        ("a: &a [*a]", "has the alias \\*a"),
        ("[" * 500_000, "not YAML"),
        ("- " * 300_000, "not YAML"),
        ("a: " + "9" * 10_000, "not YAML"),
        ("a: 2026-02-30", "not YAML"),
        ("x" * (2 << 20), "larger than 1,024 KiB"),
        ("a: [" + "1," * 200_000 + "]", "unknown setting 'a'"),
        ("\x00", "not YAML"),
        ("? [a]\n: b", "not YAML"),
    ],
    ids=["aliases", "itself", "deep flow", "deep block", "long number", "date", "large", "many", "NUL", "list as key"],
)
def test_hostile_files_are_refused_in_little_time(tmp_path: Path, text: str, message: str) -> None:
    started = time.process_time()
    with pytest.raises(UsageError, match=message):
        load_config(write(tmp_path, text))
    assert time.process_time() - started < 10  # 0.5 s on a quiet machine; without the bounds some never end


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            load_config(path)


@pytest.mark.parametrize("text", ["epochs=.inf", "epochs=1e300", "learning_rate=.nan", "lora.r=2000000000"])
def test_numbers_without_end_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=text.partition("=")[0]):
        load_config(write(tmp_path, "model: m\ndata: {path: a}\n"), [text])


@given(st.text(), st.binary())
def test_no_text_is_a_traceback(tmp_path_factory: pytest.TempPathFactory, value: str, content: bytes) -> None:
    path = tmp_path_factory.mktemp("yaml") / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        load_config(path)
    path.write_text("model: m\ndata: {path: a}\n")
    with contextlib.suppress(UsageError):
        load_config(path, [f"seed={value}"])


@pytest.mark.parametrize("value", [1, 64, "auto", "10.0.0.5:6479", "node-1:7000", None])
def test_workers_are_a_number_a_word_or_a_cluster(value: object) -> None:
    config = parse_config({"model": "m", "data": {"path": "d"}, "workers": value})
    assert cluster_of(config) == (value if isinstance(value, str) and ":" in value else None)


@pytest.mark.parametrize("value", [0, 65, "all", "10.0.0.5", "http://host:1", 1.5, True])
def test_other_workers_are_refused_with_what_there_is(value: object) -> None:
    with pytest.raises(UsageError, match="must be auto, a number from 1 to 64, or HOST:PORT of a cluster"):
        parse_config({"model": "m", "data": {"path": "d"}, "workers": value})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"gate": {"loss_gain": False}}, "'gate.loss_gain': must be a number or null, got False"),
        ({"batch_size": True}, "'batch_size': must be a number, got True"),
        ({"data": {"path": "a", "validation": 0.5, "test": 0.5}}, "'data.test': with data.validation it leaves no row"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_config({**SMALL, **section}, "run.yaml")
    assert message in raised.value.message


def test_only_settings_that_were_set_are_written() -> None:
    tree = {
        **SMALL,
        "data": {"path": "a", "also_train": ["failed"], "test": 0.2},
        "eval": {"tokens": 9},
        "gate": {"max_seconds": 3.0, "loss_gain": 0.1},
    }
    assert written_settings(parse_config(tree)) == tree


def test_a_refused_yaml_value_of_set_has_its_reason() -> None:
    with pytest.raises(UsageError) as raised:
        parse_config(SMALL, "run.yaml", ["batch_size=016"])
    assert raised.value.message == "--set batch_size=016:1: 016 is another number in YAML 1.1 than in YAML 1.2"
    assert raised.value.hint == "write a number without a leading 0 and colons, a text in quotes"
