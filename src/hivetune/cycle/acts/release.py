"""Acts on the release: export, register, load, promote, watch, close; and return to the one before."""

import time
from contextlib import closing
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.sealed import write_sealed
from hivetune.cycle.acts.slices import ActContext, ends_with_window
from hivetune.cycle.decide import ending
from hivetune.cycle.ledger import REPLAY, WATCHED, end_cycle, read_replay
from hivetune.cycle.observe import did_harm, release_of
from hivetune.cycle.pool import innocent_rows, rows_of
from hivetune.errors import Busy, DoesNotFit, HivetuneError, MachineNotFit, UsageError
from hivetune.judge.frozen import freeze_wins
from hivetune.release.export import export_run
from hivetune.release.prune import Unused, delete, remove_run
from hivetune.release.registry import Release, promote, rollback
from hivetune.run import checkpoints
from hivetune.run.folder import RECORD
from hivetune.run.status import run_status
from hivetune.serve.register import register_run
from hivetune.serve.swap.wanted import load_release, loaded_labels

BY = "cycle"  # who moved an alias, in its history


WARM_S = 120.0  # how long a gateway may take to load a new release before that counts as a failure


def restore_champion(context: ActContext) -> str:
    """Restore the champion's files from its run. If that is damaged too, return to the champion before."""
    champion = context.champion()
    if champion is None:
        raise UsageError(
            f"{context.name} has no champion to restore", hint=f"run hivetune promote {context.name}@VERSION"
        )
    try:
        restored, _ = register_run(Path(champion.run), champion.name)
        if restored.label != champion.label:
            raise UsageError(f"its run now has another adapter: {champion.run}")
        restored.check()
    except (Busy, DoesNotFit, MachineNotFit):  # says nothing of the champion: it is restored when that is mended
        raise
    except HivetuneError as error:
        with closing(open_database()) as database:
            back, _ = rollback(database, champion.label, by=BY, reason=f"it is damaged: {error.message}")
        context.details["rolled_back"] = champion.label
        return f"{back.label} is the champion again: {champion.label} is damaged"
    load_release(
        restored
    )  # whole, and yet without what is served: a person has to know, and it is not tried at once again
    return f"{restored.label} was restored from its run"


def return_to_previous(context: ActContext) -> str:
    """Roll back the champion, unless the gateway, which watches too, was faster."""
    worse, champion = context.observed.desired, context.champion()
    if worse is None or champion is None or champion.label != worse:
        return f"{worse} is no longer the champion"
    with closing(open_database()) as database:
        back, withdrawn = rollback(database, worse, by=BY, reason=context.reason)
    return f"{back.label} is the champion again; {withdrawn.label} is withdrawn"


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
    """Close the cycle. Its new rows are set aside as suspect where a training without them made a better model."""
    cycle, opened = context.cycle(), context.observed.open
    assert opened is not None
    end_and_reason = ending(opened, context.config.cycle, context.observed.failed)
    assert end_and_reason is not None, "decided by what was observed"
    end, reason = end_and_reason
    trained = frozenset() if end in ("failed", "given_up") else rows_of(cycle)
    harmful = bool(trained) and did_harm(cycle, opened.passed, opened.withdrawn)
    shown = read_replay(cycle)
    with closing(open_database()) as database:
        innocent = innocent_rows(database, cycle)
        suspect = trained - innocent if harmful and shown.get("better") else frozenset()
        saved = cycle.run / checkpoints.FOLDER
        if saved.is_dir() and run_status(cycle.run).state == "done":  # first: a closed cycle is not looked at again
            delete(database, Unused("checkpoints", saved, 0, "its cycle is closed"))
        if (cycle.folder / REPLAY / RECORD).is_file():
            remove_run(database, cycle.folder / REPLAY)
        end_cycle(database, cycle, end, reason, context.now, trained=trained | innocent, suspect=suspect)
    context.details["end"] = end
    message = f"cycle {cycle.id} {end.replace('_', ' ')}: {reason}"
    if suspect:
        context.details["suspect"] = len(suspect)
        return (
            f"{message}; {len(suspect)} rows that came with it are set aside as suspect ({cycle.run}), since"
            f" {shown['words']}. The next cycle trains without them, once there is a new row"
            f" (hivetune cycle now {cycle.name}). If they are right: hivetune cycle admit {cycle.name}"
        )
    failed = context.observed.failed
    cause = f": {failed.words}" if failed is not None and failed.kind == "replay" else ""
    excuse = shown.get("words") or f"no training without them succeeded{cause}"
    return f"{message}; its rows are not blamed, since {excuse}" if harmful else message


def _needed(context: ActContext) -> Release:
    with closing(open_database()) as database:
        release = release_of(database, context.cycle())
    if release is None:
        raise HivetuneError(f"no release was registered from cycle {context.cycle().id}", hint="the act is retried")
    return release
