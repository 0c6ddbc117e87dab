"""Notices about the loop to people: by a command of their own, and by nothing else.

A notice is one sentence. One that can't be sent is a problem in the journal, never an exception: the loop continues.
"""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

NoticeKind = Literal["promote", "rollback", "ask", "stuck", "suspect", "disk"]
SEND_TIMEOUT_S = 20.0  # the loop waits no longer, whatever the command does
MAX_SENTENCE_CHARS = 500
_BEGINNINGS: dict[NoticeKind, str] = {
    "promote": "{release} is the new champion",
    "rollback": "{release} was rolled back",
    "ask": "{release} waits for a person to promote it",
    "stuck": "the cycle of {release} can't continue",
    "suspect": "rows of {release} are set aside",
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
        """Return one line for people."""
        text = f"{_BEGINNINGS[self.kind].format(release=self.release)}: {self.reason}"
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
        return line if len(line) <= MAX_SENTENCE_CHARS else line[: MAX_SENTENCE_CHARS - 3] + "..."


def send_notice(notice: Notice, command: Sequence[str]) -> str:
    """Run the user's command with a notice, and return why that failed, else "". At most SEND_TIMEOUT_S, no exception.

    The sentence is its last argument, the notice as JSON its standard input. There is no shell, and its output is not
    read.
    """
    document = json.dumps(notice_document(notice)).encode()
    try:
        process = subprocess.Popen(
            [*command, notice.sentence],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"{command[0]} can't be started: {error}"
    try:
        process.communicate(document, timeout=SEND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with whatever it started
        process.wait()
        return f"{command[0]} was ended after {SEND_TIMEOUT_S:.0f} s"
    return "" if process.returncode == 0 else f"{command[0]} ended with {process.returncode}"


def notice_document(notice: Notice) -> dict[str, Any]:
    """Return the JSON that the command gets. Slack, Mattermost and Matrix show `text`."""
    return {"schema": 1, **asdict(notice), "text": f"Hivetune: {notice.sentence}"}
