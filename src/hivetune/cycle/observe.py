"""The observation: the artefacts of a cycle, the registry, the rows, the machine. It changes nothing but the snapshot
of the rows, which is found or made."""

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, home, sha256_file
from hivetune.config import RunConfig, parse_config
from hivetune.cycle import ledger
from hivetune.cycle.decide import STATIONS, Observation, OpenCycle, Permission, Station
from hivetune.cycle.ledger import gate_of, read_replay
from hivetune.cycle.pool import LookCache, cycle_id, read_rows_now
from hivetune.cycle.window import InUse, allowed_now, local_zone, parse_window
from hivetune.errors import HivetuneError, UsageError
from hivetune.models.prepared import folder_for
from hivetune.release.registry import ADAPTER_EXPORT, Release, champion_of, desired, forgotten_rows, history, releases
from hivetune.run.folder import ADAPTER, CONFIG, EVALUATION, EXPORTS, RECORD, adapter_hash, read_record, read_resolved
from hivetune.serve.swap.wanted import loaded_labels, wanted
from hivetune.serve.swap.watch import ReleaseCounts, read_service, regression_reason, watched_pair


def observe(config: RunConfig, name: str, known: LookCache, now: float, in_use: InUse | None = None) -> Observation:
    """Return everything that a decision rests on. Raises Busy and DoesNotFit where hive.db can't be used now."""
    settings, folder = config.cycle, ledger.loop_folder(name)
    with closing(open_database()) as database:
        cycles, acts = ledger.cycles_of(database, name), ledger.acts_of(database, name)
        champion = champion_of(database, name)
        wants = desired(database).get(name)
        served, problem = None, ""
        if wants is not None:
            state = wanted(database, (name,), known.checks)
            served, problem = state.champions.get(name), "; ".join(state.problems)
        opened = next((cycle for cycle in cycles if cycle.closed is None), None)
        requested = (folder / ledger.NOW).exists()
        label = None if wants is None else f"{name}@{wants}"
        common = Observation(
            paused=(folder / ledger.PAUSED).exists(),
            desired=label,
            served=served,
            problem=problem,
            watch_failed=_watch_failed(database, name, settings.watch, now),
            asked=requested,
            failed=ledger.last_failure(acts, opened.id if opened and served == label else None),
        )
        if served != label:  # it comes first, whatever else is there; and what is damaged can't be read
            return common
        if opened is not None:
            used = spent([act for act in acts if act.cycle == opened.id])
            seen = _artefacts(database, opened, rivals_of(database, name), used)
            trains = settings.hours is not None and "train" not in seen.done  # other stations have no budget
            left = max(0.0, (settings.hours or 0.0) - used[0]) if trains else None
            by_person = opened.opened_for == "request"
            return replace(common, open=seen, allowed=allowed_at(config, now, in_use, left=left, asked=by_person))
        forgotten = forgotten_behind(database, name, champion.folder, champion.snapshot) if champion is not None else 0
        rows = read_rows_now(config, database, name, champion, known)
        suspect = ledger.suspect_rows(database, name)
    times, failed_at = ledger.failed_in_a_row(cycles)
    identity = cycle_id(rows.snapshot, suspect, config, champion) if rows.snapshot is not None else ""
    before = next((cycle for cycle in cycles if cycle.id == identity), None)
    newest = max((cycle.opened for cycle in cycles), default=None)
    trained_hours, trained_kwh = spent(acts)  # on this machine: what an hour takes
    predicted_kwh = None
    if rows.hours is not None and trained_hours and trained_kwh:
        predicted_kwh = rows.hours * trained_kwh / trained_hours
    return replace(
        common,
        forgotten_rows=forgotten,
        known=before is not None and before.end != "failed",
        new_groups=rows.groups,
        unusable=rows.problem,
        failed_cycles=times,
        failed_at=failed_at,
        allowed=allowed_at(config, now, in_use, newest=newest, left=settings.hours, asked=requested),
        predicted_hours=rows.hours,
        predicted_kwh=predicted_kwh,
        disk_free_bytes=shutil.disk_usage(home()).free,
        disk_needed_bytes=rows.disk_bytes,
    )


