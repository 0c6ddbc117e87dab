"""The figures of a run as TensorBoard's own event files below the run, while it trains (`report_to: [tensorboard]`)."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.run.figures import TENSORBOARD, point_of


class EventFiles:
    """A writer of event files that a resumed run continues: readers drop the steps that are made again.

    Nothing is written where `tensorboard` is not among the targets or its package is not installed, and nothing more
    after an error: a full disk stops the figures, never the run.
    """

    def __init__(self, run: Path, targets: list[Any]):
        self._folder = run / TENSORBOARD
        self._wanted = "tensorboard" in targets and importlib.util.find_spec("tensorboard") is not None
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Begin a file after `step` finished steps."""
        if not self._wanted:
            return
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self.close()
        try:
            self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)
        except OSError:
            self._wanted = False

    def write(self, event: str, time_s: float, fields: Mapping[str, Any]) -> None:
        """Write the values of one line of metrics.jsonl."""
        point = point_of({**fields, "event": event, "time": time_s}) if self._writer is not None else None
        if point is None:
            return
        try:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, point.time_s)
        except OSError:
            self._writer, self._wanted = None, False

    def close(self) -> None:
        """Write the rest."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError:
                self._wanted = False
