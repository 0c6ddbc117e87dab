"""Hostile files are refused in words before llama.cpp sees them; those of other makers that are whole are not."""

import resource
from pathlib import Path

import pytest
from llama.hostile import gguf, hostile_files

from hivetune.errors import UsageError
from hivetune.llama.backend import ServerSettings, check_files

FILES = hostile_files()


def test_there_are_enough_of_them() -> None:
    assert len(FILES) >= 30


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(FILES[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError) as refused:
        check_files(path, ServerSettings())
    assert str(path) in refused.value.message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB: no count is believed


def test_a_file_of_another_maker_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf())
    check_files(path, ServerSettings())
