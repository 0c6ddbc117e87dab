"""Runs that outlive their terminal."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hivetune.base.disk import lock_holder
from hivetune.base.paths import quoted
from hivetune.base.private import check_own, open_plain
from hivetune.errors import Busy
from hivetune.run.folder import SUPERVISOR_LOG


def start_detached(run: Path, overrides: Sequence[str] = ()) -> int:
    """Start `hivetune train RUN --set ...` in its own session, and return its process id.

    Its output goes to RUN/supervisor.log. Raise Busy if the run is already running, UsageError for a folder that
    another user may have made.
    """
    check_own(run)
    holder = lock_holder(run)
    if holder is not None:
        hint = f"follow it: hivetune show {quoted(run)} --follow"
        raise Busy(f"{run} is already running in process {holder.pid}", hint=hint)
    changed = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "hivetune", "train", str(run), *changed]
    with open(open_plain(run / SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True).pid
