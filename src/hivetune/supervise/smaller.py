"""What recovery may change of the training itself, only where `supervise.allow` names it: a lower rank, fewer rows."""

import collections
from pathlib import Path
from typing import Any

import yaml

from hivetune.base.disk import write_atomic
from hivetune.data.snapshot import open_snapshot
from hivetune.plan.steps import Amendment, append_amendment, read_plan
from hivetune.run import checkpoints
from hivetune.run.folder import CONFIG


def lower_rank(run: Path) -> str:
    """Halve rank and alpha (the scale stays) and begin anew; the checkpoints of the old rank are set aside."""
    path = run / CONFIG
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    lora: dict[str, Any] = tree["config"]["lora"]
    before = lora["r"]
    lora["r"], lora["alpha"] = max(1, before // 2), lora["alpha"] * max(1, before // 2) / before
    write_atomic(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode())
    checkpoints.distrust_after(run, 0)
    return f"rank {before} -> {lora['r']}, from step 0"


def thin_out(run: Path, snapshot: Path) -> str:
    """Leave out every second row of what is still to come, evenly over agents and categories.

    The amendment ends with the plan's last step, so the rows count as not reached, not as quarantined.
    """
    plan, data = read_plan(run), open_snapshot(snapshot)
    steps = plan.steps
    done = checkpoints.newest_good(run).step
    trained = {row for i in range(done) for row in steps[i].rows}
    coming = sorted({row for i in range(done, len(steps)) for row in steps[i].rows} - trained)
    seen: collections.Counter[tuple[str | None, str | None]] = collections.Counter()
    left_out = []
    for row in coming:
        info = data.info(row)
        seen[info.agent, info.category] += 1
        if seen[info.agent, info.category] % 2 == 0:
            left_out.append(row)
    reason = "sample: every second row, as supervise.allow permits"
    append_amendment(run, Amendment(done, tuple(left_out), reason, len(steps)))
    return f"{len(left_out)} of {len(coming)} coming rows left out from step {done}"
