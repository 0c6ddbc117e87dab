"""Planted faults: exactly these rows are rejected, each with its reason and its line, and the sum adds up."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from data.conftest import adds_up
from faults import FAULTS, NEEDS_MODEL, planted

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.write import beside
from hivetune.data.reasons import REASONS


def assert_planted_faults_are_found(tmp_path: Path, model: Path, num_rows: int, num_faults: int) -> None:
    lines, reasons = planted(num_rows, num_faults)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    clean = tmp_path / "clean.jsonl"
    report = check(DataConfig(path=str(path)), model_folder=model, max_length=1024, clean=clean)
    left = map(json.loads, beside(clean, "quarantine").read_text().splitlines())
    found = {one["source"]: one["reason"] for one in left}
    assert found == {f"{path}:{line}": reason for line, reason in reasons.items()}
    assert report.rows_in == num_rows
    assert report.document["duplicates"] == 0
    assert report.usable == num_rows - num_faults
    assert adds_up(report)


def test_every_planted_fault_is_found_and_nothing_else(tmp_path: Path, chatml: Path) -> None:
    assert_planted_faults_are_found(tmp_path, chatml, 600, 2 * len(FAULTS))


@pytest.mark.proof
def test_200_faults_in_10_000_rows(
    tmp_path: Path, chatml: Path, record_property: Callable[[str, object], None]
) -> None:
    assert_planted_faults_are_found(tmp_path, chatml, 10_000, 200)
    record_property("rows", 10_000)
    record_property("faults", 200)
    record_property("kinds_of_faults", len(FAULTS))
    record_property("reasons", len({reason for reason, _ in FAULTS.values()}))


@pytest.mark.parametrize("name", [name for name, (reason, _) in FAULTS.items() if reason not in NEEDS_MODEL])
def test_the_same_without_a_model(name: str, tmp_path: Path) -> None:
    reason, make = FAULTS[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + make(random.Random(3)) + b"\n")
    report = check(DataConfig(path=str(path)))
    assert report.document["rejected"] == {reason: 1}


def test_many_kinds_of_reasons_are_planted() -> None:
    assert len({reason for reason, _ in FAULTS.values()}) >= 13
    assert {reason for reason, _ in FAULTS.values()} <= set(REASONS)
