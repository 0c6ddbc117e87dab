"""Runs that go on from the shared adapter: a fork of a few steps, and the training of an expert. Ordinary runs."""

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
from hivetune.experts.survey import ALONE, Attended, Survey, step_of
from hivetune.judge.evaluate import evaluate_run
from hivetune.judge.gate import judge_run
from hivetune.machine.inventory import read_machine
from hivetune.release.prune import remove_run
from hivetune.release.registry import promote
from hivetune.routing.domains import ExpertRow, RowDomain
from hivetune.routing.steps import ExpertStep, add_steps, expert_name
from hivetune.run.adapter import adapter_hash
from hivetune.run.choices import read_resolved
from hivetune.run.folder import EVALUATION
from hivetune.run.status import run_status
from hivetune.serve.register import register_run
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


# Experts are trained, judged against the shared adapter on their own test rows, registered, promoted if they may.


def make_experts(found: Survey, domains: Sequence[RowDomain], told: Attended = ALONE) -> list[ExpertStep]:
    """Those of several domains: trained side by side where there are devices, else one after the other, each judged
    before the next one is trained."""
    runs = [open_expert(found, domain, expert_name(found.shared.name, domain)) for domain in domains]
    train_side_by_side(runs, told)
    return [_make(found, domain, run, told) for domain, run in zip(domains, runs, strict=True)]


def make_expert(found: Survey, domain: RowDomain, told: Attended = ALONE) -> ExpertStep:
    """The expert of a domain that was born: trained from a copy of the shared adapter, and its step written down.

    Raises what training and evaluation raise; the same call goes on where it was.
    """
    return _make(found, domain, open_expert(found, domain, expert_name(found.shared.name, domain)), told)


def _make(found: Survey, domain: RowDomain, run: Run, told: Attended) -> ExpertStep:
    name = expert_name(found.shared.name, domain)
    told.between()
    train_expert(run, told.training(f"training {name}", len(run.plan.steps)))
    told.between()
    if not _is_evaluated(run):
        evaluate_run(run, told.bar(f"judging {name}"))
    verdict = judge_run(run)
    release, _ = register_run(run.folder, name)
    reasons = "; ".join(verdict.reasons[: verdict.decisive])
    details = {"release": release.label, "verdict": verdict.verdict, "run": str(run.folder)}
    step = step_of(found, domain, "refused", f"{verdict.verdict}: {reasons}", details)
    with closing(open_database()) as database:
        if verdict.verdict == "deploy":
            promote(database, release.label, by=MOVED_BY, reason=f"better than {found.shared.label} on {domain.label}")
            step = step_of(found, domain, "serving", f"better than {found.shared.label}: {reasons}", details)
        add_steps(database, step)
    return step


def _is_evaluated(run: Run) -> bool:
    """The test rows are asked once for an adapter."""
    path = run.folder / EVALUATION
    if not path.exists():
        return False
    try:
        return bool(read_sealed(path).get("adapter_sha256") == adapter_hash(run.folder))
    except HivetuneError:
        return False


def fork(found: Survey, domain: RowDomain | None, terms: Terms = Terms()) -> Path:
    """FORK_STEPS steps from the shared adapter on the rows of `domain`, or on all for None: the folder of its run.

    Nothing is chosen by the validation rows, which decide about the fork afterwards: the last step's adapter counts.
    """
    rows = list(found.rows) if domain is None else found.rows_of(domain)
    label = "control" if domain is None else domain.slug
    trained = sum(row.split == "train" for row in rows)
    steps = {
        "max_steps": FORK_STEPS,
        "epochs": float(math.ceil(FORK_STEPS * found.config.batch_size / max(1, trained)) + 1),
        "validate_every": FORK_STEPS,
        "patience": None,
    }
    config = going_on(found, {row.id for row in rows}, found.folder / f"fork-{label}").model_copy(update=steps)
    run = open_run(config, f"{found.shared.name}-fork-{label}")
    train_run(run, terms)
    return run.folder


def remove_forks(found: Survey) -> None:
    """They have been judged; what was measured of them stays."""
    for folder in sorted(found.folder.glob("fork-*")):
        if folder.is_dir():
            with closing(open_database()) as database:
                remove_run(database, folder)
        else:
            folder.unlink()  # what it left out


def open_expert(found: Survey, domain: RowDomain, name: str) -> Run:
    """The run of an expert: its domain's rows, and REPLAY of the others' among those that are trained."""
    own = found.rows_of(domain)
    kept = {row.id for row in own} | replayed(found, own)
    folder = found.folder.parent / RUNS / f"{name}-{found.folder.name}"
    config = going_on(found, kept, folder)
    settings = config.eval.model_copy(update={"baseline": found.shared.label})
    share = sum(row.split == "train" for row in own) / max(1, sum(row.split == "train" for row in found.rows))
    steps = None if config.max_steps is None else max(FORK_STEPS, math.ceil(config.max_steps * share))
    return open_run(config.model_copy(update={"eval": settings, "max_steps": steps}), name)


def train_expert(run: Run, terms: Terms = Terms()) -> None:
    """To the end of the run; one that is done is left as it is."""
    probe_run(run)
    train_run(run, terms)


def train_side_by_side(runs: Sequence[Run], told: Attended) -> None:
    """Those that are not done, to their end, one device each; nothing where one device is there for all of them.

    Raises HivetuneError naming those that failed, when the others are done; Stopped when `told` asks for an end.
    """
    waiting = [run for run in runs if run.record["status"] != "done"]
    if len(waiting) < 2 or not told.side_by_side:
        return
    places = places_of(waiting[0].config, read_machine(folder=waiting[0].folder))
    if len(places) < 2:
        return
    told.between()
    report = told.training(f"training {len(waiting)} experts", sum(len(run.plan.steps) for run in waiting))

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


def going_on(found: Survey, kept: Collection[str], folder: Path) -> RunConfig:
    """The config of a run on the rows `kept` (ids) from a copy of the shared adapter, at RATE of its rate."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    leave_out = folder.with_name(f"{folder.name}.leave_out.jsonl")
    write_leave_out(leave_out, {row.id: "other-domain" for row in found.rows if row.id not in kept})
    rate = read_resolved(found.shared.folder)[0].learning_rate
    return found.config.model_copy(
        update={
            "data": found.config.data.model_copy(update={"leave_out": str(leave_out)}),
            "lora": found.config.lora.model_copy(update={"start": str(found.shared.folder)}),
            "learning_rate": RATE * rate,
            "output": str(folder),
        }
    )


def replayed(found: Survey, own: Sequence[ExpertRow]) -> set[str]:
    """Ids of other domains' training rows with REPLAY of all trained tokens: drawn by their hashes, so that the same
    rows are drawn again, and each domain by its size. No row of validation or test: the expert is judged on its own."""
    mine = {row.id for row in own}

    def tokens(row: ExpertRow) -> int:
        return sum(found.snapshot.length(number) for number in row.numbers)

    wanted = REPLAY / (1 - REPLAY) * sum(tokens(row) for row in own if row.split == "train")
    chosen: set[str] = set()
    others = [row for row in found.rows if row.split == "train" and row.id not in mine]
    for row in sorted(others, key=lambda row: blake2b(row.id.encode(), digest_size=8, key=b"replay").digest()):
        if wanted <= 0:
            break
        chosen.add(row.id)
        wanted -= tokens(row)
    return chosen
