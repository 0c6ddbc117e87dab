"""A run's choices: written once, read back as they were, and laid over by a recovery."""

from pathlib import Path

from hivetune.config import parse_config
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.run.folder import CONFIG, read_resolved, write_resolved

SETTINGS = parse_config({"model": "tiny", "data": {"path": "rows.jsonl"}, "lora": {"r": 4}}, "test")


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    choices = Choices(device="cuda:1", dtype="bfloat16", threads=3, kernels="torch", halvings=0)
    write_resolved(tmp_path, SETTINGS, choices)
    assert read_resolved(tmp_path) == (SETTINGS, choices)


def test_whom_a_cycle_tells_is_not_written(tmp_path: Path) -> None:
    """A run folder is copied into releases, and a command may name an address at which anybody can post."""
    cycle = {"name": "demo", "notify": ["curl", "https://hooks.example.org/whisper"]}
    settings = parse_config({**SETTINGS.model_dump(mode="json"), "cycle": cycle}, "test")
    write_resolved(tmp_path, settings, NO_CHOICES)
    text = (tmp_path / CONFIG).read_text()
    assert "whisper" not in text and "example.org" not in text
    assert read_resolved(tmp_path)[0].cycle.name == "demo"


def test_changes_win_and_leave_the_rest() -> None:
    settled = Choices(device="cpu", dtype="bfloat16", halvings=1)
    assert settled.updated(Choices(dtype="float32", halvings=0)) == Choices(device="cpu", dtype="float32", halvings=0)
    assert settled.updated(NO_CHOICES) == settled
