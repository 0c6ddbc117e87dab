"""Writes the pages that are generated from data of the source: `python tools/pages.py`. Tests hold them equal."""

from pathlib import Path

from hivetune.machine.doctor.page import with_tables
from hivetune.machine.faults import as_markdown

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    (DOCS / "faults.md").write_text(as_markdown(), encoding="utf-8")
    doctor = DOCS / "doctor.md"
    doctor.write_text(with_tables(doctor.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
