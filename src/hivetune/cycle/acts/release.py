"""Acts on the release: export, register, load, promote, watch, close; and return to the one before."""

import time
from collections.abc import Set
from contextlib import closing
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, read_json
from hivetune.base.sealed import write_sealed
from hivetune.cycle.acts.context import ActContext, ends_with_window
from hivetune.cycle.decide import CycleEnd, ending
from hivetune.cycle.ledger import WATCHED, CycleRow, RowsOfCycle, end_cycle
from hivetune.cycle.observe import gate_of, release_of
from hivetune.cycle.pool import rows_behind
from hivetune.data.identity import differing_settings
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import Busy, DoesNotFit, HivetuneError, MachineNotFit, UsageError
from hivetune.judge.frozen import freeze_wins
from hivetune.release.export import export_run
from hivetune.release.prune import Unused, delete
from hivetune.release.registry import Release, promote, releases, rollback
from hivetune.run import checkpoints
from hivetune.run.folder import read_record
from hivetune.run.status import run_status
from hivetune.serve.register import register_run
from hivetune.serve.swap.wanted import load_release, loaded_labels

BY = "cycle"  # who moved an alias, in its history


ROW_SETTINGS = ("data.path", "data.leave_out")  # which rows, not how they are trained
SAME_ROWS = 0.95  # of the champion's rows that a replay has too: a few are forgotten or above a share each night
WARM_S = 120.0  # how long a gateway may take to load a new release before that counts as a failure


def restore_champion(context: ActContext) -> str:
    """Restore the champion's files from its run. If that is damaged too, return to the champion before."""
    champion = context.champion()
    if champion is None:
        raise UsageError(f"{context.name} has no champion to restore", hint=f"hivetune promote {context.name}@VERSION")
    try:
        again, _ = register_run(Path(champion.run), champion.name)
        if again.label != champion.label:
            raise UsageError(f"its run holds another adapter now: {champion.run}")
        again.check()
    except (Busy, DoesNotFit, MachineNotFit):  # says nothing of the champion: it is restored when that is mended
        raise
    except HivetuneError as error:
        with closing(open_database()) as database:
            back, _ = rollback(database, champion.label, by=BY, reason=f"it is damaged: {error.message}")
        return f"{back.label} is the champion again: {champion.label} is damaged"
    load_release(
        again
    )  # whole, and yet without what is served: a person has to know, and it is not tried at once again
    return f"{again.label} was restored from its run"


def return_to_previous(context: ActContext) -> str:
    """Roll back the champion, unless the gateway, which watches too, was faster."""
    worse, champion = context.observed.desired, context.champion()
    if worse is None or champion is None or champion.label != worse:
        return f"{worse} is not the champion any more"
    with closing(open_database()) as database:
        back, gone = rollback(database, worse, by=BY, reason=context.reason)
    return f"{back.label} is the champion again; {gone.label} is withdrawn"


def export_adapter(context: ActContext) -> str:
    return str(export_run(context.run().folder, "gguf-adapter", progress=ends_with_window(context, "exporting")).path)


def register_candidate(context: ActContext) -> str:
    release, _ = register_run(context.run().folder, context.name)
    return f"{release.label} is registered"


def wait_until_loaded(context: ActContext) -> str:
    """Wait until the gateway has loaded the release beside the champion."""
    release = _needed(context)
    deadline = time.monotonic() + WARM_S
    while True:
        loaded = loaded_labels(context.name)
        if loaded is None or release.label in loaded:
            return f"{release.label} is loaded" if loaded is not None else "no gateway runs"
        if time.monotonic() > deadline:
            raise MachineNotFit(f"the gateway has not loaded {release.label}", hint="its /health says why")
        time.sleep(0.25)


def promote_candidate(context: ActContext) -> str:
    release = _needed(context)
    with closing(open_database()) as database:
        promoted = promote(database, release.label, by=BY, reason=f"cycle {context.cycle().id}")
    return f"{promoted.label} is the champion"


def end_watch(context: ActContext) -> str:
    """End the watch and freeze the release's right answers as questions that no later candidate may lose."""
    freeze_wins(_needed(context))
    write_sealed(context.cycle().folder / WATCHED, {"schema": 1, "time": context.now})
    return "the watch is over"


