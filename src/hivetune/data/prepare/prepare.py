"""The preparation: from sources to a report, and from a config to a snapshot that is found again by its content.

The rows of all files are examined (pool.py), stored in one SQLite file (work.py), given their fates (decide.py), and
written in input order. A preparation that was killed starts again.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil

from hivetune import __version__
from hivetune.base.database import home_as_it_is, open_database
from hivetune.base.disk import (
    FULL_DISK_ERROR,
    MANIFEST,
    home,
    lock,
    path_to_store,
    problems_once,
    read_json,
    scratch_folder,
    sha256_file,
    write_json,
    write_manifest,
)
from hivetune.base.paths import spelled
from hivetune.config import DataConfig, LearnConfig, RunConfig
from hivetune.data.files.inputs import Inputs, plan_inputs
from hivetune.data.frozen import frozen_hashes
from hivetune.data.intake.interactions import load_forgotten, load_set_aside
from hivetune.data.judged.lessons import learnable
from hivetune.data.leave_out import read_leave_out
from hivetune.data.mapping import check_columns
from hivetune.data.prepare.clean import write_clean
from hivetune.data.prepare.decide import decide_rows
from hivetune.data.prepare.page import write_page
from hivetune.data.prepare.pool import examined, num_workers
from hivetune.data.prepare.report import Report, make_report, unmatched, write_dropped
from hivetune.data.prepare.stages import RowSettings
from hivetune.data.prepare.understand import examine_files, first_row, unclear, understood
from hivetune.data.prepare.work import Work, fill, work_in
from hivetune.data.render.folder import RENDER_FILES
from hivetune.data.snapshot import (
    BAD,
    DAMAGED_SNAPSHOT,
    DROPPED_FILE,
    REPORT,
    REPORT_PAGE,
    ROWS_FILE,
    ROWS_SCHEMA,
    SPLITS,
    Snapshot,
    open_snapshot,
)
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, UsageError
from hivetune.records import Progress, silent

FORMAT = 8  # raise it when the same input gives another snapshot
# Measured on rows of 500 bytes: the file of rows takes 3 times the input, the snapshot 2.5 times.
DISK_PER_INPUT_BYTE = 6
LEARN = LearnConfig()
INPUT_PREFIX = ".input-"  # followed by the process that unpacks input there


def check(
    data: DataConfig,
    *,
    model_folder: Path | None = None,
    max_length: int = 2048,
    clean: Path | None = None,
    page: Path | None = None,
    learn: LearnConfig = LEARN,
    progress: Progress = silent,
) -> Report:
    """Return the report of the rows of `data.path`. Only the files that are asked for are kept.

    `clean` is a file for the usable rows, with a quarantine file beside it; `page` is a file for the HTML report.
    `progress` counts lines; when all are read, its total is None. Raise UsageError for missing sources, but not for bad
    rows: call `Report.refuse` for that.
    """
    hint = "set TMPDIR to a folder with more room"
    with contextlib.ExitStack() as stack:
        try:
            work = stack.enter_context(scratch_folder())
        except OSError as error:
            raise DoesNotFit(f"no temporary folder can be made: {error}", hint=hint) from None
        stack.enter_context(report_full_disk(work, hint))
        inputs = _inputs(data, work, progress)
        settings = row_settings(data, model_folder, max_length, learn)
        rows = stack.enter_context(work_in(work))
        report = _examine(inputs, settings, data, learn, rows, progress, frozen_hashes(), keep_raw=clean is not None)
        if clean is not None:
            write_clean(rows, data, clean)
        if page is not None:
            write_page(page, report, rows, model_folder)
        return report


def prepare(config: RunConfig, model_folder: Path, out: Path | None = None, progress: Progress = silent) -> Snapshot:
    """Return the snapshot of the config's rows for this model: an existing one, or a new one in `out` or the home.

    Raise DataRefused with the report's numbers, DoesNotFit if the disk is full, UsageError if `out` holds something
    else, Busy if another process makes it.
    """
    root = home() / "snapshots"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)  # rows are private
    for left_over in root.glob(f"{INPUT_PREFIX}*"):  # by a preparation that was killed
        owner = left_over.name.removeprefix(INPUT_PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left_over, ignore_errors=True)
    hint = "make room, or set HIVETUNE_HOME to another disk"
    spill = tempfile.TemporaryDirectory(prefix=f"{INPUT_PREFIX}{os.getpid()}-", dir=root)
    with report_full_disk(root, hint), spill as unpacked:
        data = config.data
        inputs = _inputs(data, Path(unpacked), progress)
        settings = row_settings(data, model_folder, config.max_length, config.learn)
        frozen = frozen_hashes(config.eval.frozen)
        key = _key(inputs, settings, config, model_folder, frozen)
        folder = out or root / key[:16]
        existing = _existing(folder, key)
        if existing is not None:
            return existing
        work = root / f".work-{key[:16]}"
        with _work_folder(work), work_in(work) as rows:
            needed = DISK_PER_INPUT_BYTE * inputs.size_bytes
            free = shutil.disk_usage(root).free
            if free < needed:
                raise DoesNotFit(
                    f"preparing takes about {needed / 1e9:.1f} GB below {root}, {free / 1e9:.1f} GB are free", hint=hint
                )
            report = _examine(inputs, settings, data, config.learn, rows, progress, frozen, keep_raw=False)
            report.refuse(data.max_rejected)
            with report_full_disk(folder.parent, "make room, or give another folder"):
                _publish(folder, key, rows, report, model_folder)
    snapshot = open_snapshot(folder)
    with contextlib.closing(open_database()) as database:  # so that `data forget` finds it
        database.execute(
            "INSERT OR REPLACE INTO snapshots (hash, path, created) VALUES (?, ?, ?)",
            (snapshot.hash, path_to_store(snapshot.folder.resolve()), round(time.time(), 3)),
        )
    return snapshot


def _inputs(data: DataConfig, spill: Path, progress: Progress) -> Inputs:
    """Return the inputs of `data.path`. No row is counted yet; `progress` hears only that work continues."""

    def report(_done: int, _total: int | None) -> None:
        progress(0, None)

    inputs = plan_inputs(data.path, spill, encoding=data.encoding, progress=report)
    return examine_files(inputs, data.columns, data.ignore, report)


@contextlib.contextmanager
def report_full_disk(folder: Path, hint: str) -> Iterator[None]:
    """Raise a full disk as DoesNotFit, whether this process, SQLite or a worker met it."""
    try:
        yield
    except DoesNotFit:  # already names the disk
        raise
    except (OSError, sqlite3.OperationalError, HivetuneError) as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or (not isinstance(error, OSError) and FULL_DISK_ERROR.search(str(error))):
            raise DoesNotFit(f"the disk of {folder} is full: working on the rows needs more room", hint=hint) from None
        raise


def row_settings(
    data: DataConfig, model_folder: Path | None, max_length: int, learn: LearnConfig = LEARN
) -> RowSettings:
    """Return what the examination of a row depends on. Raise UsageError for an unknown field in `data.columns`."""
    check_columns(data.columns)
    with home_as_it_is() as database:
        forgotten, set_aside = load_forgotten(database), load_set_aside(database)
    return RowSettings(
        columns=data.columns,
        system_prompts=data.system_prompts,
        on_overlong=data.on_overlong,
        also_train=data.also_train,
        learn=learn.use,
        on_private=data.on_private,
        near_duplicates=data.near_duplicates,
        max_length=max_length,
        model_folder=model_folder,
        forgotten=frozenset(forgotten),
        set_aside=set_aside,
    )


def _examine(
    inputs: Inputs,
    settings: RowSettings,
    data: DataConfig,
    learn: LearnConfig,
    work: Work,
    progress: Progress,
    frozen: frozenset[int],
    *,
    keep_raw: bool,
) -> Report:
    """Fill `work` with all rows and their fates, and return the report."""
    try:
        rows = examined(settings, inputs.rows(), workers=num_workers())
        fill(work, rows, progress, inputs.lines, keep_raw=keep_raw)
    except (OSError, HivetuneError):
        _refuse_changed(inputs)  # the likelier cause
        raise
    _refuse_changed(inputs)
    progress(work.num_rows, None)  # how long the comparison takes is unknown
    decisions = decide_rows(work, data, frozen, learn, settings.set_aside)
    report = make_report(work, decisions, model=settings.model_folder, max_length=settings.max_length)
    report.document.update(
        {
            "learn": learnable(decisions.lessons, work.counts(), learn),
            "encodings": {source.name: source.encoding for source in inputs.sources if source.encoding},
            "understood": understood(inputs, data.columns, data.ignore),
            "unclear": unclear(inputs, data.columns),
            "unmatched": unmatched(work, data, first_row(inputs)),
        }
    )
    return report


def _refuse_changed(inputs: Inputs) -> None:
    """Raise DataRefused for a file that somebody rewrote or cut off meanwhile: some of its rows were not seen, and a
    snapshot would be found again by the bytes that it had before.
    """
    if (name := inputs.changed()) is not None:
        raise DataRefused(
            f"{spelled(name)} was changed while it was read", hint="run the same command again when nobody rewrites it"
        )


def _key(inputs: Inputs, settings: RowSettings, config: RunConfig, model_folder: Path, frozen: frozenset[int]) -> str:
    """Return the hash of everything that can change the snapshot."""
    model = {name: sha256_file(model_folder / name) for name in RENDER_FILES if (model_folder / name).exists()}
    values = {k: v for k, v in config.data.model_dump(mode="json").items() if k not in ("path", "max_rejected")}
    if config.data.leave_out is not None:
        values["leave_out"] = sorted(read_leave_out(Path(config.data.leave_out)).items())
    parts = [FORMAT, __version__, inputs.digest, values, config.max_length, model]
    parts += [sorted(settings.forgotten), sorted(settings.set_aside), sorted(frozen), sorted(config.learn.use)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _existing(folder: Path, key: str) -> Snapshot | None:
    if (folder / MANIFEST).exists():
        if read_json(folder / MANIFEST).get("key") == key:
            snapshot = open_snapshot(folder)
            problems = problems_once(folder)
            if problems:
                raise UsageError(f"the snapshot {folder} is damaged: {problems[0]}", hint=DAMAGED_SNAPSHOT)
            return snapshot
        raise UsageError(f"{folder} contains another snapshot or run", hint="choose another --out")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", hint="choose another --out")
    return None


@contextlib.contextmanager
def _work_folder(work: Path) -> Iterator[None]:
    """Lock the work folder. Remove it at the end or when data is refused; a killed process leaves it."""
    with lock(work):
        try:
            yield
        except DataRefused:
            shutil.rmtree(work)
            raise
        shutil.rmtree(work)


def _publish(folder: Path, key: str, work: Work, report: Report, model_folder: Path) -> None:
    """Write the snapshot into a temporary folder and rename it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        document = report.document
        write_json(temporary / REPORT, document)
        metadata = {k: document[k] for k in ("splits", "agents", "categories", "tokens", "trained_tokens", "lengths")}
        write_json(temporary / "metadata.json", {"schema": 1, **metadata})
        with open(temporary / DROPPED_FILE, "wb") as file:
            write_dropped(work, file)
        write_page(temporary / REPORT_PAGE, report, work, model_folder)
        write_snapshot(temporary, work, key=key, report=document)
        if folder.exists():
            folder.rmdir()  # an empty one that the user made
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def prepare_data(
    config: RunConfig, model: Path, progress: Progress = silent, on_busy: Callable[[Busy], None] | None = None
) -> Snapshot:
    """Return the snapshot of the config's rows, made or found.

    While another process makes it, `on_busy` is called, which returns after a pause; without `on_busy` raise Busy.
    Raise DataRefused if too few rows are usable.
    """
    while True:
        try:
            snapshot = prepare(config, model, None, progress)
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


