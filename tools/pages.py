"""Writes the pages that are generated from the settings and the knowledge about machines: `python tools/pages.py`.

A test checks that docs/config.md and docs/doctor.md are up to date.
"""

from pathlib import Path

from hivetune.config import known_settings
from hivetune.machine.facts import WHEELS, facts

DOCS = Path(__file__).resolve().parent.parent / "docs"


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
        doctor: with_table(doctor.read_text(encoding="utf-8")),
    }


def with_table(page: str) -> str:
    """Return `page` with the table of builds of torch between its two marks written anew."""
    lines = [["machine", "torch", "build", "Python", "sources"], ["---"] * 5]
    for fact in facts("install"):
        links = ", ".join(f"[{number}]({url})" for number, url in enumerate(fact.source, 1))
        named = (fact.fields["requirement"], fact.fields["backend"], fact.fields.get("python", WHEELS))
        lines.append([fact.id, *(f"`{name}`" for name in named), links])
    table = "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
    before, mark, rest = page.partition("<!-- installs -->\n")
    return f"{before}{mark}{table}<!-- end -->{rest.partition('<!-- end -->')[2]}"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
