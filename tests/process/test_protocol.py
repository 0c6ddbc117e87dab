"""A task that crosses the border is the same on both sides."""

from pathlib import Path

import pytest

from hivetune.base.disk import read_json
from hivetune.process import protocol
from hivetune.process.protocol import Item, Merge, Replay, Score, Train
from hivetune.run.choices import Choices

TASKS = [
    Train(Path("run"), Path("model"), Path("data"), Choices(dtype="float32"), 60.0),
    Train(Path("run"), Path("model"), Path("data")),
    Replay(Path("run"), Path("model"), Path("data"), Path("items"), (Item((3,)), Item((4, 5), padded=True))),
    Score(Path("model"), None, Path("data"), Path("scores"), (1, 2)),
]


@pytest.mark.parametrize("task", TASKS)
def test_what_is_written_is_what_is_read(task: object, tmp_path: Path) -> None:
    path = protocol.write_task(task, tmp_path, memory_limit_bytes=1 << 30)
    document = read_json(path)
    assert protocol.task_in(document, type(task)) == task and document["memory_limit_bytes"] == 1 << 30


def test_a_task_for_another_module_is_refused(tmp_path: Path) -> None:
    path = protocol.write_task(Merge(Path("model"), Path("adapter"), Path("target")), tmp_path)
    with pytest.raises(ValueError, match="a task Merge, not Train or Replay"):
        protocol.task_in(read_json(path), Train, Replay)
    with pytest.raises(ValueError, match="model"):
        protocol.task_in({"kind": "Merge", "fields": {"model": 5}}, Merge)
