"""An archive that is damaged is refused at its place: how many rows are lost is unknown."""

import gzip
import json
from pathlib import Path

import pytest

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.errors import DataRefused


def pack(text: str, suffix: str) -> bytes:
    if suffix.endswith(".gz"):
        return gzip.compress(text.encode())
    compressor = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True)  # as `zstd` does
    return bytes(compressor.compress(text.encode()))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.gz", ".jsonl.zst", ".csv.zst"])
@pytest.mark.parametrize("damage", ["middle", "end"])
def test_damage_refuses_the_file(suffix: str, damage: str, tmp_path: Path) -> None:
    rows = [(f"what is {n}?", f"It is the number {n * 7919}.") for n in range(3000)]
    lines = [json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in rows]
    if suffix.startswith(".csv"):
        lines = ["prompt,completion\n", *(f"{one},{other}\n" for one, other in rows)]
    data = bytearray(pack("".join(lines), suffix))
    middle = len(data) // 2
    if damage == "middle":
        data[middle : middle + 64] = bytes(64)
    else:
        del data[middle:]
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(data)
    with pytest.raises(DataRefused, match=r"rows\..* is damaged in the MiB behind byte [\d,]+ of its content"):
        check(DataConfig(path=str(path), near_duplicates=0))
