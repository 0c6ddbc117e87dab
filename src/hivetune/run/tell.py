"""What a run's events mean, in words for people."""

from collections.abc import Mapping
from typing import Any

TOLD = {
    "attempt": "worker {number} started",
    "failure": "fault in step {step}: {words}",
    "action": "-> {action}: {why}",
    "isolated": "isolated: {words}",
    "quarantined": "quarantined {source}: {reason}",
    "from_memory": "state of step {step} saved from memory",
    "warning": "warning: {text}",
    "disk_wait": "the disk is full: waiting for room",
    "disk_ready": "there is room on the disk again",
    "stop_requested": "asked to stop",
    "supervisor_ended": "{status} at step {steps}, {restarts} restarts; {why}",
}


def tell_event(entry: Mapping[str, Any]) -> str:
    """A line of events.jsonl in words; empty for one that says nothing to a person."""
    form = TOLD.get(str(entry["event"]))
    return form.format(**entry).strip(" ;") if form else ""
