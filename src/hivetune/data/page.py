"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from collections.abc import Sequence
from pathlib import Path

from hivetune.data.decide import Decisions
from hivetune.data.report import Report


def write_page(
    path: Path, report: Report, results: Sequence[Path], decisions: Decisions, model_folder: Path | None
) -> None:
    path.write_text(f"<!doctype html><title>Data</title><pre>{report.document['rows_in']}</pre>")
