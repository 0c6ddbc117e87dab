"""What card.py has found so far: one JSON file, a table and a plot, whole on the disk after each finding."""

import html
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH, BAR, LEFT = 640, 22, 220


class Report:
    """`note` adds a finding, `end` says how a part ended; both write the files anew, each atomically."""

    def __init__(self, out: Path, **told: Any):
        self.out = out
        self.content: dict[str, Any] = {"schema": 1, "begun": round(time.time()), "python": platform.python_version()}
        self.content |= {**told, "parts": {}}
        self._write()

    def note(self, part: str, key: str, value: Any) -> None:
        self._part(part)["found"][key] = value
        self._write()

    def end(self, part: str, status: str, seconds: float) -> None:
        self._part(part).update(status=status, seconds=round(seconds, 1))
        self._write()

    def table(self) -> str:
        """Markdown: how each part ended and its figures."""
        lines = ["| part | ended | seconds | found |", "| --- | --- | ---: | --- |"]
        for name, part in self.content["parts"].items():
            words = "; ".join(f"{key} {_words(value)}" for key, value in part["found"].items() if key in SHOWN)
            lines.append(f"| {name} | {part['status']} | {part['seconds']} | {words[:400]} |")
        return "\n".join(lines)

    def _part(self, name: str) -> dict[str, Any]:
        part: dict[str, Any] = self.content["parts"].setdefault(
            name, {"status": "under way", "seconds": None, "found": {}}
        )
        return part

    def _write(self) -> None:
        for name, text in (
            ("card.json", json.dumps(self.content, indent=1) + "\n"),
            ("card.md", self.table() + "\n"),
            ("card.svg", plot(list(rates(self.content)))),
        ):
            new = self.out / f".{name}"
            new.write_text(text, encoding="utf-8")
            os.replace(new, self.out / name)


SHOWN = (
    "device",
    "torch",
    "dtype",
    "wrong",
    "worst",
    "agents",
    "plain",
    "full",
    "job",
    "job graphs",
    "peer",
    "error",
)


def rates(content: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(what, samples/s) of all that was timed."""
    for name, part in content["parts"].items():
        for key, value in part["found"].items():
            if isinstance(value, dict) and "samples_per_s" in value:
                yield f"{name} {key}", float(value["samples_per_s"])


def plot(bars: list[tuple[str, float]]) -> str:
    """Horizontal bars on a linear scale from 0."""
    most = max((value for _, value in bars), default=0.0) or 1.0
    rows = []
    for number, (name, value) in enumerate(bars):
        y, width = 30 + number * BAR, (WIDTH - LEFT - 80) * value / most
        rows.append(
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{BAR - 6}" fill="#3b6ea5"/>'
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 14}">{value:,.1f}</text>'
        )
    height = 40 + BAR * len(bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><text x="8" y="18">samples a second</text>{"".join(rows)}</svg>\n'
    )


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items() if not isinstance(inner, dict))
    return str(value)
