"""Rows that declare nothing that divides them: which of them look alike. A suggestion to a person, never a domain."""

import json
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import write_atomic
from hivetune.experts.survey import Survey
from hivetune.routing.clusters import TextCluster, clusters_of
from hivetune.routing.domains import LEAST_ROWS

SUGGESTED = "suggested.jsonl"


@dataclass(frozen=True)
class Suggestions:
    """`undeclared`: rows that declare nothing of the kind that makes domains; `key`: what they would declare.
    `clusters`: of LEAST_ROWS rows at least; `smaller`: how many stable ones have fewer. `lines`: the file that names
    each of their rows by its source, with a value to declare; None where nothing is suggested."""

    undeclared: int
    key: str
    clusters: tuple[TextCluster, ...] = ()
    smaller: int = 0
    lines: Path | None = None


def suggest_domains(found: Survey) -> Suggestions:
    """What the texts of undeclared rows suggest; seconds, and nothing is decided by it."""
    rows = [row for row in found.rows if found.kind is None or found.kind not in row.keys]
    key = "agent" if found.kind == "agent" else "category"
    stable = clusters_of([row.text for row in rows]) if len(rows) >= LEAST_ROWS else []
    large = tuple(cluster for cluster in stable if len(cluster.texts) >= LEAST_ROWS)
    smaller = len(stable) - len(large)
    if not large:
        return Suggestions(len(rows), key, smaller=smaller)
    sources = [found.snapshot.info(row.numbers[0]).source for row in rows]
    lines = [
        json.dumps({"source": sources[number], key: cluster.name}, ensure_ascii=False)
        for cluster in large
        for number in cluster.texts
    ]
    path = found.folder / SUGGESTED
    write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
    return Suggestions(len(rows), key, large, smaller, path)
