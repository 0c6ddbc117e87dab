"""The second station: the rows of a config become a snapshot of tokens."""

from pathlib import Path

from hivetune.config import RunConfig
from hivetune.data.prepare.prepare import prepare
from hivetune.data.snapshot import Snapshot
from hivetune.errors import DataRefused
from hivetune.records import Progress, silent


def prepare_data(config: RunConfig, model: Path, progress: Progress = silent) -> Snapshot:
    """The snapshot of the config's rows, made or found. Raises DataRefused when too few rows are usable."""
    snapshot = prepare(config, model, None, progress)
    if not snapshot.rows("train"):
        raise DataRefused(f"no row of {config.data.path} is left to train on", hint="see why: hivetune data check")
    return snapshot
