"""A W&B run on the disk, for `wandb sync`: written whole when the run ends. Nothing is uploaded from here."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hivetune.base.disk import read_json, write_json
from hivetune.dashboard.exporters.points import PROJECT, HeldPoints, RunPoint, Subject

_POINTS = "hivetune.json"


class WandB:
    """One W&B run for each run. Its file only grows, in the order of the steps, and a process of W&B's own writes
    it. So the run is written into a temporary folder and renamed when it is whole. A kill leaves the earlier one,
    or none."""

    def __init__(self, subject: Subject, folder: Path):
        self._subject, self._folder = subject, folder / "wandb"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._before = sorted(self._folder.glob(f"offline-run-*-{subject.id}"))
        written = self._before[-1] / _POINTS if self._before else None
        document = read_json(written) if written is not None and written.exists() else {"status": None, "points": []}
        self._points = [RunPoint(*fields) for fields in document["points"]]
        written_before = (document["status"], len(self._points), document.get("outcome"))
        self._written = written_before if len(self._before) == 1 else None
        self._changed = False

    def held(self) -> HeldPoints:
        return {point.key: point.time_ms for point in self._points}

    def take_back(self, step: int, held: HeldPoints) -> HeldPoints:
        self._points = [point for point in self._points if point.step < step]
        self._changed = True
        return self.held()

    def add(self, points: Sequence[RunPoint]) -> None:
        self._points += points

    def finish(self, status: str, outcome: Mapping[str, str]) -> None:
        """Replace an earlier report, unless it is equal."""
        if not self._changed and self._written == (status, len(self._points), dict(outcome)):
            return
        for rest in self._folder.glob(f".{self._subject.id}-*"):  # of an exporter that was killed
            shutil.rmtree(rest)
        with tempfile.TemporaryDirectory(prefix=f".{self._subject.id}-", dir=self._folder) as staging:
            self._write(Path(staging), outcome, failed=status == "failed")
            [new_run] = Path(staging).glob("wandb/offline-run-*")
            points = [[point.kind, point.step, point.time_ms, dict(point.values)] for point in self._points]
            write_json(new_run / _POINTS, {"schema": 1, "status": status, "points": points, "outcome": dict(outcome)})
            for earlier in self._before:
                shutil.rmtree(earlier)
            os.rename(new_run, self._folder / new_run.name)

    def _write(self, staging: Path, outcome: Mapping[str, str], *, failed: bool) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        quiet = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        run = wandb.init(
            project=PROJECT,
            id=self._subject.id,
            name=self._subject.name,
            config=self._subject.settings,
            dir=str(staging),
            mode="offline",
            settings=quiet,
        )
        rows: dict[int, dict[str, float]] = {}  # a validation belongs to the row of its step
        for point in self._points:
            row = rows.setdefault(point.step, {"_timestamp": 0.0})
            row |= {**point.values, "_timestamp": max(row["_timestamp"], point.time_ms / 1000)}
        for step, row in sorted(rows.items()):
            run.log(row, step=step)
        run.summary.update(dict(outcome))
        run.finish(exit_code=1 if failed else 0)
