"""A home as commands leave it: a tiny model, collected rows, a client, and what a cycle trained and judged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cycle.small import append_rows, make_config, make_rows

Call = Callable[[str], tuple[int, list[Any]]]


def make_home(place: Path, call: Call) -> None:
    """Fill `place` and `place/home` by commands of `call`, which gives an exit code and the documents."""
    make_config(place)
    append_rows(place / "rows.jsonl", make_rows(0, 60))
    for command in ("collect rows.jsonl", "clients --new anna", "cycle cycle.yaml --once"):
        code, documents = call(command)
        assert code == 0, (command, documents)
