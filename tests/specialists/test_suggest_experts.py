"""What the texts of undeclared rows suggest: a file to declare them by, or nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hivetune.routing.domains import KeyedRow, KeyKind
from hivetune.specialists import suggest
from hivetune.specialists.suggest import TextCluster, suggest_domains
from hivetune.specialists.survey import Survey


def found(folder: Path, rows: int, kind: KeyKind | None) -> Survey:
    """Half of the rows declare an agent."""
    made = [
        KeyedRow(str(n), "train", str(n), (n,), {"agent": "coder"} if n % 2 else {}, f"text {n}") for n in range(rows)
    ]
    snapshot = SimpleNamespace(info=lambda number: SimpleNamespace(source=f"rows.jsonl:{number + 1}"))
    unused: Any = None
    return Survey(unused, unused, folder, cast(Any, snapshot), tuple(made), kind, (), folder)


def clusters(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    made, start = [], 0
    for size in sizes:
        made.append(TextCluster(tuple(range(start, start + size)), (("red", size, 1), ("blue", 9, 0)), 0.9))
        start += size
    monkeypatch.setattr(suggest, "clusters_of", lambda texts: made)


def test_rows_of_a_cluster_are_named_with_what_they_would_declare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters(monkeypatch, 200, 30)
    made = suggest_domains(found(tmp_path, 600, "agent"))
    assert (made.undeclared, made.key, len(made.clusters), made.smaller) == (300, "agent", 1, 1)
    assert made.lines is not None
    lines = [json.loads(line) for line in made.lines.read_text().splitlines()]
    assert lines[1] == {"source": "rows.jsonl:3", "agent": "red-blue"} and len(lines) == 200


def test_rows_that_nothing_divides_are_all_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters(monkeypatch, 210)
    made = suggest_domains(found(tmp_path, 250, None))
    assert (made.undeclared, made.key, len(made.clusters)) == (250, "category", 1)


def test_nothing_is_suggested_of_few_rows_or_of_small_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters(monkeypatch, 199)
    assert suggest_domains(found(tmp_path, 398, "agent")).smaller == 0
    made = suggest_domains(found(tmp_path, 402, "agent"))
    assert (made.clusters, made.smaller, made.lines) == ((), 1, None)
