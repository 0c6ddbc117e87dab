"""An archive that is damaged in its middle: what is lost is counted as what was read lets one expect."""

import gzip
import json
import random
from pathlib import Path

import pytest

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check

ROWS = 4000


def archive(suffix: str, num_rows: int = ROWS) -> bytes:
    words = random.Random(1)
    rows = [(f"what is {words.getrandbits(80)}?", f"It is {words.getrandbits(80)} here.") for _ in range(num_rows)]
    if suffix.startswith(".csv"):
        text = "prompt,completion\n" + "".join(f"{one},{other}\n" for one, other in rows)
    else:
        text = "".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in rows)
    return pack(text, suffix)


def pack(text: str, suffix: str) -> bytes:
    if suffix.endswith(".gz"):
        return gzip.compress(text.encode())
    compressor = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True)  # as `zstd` does
    return bytes(compressor.compress(text.encode()))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.gz", ".jsonl.zst", ".csv.zst"])
def test_rows_behind_the_damage_are_counted(suffix: str, tmp_path: Path) -> None:
    num_rows = 2 * ROWS if suffix.endswith(".zst") else ROWS  # its blocks are of 128 kB
    path, data = tmp_path / f"rows{suffix}", bytearray(archive(suffix, num_rows))
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    report = check(DataConfig(path=str(path), near_duplicates=0)).document
    lost = sum(report["rejected"].values())
    assert report["rows_in"] == report["usable"] + lost
    assert (
        0.8 * num_rows < report["rows_in"] < 1.2 * num_rows
    )  # zeros may decode for a while, so the place is not exact
    assert 0.2 < lost / report["rows_in"] < 0.7
    assert any("rows are lost" in problem["hint"] for problem in report["problems"])


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_an_archive_that_ends_too_early_says_that_nobody_knows(suffix: str, tmp_path: Path) -> None:
    path, data = tmp_path / f"rows{suffix}", archive(suffix)
    path.write_bytes(data[: len(data) // 2])
    report = check(DataConfig(path=str(path), near_duplicates=0)).document
    assert any("how many rows are missing is unknown" in problem["hint"] for problem in report["problems"])


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.gz", ".jsonl.zst"])
def test_what_is_whole_before_the_end_of_a_small_archive_is_read(suffix: str, tmp_path: Path) -> None:
    """Its rows were lost with the piece in which the archive breaks off, or junk stands behind it."""
    rows = [(f"what is {n}?", f"It is the number {n}.") for n in range(30)]
    lines = [json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in rows]
    if suffix.startswith(".csv"):
        lines = ["prompt,completion\n", *(f"{one},{other}\n" for one, other in rows)]
    whole, path = pack("".join(lines), suffix), tmp_path / f"rows{suffix}"
    for data in (whole + b"junk" * 9, whole[:-3]):
        path.write_bytes(data)
        report = check(DataConfig(path=str(path), near_duplicates=0)).document
        assert report["usable"] == len(rows) and list(report["rejected"]) == ["broken-file"]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_the_line_in_which_an_archive_breaks_off_is_counted_once(suffix: str, tmp_path: Path) -> None:
    """With the damage, and not as a torn line too."""
    path, data = tmp_path / f"rows{suffix}", archive(suffix)
    for cut in (50, 500, 5000, len(data) // 2, len(data) - 9):
        path.write_bytes(data[:cut])
        assert check(DataConfig(path=str(path), near_duplicates=0)).document["rejected"] == {"broken-file": 1}
