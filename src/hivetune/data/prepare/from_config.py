"""The second station: the rows of a config become a snapshot of tokens."""

from collections.abc import Callable
from pathlib import Path

from hivetune.config import RunConfig
from hivetune.data.prepare.prepare import prepare
from hivetune.data.snapshot import Snapshot
from hivetune.errors import Busy, DataRefused
from hivetune.records import Progress, silent


def prepare_data(
    config: RunConfig, model: Path, progress: Progress = silent, on_busy: Callable[[Busy], None] | None = None
) -> Snapshot:
    """The snapshot of the config's rows, made or found.

    `on_busy` is called while another process makes it, returns after a pause, and then it is looked for again; without
    it Busy is raised. Raises DataRefused when too few rows are usable.
    """
    while True:
        try:
            snapshot = prepare(config, model, None, progress)
            break
        except Busy as busy:
            if on_busy is None:
                raise
            on_busy(busy)
    if not snapshot.rows("train"):
        raise DataRefused(f"no row of {config.data.path} is left to train on", hint="see why: hivetune data check")
    return snapshot
