"""The adapter of a run that can't continue, written from its checkpoints: the best by validation, else the last.

It works without the base model's weights and without a device.
"""

from typing import Any

from hivetune.errors import HivetuneError
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Salvage
from hivetune.run.folder import read_resolved
from hivetune.train.worker.checkpoint import kept_adapter, load_newest_good
from hivetune.train.worker.model.adapter import base_name, write_adapter


def main(task: Salvage, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write the adapter of `task`'s run. Raises HivetuneError without a good checkpoint."""
    run = task.run
    config, _ = read_resolved(run)
    state, problems = load_newest_good(run)
    if state is None:
        raise HivetuneError(
            f"{run} has no good checkpoint: {'; '.join(problems) or 'none was committed'}",
            hint="train it again in another folder: --set output=FOLDER",
        )
    adapter, step, problem = kept_adapter(run, state.param, state.step, state.best)
    write_adapter(run, adapter, config.lora, *base_name(task.model))
    return {"adapter_step": step, "problems": [*problems, *filter(None, [problem])]}
