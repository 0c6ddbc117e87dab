"""A sweep: several runs of one config with other settings, one device each; the losers stop, the winner is judged.

The state is what lies in the run folders, and for those that stopped early `sweep.json`; the same command goes on.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hivetune.base.database import open_database
from hivetune.base.disk import home, lock, read_json, write_atomic, write_json
from hivetune.base.journal import read_journal
from hivetune.base.private import make_folder
from hivetune.cluster.carry import Teller, check_carried
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge.evaluate_run import evaluate_run
from hivetune.judge.statistics import Estimate
from hivetune.judge.verdict import judge_run, verdict_document
from hivetune.machine.inventory import Machine, read_machine
from hivetune.process.cluster import ask_cluster, own_address
from hivetune.records import Progress, silent
from hivetune.release.prune import remove_run
from hivetune.run.chart import curves_chart
from hivetune.run.folder import EVENTS, ROW_LOSSES, SUPERVISOR_LOG
from hivetune.run.status import loss_curve, run_status
from hivetune.sweep.race import LOOK_SHARES, RowLosses, above, losers
from hivetune.sweep.variants import Variant, make_variants
from hivetune.train.open import Run, load_run, open_run
from hivetune.train.queue import Going, places_of, run_queue, why_failed

RESULT, CURVES = "sweep.json", "sweep.svg"
Keep = Literal["all", "best"]


@dataclass
class Entrant:
    """A variant and its run. `stopped`: why it left the race; `failed`: why its run ended."""

    variant: Variant
    run: Run
    stopped: str = ""
    failed: str = ""

    @property
    def racing(self) -> bool:
        return not self.stopped and not self.failed

    @property
    def steps(self) -> int:
        return len(self.run.plan.steps)


@dataclass(frozen=True)
class _Field:
    """Where runs go on side by side: `places` as the queue has them, of this machine or of the cluster at `cluster`."""

    places: Sequence[Mapping[str, str]]
    cluster: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        return () if self.cluster is None else ("--on", self.cluster)


def run_sweep(
    config: RunConfig,
    name: str,
    over: Sequence[str],
    keep: Keep,
    tell: Teller,
    progress: Progress = silent,
    cluster: str | None = None,
) -> dict[str, Any]:
    """The document of `sweep --json`. `cluster`: the address of one whose devices train instead of this machine's.

    Raises UsageError for settings that can't be tried, Busy while another process sweeps the same, HivetuneError when
    every run failed, MachineNotFit for a cluster that does not answer, or has no device that can go on.
    """
    variants = make_variants(config, over)
    folder = home() / "sweeps" / f"{name}-{_hash(config, over)}"
    make_folder(folder)
    with lock(folder, hint="it is the same sweep; wait for it"):
        if (folder / RESULT).exists() and read_json(folder / RESULT)["status"] == "done":
            return {**read_json(folder / RESULT), "already_done": True}
        entrants = [_open(variant, name, number) for number, variant in enumerate(variants, 1)]
        if cluster is not None:
            for entrant in entrants:
                check_carried(entrant.run)
        _recall(folder, entrants)
        field = _field(config, cluster, read_machine(folder=folder))
        tell(f"{len(entrants)} runs, {len(field.places)} at a time")
        _race(folder, entrants, field, tell, progress)
        return _finish(folder, entrants, keep, tell)


def _field(config: RunConfig, cluster: str | None, machine: Machine) -> _Field:
    if cluster is None:
        return _Field(places_of(config, machine))
    devices = ask_cluster(cluster).devices
    if not devices:
        raise MachineNotFit(f"the cluster at {cluster} offers no device", hint="see: hivetune cluster status")
    return _Field([{}] * devices, cluster)


def _open(variant: Variant, name: str, number: int) -> Entrant:
    config = variant.config
    if config.output is not None:
        config = config.model_copy(update={"output": os.path.join(config.output, f"{number:02d}")})
    run = open_run(config, name)
    if not run.snapshot.rows("validation"):
        raise UsageError("a sweep chooses by the validation rows, and there are none", hint="set data.validation: 0.1")
    return Entrant(variant, run)


def _race(folder: Path, entrants: Sequence[Entrant], field: _Field, tell: Teller, progress: Progress) -> None:
    one_snapshot = len({entrant.run.snapshot.hash for entrant in entrants}) == 1
    if not one_snapshot:
        tell("the settings change which rows are held out: no run is stopped early")
    for share in (*(LOOK_SHARES if one_snapshot else ()), None):
        if share is not None and sum(entrant.racing for entrant in entrants) < 2:
            continue  # nobody is left to be compared with
        _forward([entrant for entrant in entrants if entrant.racing], share, field, progress)
        _note_failures(entrants, tell)
        if share is not None:
            _stop_losers(entrants, share, tell)
        _write(folder, entrants, "racing")


def _forward(entrants: Sequence[Entrant], share: float | None, field: _Field, progress: Progress) -> None:
    """All of `entrants` to their first validation from `share` of the steps on; None: to their end."""
    total = sum(entrant.steps for entrant in entrants)

    def look() -> None:
        progress(sum(run_status(entrant.run.folder).step for entrant in entrants), total)

    queue = [Going(entrant.run.folder, _pause(entrant, share)) for entrant in entrants if not _is_there(entrant, share)]
    codes = run_queue(queue, field.places, look, field.options)
    if field.cluster is not None and any(codes.values()):
        own_address(field.cluster)  # without its head a cluster ends whoever spoke to it: no run has failed
    for entrant in entrants:
        code = codes.get(entrant.run.folder, 0)
        if field.cluster is not None and code == MachineNotFit.exit_code:
            raise MachineNotFit(_last_words(entrant.run.folder), hint="mend that; the same command goes on")
        if code:
            entrant.failed = why_failed(entrant.run.folder, code)


def _last_words(run: Path) -> str:
    """Why no device of a cluster goes on with a run: the end of what its process said, hint left out."""
    text = (run / SUPERVISOR_LOG).read_text(encoding="utf-8", errors="replace")
    said = f"\n{text}".rpartition("\nhivetune: ")[2]
    return said.partition("\nhint: ")[0].strip()


def _pause(entrant: Entrant, share: float | None) -> Callable[[], bool] | None:
    return None if share is None else lambda: _is_there(entrant, share)


def _is_there(entrant: Entrant, share: float | None) -> bool:
    if entrant.run.record["status"] == "done":
        return True
    return share is not None and losses_at(entrant.run.folder, share * entrant.steps) is not None


def losses_at(run: Path, step: float) -> RowLosses | None:
    """Of the first validation at `step` or later."""
    path = run / ROW_LOSSES
    entries = read_journal(path) if path.exists() else ()
    return next((_row_losses(entry) for entry in entries if entry.get("step", -1) >= step), None)


def _last_losses(run: Path, step: int | None) -> RowLosses:
    """Of the validation at `step`; of the last one where that is None."""
    found = [entry for entry in read_journal(run / ROW_LOSSES) if step is None or entry["step"] == step]
    return _row_losses(found[-1])


def _row_losses(entry: Mapping[str, Any]) -> RowLosses:
    return RowLosses(entry["step"], dict(zip(entry["rows"], entry["nll"], strict=True)))


def _stop_losers(entrants: Sequence[Entrant], share: float, tell: Teller) -> None:
    snapshot = entrants[0].run.snapshot
    losses: dict[int, RowLosses] = {}
    for number, entrant in enumerate(entrants):
        if entrant.racing:
            at = losses_at(entrant.run.folder, share * entrant.steps)
            losses[number] = at or _last_losses(entrant.run.folder, None)
    for loser in losers(losses, *_rows_of(snapshot), looks=len(LOOK_SHARES)):
        entrant = entrants[loser.variant]
        why = f"at {share:.0%} of the steps {loser.why}"
        if entrant.run.record["status"] == "done":  # a short run may end before its process hears that it is to stop
            tell(f"{entrant.variant.label}: finished before it could be stopped; {why}")
        else:
            entrant.stopped = why
            tell(f"{entrant.variant.label}: stopped {why}")


def _rows_of(snapshot: Snapshot) -> tuple[dict[int, int], dict[int, str]]:
    """Trained tokens of each validation row, and the session that it belongs to."""
    rows = snapshot.rows("validation")
    infos = {row: snapshot.info(row) for row in rows}
    return {row: snapshot.num_trained(row) for row in rows}, {
        row: info.session or str(row) for row, info in infos.items()
    }


def _note_failures(entrants: Sequence[Entrant], tell: Teller) -> None:
    """Raises HivetuneError when none is left; the same command tries those that failed again."""
    failed = [entrant for entrant in entrants if entrant.failed]
    for entrant in failed:
        tell(f"{entrant.variant.label}: {entrant.failed}")
    if failed and not any(entrant.racing for entrant in entrants):
        others = " that was not stopped early" if len(failed) < len(entrants) else ""
        raise HivetuneError(
            f"every run{others} failed; the first: {failed[0].failed}", hint="hivetune logs RUN says more"
        )


def _finish(folder: Path, entrants: Sequence[Entrant], keep: Keep, tell: Teller) -> dict[str, Any]:
    """The winner by its best validation loss, evaluated and judged on the test rows, which chose nothing."""
    finished = [entrant for entrant in entrants if entrant.racing]
    best = min(finished, key=lambda entrant: _best(entrant)["loss"])
    tell(f"best: {best.variant.label}; evaluating it on the test rows")
    winner = load_run(best.run.folder)
    evaluate_run(winner)
    verdict = verdict_document(judge_run(winner))
    curves = {
        entrant.variant.label: [
            (step, loss) for step, loss, kind in loss_curve(entrant.run.folder) if kind == "validation"
        ]
        for entrant in entrants
    }
    chart = curves_chart(curves, title=f"{folder.name}: validation loss, nats per token", best=best.variant.label)
    write_atomic(folder / CURVES, chart.encode())
    described = _described(entrants, best)
    kinds = {kind: host for entrant in entrants for host, kind in _computed_by(entrant.run.folder).items()}
    if len(kinds) > 1:
        tell(
            f"computed by {len(kinds)} kinds of machines (such as {', '.join(sorted(kinds.values()))}): "
            "between them results are equal up to rounding, not bit for bit"
        )
    if keep == "best":
        with closing(open_database()) as database:
            for entrant in entrants:
                if entrant is not best:
                    remove_run(database, entrant.run.folder)
    document = _write(folder, entrants, "done", runs=described, best=best.variant.label, verdict=verdict, kept=keep)
    return {**document, "already_done": False}


def _best(entrant: Entrant) -> dict[str, Any]:
    best: dict[str, Any] | None = entrant.run.record["result"]["best"]
    if best is None:
        raise HivetuneError(f"{entrant.run.folder} was finished without a validation", hint="set validate_every")
    return best


def _described(entrants: Sequence[Entrant], best: Entrant) -> list[dict[str, Any]]:
    """One line of the table each, the best first."""
    one_snapshot = len({entrant.run.snapshot.hash for entrant in entrants}) == 1
    told = []
    for entrant in entrants:
        status = run_status(entrant.run.folder)
        losses = [loss for _, loss, kind in loss_curve(entrant.run.folder) if kind == "validation"]
        estimate = _above_best(entrant, best) if one_snapshot and entrant.racing and entrant is not best else None
        told.append(
            {
                "settings": list(entrant.variant.settings),
                "run": str(entrant.run.folder),
                "state": "failed" if entrant.failed else "stopped" if entrant.stopped else "done",
                "steps": status.step,
                "steps_planned": entrant.steps,
                "validation_loss": min(losses, default=None),
                "above_best": None if estimate is None else asdict(estimate),
                "machines": list(_computed_by(entrant.run.folder)),
                "why": entrant.failed or entrant.stopped,
            }
        )
    return sorted(told, key=lambda line: (line["run"] != str(best.run.folder), line["state"] != "done", _key(line)))


def _computed_by(run: Path) -> dict[str, str]:
    """The names of the machines that a run was on, in order; each with the fingerprint of what computed."""
    starts = [entry for entry in read_journal(run / EVENTS) if entry["event"] == "supervisor_started"]
    return {entry["host"]: entry["fingerprint"] for entry in starts if "host" in entry}


def _key(line: Mapping[str, Any]) -> float:
    return float("inf") if line["validation_loss"] is None else float(line["validation_loss"])


def _above_best(entrant: Entrant, best: Entrant) -> Estimate:
    one, other = (_last_losses(each.run.folder, _best(each)["step"]) for each in (entrant, best))
    return above(one, other, *_rows_of(best.run.snapshot))


def _hash(config: RunConfig, over: Sequence[str]) -> str:
    text = json.dumps([config.model_dump(mode="json"), list(over)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _recall(folder: Path, entrants: Sequence[Entrant]) -> None:
    """Who was stopped before this process began."""
    known = read_json(folder / RESULT)["runs"] if (folder / RESULT).exists() else []
    why = {line["run"]: line["why"] for line in known if line["state"] == "stopped"}
    for entrant in entrants:
        entrant.stopped = why.get(str(entrant.run.folder), "")


def _write(folder: Path, entrants: Sequence[Entrant], status: str, **more: Any) -> dict[str, Any]:
    runs = [
        {"run": str(entrant.run.folder), "state": "stopped" if entrant.stopped else "open", "why": entrant.stopped}
        for entrant in entrants
    ]
    document = {"schema": 1, "sweep": str(folder), "status": status, "runs": runs, **more}
    write_json(folder / RESULT, document)
    return document
