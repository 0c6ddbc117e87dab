"""The tables of docs/doctor.md, made of the knowledge; a test holds the page equal to them. Pure."""

import re
from collections.abc import Callable, Iterable, Sequence

from hivetune.machine.knowledge.facts import Fact, facts


def with_tables(page: str) -> str:
    """`page` with each table between `<!-- NAME -->` and `<!-- end -->` written anew. Raises KeyError for a name that
    has no table."""
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
    return _table(("architecture", "cards", "number types of its own", "what to know"), rows)


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
        f"{name} {' or '.join(pattern) if isinstance(pattern, Sequence) and not isinstance(pattern, str) else pattern}"
        for name, pattern in fact.when.items()
    )


def _why(fact: Fact) -> str:
    links = ", ".join(f"[{number}]({url})" for number, url in enumerate(fact.source, 1))
    return f"{fact.says} ({fact.confidence}, {fact.date[:7]}: {links})"


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
