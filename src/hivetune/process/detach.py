"""Processes that outlive their terminal: detached runs, and systemd units."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hivetune.base.disk import home, lock_holder
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
    command = _command("train", str(run), overrides=overrides)
    with open(open_plain(run / SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True).pid


def systemd_unit(run: Path, overrides: Sequence[str] = ()) -> str:
    """Return a user unit that resumes `run` after a crash of the supervisor and after a restart of the machine.

    It ends when the run is done, stopped or refused. Stopping takes longer than systemd's default, because a step must
    end and a checkpoint must be written. Its cgroup limits the memory.
    """
    command = _command("train", str(run), overrides=overrides)
    return _unit(f"Hivetune run {run.name}", command, "1 2 3 4 5 6 7 75 130 143")


def cycle_unit(config: Path, overrides: Sequence[str] = ()) -> str:
    """Return a user unit for the loop of a config, in the current directory, to which paths in the config are relative.

    It ends only for what a person has to change: the config, or another running loop.
    """
    where = f"WorkingDirectory={_percent(str(Path.cwd()))}\n"
    command = _command("cycle", str(config.resolve()), overrides=overrides)
    return _unit(f"Hivetune cycle of {config.name}", command, "2 4 75", where)


def serve_unit(arguments: Sequence[str]) -> str:
    """Return a user unit that runs `hivetune serve` with these arguments; a wrong argument ends it for good."""
    return _unit("Hivetune gateway", _command("serve", *arguments), "2 4")


def _command(*words: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return a command of this installation, with `--set` for each override."""
    changed = [word for override in overrides for word in ("--set", override)]
    return [sys.executable, "-m", "hivetune", *words, *changed]


def _percent(text: str) -> str:
    """Return a text of a unit file: a `%` begins a specifier there."""
    return text.replace("%", "%%")


def _words(*words: str) -> str:
    """Return words of a unit file, in which a backslash escapes within quotes too."""
    return _percent(shlex.join(words).replace("\\", "\\\\"))


def _unit(description: str, command: list[str], final_codes: str, more: str = "") -> str:
    return f"""[Unit]
Description={_percent(description)}
After=local-fs.target

[Service]
ExecStart={_words(*command).replace("$", "$$")}
Environment=HIVETUNE_HOME={_words(str(home()))}
{more}Restart=on-failure
RestartSec=30
RestartPreventExitStatus={final_codes}
KillMode=mixed
MemoryMax=90%
OOMPolicy=continue
TimeoutStopSec=900
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""
