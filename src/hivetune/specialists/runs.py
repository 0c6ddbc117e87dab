"""Runs that go on from the shared adapter: forks of a few steps, and specialists from training to promotion."""

import math
from collections.abc import Collection, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.sealed import read_sealed
from hivetune.config import RunConfig
from hivetune.data.leave_out import write_leave_out
from hivetune.errors import HivetuneError, Stopped
from hivetune.judge.evaluate import evaluate_run
from hivetune.judge.gate import judge_run
from hivetune.machine.inventory import read_machine
from hivetune.release.prune import remove_run
from hivetune.release.registry import promote
from hivetune.routing.domains import KeyedRow, RowDomain
from hivetune.routing.steps import SpecialistStep, add_steps, specialist_name
from hivetune.run.choices import read_resolved
from hivetune.run.folder import EVALUATION, adapter_hash
from hivetune.run.status import run_status
from hivetune.serve.register import register_run
from hivetune.specialists.survey import ALONE, Attended, Survey, step_of
from hivetune.train.open import Run, open_run
from hivetune.train.probe import probe_run
from hivetune.train.queue import Going, places_of, run_queue, why_failed
from hivetune.train.start import train_run
from hivetune.train.supervise.attempt import Terms

FORK_STEPS = 40


# Of the rate that the shared adapter was trained with: it is near its optimum, and a large step away from it forgets.
RATE = 0.5


# Share of an expert's training tokens that are other domains': 10 to 20 % keep what a copy would forget.
REPLAY = 0.15


RUNS = "runs"  # of experts, below the folder of their shared release


MOVED_BY = "experts"  # who moved an alias, in its history


def make_specialists(survey: Survey, domains: Sequence[RowDomain], attended: Attended = ALONE) -> list[SpecialistStep]:
    """Make the specialists of several domains.

    They are trained side by side where there are devices. Else each is judged before the next one is trained.
    """
    runs = [open_specialist(survey, domain, specialist_name(survey.shared.name, domain)) for domain in domains]
    train_side_by_side(runs, attended)
    return [_make(survey, domain, run, attended) for domain, run in zip(domains, runs, strict=True)]


def make_specialist(survey: Survey, domain: RowDomain, attended: Attended = ALONE) -> SpecialistStep:
    """Train the specialist of a domain that was born from a copy of the shared adapter, and write down its step.

    Raises what training and evaluation raise; the same call goes on where it was.
    """
    return _make(survey, domain, open_specialist(survey, domain, specialist_name(survey.shared.name, domain)), attended)


def _make(survey: Survey, domain: RowDomain, run: Run, attended: Attended) -> SpecialistStep:
    name = specialist_name(survey.shared.name, domain)
    attended.between()
    train_specialist(run, attended.training(f"training {name}", len(run.plan.steps)))
    attended.between()
    if not _is_evaluated(run):
        evaluate_run(run, attended.bar(f"judging {name}"))
    verdict = judge_run(run)
    release, _ = register_run(run.folder, name)
    reasons = "; ".join(verdict.reasons[: verdict.decisive])
    details = {"release": release.label, "verdict": verdict.verdict, "run": str(run.folder)}
    step = step_of(survey, domain, "refused", f"{verdict.verdict}: {reasons}", details)
    with closing(open_database()) as database:
        if verdict.verdict == "deploy":
            promote(database, release.label, by=MOVED_BY, reason=f"better than {survey.shared.label} on {domain.label}")
            step = step_of(survey, domain, "serving", f"better than {survey.shared.label}: {reasons}", details)
        add_steps(database, step)
    return step


def _is_evaluated(run: Run) -> bool:
    """Return whether the run's evaluation is of its present adapter: test rows are asked once for an adapter."""
    path = run.folder / EVALUATION
    if not path.exists():
        return False
    try:
        return bool(read_sealed(path).get("adapter_sha256") == adapter_hash(run.folder))
    except HivetuneError:
        return False


def fork(survey: Survey, domain: RowDomain | None, terms: Terms = Terms()) -> Path:
    """Train FORK_STEPS steps from the shared adapter on the rows of `domain`, or on all for None; return the run's
    folder.

    Nothing is chosen by the validation rows, which decide about the fork afterwards: the last step's adapter counts.
    """
    rows = list(survey.rows) if domain is None else survey.rows_of(domain)
    label = "control" if domain is None else domain.slug
    trained = sum(row.split == "train" for row in rows)
    steps = {
        "max_steps": FORK_STEPS,
        "epochs": float(math.ceil(FORK_STEPS * survey.config.batch_size / max(1, trained)) + 1),
        "validate_every": FORK_STEPS,
        "patience": None,
    }
    config = going_on(survey, {row.id for row in rows}, survey.folder / f"fork-{label}").model_copy(update=steps)
    run = open_run(config, f"{survey.shared.name}-fork-{label}")
    train_run(run, terms)
    return run.folder


