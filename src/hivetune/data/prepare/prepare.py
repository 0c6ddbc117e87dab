"""The preparation: from sources to a report, and from a config to a snapshot that is found again by its content.

    file -> rows -> examined by a pool (read, check, redact, render, hash) -> work.sqlite -> decided by SQL
      -> snapshot and report

A preparation that was killed starts again.
"""

import contextlib
import errno
import hashlib
import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hivetune import __version__
from hivetune.base.database import open_database, open_existing_database
from hivetune.base.disk import (
    FULL_DISK_ERROR,
    MANIFEST,
    home,
    lock,
    path_to_store,
    problems_since_last_read,
    scratch_folder,
    sha256_file,
)
from hivetune.base.paths import spelled
from hivetune.config import DataConfig, LearnConfig, RunConfig
from hivetune.data.files.inputs import Inputs, plan_inputs
from hivetune.data.frozen import frozen_hashes
from hivetune.data.intake.interactions import load_forgotten, load_set_aside
from hivetune.data.mapping import check_columns
from hivetune.data.prepare.decide import decide_rows
from hivetune.data.prepare.examine import RowSettings
from hivetune.data.prepare.pool import examined, num_workers
from hivetune.data.prepare.report import Report, make_report, unmatched, with_late_columns
from hivetune.data.prepare.understand import Understood, understand
from hivetune.data.prepare.work import Work, fill, work_in
from hivetune.data.prepare.write import publish, write_clean
from hivetune.data.render.folder import RENDER_FILES
from hivetune.data.snapshot import DAMAGED_SNAPSHOT, Snapshot, open_snapshot
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, UsageError
from hivetune.records import Progress, silent

FORMAT = 17  # raise it when the same input gives another snapshot
# Measured on rows of 500 bytes: the file of rows takes 3 times the input, the snapshot 2.5 times.
DISK_PER_INPUT_BYTE = 6
# Below it the start of a child (0.3 s with a tokenizer) costs more than it saves.
CHILDREN_FROM_BYTES = 1 << 20
LEARN = LearnConfig()


def check(
    data: DataConfig,
    *,
    model_folder: Path | None = None,
    max_length: int = 2048,
    clean: Path | None = None,
    learn: LearnConfig = LEARN,
    progress: Progress = silent,
) -> Report:
    """Return the report of the rows of `data.path`. Only the requested files are kept.

    `clean`: a file for the usable rows, with a quarantine file beside it. `progress` counts lines; when all are read,
    its total is None. Raise UsageError for missing sources, but nothing for bad rows: call `Report.refuse` for that.
    """
    hint = "set TMPDIR to a folder with more room"
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder())
        except OSError as error:
            raise DoesNotFit(f"no temporary folder can be made: {error}", hint=hint) from None
        stack.enter_context(report_full_disk(folder, hint))
        task = _Task(data, learn, max_length, model_folder, frozen_hashes(), _understood(data, folder, progress))
        work = stack.enter_context(work_in(folder))
        report = task.run(work, progress, keep_raw=clean is not None)
        if clean is not None:
            write_clean(work, data, clean)
        return report


def prepare(
    config: RunConfig, model_folder: Path, progress: Progress = silent, leave_out: Mapping[str, str] | None = None
) -> Snapshot:
    """Return the snapshot of the config's rows for this model, a new one or the existing one of this home.
    `leave_out`: id of a row -> reason (data/reasons.py), of rows that are kept out of it.

    Raise DataRefused with the report's numbers, DoesNotFit if the disk is full, UsageError if the existing snapshot is
    damaged, Busy if another process makes it.
    """
    root = home() / "snapshots"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)  # rows are private
    hint = "make room, or set HIVETUNE_HOME to another disk"
    with report_full_disk(root, hint), scratch_folder() as spill:
        understood = _understood(config.data, spill, progress)
        frozen = frozen_hashes(config.eval.frozen)
        task = _Task(config.data, config.learn, config.max_length, model_folder, frozen, understood, leave_out or {})
        key = task.key(model_folder)
        folder = root / key[:16]
        if (folder / MANIFEST).exists():
            snapshot = open_snapshot(folder)
            if problems := problems_since_last_read(folder):
                raise UsageError(f"the snapshot {folder} is damaged: {problems[0]}", hint=DAMAGED_SNAPSHOT)
            return snapshot
        work_folder = root / f".work-{key[:16]}"
        with lock(work_folder):
            try:
                needed, free = DISK_PER_INPUT_BYTE * understood.inputs.size_bytes, shutil.disk_usage(root).free
                if free < needed:
                    needs = f"preparing takes about {needed / 1e9:.1f} GB below {root}, {free / 1e9:.1f} GB are free"
                    raise DoesNotFit(needs, hint=hint)
                with work_in(work_folder) as work:
                    report = task.run(work, progress, keep_raw=False)
                    report.refuse(config.data.max_rejected, in_cycle=config.cycle.name is not None)
                    publish(folder, key, work, report.document)
            finally:
                shutil.rmtree(work_folder)
    snapshot = open_snapshot(folder)
    with contextlib.closing(open_database()) as database:  # so that `forget` finds it
        database.execute(
            "INSERT OR REPLACE INTO snapshots (hash, path, created) VALUES (?, ?, ?)",
            (snapshot.hash, path_to_store(snapshot.folder.resolve()), round(time.time(), 3)),
        )
    return snapshot


