"""A snapshot of a few conversations of every shape: its tokens, mask and splits are what they were.

To accept a wanted change, run this file with HIVETUNE_WRITE_GOLDEN=1.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.conftest import chat

from hivetune.base.disk import sha256_file
from hivetune.config import parse_config
from hivetune.data.prepare.prepare import prepare
from hivetune.data.snapshot import SPLITS

GOLDEN = Path(__file__).parent / "golden" / "snapshot.json"
FILES = ("tokens.u32", "trained.u8", "offsets.u64")


def conversations() -> list[dict[str, Any]]:
    """Twenty conversations: one and more turns, system prompts, answers without weight, sessions."""
    found = [chat(f"What is number {i}?", f"It comes after {i - 1}.", agent=f"a{i % 3}") for i in range(8)]
    for i in range(12):
        turns = [{"role": "system", "content": f"Answer as tester {i}."}] if i % 2 else []
        turns += [
            {"role": "user", "content": f"Name a colour, please: {i}."},
            {"role": "assistant", "content": f"Blue, and then {i} more.", "weight": i % 3 and 1},
            {"role": "user", "content": "And another one?"},
            {"role": "assistant", "content": f"Green comes {i + 1} times."},
        ]
        found.append({"messages": turns, "session_id": f"s{i // 2}", "timestamp": 100 + i})
    return found


def test_a_snapshot_is_what_it_was(write_rows: Callable[..., Path], chatml: Path) -> None:
    config = parse_config({"model": "m", "data": {"path": str(write_rows(conversations()))}})
    snapshot = prepare(config, chatml)
    found = {name: sha256_file(snapshot.folder / name) for name in FILES}
    found |= {"rows": snapshot.num_rows, **{split: snapshot.rows(split) for split in SPLITS}}
    found["trained"] = [snapshot.num_trained(row) for row in range(snapshot.num_rows)]
    if os.environ.get("HIVETUNE_WRITE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))