def _watch_failed(database: sqlite3.Connection, name: str, hours: float, now: float) -> str:
    """Return why the watched champion is worse than the previous one, if there is one to return to."""
    pair = watched_pair(database, name)
    since = max((move.time for move in history(database, name) if move.alias == "champion"), default=0.0)
    if pair is None or now > since + hours * 3600:
        return ""
    newest, before = pair
    services = [read_service(database, release.label, newest=release is before) for release in (before, newest)]
    if loaded_labels(name) is not None:  # the gateway lives, and judges its counts with what it knows of the traffic
        services = [replace(service, counts=ReleaseCounts()) for service in services]
    return regression_reason(*services)


@dataclass(frozen=True)
class Rivals:
    """The releases that a candidate is compared with besides the base. `best`: the best ever, where that is not the
    champion and its files are there."""

    champion: Release | None = None
    best: Release | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(rival.label for rival in (self.champion, self.best) if rival is not None)


def rivals_of(database: sqlite3.Connection, name: str) -> Rivals:
    """Return the champion of a name and the best release ever, which was the champion, whoever promoted it."""
    champion = champion_of(database, name)
    if champion is None:
        return Rivals()
    champions = {move.version for move in history(database, name) if move.alias == "champion"}
    for cycle in reversed(ledger.cycles_of(database, name)):
        release = release_of(database, cycle)
        if release is None or release.withdrawn or release.pruned or release.version not in champions:
            continue
        try:
            if forgotten_behind(database, name, release.folder, release.snapshot):
                continue  # nobody has to be as good as what knows the forgotten
        except UsageError:  # damaged: nothing can be held against it
            continue
        if gate_of(cycle).get("becomes_best"):
            return Rivals(champion, release if release.label != champion.label else None)
    return Rivals(champion)


def forgotten_behind(database: sqlite3.Connection, name: str, folder: Path, snapshot: str) -> int:
    """Return at least how many forgotten rows the weights of a run or release have seen: its own rows, and those of the
    adapters that it was trained from."""
    by_folder: dict[str | None, Release] = {str(release.folder): release for release in releases(database, name)}
    count = forgotten_rows(database, snapshot)
    while (folder / CONFIG).is_file() and (start := read_resolved(folder)[0].lora.start) in by_folder:
        before = by_folder.pop(start)
        count += forgotten_rows(database, before.snapshot)
        folder = before.folder
    return count


def release_of(database: sqlite3.Connection, cycle: ledger.CycleRow) -> Release | None:
    """Return the release that was registered from a cycle's run."""
    run = cycle.run.resolve()  # a release may be known by a name of the home that led through a link
    return next((release for release in releases(database, cycle.name) if Path(release.run).resolve() == run), None)


def settings_then(cycle: ledger.CycleRow) -> RunConfig:
    """Return the config that a cycle was opened with. A later change counts for the next cycle."""
    return parse_config(cycle.config, f"cycle {cycle.id}")


def spent(acts: Iterable[ledger.Act]) -> tuple[float, float]:
    """Return hours and kWh of training in these acts."""
    slices = [act.details for act in acts if act.kind in ("train", "replay")]
    return sum(details.get("hours", 0.0) for details in slices), sum(details.get("kwh", 0.0) for details in slices)


def allowed_at(
    config: RunConfig,
    now: float,
    in_use: InUse | None,
    *,
    newest: float | None = None,
    left: float | None = None,
    asked: bool = False,
) -> Permission:
    """Return what the window says. `newest`: when the newest cycle was opened, if none is. `left`: budget hours."""
    window = parse_window(config.cycle.window)
    return allowed_now(window, now, local_zone(), opened_s=newest, left_hours=left, in_use=in_use, asked=asked)


