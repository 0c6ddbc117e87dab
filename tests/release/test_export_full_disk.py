"""An export while another program fills the disk or the memory: the documented exit code, and no half-made file."""

import os
from pathlib import Path

import pytest
from serve.hive import make_home, write_adapter
from small_disk import fill

from hivetune.cli.output import explain
from hivetune.errors import DoesNotFit, HivetuneError
from hivetune.release.export import Source, export

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("to", "room_bytes"), [("adapter", 8 << 10), ("merged", 60 << 10), ("gguf", 60 << 10)])
def test_a_disk_that_fills_while_it_exports(to: str, room_bytes: int, small_disk: Path, tmp_path: Path) -> None:
    """In this process and in a child: the first of its files fit, the weights do not."""
    source = Source(tmp_path / "adapter", make_home(), "mine")
    write_adapter(source.model, source.adapter, 1)
    taken = fill(small_disk)
    os.truncate(taken, taken.stat().st_size - room_bytes)
    with pytest.raises((OSError, HivetuneError), match="No space left on device") as caught:
        export(source, small_disk / "export", to)
    told = caught.value if isinstance(caught.value, HivetuneError) else explain(caught.value)
    assert (type(told), told.hint) == (DoesNotFit, "free some space, then run the same command again")
    assert "the disk is full" in told.message
    assert [path.name for path in (small_disk / "export").iterdir()] == [".lock"]
