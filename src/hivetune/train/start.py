"""The start of a run: its folder with its plan, the training under the supervisor, and the accounting of its rows."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from hivetune import __version__
from hivetune.base.database import open_database
from hivetune.base.disk import LOCK, home, path_to_store, write_manifest
from hivetune.base.journal import read_journal
from hivetune.base.paths import real_path
from hivetune.base.private import check_owner, make_folder
from hivetune.config import RunConfig
from hivetune.data.identity import identity_hash, identity_of, refuse_other
from hivetune.data.prepare.prepare import prepare_data
from hivetune.errors import Busy, UsageError
from hivetune.machine.findings import Variable, advised_variables
from hivetune.machine.inventory import read_machine
from hivetune.machine.look import HIDING, Surroundings, look
from hivetune.machine.profile import read_profile, write_profile
from hivetune.models.architecture import read_architecture
from hivetune.models.prepared import fetch_model
from hivetune.process.launch import reach_cluster
from hivetune.records import Accounting, Progress, silent
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.run.figures import report
from hivetune.run.folder import EVENTS, RECORD, read_resolved, write_record, write_resolved
from hivetune.run.status import lock_run, run_status
from hivetune.train.open import Run, check_disk, check_eval, load_run, plan_of, with_workers
from hivetune.train.plan.memory import setup_of
from hivetune.train.plan.steps import write_plan
from hivetune.train.supervise.attempt import Terms
from hivetune.train.supervise.ladder import arithmetic_changes
from hivetune.train.supervise.supervisor import supervise_run, write_with_retries

FOR_LESSONS = "for-lessons"  # the reason in data/reasons.py
# The fields of the worker's result that `train --json` reports.
REPORTED = (
    "loss_first",
    "loss_last",
    "best",
    "adapter_step",
    "stopped_early",
    "tokens",
    "train_seconds",
    "tokens_per_second",
    "samples_per_second",
    "peak_memory_bytes",
    "path",
    "why",
    "kernels",
    "device",
    "dtype",
)


def open_run(
    config: RunConfig,
    name: str,
    progress: Progress = silent,
    on_busy: Callable[[Busy], None] | None = None,
    leave_out: Mapping[str, str] | None = None,
) -> Run:
    """Return the run of this config and these rows: the existing one, or a new one with its plan. Trains nothing.

    `on_busy` as in prepare_data: a second run on the same rows waits until the first has prepared them.

    Raises UsageError if the folder belongs to another config or other data, naming the difference, or if a new run
    could not be evaluated later; MachineNotFit if the config's cluster does not answer; DoesNotFit if the disk is too
    small.
    """
    model = fetch_model(config.model, progress, config.template)
    snapshot = prepare_data(config, model, progress, on_busy, leave_out)
    identity = identity_of(config, snapshot, model)
    settings_hash = identity_hash(identity)
    folder = real_path(config.output or home() / "runs" / f"{name}-{settings_hash[:10]}")
    if (folder / RECORD).exists():
        refuse_other(folder, identity)
        return with_workers(load_run(folder), config.workers)
    if folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
        raise UsageError(f"{folder} is not empty and not a run folder", hint="choose another output folder")
    check_eval(config.eval)  # now, not after hours of training
    plan = plan_of(config, snapshot, settings_hash)
    check_disk(folder, setup_of(read_architecture(model), config.lora.r, config.lora.target_modules, "float32"))
    if config.cluster is not None:
        reach_cluster(config.cluster)  # raised before a folder is made: no run is left that never began
    make_folder(folder)
    check_owner(folder)
    write_resolved(folder, config, Choices())
    write_plan(folder, plan)
    record = {
        "schema": 1,
        "name": name,
        "created": round(time.time(), 3),
        "hivetune": __version__,
        "model": str(model),
        "snapshot": str(snapshot.folder),
        "identity": identity,
        "status": "new",
    }
    if not folder.is_relative_to(home()):
        record["home"] = str(home())  # a copy of the home names the same folder, and may not delete it
    write_record(folder, record)
    with closing(open_database()) as database:
        database.execute(
            "INSERT OR REPLACE INTO runs (path, name, created, snapshot) VALUES (?, ?, ?, ?)",
            (path_to_store(folder), name, record["created"], snapshot.hash),
        )
    return Run(folder, config, model, snapshot, plan)


def settle_variables(run: Run, where: Surroundings | None = None) -> tuple[Variable, ...]:
    """Choose the environment variables of a run's workers once, and store them. Return the new ones."""
    with lock_run(run.folder):
        config, choices = read_resolved(run.folder)
        if checkpoints.steps(run.folder) or choices.environment is not None or config.device == "cpu":
            return ()
        # What the user has set stays, unless it is known to break or falsify a run on this card.
        advised = advised_variables(look(where or Surroundings(folder=run.folder)), keep_set=True)
        if config.device.startswith("cuda:"):  # a card that the user chose by its number among all
            advised = tuple(variable for variable in advised if variable.name not in (*HIDING, "CUDA_DEVICE_ORDER"))
        if advised:
            settled = replace(choices, environment={variable.name: variable.value for variable in advised})
            write_resolved(run.folder, config, settled)
        return advised


