"""Writes the pages that are generated from the settings and the knowledge about machines: `python tools/pages.py`.

Tests check that docs/config.md, docs/faults.md and docs/doctor.md are up to date.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hivetune.config import known_settings
from hivetune.machine.faults import catalogue
from hivetune.machine.knowledge.facts import Fact, facts

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
        "Causes and remedies of failed runs, from `src/hivetune/machine/knowledge/faults.yaml`. The first entry",
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
    lines += ["", *_published_table()]
    return "\n".join(lines) + "\n"


def _published_table() -> list[str]:
    """Return the table of published faults of cards."""
    lines = [
        "## Published faults of cards",
        "",
        "Others published these faults; none was seen here. Tests give each to doctor, diagnosis and ladder.",
        "",
        "| thread | what happened | fault | first changes |",
        "| --- | --- | --- | --- |",
    ]
    for fact in facts("published"):
        thread = f"[{fact.more['thread']}]({fact.source[0]})"
        name = f"[{fact.more['fault']}](#{fact.more['fault']})" if fact.more["fault"] else "none"
        rungs = ", ".join(f"`{rung}`" for rung in fact.more["rungs"])
        lines.append(f"| {thread} | {fact.says} | {name} | {rungs} |")
    return lines


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


def _chips() -> str:
    rows = ((f.more["gfx"], f.more["cards"], ", ".join(f.more["types"]), _why(f)) for f in facts("chip"))
    return _table(("architecture", "cards", "fast number types", "what to know"), rows)


def _builds() -> str:
    rows = (
        (_where(f), f.more["verdict"] if f.more["verdict"] == "good" else f.more["severity"], _why(f), _unknown(f))
        for f in facts("build")
    )
    return _table(("where", "verdict", "what is known", "what is not"), rows)


def _variables() -> str:
    rows = ((f"`{f.more['name']}`", f.more["verdict"], f.more.get("default", ""), _why(f)) for f in facts("variable"))
    return _table(("variable", "verdict", "default", "what it really does"), rows)


def _advice() -> str:
    rows = ((f"`{f.more['name']}={f.more['value']}`", _where(f), _why(f), _unknown(f)) for f in facts("advice"))
    return _table(("variable", "where", "why", "what is not known"), rows)


def _poison() -> str:
    rows = (
        (", ".join(f"`{name}`" for name in f.more["name"].split()), f"{f.more['title']}: {_why(f)}")
        for f in facts("poison")
    )
    return _table(("taken from the worker", "when and why"), rows)


def _where(fact: Fact) -> str:
    return ", ".join(
        f"{name.removeprefix('gfx')} {pattern if isinstance(pattern, str) else ' or '.join(pattern)}".lstrip()
        for name, pattern in fact.when.items()
    )


def _why(fact: Fact) -> str:
    links = ", ".join(f"[{number}]({url})" for number, url in enumerate(fact.source[1:], 2))
    return f"{fact.says} ([{fact.confidence}]({fact.source[0]}){links and ', ' + links})"


def _unknown(fact: Fact) -> str:
    return str(fact.more.get("unknown", ""))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


_TABLES: dict[str, Callable[[], str]] = {
    "installs": _installs,
    "chips": _chips,
    "builds": _builds,
    "variables": _variables,
    "advice": _advice,
    "poison": _poison,
}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
