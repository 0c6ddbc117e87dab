"""A sweep: several runs of one config with other settings, one device each. Losers stop early, the winner is judged.

Its state is the run folders, and `sweep.json` for the runs that stopped early. The same command continues from there.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hivetune.base.database import open_database
from hivetune.base.disk import home, lock, read_json, write_atomic, write_json
from hivetune.base.journal import read_journal
from hivetune.base.private import make_folder
from hivetune.cluster.carry import Teller, check_carried
from hivetune.config import RunConfig, override_config
from hivetune.data.identity import identity_hash
from hivetune.data.intake.files import refuse_read_once
from hivetune.data.snapshot import Snapshot
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge.compare import evaluate_run
from hivetune.judge.gate import judge_run, verdict_document
from hivetune.judge.statistics import ALPHA, Estimate, by_group, jackknife
from hivetune.machine.inventory import read_machine
from hivetune.process.cluster import ask_cluster, own_address
from hivetune.records import Progress, silent
from hivetune.release.prune import remove_run
from hivetune.run.folder import EVENTS, ROW_LOSSES, SUPERVISOR_LOG
from hivetune.run.page import curves_chart
from hivetune.run.status import loss_curve, run_status
from hivetune.train.open import Run, load_run
from hivetune.train.queue import Going, failure_text, run_queue, slots_of
from hivetune.train.start import open_run, prepare_run

RESULT, CURVES = "sweep.json", "sweep.svg"
Keep = Literal["all", "best"]


# Variants: every combination of the values that `--over` gives.

MAX_VARIANTS = 64


@dataclass(frozen=True)
class Variant:
    """One combination of settings. `settings`: `a.b=c` each, in the order of `--over`; `label` joins them."""

    settings: tuple[str, ...]
    config: RunConfig

    @property
    def label(self) -> str:
        return " ".join(self.settings)


def make_variants(config: RunConfig, over: Sequence[str]) -> list[Variant]:
    """Return a variant for each combination of `over` (`a.b=c,d`; brackets and quotes hold commas)."""
    if not over:
        raise UsageError("a sweep needs settings to try", hint="for example --over learning_rate=1e-4,2e-4 lora.r=8,16")
    axes = []
    for text in over:
        key, equals, values = text.partition("=")
        parts = _parts(values)
        if not equals or not key or not all(parts):
            hint = "for example --over learning_rate=1e-4,2e-4"
            raise UsageError(f"--over {text}: not of the form a.b=c,d", hint=hint)
        if len(set(parts)) < len(parts):
            raise UsageError(f"--over {text}: a value is listed twice")
        axes.append([f"{key}={value}" for value in parts])
    keys = [values[0].partition("=")[0] for values in axes]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UsageError(f"--over {twice} is given twice", hint=f"name all its values at once: {twice}=A,B")
    refused = next((key for key in keys if key == "output" or key.startswith(("supervise.", "cycle."))), None)
    if refused is not None:
        raise UsageError(f"--over {refused} does not change the training", hint="try settings of the training")
    combinations = list(itertools.product(*axes))
    if len(combinations) > MAX_VARIANTS:
        raise UsageError(f"{len(combinations)} combinations, at most {MAX_VARIANTS}", hint="name fewer values")
    return [Variant(settings, override_config(config, settings, "--over")) for settings in combinations]


def _parts(values: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
            if letter == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


# The race: successive halving (Jamieson and Talwalkar, AISTATS 2016), stopped by evidence (Maron and Moore, NIPS 1993).
# At a quarter and at a half of the steps the worse half is compared with the leader. A run stops when its loss on the
# validation rows is shown to be higher, row by row on the same rows.

# All runs that are left after the last of these shares of the steps go on to their end.
LOOK_SHARES = (0.25, 0.5)


# The nll of each row at one validation, in nats. Rows have their numbers in the snapshot.
RowLosses = Mapping[int, float]


@dataclass(frozen=True)
class Loser:
    """A variant that stops. `worse`: how many nats per token it is above the leader, with the interval."""

    variant: int
    leader: int
    worse: Estimate

    @property
    def why(self) -> str:
        assert self.worse.ci95 is not None
        low, high = self.worse.ci95
        return f"{self.worse.value:+.3f} nats a token ({low:+.3f} to {high:+.3f}) above the leader"


def losers(
    losses: Mapping[int, RowLosses], tokens: Mapping[int, int], groups: Mapping[int, Hashable], *, looks: int
) -> list[Loser]:
    """Return the variants that stop now, among the variants still in the race.

    `tokens`: trained tokens of each validation row; `groups`: the session of each row; `looks`: how many comparisons
    over time there are in all. They and the variants share the level of an interval (Bonferroni).
    """
    rows = sorted(set.intersection(*map(set, losses.values()))) if losses else []
    total = sum(tokens[row] for row in rows)
    if len(losses) < 2 or not total:
        return []
    loss = {variant: math.fsum(nll[row] for row in rows) / total for variant, nll in losses.items()}
    ranked = sorted(loss, key=lambda variant: (loss[variant], variant))
    leader, worse_half = ranked[0], ranked[math.ceil(len(ranked) / 2) :]
    alpha = ALPHA / (looks * len(worse_half))
    stopping = []
    for variant in worse_half:
        estimate = above(losses[variant], losses[leader], tokens, groups, alpha=alpha)
        if estimate.ci95 is not None and estimate.ci95[0] > 0:
            stopping.append(Loser(variant, leader, estimate))
    return stopping


def above(
    first: RowLosses,
    second: RowLosses,
    tokens: Mapping[int, int],
    groups: Mapping[int, Hashable],
    *,
    alpha: float = ALPHA,
) -> Estimate:
    """Return the nats per token of `first` less those of `second`, on the rows of both."""
    rows = sorted(set(first) & set(second))
    columns = [[first[row] - second[row] for row in rows], [float(tokens[row]) for row in rows]]
    return jackknife(by_group(columns, [groups[row] for row in rows]), lambda sums: sums[0] / sums[1], alpha=alpha)


@dataclass
class Entrant:
    """A variant and its run. `stopped`: why it left the race; `failed`: why its run failed."""

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


# The devices that train side by side, as the queue has them.
_Places = Sequence[Mapping[str, str]]


def run_sweep(
    config: RunConfig,
    name: str,
    over: Sequence[str],
    keep: Keep,
    tell: Teller,
    progress: Progress = silent,
    cluster: str | None = None,
) -> dict[str, Any]:
    """Run a sweep to its end and return the document of `sweep --json`.

    `cluster`: the address of a cluster whose devices train instead of this machine's.

    Raises UsageError for settings that can't be tried, Busy while another process sweeps the same, HivetuneError when
    every run failed, MachineNotFit for a cluster that does not answer, or has no suitable device.
    """
    variants = make_variants(config, over)
    refuse_read_once(config.data.path)
    trainings = _trainings(variants)
    text = json.dumps([config.model_dump(mode="json"), list(over), trainings], sort_keys=True)
    folder = home() / "sweeps" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    make_folder(folder)
    with lock(folder, hint="it is the same sweep; wait for it"):
        if (folder / RESULT).exists() and (document := read_json(folder / RESULT))["status"] == "done":
            if keep == "best" and document["kept"] != keep:
                _delete_others(document["runs"])
                document["kept"] = keep
                write_json(folder / RESULT, document)
            return {**document, "already_done": True}
        entrants = [_open(variant, name, number) for number, variant in enumerate(variants, 1)]
        if cluster is not None:
            for entrant in entrants:
                check_carried(entrant.run)
        lines = read_json(folder / RESULT)["runs"] if (folder / RESULT).exists() else []
        reason_of = {line["run"]: line["why"] for line in lines if line["state"] == "stopped"}
        for entrant in entrants:  # those that were stopped before this process began
            entrant.stopped = reason_of.get(str(entrant.run.folder), "")
        if cluster is None:
            places: _Places = slots_of(config, read_machine(folder=folder))
        elif not (places := [{}] * ask_cluster(cluster).devices):
            raise MachineNotFit(f"the cluster at {cluster} offers no device", hint="see: hivetune cluster status")
        tell(f"{len(entrants)} runs, {len(places)} at a time")
        _race(folder, entrants, places, cluster, tell, progress)
        return _finish(folder, entrants, keep, tell)


def _trainings(variants: Sequence[Variant]) -> list[str]:
    """Return the identity of each variant's run. Raises UsageError for two that are one run."""
    labels: dict[str, str] = {}
    for variant in variants:
        identity = identity_hash(prepare_run(variant.config)[2])
        if identity in labels:
            raise UsageError(
                f"--over: {labels[identity]} and {variant.label} are the same training",
                hint="name settings that change the training, and each value once",
            )
        labels[identity] = variant.label
    return list(labels)