def train_run(run: Run, terms: Terms = Terms()) -> dict[str, Any]:
    """Train a run to its end under the supervisor. Return the document of `train --json`.

    For a finished run only the document is returned. Raises Stopped, RecoveryExhausted, Busy and other errors that end
    a run; the folder then has what was trained so far.
    """
    if run.is_finished:
        return run.summary
    for variable in settle_variables(run):
        terms.on_change(variable.words)
    outcome = supervise_run(run.folder, run.config, model=run.model, snapshot=run.snapshot.folder, terms=terms)
    run = load_run(run.folder)  # with the amendments that were made
    result = outcome.result
    # The events of the whole run: a resumed one reports what happened before, too.
    events = list(read_journal(run.folder / EVENTS))
    document = {
        "schema": 1,
        "run": str(run.folder),
        "status": outcome.status,
        "steps": outcome.steps,
        "steps_planned": len(run.plan.steps),
        "trained_tokens": result.get("trained_tokens", 0),
        "rows": asdict(account(run, outcome.steps)),
        **{key: result.get(key) for key in REPORTED},
        "restarts": sum(entry["event"] == "attempt" and entry["number"] > 1 for entry in events),
        "faults": [entry["fault"] for entry in events if entry["event"] == "failure"],
        "rungs": list(outcome.rungs),
        "arithmetic_changes": arithmetic_changes(events, outcome.rungs),
        "environment": dict(read_resolved(run.folder)[1].environment or {}),
        "quarantined": [
            f"{run.snapshot.info(row).source}: {amendment.reason}"
            for amendment in run.plan.amendments
            if amendment.until_step is None
            for row in amendment.rows
        ],
        "storage_problem": run_status(run.folder).storage_problem,
        "already_done": False,
    }

    def write() -> None:
        write_record(run.folder, {**run.record, "status": outcome.status, "result": document})
        if outcome.status == "done":
            write_manifest(run.folder, {"kind": "run"})

    # The manifest is last: a run without it is not finished, whatever its record says.
    with lock_run(run.folder):
        write_with_retries(run.folder, write, terms.on_wait)
    if outcome.status == "done":
        _remember_rate(run, result)
    for problem in report(run.folder, run.config.report_to):
        terms.on_wait(problem)
    outcome.check()
    return document


def _remember_rate(run: Run, result: Mapping[str, Any]) -> None:
    """Keep in the machine's profile what later runs may know from this one: its rate, and that its path is right."""
    profile = read_profile(read_machine().fingerprint)
    choices = read_resolved(run.folder)[1]
    rates, agreements = dict(profile.rates), dict(profile.agreements)
    if result.get("rate"):
        rates[result["rate"]["key"]] = result["rate"]["flops_per_s"]
    if choices.agreement is not None:
        agreements[choices.agreement["key"]] = choices.agreement
    write_profile(replace(profile, rates=rates, agreements=agreements))


def account(run: Run, steps_done: int) -> Accounting:
    """Return the accounting of a run (law 1): the snapshot's, with the training rows divided by their fate.

    A row of several views is quarantined if one of them is, else trained if one of them was.
    """
    accepted = run.snapshot.manifest["accounting"]
    first = run.snapshot.first_views()
    bad = {answer.row: answer.own for answer in run.snapshot.bad_rows()}
    reached = run.plan.rows_reached(steps_done)
    trained, quarantined = ({first.get(row, row) for row in rows if row not in bad} for rows in reached)
    trained -= quarantined
    # Bad rows were set aside for the lessons; a worse answer is part of the row with the better one.
    bad_trained, bad_quarantined = (sum(bad.get(row, False) for row in rows) for rows in reached)
    set_aside = dict(accepted["set_aside"])
    if bad_trained or bad_quarantined:
        set_aside[FOR_LESSONS] -= bad_trained + bad_quarantined
    return Accounting(
        rows_in=accepted["rows_in"],
        trained=len(trained) + bad_trained,
        held_out=accepted["held_out"],
        duplicates=accepted["duplicates"],
        rejected=accepted["rejected"],
        set_aside={reason: count for reason, count in set_aside.items() if count},
        quarantined=len(quarantined) + bad_quarantined,
        not_reached=accepted["trained"] - len(trained) - len(quarantined),
    )