def remove_forks(survey: Survey) -> None:
    """Remove the forks, which have been judged; what was measured of them stays."""
    for folder in sorted(survey.folder.glob("fork-*")):
        if folder.is_dir():
            with closing(open_database()) as database:
                remove_run(database, folder)
        else:
            folder.unlink()  # what it left out


def open_specialist(survey: Survey, domain: RowDomain, name: str) -> Run:
    """Open the run of a specialist: its domain's rows, and REPLAY of the others' among its training rows."""
    own = survey.rows_of(domain)
    kept = {row.id for row in own} | replayed(survey, own)
    folder = survey.folder.parent / RUNS / f"{name}-{survey.folder.name}"
    config = going_on(survey, kept, folder)
    settings = config.eval.model_copy(update={"baseline": survey.shared.label})
    share = sum(row.split == "train" for row in own) / max(1, sum(row.split == "train" for row in survey.rows))
    steps = None if config.max_steps is None else max(FORK_STEPS, math.ceil(config.max_steps * share))
    return open_run(config.model_copy(update={"eval": settings, "max_steps": steps}), name)


def train_specialist(run: Run, terms: Terms = Terms()) -> None:
    """Train a run to its end; a finished one is left as it is."""
    probe_run(run)
    train_run(run, terms)


def train_side_by_side(runs: Sequence[Run], attended: Attended) -> None:
    """Train unfinished runs to their ends, one device each; do nothing where there is only one device.

    Raises HivetuneError naming those that failed, when the others are done; Stopped when `attended` asks for an end.
    """
    waiting = [run for run in runs if run.record["status"] != "done"]
    if len(waiting) < 2 or not attended.side_by_side:
        return
    places = places_of(waiting[0].config, read_machine(folder=waiting[0].folder))
    if len(places) < 2:
        return
    attended.between()
    report = attended.training(f"training {len(waiting)} experts", sum(len(run.plan.steps) for run in waiting))

    def look() -> None:
        report.on_step(sum(run_status(run.folder).step for run in waiting))
        if report.ends():
            raise Stopped(
                "the training of experts was asked to end", hint="the same command goes on", signal_number=None
            )

    codes = run_queue([Going(run.folder) for run in waiting], places, look)
    failed = [f"{run.record['name']}: {why_failed(run.folder, code)}" for run in waiting if (code := codes[run.folder])]
    if failed:
        raise HivetuneError("; ".join(failed), hint="the same command goes on; hivetune logs RUN says more")


def going_on(survey: Survey, kept: Collection[str], folder: Path) -> RunConfig:
    """Return the config of a run on the rows `kept` (ids) from a copy of the shared adapter, at RATE of its rate."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    leave_out = folder.with_name(f"{folder.name}.leave_out.jsonl")
    write_leave_out(leave_out, {row.id: "other-domain" for row in survey.rows if row.id not in kept})
    rate = read_resolved(survey.shared.folder)[0].learning_rate
    return survey.config.model_copy(
        update={
            "data": survey.config.data.model_copy(update={"leave_out": str(leave_out)}),
            "lora": survey.config.lora.model_copy(update={"start": str(survey.shared.folder)}),
            "learning_rate": RATE * rate,
            "output": str(folder),
        }
    )


def replayed(survey: Survey, own: Sequence[KeyedRow]) -> set[str]:
    """Return ids of other domains' training rows, with REPLAY of all trained tokens.

    They are drawn by their hashes, so that the same rows are drawn again, and each domain by its size. No row of
    validation or test is drawn: the specialist is judged on its own.
    """
    mine = {row.id for row in own}

    def tokens(row: KeyedRow) -> int:
        return sum(survey.snapshot.length(number) for number in row.numbers)

    wanted = REPLAY / (1 - REPLAY) * sum(tokens(row) for row in own if row.split == "train")
    chosen: set[str] = set()
    others = [row for row in survey.rows if row.split == "train" and row.id not in mine]
    for row in sorted(others, key=lambda row: blake2b(row.id.encode(), digest_size=8, key=b"replay").digest()):
        if wanted <= 0:
            break
        chosen.add(row.id)
        wanted -= tokens(row)
    return chosen