def _open(variant: Variant, name: str, number: int) -> Entrant:
    config = variant.config
    if config.output is not None:
        config = config.model_copy(update={"output": os.path.join(config.output, f"{number:02d}")})
    run = open_run(config, name)
    if not run.snapshot.rows("validation"):
        raise UsageError("a sweep needs validation rows, and there are none", hint="set data.validation: 0.1")
    return Entrant(variant, run)


def _race(
    folder: Path, entrants: Sequence[Entrant], places: _Places, cluster: str | None, tell: Teller, progress: Progress
) -> None:
    one_snapshot = len({entrant.run.snapshot.hash for entrant in entrants}) == 1
    if not one_snapshot:
        tell(
            "the settings change the held-out rows or their tokens: no run is stopped early, "
            "and the lowest loss may not be the best"
        )
    for share in (*(LOOK_SHARES if one_snapshot else ()), None):
        if share is not None and sum(entrant.racing for entrant in entrants) < 2:
            continue  # nobody is left to be compared with
        _forward([entrant for entrant in entrants if entrant.racing], share, places, cluster, progress)
        _note_failures(entrants, tell)
        if share is not None:
            _stop_losers(entrants, share, tell)
        _write(folder, entrants, "racing")


def _forward(
    entrants: Sequence[Entrant], share: float | None, places: _Places, cluster: str | None, progress: Progress
) -> None:
    """Bring all entrants to their first validation at `share` of the steps or later. None: to their end."""
    total = sum(entrant.steps for entrant in entrants)

    def look() -> None:
        progress(sum(run_status(entrant.run.folder).step for entrant in entrants), total)

    queue = [
        Going(entrant.run.folder, None if share is None else partial(_reached, entrant, share))
        for entrant in entrants
        if not _reached(entrant, share)
    ]
    codes = run_queue(queue, places, look, () if cluster is None else ("--on", cluster))
    if cluster is not None and any(codes.values()):
        own_address(cluster)  # without its head a cluster ends whoever spoke to it: no run has failed
    for entrant in entrants:
        code = codes.get(entrant.run.folder, 0)
        if cluster is not None and code == MachineNotFit.exit_code:
            # Why no device of the cluster continues with it: the last error of its process, without the hint.
            text = (entrant.run.folder / SUPERVISOR_LOG).read_text(encoding="utf-8", errors="replace")
            error = f"\n{text}".rpartition("\nhivetune: ")[2].partition("\nhint: ")[0].strip()
            raise MachineNotFit(error, hint="fix that; the same command continues")
        if code:
            entrant.failed = failure_text(entrant.run.folder, code)


