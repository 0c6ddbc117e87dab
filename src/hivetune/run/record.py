"""`run.json`: what a run is called, what it was made of, and what became of it."""

from pathlib import Path
from typing import Any

from hivetune.base.sealed import HINT, read_sealed, write_sealed
from hivetune.errors import UsageError
from hivetune.run.folder import RECORD

FIELDS: dict[str, type | tuple[type, ...]] = {"name": str, "created": (int, float), "status": str}
OPTIONAL: dict[str, type | tuple[type, ...]] = {"model": str, "snapshot": str, "identity": dict, "result": dict}


def read_record(run: Path) -> dict[str, Any]:
    """Raises UsageError when `run` is not a run folder, or its record is damaged."""
    path = run / RECORD
    if not path.is_symlink() and not path.exists():
        raise UsageError(f"{run} is not a run folder", hint="see the runs: hivetune runs")
    record = read_sealed(path)
    for name, kind in (*FIELDS.items(), *((name, kind) for name, kind in OPTIONAL.items() if name in record)):
        if not isinstance(record.get(name), kind):
            raise UsageError(f"{path} is damaged: its {name!r} is {record.get(name)!r}", hint=HINT)
    return record


def write_record(run: Path, record: dict[str, Any]) -> None:
    """Only the process that holds the run's lock may. Raises OSError."""
    write_sealed(run / RECORD, record)
