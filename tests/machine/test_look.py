"""The look at this very machine: quick, without torch, and without the names of who runs it."""

import json
import os
import subprocess
import sys

from hivetune.machine.report import Redaction

LOOK_S = 2.0


def doctor(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hivetune", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def test_the_look_of_this_machine_is_one_document_with_what_was_seen() -> None:
    ended = doctor("--json")
    document = json.loads(ended.stdout)
    assert document["schema"] == 1 and ended.returncode == (0 if document["fit"] else 4)
    assert document["machine"]["cores"] >= 1 and document["machine"]["memory_bytes"] > 0
    assert document["observed"]["kernel"] and document["observed"]["torch"]


def test_names_of_people_and_machines_are_taken_out_and_nothing_else() -> None:
    redaction = Redaction("alice", "box7.example.org", ["/home/alice", "/data/alice"])
    text = "/home/alice/x /data/alice alice@box7.example.org box7 malice box77 /srv/alice/models"
    assert redaction.text(text) == "~/x ~ USER@HOST HOST malice box77 /srv/USER/models"
    assert redaction.document({"alice": ["alice", 1]}) == {"alice": ["USER", 1]}
    assert Redaction("root", "localhost", ["/"]).text("root@localhost:/x") == "root@localhost:/x"
