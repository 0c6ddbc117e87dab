"""A log that was packed and cut: what can be read is read, and the loss is reported."""

import gzip
from pathlib import Path

import pytest
from test_formats import FOLDER, read_sample


@pytest.mark.parametrize("sample", ["claude-code.jsonl", "gemini-cli.jsonl", "opencode--a-transcript.md"])
def test_a_log_in_a_gzip_that_was_cut_is_reported(sample: str, tmp_path: Path) -> None:
    path = tmp_path / f"{sample}.gz"
    whole = gzip.compress((FOLDER / sample).read_bytes() * 3)
    path.write_bytes(whole[: len(whole) - 12])
    assert [row.get("refused") for row in read_sample(path)][-1] == "broken-file"
