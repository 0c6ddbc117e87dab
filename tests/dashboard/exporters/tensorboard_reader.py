"""An event file as TensorBoard itself reads it."""

from pathlib import Path

from journals import Points
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hivetune.dashboard.exporters.points import point_kind


def read_by_tensorboard(folder: Path) -> Points:
    """Return the losses of both kinds, of the run's folder or of the only one below `folder`; no step is there
    twice."""
    folder = next((path for path in folder.iterdir() if path.is_dir()), folder)
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    found: Points = {}
    for tag in {"train/loss", "validation/loss"} & set(read.Tags()["scalars"]):
        for event in read.Scalars(tag):
            assert (point_kind(tag), event.step) not in found
            found[point_kind(tag), event.step] = event.value
    return found