def close_cycle(context: ActContext) -> str:
    """Close the cycle. Rows that came with a worse model are set aside as suspect, where nothing else explains it."""
    cycle = context.cycle()
    assert context.observed.open is not None
    end_and_reason = ending(context.observed.open, context.config.cycle, context.observed.failed)
    assert end_and_reason is not None, "decided by what was observed"
    end, reason = end_and_reason
    trained = frozenset() if end in ("failed", "given_up") else _rows_of(cycle)
    with closing(open_database()) as database:
        before = next((release for release in releases(database, cycle.name) if release.label == cycle.champion), None)
        innocent = frozenset() if before is None else rows_behind(database, before)
        harmful = before is not None and _did_harm(cycle, end)
        excuse = _why_no_replay(cycle, before, trained, innocent) if harmful and before is not None else ""
        suspect = trained - innocent if harmful and not excuse else frozenset()
        saved = cycle.run / checkpoints.FOLDER
        if saved.is_dir() and run_status(cycle.run).state == "done":  # first: a closed cycle is not looked at again
            delete(database, Unused("checkpoints", saved, 0, "its cycle is closed"))
        end_cycle(database, cycle, end, reason, context.now, RowsOfCycle(trained | innocent, suspect))
    context.details["end"] = end
    words = f"cycle {cycle.id} {end.replace('_', ' ')}: {reason}"
    if harmful and excuse:
        words += f"; its rows are not blamed, since {excuse}"
    if not suspect:
        return words
    context.details["suspect"] = len(suspect)
    return (
        f"{words}; {len(suspect)} rows that came with it are set aside as suspect ({cycle.run})."
        " No training without them was tried: the next cycle does that, once there is a new row"
        f" (hivetune cycle now {cycle.name}). If they are right: hivetune cycle admit {cycle.name}"
    )


def _did_harm(cycle: CycleRow, end: CycleEnd) -> bool:
    """Return whether the model was shown to be worse: in service, or beyond the tolerance on rows that are older than
    it. One that only was not better, or that lacks evidence, says nothing against its rows."""
    if end == "rolled_back":
        return True
    against_best = gate_of(cycle).get("parts", {}).get("best", {})
    return end == "refused" and bool(against_best.get("verdict") == "abort")


def _why_no_replay(cycle: CycleRow, champion: Release, trained: Set[str], innocent: Set[str]) -> str:
    """Return why the champion is no replay of the cycle's training without its new rows, or "" where it is one.

    A worse model speaks against its rows only beside one that was trained alike without them. `trained`: rows of the
    cycle. `innocent`: those that the champion was made with.
    """
    identity = read_record(cycle.run)["identity"]
    if champion.model_sha256 != identity["model"]:
        return "the champion is of another base model"
    try:
        theirs = read_json(champion.folder / MANIFEST)["settings"]
    except FileNotFoundError:
        return "the champion's settings are gone"
    differences = differing_settings(theirs, identity["settings"])
    others = [words for key, words in differences.items() if key not in ROW_SETTINGS]
    if others:
        return f"the champion was trained otherwise ({'; '.join(others)})"
    if identity["settings"].get("max_steps") is not None:
        return "max_steps is set, so that each row was read less often beside more rows"
    if len(innocent - trained) > (1 - SAME_ROWS) * len(innocent):
        return f"{len(innocent - trained)} of the champion's {len(innocent)} rows were left out"
    return ""


def _rows_of(cycle: CycleRow) -> frozenset[str]:
    """Return the ids of the rows that the run trained on or held out, or all rows of its pool where the run is gone."""
    try:
        return frozenset(row.id for row in open_snapshot(Path(read_record(cycle.run)["snapshot"])).pool())
    except (UsageError, KeyError):
        return frozenset(row.id for row in open_snapshot(Path(cycle.pool)).pool())


def _needed(context: ActContext) -> Release:
    with closing(open_database()) as database:
        release = release_of(database, context.cycle())
    if release is None:
        raise HivetuneError(f"no release was registered from cycle {context.cycle().id}", hint="the act is retried")
    return release