def _reached(entrant: Entrant, share: float | None) -> bool:
    if entrant.run.is_finished:
        return True
    return share is not None and losses_at(entrant.run.folder, share * entrant.steps) is not None


def losses_at(run: Path, step: float) -> RowLosses | None:
    """Return the losses of the first validation at `step` or later."""
    path = run / ROW_LOSSES
    entries = read_journal(path) if path.exists() else ()
    return next((_row_losses(entry) for entry in entries if entry.get("step", -1) >= step), None)


def _last_losses(run: Path, step: int | None) -> RowLosses:
    """Return the losses of the validation at `step`, or of the last one for None."""
    validations = [entry for entry in read_journal(run / ROW_LOSSES) if step is None or entry["step"] == step]
    return _row_losses(validations[-1])


def _row_losses(entry: Mapping[str, Any]) -> RowLosses:
    return dict(zip(entry["rows"], entry["nll"], strict=True))


def _stop_losers(entrants: Sequence[Entrant], share: float, tell: Teller) -> None:
    snapshot = entrants[0].run.snapshot
    losses: dict[int, RowLosses] = {}
    for number, entrant in enumerate(entrants):
        if entrant.racing:
            at = losses_at(entrant.run.folder, share * entrant.steps)
            losses[number] = at or _last_losses(entrant.run.folder, None)
    for loser in losers(losses, *_rows_of(snapshot), looks=len(LOOK_SHARES)):
        entrant = entrants[loser.variant]
        reason = f"at {share:.0%} of the steps {loser.why}"
        if entrant.run.is_finished:  # a short run may end before its process hears that it is to stop
            tell(f"{entrant.variant.label}: finished before it could be stopped; {reason}")
        else:
            entrant.stopped = reason
            tell(f"{entrant.variant.label}: stopped {reason}")