# The columns that are equal in the file of rows and in the snapshot.
COPIED = (
    *("id", "interaction_id", "source", "agent", "category", "session", "user", "time", "answered_by"),
    *("messages", "tools", "checker"),
)
WRITTEN = ("row", "tied", "length", "trained", "split", "view", "vouched", "lesson", *COPIED)
INSERT = f"INSERT INTO rows ({', '.join(WRITTEN)}) VALUES ({', '.join('?' * len(WRITTEN))})"


def write_snapshot(folder: Path, work: Work, *, key: str, report: Mapping[str, Any]) -> None:
    """Fill `folder`, the manifest last.

    The snapshot's hash covers tokens, masks, ids and splits, so it does not depend on where the rows came from.
    """
    better_rows = {
        row for (row,) in work.all("SELECT better FROM rows WHERE better NOT NULL UNION SELECT pair FROM rows")
    }
    good: dict[int, int] = {}  # input row of a better answer: its row in the snapshot
    bad: list[tuple[int, int]] = []  # (row of the snapshot, input row of the better answer)
    digest = hashlib.sha256()
    offsets, num_bad = array("Q", [0]), 0
    with ExitStack() as stack:
        tokens_file = stack.enter_context(open(folder / "tokens.u32", "wb"))
        trained_file = stack.enter_context(open(folder / "trained.u8", "wb"))
        database = stack.enter_context(closing(sqlite3.connect(folder / ROWS_FILE, isolation_level=None)))
        database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {ROWS_SCHEMA}")
        database.execute("BEGIN")
        for number, better, values, tokens, mask in _sequences(work):
            row = len(offsets) - 1
            tokens_file.write(tokens)
            trained_file.write(mask)
            digest.update(f"{values['id']} {values['split']} {len(mask)}\n".encode())
            digest.update(tokens)
            digest.update(mask)
            offsets.append(offsets[-1] + len(mask))
            if values["split"] == BAD:
                num_bad += 1
                if better is not None:
                    bad.append((row, better))
            elif number in better_rows:
                good[number] = row  # of several views the last one, whose answer was judged
            sizes = len(mask), mask.count(1)
            database.execute(INSERT, (row, values["tied"], *sizes, *map(values.get, WRITTEN[4:])))
        for row, better in bad:
            if better in good:  # else it was left out
                pair = good[better], row
                digest.update(f"{pair}\n".encode())
                database.execute("UPDATE rows SET better = ? WHERE row = ?", pair)
        database.execute("COMMIT")
        database.execute("CREATE INDEX rows_split ON rows(split)")
    with open(folder / "offsets.u64", "wb") as file:
        offsets.tofile(file)
    counts = {name: report[name] for name in ("rows_in", "usable", "duplicates", "rejected", "set_aside")}
    extra = {
        "kind": "snapshot",
        "hash": digest.hexdigest(),
        "key": key,
        "num_rows": len(offsets) - 1,  # views: a row has several where its template rewrites earlier turns
        "num_bad": num_bad,
        "num_tokens": offsets[-1],
        "num_trained": report["trained_tokens"],
        "accounting": {
            **counts,
            "trained": report["splits"]["train"],
            "held_out": report["splits"]["validation"] + report["splits"]["test"],
        },
        "model": report["model"],
        "max_length": report["max_length"],
    }
    write_manifest(folder, extra)


