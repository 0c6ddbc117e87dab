"""What the rungs of the ladder change: environment and choices of the next worker, or the training itself."""

import collections
from collections.abc import Sequence
from pathlib import Path

from hivetune.data.snapshot import open_snapshot
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.run.folder import read_resolved, write_resolved
from hivetune.train.plan.steps import Amendment, append_amendment, read_plan
from hivetune.train.supervise.ladder import effects_of


def worker_effects(run: Path, rungs: Sequence[str]) -> tuple[dict[str, str | None], Choices]:
    """Return variables (None: removed) and choices of a worker of `run` with `rungs` in effect.

    The variables that the run was settled with hold, except where a rung changes them.
    """
    settled = read_resolved(run)[1].environment or {}
    changed, choices = effects_of(rungs)
    return {**settled, **changed}, choices


def lower_rank(run: Path) -> str:
    """Halve rank and alpha (the scale stays) and begin again; the checkpoints of the old rank are set aside."""
    config, choices = read_resolved(run)
    before, rank = config.lora.r, max(1, config.lora.r // 2)
    lora = config.lora.model_copy(update={"r": rank, "alpha": config.lora.alpha * rank / before})
    write_resolved(run, config.model_copy(update={"lora": lora}), choices)
    checkpoints.distrust_after(run, 0)
    return f"rank {before} -> {rank}, from step 0"


def thin_out(run: Path, snapshot: Path) -> str:
    """Leave out every second row that is still to come, evenly over agents and categories.

    The amendment ends with the plan's last step, so the rows count as not reached, not as quarantined.
    """
    plan, data = read_plan(run), open_snapshot(snapshot)
    steps = plan.steps
    step = checkpoints.newest_good(run).step
    trained = {row for i in range(step) for row in steps[i].rows}
    coming = sorted({row for i in range(step, len(steps)) for row in steps[i].rows} - trained)
    counts: collections.Counter[tuple[str | None, str | None]] = collections.Counter()
    left_out = []
    for row in coming:
        info = data.info(row)
        counts[info.agent, info.category] += 1
        if counts[info.agent, info.category] % 2 == 0:
            left_out.append(row)
    reason = "sample: every second row is left out, as allow permits"
    append_amendment(run, Amendment(step, tuple(left_out), reason, len(steps)))
    return f"{len(left_out)} of {len(coming)} coming rows left out from step {step}"
