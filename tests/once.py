"""What tests make the same each time is made once for all workers of a session, and copied."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hivetune.synth.demo import write_demo_data


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """What is made in `folder` is made by one worker; the others wait for it and find it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".making", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def copy_of(name: str, make: Callable[[Path], object], target: Path) -> None:
    """Copy into `target` what `make` puts into an empty folder. It is called once a session and `name`."""
    common = Path(
        os.environ.get("HIVETUNE_TEST_COMMON") or tempfile.mkdtemp(prefix="hivetune-")
    )  # a benchmark has none
    with one_at_a_time(common / f".{name}"):
        if not (common / name).exists():
            work = Path(tempfile.mkdtemp(dir=common))
            make(work)
            work.rename(common / name)
    shutil.copytree(common / name, target, dirs_exist_ok=True)


def demo_rows(folder: Path) -> Path:
    """Return the demo's rows as a file in `folder`. They are made once (3 s of processor time)."""
    copy_of("demo-rows", lambda work: write_demo_data(work / "rows.jsonl"), folder)
    return folder / "rows.jsonl"
