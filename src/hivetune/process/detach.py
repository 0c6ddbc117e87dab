"""A run that goes on without its terminal: a process of its own, or a systemd unit that survives a restart."""

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


def cycle_command(config: Path, overrides: Sequence[str] = ()) -> list[str]:
    return [sys.executable, "-m", "hivetune", "cycle", str(config.resolve()), *_changed(overrides)]


def resume_command(run: Path, overrides: Sequence[str] = ()) -> list[str]:
    return [sys.executable, "-m", "hivetune", "resume", str(run), *_changed(overrides)]


def _changed(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def report_command(run: Path, target: str) -> list[str]:
    return [sys.executable, "-m", "hivetune", "report", str(run), "--to", target, "--follow"]


def start_detached(run: Path, overrides: Sequence[str] = ()) -> int:
    """`hivetune resume RUN --set ...` in its own session, deaf to this terminal's hang-up; returns its process id.

    What it prints goes to RUN/supervisor.log. Raises Busy when the run goes on already,
    UsageError for a folder that may be planted.
    """
    check_own(run)
    holder = lock_holder(run)
    if holder is not None:
        raise Busy(f"{run} goes on already, in process {holder.pid}", hint=f"follow it: hivetune watch {quoted(run)}")
    with open(open_plain(run / SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
        process = subprocess.Popen(
            resume_command(run, overrides),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return process.pid


def systemd_unit(run: Path, overrides: Sequence[str] = ()) -> str:
    """A user unit that goes on with `run` after a crash of the supervisor and after a restart of the machine.

    It ends for good when the run is done, was stopped, or was refused. systemd needs more time than its default to
    stop it: a step must end and a checkpoint must be written. Its cgroup caps the memory.
    """
    return _unit(f"Hivetune run {run.name}", resume_command(run, overrides), "1 2 3 4 5 6 7 75 130 143")


def cycle_unit(config: Path, overrides: Sequence[str] = ()) -> str:
    """A user unit that runs the loop of a config, from the working directory of now: paths of the config are relative
    to it. What a person has to mend (the config, another loop that runs) ends it for good, nothing else does."""
    where = f"WorkingDirectory={Path.cwd()}\n"
    return _unit(f"Hivetune cycle of {config.name}", cycle_command(config, overrides), "2 4 75", where)


def serve_unit(arguments: Sequence[str]) -> str:
    """Return a user unit that runs `hivetune serve` with these arguments; a wrong argument ends it for good."""
    return _unit("Hivetune gateway", [sys.executable, "-m", "hivetune", "serve", *arguments], "2 4")


def _unit(description: str, words: list[str], final_codes: str, more: str = "") -> str:
    return f"""[Unit]
Description={description}
After=local-fs.target

[Service]
ExecStart={shlex.join(words)}
Environment=HIVETUNE_HOME={shlex.quote(str(home()))}
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
