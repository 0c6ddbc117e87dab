"""Writes the pages that are generated from data of the source: `python tools/pages.py`. Tests hold them equal."""

from pathlib import Path

from hivetune.config import FORMER_NAMES, GROUPS, known_settings, stored_settings
from hivetune.machine.doctor.page import with_tables
from hivetune.machine.faults import as_markdown

DOCS = Path(__file__).resolve().parent.parent / "docs"


def with_settings(page: str) -> str:
    """Return the page of the settings with its table as the code has it."""
    stored = {setting.key: setting for setting in stored_settings()}
    lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for setting in known_settings():
        default = setting.default.strip('"') or "required"
        lines.append(f"| `{setting.key}` | `{default}` | {setting.meaning} |")
    lines += ["", "## Parts of settings", "", "| part | meaning | former name |", "| --- | --- | --- |"]
    for name, group in GROUPS.items():
        for part, key in group.parts.items():
            shown = f"`{name}.{part}`" if group.listed is None else f"`{part}` in `{name}`"
            lines.append(f"| {shown} | {stored[key].meaning} | `{key}` |")
    assert set(FORMER_NAMES) <= set(stored)
    return page.partition("## All settings\n")[0] + "## All settings\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    config = DOCS / "config.md"
    config.write_text(with_settings(config.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "faults.md").write_text(as_markdown(), encoding="utf-8")
    doctor = DOCS / "doctor.md"
    doctor.write_text(with_tables(doctor.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