def prepare_data(
    config: RunConfig,
    model: Path,
    progress: Progress = silent,
    on_busy: Callable[[Busy], None] | None = None,
    leave_out: Mapping[str, str] | None = None,
) -> Snapshot:
    """Return the snapshot of the config's rows, new or existing. `leave_out`: as in `prepare`.

    While another process makes it, `on_busy` is called repeatedly to wait; without `on_busy` raise Busy. Raise
    DataRefused if too few rows are usable.
    """
    while True:
        try:
            snapshot = prepare(config, model, progress, leave_out)
            break
        except Busy as busy:
            if on_busy is None:
                raise
            on_busy(busy)
    refuse_without_training(config.data, len(snapshot.rows("train")))
    return snapshot


def refuse_without_training(data: DataConfig, trained: int) -> None:
    """Raise DataRefused if no row is left to train on."""
    if not trained:
        hint = "data.validation and data.test hold rows out; see where each went: hivetune check --config CONFIG"
        raise DataRefused(f"no row of {data.path} is left to train on", hint=hint)


def _understood(data: DataConfig, spill: Path, progress: Progress) -> Understood:
    """Return the inputs of `data.path`. `progress` is called without counting rows."""
    check_columns(data.columns)

    def report(_done: int, _total: int | None) -> None:
        progress(0, None)

    return understand(
        plan_inputs(data.path, spill, encoding=data.encoding, progress=report), data.columns, data.ignore, report
    )


@dataclass
class _Task:
    """The inputs that determine a preparation: settings, frozen questions, rows, and the rows that a person forgot or
    set aside.
    """

    data: DataConfig
    learn: LearnConfig
    max_length: int
    model_folder: Path | None
    frozen: frozenset[int]
    understood: Understood
    leave_out: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with open_existing_database() as database:
            self.forgotten = load_forgotten(database)
            self.set_aside = load_set_aside(database)

    def key(self, model_folder: Path) -> str:
        """Return the hash of everything that can change the snapshot."""
        model = {name: sha256_file(model_folder / name) for name in RENDER_FILES if (model_folder / name).exists()}
        values = {k: v for k, v in self.data.model_dump(mode="json").items() if k not in ("path", "max_rejected")}
        parts = [FORMAT, __version__, self.understood.inputs.digest, values, self.max_length, model]
        parts += [sorted(self.forgotten), sorted(self.set_aside), sorted(self.frozen), sorted(self.learn.use)]
        parts += [sorted(self.leave_out.items())]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def run(self, work: Work, progress: Progress, *, keep_raw: bool) -> Report:
        """Fill `work` with all rows and their fates, and return the report."""
        data, inputs = self.data, self.understood.inputs
        settings = RowSettings(data, self.learn.use, self.max_length, self.model_folder, self.forgotten)
        workers = num_workers() if inputs.size_bytes >= CHILDREN_FROM_BYTES else 1
        try:
            fill(work, examined(settings, inputs.rows(), workers=workers), progress, inputs.lines, keep_raw=keep_raw)
        except (OSError, HivetuneError):
            _refuse_changed(inputs)  # the likelier cause
            raise
        _refuse_changed(inputs)
        progress(work.num_rows, None)  # how long the comparison takes is unknown
        document = {
            **decide_rows(work, data, self.frozen, self.learn, self.set_aside, self.leave_out),
            "encodings": {source.name: source.encoding for source in inputs.sources if source.encoding},
            "understood": with_late_columns(work, self.understood.formats, data.ignore),
            "unclear": self.understood.unclear,
            "unmatched": unmatched(work, data, self.understood.first_row),
        }
        return make_report(work, document, model=self.model_folder, max_length=self.max_length)


@contextlib.contextmanager
def report_full_disk(folder: Path, hint: str) -> Iterator[None]:
    """Raise DoesNotFit in place of a full disk's error, whether from this process, SQLite or a worker."""
    try:
        yield
    except DoesNotFit:  # already names the disk
        raise
    except (OSError, sqlite3.OperationalError, HivetuneError) as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or (not isinstance(error, OSError) and FULL_DISK_ERROR.search(str(error))):
            raise DoesNotFit(f"the disk of {folder} is full: preparing the rows needs more space", hint=hint) from None
        raise


def _refuse_changed(inputs: Inputs) -> None:
    """Raise DataRefused for a file that was rewritten or cut meanwhile: some of its rows were not read, and the
    snapshot would be filed under the file's earlier bytes.
    """
    if (name := inputs.changed()) is not None:
        raise DataRefused(f"{spelled(name)} was changed while it was read", hint="run it again when nobody rewrites it")
