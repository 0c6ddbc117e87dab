"""The rows of a config by what they declare, the shared adapter and the specialists that serve beside it, and adapters
scored on the rows.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.base.journal import read_journal
from hivetune.base.private import make_folder
from hivetune.config import RunConfig
from hivetune.data.intake.files import refuse_read_once
from hivetune.data.prepare.prepare import prepare_data
from hivetune.data.snapshot import PoolRow, Snapshot
from hivetune.errors import HivetuneError, UsageError
from hivetune.models.fetch import fetch_model
from hivetune.process.parent import count_items, run_task
from hivetune.process.protocol import ScoreAdapters
from hivetune.records import Message, Progress, silent
from hivetune.release.registry import Release, find
from hivetune.routing.choose import specialists_folder
from hivetune.routing.domains import (
    KEY_KINDS,
    KeyedRow,
    KeyKind,
    RowDomain,
    choose_kind,
    declared_keys,
    domains_of,
    title_of,
)
from hivetune.routing.steps import SpecialistStep, SpecialistStepName, newest_steps, specialist_name
from hivetune.run.folder import ADAPTER, SCORES, read_resolved
from hivetune.specialists.decide import ScoredUnit
from hivetune.train.supervise.attempt import Terms


@dataclass(frozen=True)
class Attended:
    """The callbacks of a long job, for progress and for its end.

    `bar`: makes a progress callback from a label. `terms`: of every training. `between`: called between two pieces of
    work, of minutes each; it raises what ends the whole, and finished work is kept. `side_by_side`: several trainings
    may run at once, each in its own process, none of which can stand still as `terms` may ask.
    """

    bar: Callable[[str], Progress] = lambda label: silent
    terms: Terms = Terms()  # noqa: RUF009 (frozen)
    between: Callable[[], None] = lambda: None
    side_by_side: bool = True

    def training(self, label: str, steps: int) -> Terms:
        """Return the callbacks of one training, which also update its progress bar."""
        report = self.bar(label)

        def on_step(done: int) -> None:
            self.terms.on_step(done)
            report(done, steps)

        return replace(self.terms, on_step=on_step)


ALONE = Attended()  # nobody watches


@dataclass(frozen=True)
class Survey:
    """`config`: with the kind of adapter that the shared release has; `domains`: by `kind`, the largest first;
    `folder`: of what is measured of these rows and this shared adapter."""

    config: RunConfig
    shared: Release
    model: Path
    snapshot: Snapshot
    rows: tuple[KeyedRow, ...]
    kind: KeyKind | None
    domains: tuple[RowDomain, ...]
    folder: Path

    def rows_of(self, domain: RowDomain) -> list[KeyedRow]:
        return [row for row in self.rows if domain.has(row.keys)]


def shared_name(config: RunConfig) -> str:
    """Return the release whose champion is the shared adapter. Raises UsageError when the config names none."""
    name = config.experts.shared or config.cycle.name
    if name is None:
        raise UsageError(
            "experts.shared names no release",
            hint="hivetune register RUN --as NAME; hivetune promote NAME@1; then set experts.shared: NAME",
        )
    return name


def read_survey(config: RunConfig, progress: Progress = silent) -> Survey:
    """Read the rows of the config by their declarations.

    Raises UsageError when there is no shared adapter or when it is of another base, DataRefused for rows that can't be
    used.
    """
    with closing(open_database()) as database:
        shared = find(database, shared_name(config))
    shared.check()
    refuse_read_once(config.data.path)
    model = fetch_model(config.model, progress)
    if sha256_file(model / MANIFEST) != shared.model_sha256:
        raise UsageError(
            f"{shared.label} was trained on another base model than the present {config.model}",
            hint=f"first train the shared adapter on {config.model}",
        )
    theirs = read_resolved(shared.folder)[0]
    lora = theirs.lora.model_copy(update={"start": None})
    config = config.model_copy(update={"lora": lora, "method": theirs.method})
    snapshot = prepare_data(config, model, progress)
    rows, titles = _rows_of(snapshot)
    kind = choose_kind(rows, config.experts.by)
    if kind is not None and not any(kind in row.keys for row in rows):
        others = [k for k in KEY_KINDS if any(k in row.keys for row in rows)]
        raise UsageError(
            f"experts.by is {kind}, and none of {len(rows)} rows declares one",
            hint=f"rows declare {', '.join(others) or 'nothing that makes a domain'}; set experts.by to auto"
            f" or to what they declare, or write the {kind} into the rows",
        )
    domains = () if kind is None else tuple(domains_of(rows, kind, titles))
    key = hashlib.sha256(f"{snapshot.hash} {shared.adapter_sha256} {kind}".encode()).hexdigest()[:12]
    folder = specialists_folder(shared.name) / key
    make_folder(folder)
    return Survey(config, shared, model, snapshot, tuple(rows), kind, domains, folder)


def _rows_of(snapshot: Snapshot) -> tuple[list[KeyedRow], dict[str, str]]:
    """Return every row of the input, and texts for keys that are hashes."""
    rows, titles = [], {}
    for row in snapshot.pool():
        info = snapshot.info(row.numbers[0])
        system = next((message.content for message in info.messages if message.role == "system"), None)
        tools = [str(tool.get("function", tool).get("name", "")) for tool in info.tools]
        keys = declared_keys(info.agent, info.category, system, tools)
        for kind in ("system", "tools"):
            if kind in keys and keys[kind] not in titles:
                titles[keys[kind]] = title_of(kind, system, tools)
        rows.append(_row(row, info.session, keys, info.messages))
    return rows, titles


def _row(row: PoolRow, session: str | None, keys: dict[str, str], messages: Sequence[Message]) -> KeyedRow:
    question = next((message.content for message in reversed(messages) if message.role == "user"), "")
    return KeyedRow(row.id, row.split, session or row.id, row.numbers, keys, question)


# A score is computed once: it is kept by the hash of its adapter, beside the base that it was computed with.


@dataclass(frozen=True)
class Serving:
    """A specialist that answers now: its domain, its champion, and the hash of the shared adapter it was last compared
    with.
    """

    domain: RowDomain
    release: Release
    parent: str


def serving(survey: Survey) -> tuple[dict[str, Serving], list[str]]:
    """Return the specialists of the shared release by name, and problems: specialists that can't serve or serve
    unchecked.
    """
    specialists, problems = {}, []
    with closing(open_database()) as database:
        for name, step in newest_steps(database, survey.shared.name).items():
            if step.step != "serving":
                continue
            try:
                release = find(database, name)
                release.check()
            except HivetuneError as error:
                problems.append(f"{name} can't serve, the shared adapter answers: {error.message}")
                continue
            if release.model_sha256 != survey.shared.model_sha256:
                problems.append(f"{name} is of another base than {survey.shared.label}, which answers instead")
                continue
            specialists[name] = Serving(step.domain, release, step.parent)
    problems += [
        f"{name} answers unchecked: no test row declares {specialists[name].domain.label} any more. Keep it, bring its"
        f" rows back, or take it out of service: hivetune registry retire {name}"
        for name in unchecked(survey.rows, specialists)
    ]
    return specialists, problems


def unchecked(rows: Sequence[KeyedRow], specialists: Mapping[str, Serving]) -> list[str]:
    """Return the specialists whose domain has no test row: what becomes of them is a person's choice."""
    tests = [row.keys for row in rows if row.split == "test"]
    return [name for name, s in specialists.items() if not any(map(s.domain.has, tests))]