def _rows_of(snapshot: Snapshot) -> tuple[dict[int, int], dict[int, str]]:
    """Return the trained tokens of each validation row, and the session that it belongs to."""
    rows = snapshot.rows("validation")
    sessions = {row: snapshot.info(row).session or str(row) for row in rows}
    return {row: snapshot.num_trained(row) for row in rows}, sessions


def _note_failures(entrants: Sequence[Entrant], tell: Teller) -> None:
    """Report the runs that failed. Raises HivetuneError when none is left; the same command tries them again."""
    failed = [entrant for entrant in entrants if entrant.failed]
    for entrant in failed:
        tell(f"{entrant.variant.label}: {entrant.failed}")
    if failed and not any(entrant.racing for entrant in entrants):
        others = " that was not stopped early" if len(failed) < len(entrants) else ""
        raise HivetuneError(
            f"every run{others} failed; the first: {failed[0].failed}", hint="see the log: hivetune logs RUN"
        )


def _finish(folder: Path, entrants: Sequence[Entrant], keep: Keep, tell: Teller) -> dict[str, Any]:
    """Evaluate and judge the winner by validation loss, on the test rows, which had no part in the choice."""
    best = min([entrant for entrant in entrants if entrant.racing], key=lambda entrant: _best(entrant)["loss"])
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
        _delete_others(described)
    document = _write(folder, entrants, "done", runs=described, best=best.variant.label, verdict=verdict, kept=keep)
    return {**document, "already_done": False}


def _delete_others(runs: Sequence[Mapping[str, Any]]) -> None:
    """Delete all runs but the best one, which is the first."""
    with closing(open_database()) as database:
        for line in runs[1:]:
            if Path(line["run"]).exists():
                remove_run(database, Path(line["run"]))


def _best(entrant: Entrant) -> dict[str, Any]:
    best: dict[str, Any] | None = entrant.run.record["result"]["best"]
    if best is None:
        raise HivetuneError(f"{entrant.run.folder} was finished without a validation", hint="set validate_every")
    return best


def _described(entrants: Sequence[Entrant], best: Entrant) -> list[dict[str, Any]]:
    """Return a line of the table for each run, the best one first."""
    one_snapshot = len({entrant.run.snapshot.hash for entrant in entrants}) == 1
    lines = []
    for entrant in entrants:
        status = run_status(entrant.run.folder)
        losses = [loss for _, loss, kind in loss_curve(entrant.run.folder) if kind == "validation"]
        estimate = None
        if one_snapshot and entrant.racing and entrant is not best:
            mine, of_best = (_last_losses(e.run.folder, _best(e)["step"]) for e in (entrant, best))
            estimate = above(mine, of_best, *_rows_of(best.run.snapshot))
        lines.append(
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

    def rank(line: Mapping[str, Any]) -> tuple[bool, bool, float]:
        loss = math.inf if line["validation_loss"] is None else float(line["validation_loss"])
        return line["run"] != str(best.run.folder), line["state"] != "done", loss

    return sorted(lines, key=rank)


def _computed_by(run: Path) -> dict[str, str]:
    """Return the machines that a run was on, in order, each with the fingerprint of its hardware and software."""
    starts = [entry for entry in read_journal(run / EVENTS) if entry["event"] == "supervisor_started"]
    return {entry["host"]: entry["fingerprint"] for entry in starts if "host" in entry}


def _write(folder: Path, entrants: Sequence[Entrant], status: str, **more: Any) -> dict[str, Any]:
    runs = [
        {"run": str(entrant.run.folder), "state": "stopped" if entrant.stopped else "open", "why": entrant.stopped}
        for entrant in entrants
    ]
    document = {"schema": 1, "sweep": str(folder), "status": status, "runs": runs, **more}
    write_json(folder / RESULT, document)
    return document
