"""A run on the machine that it was carried to: `python -m hivetune.cluster.guest RUN PID` becomes `hivetune resume`.

The kernel kills it together with the actor PID that started it: nobody would fetch what it computes after that.
"""

import os
import sys
from pathlib import Path

from hivetune.process.detach import resume_command
from hivetune.process.sandbox import die_with_parent

GUEST = "hivetune.cluster.guest"
# Exporters look at the run where it is at home.
_NO_REPORT = ("--set", "report_to=[]")


def main(run: str, agent: str) -> None:
    die_with_parent()
    if os.getppid() == int(agent):  # else it died before the kernel was told
        command = [*resume_command(Path(run)), *_NO_REPORT]
        os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:3])
