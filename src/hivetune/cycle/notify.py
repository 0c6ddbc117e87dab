"""Notices about the loop to people, by a command of their own that gets one JSON object on its standard input."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

NoticeKind = Literal["promote", "rollback", "ask", "worse", "stuck", "disk"]
SEND_TIMEOUT_S = 20.0
MAX_SENTENCE_CHARS = 500
_BEGINNINGS: dict[NoticeKind, str] = {
    "promote": "{release} is the new champion",
    "rollback": "{release} was rolled back",
    "ask": "{release} waits for a person to promote it",
    "worse": "the new rows of {release} made a worse model",
    "stuck": "the cycle of {release} can't continue",
    "disk": "the cycle of {release} waits for room on the disk",
}


@dataclass(frozen=True)
class Notice:
    """A notice. `release`: NAME@VERSION, or NAME where it is about the loop itself. `reason`: why, in words."""

    kind: NoticeKind
    release: str
    reason: str
    time: float = field(default_factory=time.time)

    @property
    def sentence(self) -> str:
        """Return one printable line: a reason may quote what a stranger sent."""
        text = f"{_BEGINNINGS[self.kind].format(release=self.release)}: {self.reason}"
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
        return line if len(line) <= MAX_SENTENCE_CHARS else line[: MAX_SENTENCE_CHARS - 3] + "..."


def send_notice(notice: Notice, command: Sequence[str]) -> str:
    """Run the command, without a shell, with the notice as JSON (`text` is the sentence) and return why it failed, or
    "". It never raises, since the loop continues whatever becomes of a notice."""
    document = {"schema": 1, **asdict(notice), "text": f"Hivetune: {notice.sentence}"}
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        )
    except (OSError, ValueError) as error:
        return f"{command[0]} can't be started: {error}"
    try:
        process.communicate(json.dumps(document).encode(), timeout=SEND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with whatever it started
        process.wait()
        return f"{command[0]} was ended after {SEND_TIMEOUT_S:.0f} s"
    return "" if process.returncode == 0 else f"{command[0]} ended with {process.returncode}"
