"""Hostile files are refused in words before llama.cpp sees them; those of other makers that are whole are not."""

import resource
from pathlib import Path

import pytest
from llama.hostile import gguf, hostile_files

from hivetune.errors import MachineNotFit, UsageError
from hivetune.llama.backend import ServerSettings, check_files, open_backend

FILES = hostile_files()
# The header reader leaves these to llama.cpp, which refuses them itself, in its sandbox.
BY_LLAMA_CPP = ("a tensor of an unknown type", "the same tensor twice", "the same setting twice")


def test_there_are_enough_of_them() -> None:
    assert len(FILES) >= 30


@pytest.mark.parametrize("name", [name for name in FILES if name not in BY_LLAMA_CPP])
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(FILES[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError) as refused:
        check_files(path, ServerSettings())
    assert str(path) in refused.value.message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB: no count is believed


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_LLAMA_CPP)
def test_a_hostile_file_is_refused_by_llama_cpp(name: str, tmp_path: Path) -> None:
    """By its reader of GGUF: a whole file of this form fails later, at a setting that is missing."""
    path = tmp_path / "model.gguf"
    path.write_bytes(FILES[name])
    with pytest.raises(MachineNotFit, match="llama_model_loader: failed to load model"), open_backend(path):
        pass


def test_a_file_of_another_maker_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf())
    check_files(path, ServerSettings())
