"""The adapter of a run that can't continue, written from its checkpoints: the best by validation, else the last.

It works without the base model's weights and without a device.
"""

from typing import Any

from hivetune.errors import HivetuneError
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Salvage
from hivetune.run import checkpoints
from hivetune.run.choices import read_resolved
from hivetune.train.worker.checkpoint import load, load_newest_good
from hivetune.train.worker.model.adapter import write_adapter
from hivetune.train.worker.session import base_name


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
    if state.best is not None and state.best["step"] != state.step:
        try:
            state = load(checkpoints.folder_of(run, state.best["step"]))
        except (OSError, ValueError) as error:
            problems.append(f"the best step can't be read, the last is kept: {error}")
    base, revision = base_name(task.model)
    write_adapter(run, state.param, config.lora, base, revision)
    return {"adapter_step": state.step, "problems": problems}


if __name__ == "__main__":
    run_child(main, Salvage)