def _artefacts(
    database: sqlite3.Connection, cycle: ledger.CycleRow, rivals: Rivals, used: tuple[float, float]
) -> OpenCycle:
    """Return the stations of an open cycle whose artefact exists."""
    release = release_of(database, cycle)
    stations: set[Station] = set()
    passed, promoted_at = None, 0.0
    past = [move for move in history(database, cycle.name) if move.alias == "champion"]
    if release is not None:
        stations |= set(STATIONS[: STATIONS.index("register") + 1]) - {"evaluate", "gate"}
        if _is_beside(cycle, release.adapter_sha256, rivals):
            stations.add("evaluate")
        loaded = loaded_labels(cycle.name)
        # The first release of a name is loaded when it is promoted.
        if rivals.champion is None or loaded is None or release.label in loaded:
            stations.add("warm")
        moves = [move.time for move in past if move.version == release.version]
        if moves:
            stations |= {"evaluate", "gate", "warm", "promote"}
            passed, promoted_at = True, max(moves)
    else:
        stations |= _of_run(cycle, rivals)
    if "promote" not in stations:
        gate = gate_of(cycle)
        if gate.get("rivals") == list(rivals.labels):  # judged against those of now
            passed = bool(gate["passed"])
            stations.add("gate")
    if (cycle.folder / ledger.WATCHED).exists():
        stations.add("watch")
    withdrawn = release.withdrawn if release is not None else ""
    return OpenCycle(
        id=cycle.id,
        opened_for=cycle.opened_for,
        done=frozenset(stations),
        passed=passed,
        void=_void(database, cycle),
        withdrawn=withdrawn,
        spent_hours=round(used[0], 6),
        promoted_at=promoted_at,
        replay_due=did_harm(cycle, passed, withdrawn) and not read_replay(cycle),
        retired=bool(past) and past[-1].version is None,
    )


def _of_run(cycle: ledger.CycleRow, rivals: Rivals) -> set[Station]:
    """Return the stations whose artefacts the run's folder has, up to the first gap."""
    run = cycle.run
    if not (run / RECORD).exists() or not Path(read_record(run).get("snapshot", "")).is_dir():
        return set()
    stations: set[Station] = {"snapshot"}
    if read_record(run)["status"] != "done" or not (run / ADAPTER).is_file():
        return stations
    try:
        adapter = adapter_hash(run)
    except HivetuneError:  # damaged after it was trained: training again makes the same one
        return stations
    stations.add("train")
    evaluated = ledger.read_document(run / EVALUATION).get("adapter_sha256") == adapter
    if evaluated and _is_beside(cycle, adapter, rivals):
        stations.add("evaluate")
    export = run / EXPORTS / ADAPTER_EXPORT / MANIFEST
    if export.exists() and ledger.read_document(export).get("adapter_sha256") == adapter:
        stations.add("export")
    return stations


def _is_beside(cycle: ledger.CycleRow, adapter: str, rivals: Rivals) -> bool:
    """Return whether the adapter was evaluated beside each rival of now."""
    files = ((rivals.champion, ledger.AGAINST_CHAMPION), (rivals.best, ledger.AGAINST_BEST))
    return all(rival is None or is_evaluation_of(cycle.folder / file, adapter, rival) for rival, file in files)


def is_evaluation_of(path: Path, adapter: str, rival: Release) -> bool:
    """Return whether an evaluation is whole, of this adapter, and against this rival."""
    document = ledger.read_document(path)
    return (document.get("adapter_sha256"), document.get("rival")) == (adapter, rival.label)


def looks_at(database: sqlite3.Connection, name: str, rivals: Rivals) -> int:
    """Return how many candidates of closed cycles were judged against this champion, whichever they began under."""
    gates = [gate_of(cycle) for cycle in ledger.cycles_of(database, name) if cycle.closed is not None]
    champion = [] if rivals.champion is None else [rivals.champion.label]
    return sum("rivals" in gate and gate["rivals"][:1] == champion for gate in gates)


def did_harm(cycle: ledger.CycleRow, passed: bool | None, withdrawn: str) -> bool:
    """Return whether the model was shown to be worse than the champion: in service, or beyond the tolerance on rows
    that are older than it. A model that was merely not better, or lacks evidence, is no proof against its rows."""
    against_best = gate_of(cycle).get("parts", {}).get("best", {})
    aborted = passed is False and against_best.get("verdict") == "abort"
    return cycle.champion is not None and (bool(withdrawn) or aborted)


def _void(database: sqlite3.Connection, cycle: ledger.CycleRow) -> str:
    """Return why an open cycle must not continue, or ""."""
    if not (cycle.run / RECORD).exists():
        return ""
    identity = read_record(cycle.run).get("identity", {})
    forgotten = forgotten_behind(database, cycle.name, cycle.run, identity.get("snapshot", ""))
    if forgotten:
        return f"{forgotten} of its rows were forgotten"
    manifest = folder_for(settings_then(cycle).model) / MANIFEST
    if manifest.exists() and sha256_file(manifest) != identity.get("model"):
        return "the base model was changed after it began"
    return ""
