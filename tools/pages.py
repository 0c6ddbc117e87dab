"""Writes the pages that are generated from the settings and the knowledge about machines: `python tools/pages.py`.

Tests check that docs/config.md, docs/faults.md and docs/doctor.md are up to date.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hivetune.config import known_settings
from hivetune.machine.faults import catalogue
from hivetune.machine.knowledge.facts import Fact, alternatives, facts

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIRST = {"again": "retry", "change": "no plain retry"}


def with_settings(page: str) -> str:
    """Return the page of the settings with its table as the code has it."""
    lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for setting in known_settings():
        default = setting.default.strip('"') or "required"
        lines.append(f"| `{setting.key}` | `{default}` | {setting.meaning} |")
    return page.partition("## All settings\n")[0] + "## All settings\n\n" + "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of each generated page."""
    doctor = DOCS / "doctor.md"
    config = DOCS / "config.md"
    return {
        config: with_settings(config.read_text(encoding="utf-8")),
        DOCS / "faults.md": faults_page(),
        doctor: with_tables(doctor.read_text(encoding="utf-8")),
    }


def faults_page() -> str:
    """Return the page of the fault catalogue."""
    lines = [
        "# Faults",
        "",
        "Causes and remedies of failed runs, from `src/hivetune/machine/knowledge/faults.toml`. The first entry",
        "whose pattern matches is the diagnosis. Recovery tries the changes from left to right",
        "([reliability.md](reliability.md)).",
    ]
    for entry in catalogue():
        retry = FIRST[entry.first] if entry.retry else "no retry"
        changes = f"; {', '.join(entry.rungs)}" if entry.rungs else ""
        lines += [
            "",
            f"## {entry.id}",
            "",
            f"**{entry.title[0].upper()}{entry.title[1:]}.** {entry.cause} {entry.advice}",
        ]
        lines += [f"({entry.domain}; {retry}{changes})"]
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """Return `page` with each table between `<!-- NAME -->` and `<!-- end -->` written anew."""
    return re.sub(
        r"(<!-- (\w+) -->\n).*?(<!-- end -->)",
        lambda found: found[1] + _TABLES[found[2]]() + found[3],
        page,
        flags=re.S,
    )


def _installs() -> str:
    rows = (
        (f.more["title"], f"`{f.more['requirement']}`", f"`{f.more['backend']}`", f"`{f.more['python']}`", _why(f))
        for f in facts("install")
    )
    return _table(("machine", "torch", "build", "Python", "why"), rows)


def _findings() -> str:
    rows = ((f"`{f.id}`", f.more["severity"], _titled(f)) for f in facts("finding"))
    return _table(("finding", "severity", "what is wrong"), rows)


def _advice() -> str:
    rows = ((f"`{f.more['name']}={f.more['value']}`", _where(f), _why(f)) for f in facts("advice"))
    return _table(("variable", "where", "why"), rows)


def _where(fact: Fact) -> str:
    return "; or ".join(
        ", ".join(
            f"{name.removeprefix('gfx')} {' or '.join(pattern) if isinstance(pattern, list) else pattern}".lstrip()
            for name, pattern in patterns.items()
        )
        for patterns in alternatives(fact.when)
    )


def _why(fact: Fact) -> str:
    return f"{fact.says} {_sources(fact)}"


def _titled(fact: Fact) -> str:
    return f"{fact.more['title']} {_sources(fact)}"


def _sources(fact: Fact) -> str:
    links = ", ".join(f"[{number}]({url})" for number, url in enumerate(fact.source, 1))
    return f"({links})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


_TABLES: dict[str, Callable[[], str]] = {
    "installs": _installs,
    "findings": _findings,
    "advice": _advice,
}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