def scored_rows(
    survey: Survey,
    adapters: Mapping[str, Path],
    rows: Sequence[KeyedRow],
    *,
    model: Path | None = None,
    progress: Progress = silent,
) -> list[ScoredUnit]:
    """Return the nats of each of `rows` with each adapter, in their order; see `scored_parts`."""
    return scored_parts(survey, [(adapters, rows)], model=model, progress=progress)[0]


def scored_parts(
    survey: Survey,
    parts: Sequence[tuple[Mapping[str, Path], Sequence[KeyedRow]]],
    *,
    model: Path | None = None,
    progress: Progress = silent,
) -> list[list[ScoredUnit]]:
    """Return for each part the nats of its rows with each of its adapters, all computed by one child.

    `model`: another form of the base, such as the quantized one that is served. A loss that is not finite is not a
    number here. Raises the errors of a child; a scoring that was killed continues where it was.
    """
    base = model or survey.model
    settings = [sha256_file(base / MANIFEST), survey.config.dtype, survey.config.device]
    folder = survey.folder / "scores" / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    scores = _known_scores(folder / SCORES)
    hashes = {path: sha256_file(path / ADAPTER) for adapters, _ in parts for path in adapters.values()}
    missing: dict[str, set[int]] = {}
    for adapters, rows in parts:
        for path in adapters.values():
            numbers = {number for row in rows for number in row.numbers}
            missing.setdefault(hashes[path], set()).update(n for n in numbers if (hashes[path], n) not in scores)
    by_adapter = {sha: tuple(sorted(numbers)) for sha, numbers in missing.items() if numbers}
    if by_adapter:
        folders = {sha: path for path, sha in hashes.items() if sha in by_adapter}
        config = survey.config
        task = ScoreAdapters(
            model=base,
            adapters=folders,
            snapshot=survey.snapshot.folder,
            scores=folder / SCORES,
            rows=by_adapter,
            like=survey.shared.folder,
            dtype=config.dtype,
            device=config.device,
        )
        beats = count_items(progress, sum(map(len, by_adapter.values())))
        run_task(task, folder, on_beat=beats).check("scoring the adapters")
        scores = _known_scores(folder / SCORES)
    return [
        [_unit(row, {name: hashes[path] for name, path in adapters.items()}, scores) for row in rows]
        for adapters, rows in parts
    ]


def _known_scores(scores: Path) -> dict[tuple[str, int], tuple[float, int]]:
    """Return (hash of the adapter, row) -> (nats, tokens)."""
    return {
        (line["model"], line["row"]): (math.nan if line["nll"] is None else line["nll"], line["tokens"])
        for line in (read_journal(scores) if scores.exists() else ())
        if line["event"] == "loss"
    }


def _unit(row: KeyedRow, names: Mapping[str, str], scores: Mapping[tuple[str, int], tuple[float, int]]) -> ScoredUnit:
    """Sum the views of one row of the input."""
    nats = {name: math.fsum(scores[sha, number][0] for number in row.numbers) for name, sha in names.items()}
    sha = next(iter(names.values()))
    return ScoredUnit(row.group, sum(scores[sha, number][1] for number in row.numbers), nats)


def step_of(
    survey: Survey, domain: RowDomain, step: SpecialistStepName, reason: str, details: dict[str, Any] | None = None
) -> SpecialistStep:
    shared = survey.shared
    facts = {"shared": shared.label, "snapshot": survey.snapshot.hash, **(details or {})}
    return SpecialistStep(
        shared.name, domain, step, reason, specialist_name(shared.name, domain), shared.adapter_sha256, facts
    )