def _sequences(work: Work) -> Iterator[tuple[int, int | None, dict[str, Any], bytes, bytes]]:
    """Yield (input row, row of the better answer, columns of the snapshot, tokens, mask) in input order, a worse answer
    after the better one.
    """
    query = (
        f"SELECT n, fate, coalesce(tied, n), better, pair, {', '.join(COPIED)}, vouched, lesson, tokens, mask, views,"
        " worse, worse_tokens, worse_mask FROM rows JOIN bodies USING (n)"
        " WHERE fate IN ('train', 'validation', 'test', 'for-lessons') OR pair NOT NULL ORDER BY n"
    )
    trained = "SELECT 1 FROM rows WHERE n = ? AND fate = 'train'"
    for row, fate, tied, better, pair, *found in work.all(query):
        copied, (vouched, kind, tokens, mask, views) = found[: len(COPIED)], found[len(COPIED) : -3]
        worse, worse_tokens, worse_mask = found[-3:]
        values = {**dict(zip(COPIED, copied, strict=True)), "tied": tied, "split": BAD, "view": 0, "vouched": 0}
        if fate in SPLITS:
            values |= {"split": fate, "vouched": vouched}
            if views is None:
                yield row, None, values, tokens, mask
            else:
                yield from ((row, None, *view) for view in _views(values, tokens, mask, json.loads(views)))
        elif fate == "for-lessons":
            yield row, better, {**values, "lesson": "failure" if better is None else "retry"}, tokens, mask
        if pair is not None and work.one(trained, pair):
            values |= {"split": BAD, "vouched": 0, "lesson": kind, "messages": worse}
            yield row, pair, values, worse_tokens, worse_mask


def _views(
    values: Mapping[str, Any], tokens: bytes, mask: bytes, views: Sequence[tuple[int, int, Sequence[int]]]
) -> Iterator[tuple[dict[str, Any], bytes, bytes]]:
    """Yield (columns, tokens, mask) of each view: messages up to its last answer, with weights only for its answers."""
    start = 0
    for number, (length, num_messages, answers) in enumerate(views):
        turns = json.loads(values["messages"])[:num_messages]
        for i, message in enumerate(turns):
            if message["role"] == "assistant" and i not in answers:
                message["weight"] = 0
        columns = {**values, "view": number, "messages": json.dumps(turns, ensure_ascii=False)}
        yield columns, tokens[4 * start : 4 * (start + length)], mask[start : start + length]
        start += length
